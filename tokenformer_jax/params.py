"""Parameters as a plain nested dict of arrays, taken out of Flax NNX modules.

NNX modules say what the parameters are; they exist only while a function is traced. What is
trained, stored and grown is a nested dict `{'blocks': {'ffn': {'keys': Array, …}, …}, …}`, so the
transforms are plain JAX and the files on disk do not depend on the module library.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Params = dict[str, Any]
Axes = tuple[str, ...]
Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


def param(rngs: nnx.Rngs, init: Initializer, shape: tuple[int, ...], axes: Axes) -> nnx.Param:
  """A float32 parameter with a logical name for each of its axes (see `sharding.RULES`)."""
  if len(shape) != len(axes):
    raise ValueError(f'{len(axes)} axis names {axes} for the shape {shape}')
  return nnx.Param(init(rngs.params(), shape, jnp.float32), logical_axes=axes, initializer=init)


def is_axes(node: Any) -> bool:
  """Whether a node of a tree of axis names is a leaf; for `jax.tree.map(…, is_leaf=is_axes)`."""
  return isinstance(node, tuple)


def token_axis(axes: Axes) -> int | None:
  """The position of the axis that grows, or None for an array that has none."""
  return axes.index('param_tokens') if 'param_tokens' in axes else None


@dataclasses.dataclass(frozen=True, eq=False)
class Definition:
  """A module taken apart into functions of a nested dict.

  Attributes:
    init: from a random key to the parameters.
    bind: from parameters to a module that can be called, for use inside a traced function.
    abstract: the parameters' shapes and dtypes.
    axes: the parameters' logical axis names, a tuple of strings for each array.
    initializers: how each array is drawn, from a key, a shape and a dtype, by itself: growth draws
      some arrays, in other shapes.
  """

  init: Callable[[jax.Array], Params]
  bind: Callable[[Params], Any]
  abstract: Params
  axes: Params
  initializers: Params

  @property
  def count(self) -> int:
    """The number of parameters, found without allocating any."""
    return sum(leaf.size for leaf in jax.tree.leaves(self.abstract))


def define(make: Callable[[nnx.Rngs], nnx.Module]) -> Definition:
  """Takes the module that `make` builds apart; allocates nothing."""
  graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

  def metadata(name: str) -> Params:
    return nnx.to_pure_dict(_map_variables(lambda v: v.get_metadata(name), state))

  def init(key: jax.Array) -> Params:
    return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(params=key)), nnx.Param))

  def bind(params: Params) -> nnx.Module:
    bound = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(bound, params)
    return nnx.merge(graphdef, bound)

  return Definition(
    init=init,
    bind=bind,
    abstract=nnx.to_pure_dict(state),
    axes=metadata('logical_axes'),
    initializers=metadata('initializer'),
  )


def stack(make: Callable[[nnx.Rngs], nnx.Module], layers: int, *, rngs: nnx.Rngs) -> nnx.Module:
  """`layers` modules as one, every parameter with a leading axis `layers`."""
  graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

  def init(key: jax.Array) -> nnx.State:
    return nnx.state(make(nnx.Rngs(params=key)), nnx.Param)

  state = jax.vmap(init)(jax.random.split(rngs.params(), layers))
  named = _map_variables(
    lambda v: v.replace(
      logical_axes=('layers', *v.get_metadata('logical_axes')),
      initializer=_layer_by_layer(v.get_metadata('initializer')),
    ),
    state,
  )
  return nnx.merge(graphdef, named)


def _layer_by_layer(init: Initializer) -> Initializer:
  """Draws [L, …]; one layer after the other, which takes a CPU half the time of all at once."""

  def layers(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    keys = jax.random.split(key, shape[0])
    return jax.lax.map(lambda key: init(key, shape[1:], dtype), keys)

  return layers


def _map_variables(f: Callable[[nnx.Variable], Any], state: nnx.State) -> nnx.State:
  return jax.tree.map(f, state, is_leaf=lambda node: isinstance(node, nnx.Variable))
