"""What runs left, to compare."""

import jax
import numpy as np

from tokenformer_jax import metrics


def losses(workdir, name='train/loss'):
  return {line['step']: line[name] for line in metrics.read(workdir) if name in line}


def assert_same(a, b, what):
  for (path, x), (_, y) in zip(
    jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b), strict=True
  ):
    name = jax.tree_util.keystr(path)
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=f'{what}: {name} differs')
