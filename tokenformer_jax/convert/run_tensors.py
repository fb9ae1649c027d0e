"""Read the parameters of a run array by array, and check that weights are finite."""

from collections.abc import Iterator

import jax
import numpy as np

from tokenformer_jax.config import MeshConfig
from tokenformer_jax.convert.tensor_layout import Names
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.grow import grow_run
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.parallel import messages, sharding
from tokenformer_jax.runs.checkpoint import Source


def read_array(source: Source, path: Names) -> np.ndarray:
  """Return one array of the parameters in a checkpoint."""
  tree = define_lm(source.meta.config.model).abstract
  for key in path:
    tree = tree[key]
  for key in reversed(path):
    tree = {key: tree}
  mesh = sharding.make_mesh(MeshConfig(), jax.local_devices()[:1])
  (array,) = jax.tree.leaves(grow_run.read_params(source, mesh, tree))
  return np.asarray(array)


def check_finite(
  stream: Iterator[tuple[str, np.ndarray]], source: str, allowed: bool
) -> Iterator[tuple[str, np.ndarray]]:
  """Yield the stream of tensors; refuse numbers that are NaN or infinite at its end.

  If they are `allowed`, print how many there are.
  """
  number, first = 0, ''
  for name, array in stream:
    wrong = array.size - int(np.count_nonzero(np.isfinite(array)))
    number, first = number + wrong, first or (name if wrong else '')
    yield name, array
  if not number:
    return
  message = (
    f'{source} has {number:,} weights that are NaN or infinite, the first of them in the tensor '
    f'{first}'
  )
  if not allowed:
    raise UserError(
      f'{message}: a model with them computes nothing but NaN; fetch the weights again, or name an '
      f'earlier checkpoint ({arg.allow_nonfinite} takes them as they are)'
    )
  messages.say(f'{message}; they are taken as they are ({arg.allow_nonfinite})')
