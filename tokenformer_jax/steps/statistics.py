"""Read and map an optimizer's state, which has statistics of parameters and counts of updates.

The state is nested tuples and dicts of optax. The name of a field says what it holds: a statistic
is a tree like the parameters, with `optax.MaskedNode` for parameters without that statistic.
Sharding, growth and freezing rely on this, so they work for every optimizer of `optimizers.py`. A
new optimizer needs its fields in `ORDERS`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import rules, sharding
from tokenformer_jax.parallel.rules import Axes

# The fields that hold statistics: means of gradients (1), or of their squares (2).
ORDERS = {'mu': 1, 'nu': 2, 'v': 2, 'v_row': 2, 'v_col': 2}
# Statistics that are also a mean over an axis of the parameter, and that axis.
_AVERAGED = {'v_row': -1, 'v_col': -2}

StatisticMap = Callable[..., Params]  # of the field's name, and its tree in every state
CountMap = Callable[..., Any]  # of the tuple that holds the count, and the count in every state


def is_masked(node: Any) -> bool:
  """Return whether a node stands for a parameter without the statistic."""
  return isinstance(node, optax.MaskedNode)


def map_state(map_statistic: StatisticMap, map_count: CountMap, *states: Any) -> Any:
  """Map the statistics and the counts of optimizer states of one structure."""
  first, *_ = states
  if isinstance(first, dict):
    return {
      name: map_state(map_statistic, map_count, *(state[name] for state in states))
      for name in first
    }
  if not isinstance(first, tuple):
    raise TypeError(f'{type(first)} is neither a statistic of `ORDERS` nor a count')
  fields = getattr(first, '_fields', [''] * len(first))
  new = []
  for name, *values in zip(fields, *states, strict=True):
    if name in ORDERS:
      new.append(map_statistic(name, *values))
    elif name == 'count':
      new.append(map_count(first, *values))
    else:
      new.append(map_state(map_statistic, map_count, *values))
  return type(first)(*new) if hasattr(first, '_fields') else tuple(new)


def kept_axes(name: str, axes: Axes) -> Axes:
  """Return the logical axes of a statistic of a parameter; '' is the parameter itself."""
  if name not in _AVERAGED:
    return axes
  averaged = len(axes) + _AVERAGED[name]
  return tuple(axis for i, axis in enumerate(axes) if i != averaged)


def expand(name: str, array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Return a statistic in the shape of its parameter."""
  if name not in _AVERAGED:
    return array
  return jnp.broadcast_to(jnp.expand_dims(array, _AVERAGED[name]), shape)


def reduce(name: str, array: jax.Array) -> jax.Array:
  """Return a statistic from its values in the shape of the parameter: the inverse of `expand`."""
  return jnp.mean(array, _AVERAGED[name]) if name in _AVERAGED else array


def with_history(name: str, array: jax.Array) -> jax.Array:
  """Replace zeros of a mean square by the mean of the others, if the optimizer has no mean.

  An update by the root of a mean square that begins at zero is too large by 1/√(1 − β). Adam's mean
  of gradients also begins at zero and makes up for it; Adafactor has no such mean.

  The array has the shape of the parameter, after tokens or units were added. The mean is over each
  matrix or vector.
  """
  if name not in ('v', *_AVERAGED):
    return array
  known, over = array != 0, (-1,) if name == 'v' else (-2, -1)
  number = jnp.maximum(1, jnp.sum(known, over, keepdims=True))
  return jnp.where(known, array, jnp.sum(array, over, keepdims=True) / number)


def shardings(
  mesh: Mesh | AbstractMesh, tx: optax.GradientTransformation, abstract: Params, axes: Params
) -> Any:
  """Return the shardings of the state of `tx`: a statistic is sharded like its parameter."""

  def statistic_shardings(name: str, tree: Params) -> Params:
    def sharded(axes: Axes, array: Any) -> Any:
      return array if is_masked(array) else NamedSharding(mesh, rules.spec(kept_axes(name, axes)))

    return jax.tree.map(sharded, axes, tree, is_leaf=rules.is_axes)

  state = jax.eval_shape(tx.init, abstract)
  return map_state(statistic_shardings, lambda _, count: sharding.replicated(mesh), state)
