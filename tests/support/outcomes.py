"""Comparisons of what runs leave behind."""

from typing import Any

import jax
import numpy as np

from tokenformer_jax.runs import metrics


def losses(workdir, name='train/loss'):
  return {line['step']: line[name] for line in metrics.read(workdir) if name in line}


def paths(tree: Any) -> dict[str, np.ndarray]:
  """Arrays by path, such as blocks/ffn/keys."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(leaf)
    for path, leaf in leaves
  }


def assert_same(got: Any, want: Any, meaning: str) -> None:
  """Two trees are bit for bit the same."""
  got, want = paths(got), paths(want)
  assert got.keys() == want.keys(), f'{meaning}: {got.keys() ^ want.keys()} are not in both'
  for path, array in want.items():
    np.testing.assert_array_equal(got[path], array, err_msg=f'{meaning}: {path} differs')


def assert_close(got: Any, want: Any, meaning: str) -> None:
  """Two trees are the same but for the order of sums in float32."""
  got, want = paths(got), paths(want)
  assert got.keys() == want.keys(), f'{meaning}: {got.keys() ^ want.keys()} are not in both'
  for path, array in want.items():
    limits = {'rtol': 1e-4, 'atol': 1e-5 * max(1e-3, np.abs(array).max())}
    np.testing.assert_allclose(got[path], array, **limits, err_msg=f'{meaning}: {path} differs')
