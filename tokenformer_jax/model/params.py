"""Parameters as a plain nested dict of arrays, taken out of Flax NNX modules.

NNX modules define the parameters, and exist only while a function is traced. Training, checkpoints
and growth use a nested dict `{'blocks': {'ffn': {'keys': Array, …}, …}, …}`. So the transforms are
plain JAX, and the files on disk do not depend on the module library.
"""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import InitConfig, ModelConfig
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.parallel.rules import Axes

TOKEN_AXES = ('param_tokens', 'width')  # of the keys and of the values of parameter tokens

Params = dict[str, Any]
Path = tuple[Any, ...]  # of `jax.tree_util`
Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


class Role(enum.Enum):
  """The purpose of an array of parameters."""

  KEY = 'key'  # of parameter tokens: they score the input
  VALUE = 'value'  # of parameter tokens: their weighted sum is the output
  EMBEDDING = 'embedding'  # rows that are looked up
  TIED_EMBEDDING = 'tied_embedding'  # rows that are looked up and also serve as the head
  HEAD = 'head'  # a row for each logit
  POSITION = 'position'  # a row for each position, added to its input
  KERNEL = 'kernel'  # a matrix from its second-last axis to its last one
  ROUTER = 'router'  # a matrix whose products choose experts
  BALANCE = 'balance'  # added to the gates of a router for the choice
  BIAS = 'bias'  # added to an output
  GAIN = 'gain'  # the scale of a norm
  VECTOR = 'vector'  # a learned input: a class token, the query of a pool
  GATE = 'gate'  # a vector whose product with a hidden state is a gate


# The roles of arrays that multiply a token.
_MATRICES = (Role.KEY, Role.VALUE, Role.TIED_EMBEDDING, Role.HEAD, Role.KERNEL, Role.ROUTER)


@dataclasses.dataclass(frozen=True)
class ParamInfo:
  """Metadata of an array of parameters.

  Growth, decay, rates, sharding and FLOPs use it, and not the names in an array's path. Only code
  that pairs the arrays of two models reads names.

  Attributes:
    axes: a logical name for each axis (see `rules.RULES`).
    role: the purpose of the array.
    initializer: draws the array from a key, a shape and a dtype. Growth draws other shapes.
    depth: 0 before the layers; in stacked layers the number of each layer, from 1 on, of tied ones
      the first; None after the layers, and in layers that are not stacked, which only decode.
    active: the share of the array's entries that one token uses.
    runs: how often one token uses them: more than once in tied layers.
    groups: for an array of parameter tokens, the numbers of tokens that share a norm, in order.
    frozen: for each of these groups, whether training leaves it as it is.
    adds_to_residual: whether a branch adds its products with the array to the residual stream. A
      layer adds nothing if all its arrays of this type are zero; behind a norm with a scale, if the
      norm's are.
    zero: the entries of an array that counts as zero: −1 for a scale of 1 + w.
    first: draws the array of a new model instead of `initializer`.
    own_update: maps the gradient of an array that no optimizer moves to its change in a step.
  """

  axes: Axes
  role: Role
  initializer: Initializer
  depth: int | tuple[int, ...] | None = None
  active: float = 1.0
  runs: int = 1
  groups: tuple[int, ...] = ()
  frozen: tuple[bool, ...] = ()
  adds_to_residual: bool = False
  zero: float = 0.0
  first: Initializer | None = None
  own_update: Callable[[jax.Array], jax.Array] | None = None

  @property
  def token_axis(self) -> int | None:
    """The position of the axis that grows, or None."""
    return self.axes.index('param_tokens') if 'param_tokens' in self.axes else None

  @property
  def expert_axis(self) -> int | None:
    """The position of the axis with an entry for each expert, or None."""
    axes = [i for i, axis in enumerate(self.axes) if axis in ('experts', 'routes')]
    return axes[0] if axes else None

  @property
  def in_layers(self) -> bool:
    """Whether the array belongs to a stacked layer."""
    return isinstance(self.depth, tuple)


class _Shapes(nnx.Rngs):
  """Stands for random keys where a module is made for its shapes: nothing is traced or drawn."""


class _Keys(nnx.Rngs):
  """Gives the keys of `nnx.Rngs(params=key)`, many by one operation: programs compile sooner."""

  def __init__(self, key: jax.Array):
    self.params = functools.partial(next, _fold_in_numbers(key))


def _fold_in_numbers(key: jax.Array, at_once: int = 16) -> Iterator[jax.Array]:
  """Yield the key with 0, 1, 2 and so on folded in."""
  for first in itertools.count(0, at_once):
    numbers = jnp.arange(first, first + at_once, dtype=jnp.uint32)
    yield from jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)


def param(
  rngs: nnx.Rngs, init: Initializer, shape: tuple[int, ...], axes: Axes, *, role: Role, **more: Any
) -> nnx.Param:
  """Make a float32 parameter; `more` are other attributes of its `ParamInfo`.

  `init` draws it and its growth; `first`, if given, draws it at the start instead.
  """
  if len(shape) != len(axes):
    raise ValueError(f'{len(axes)} axis names {axes} for the shape {shape}')
  info = ParamInfo(axes, role, init, **more)
  if isinstance(rngs, _Shapes):
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), info=info)
  return nnx.Param((info.first or init)(rngs.params(), shape, jnp.float32), info=info)


def lookup(tree: Any, path: Path) -> Any:
  """Return the entry of nested dicts at a path of `jax.tree_util`."""
  for key in path:
    tree = tree[key.key]
  return tree


@dataclasses.dataclass(frozen=True, eq=False)
class Definition:
  """A module taken apart into functions of a nested dict."""

  init: Callable[[jax.Array], Params]  # maps a random key to parameters
  # Maps parameters to a callable module, for use inside a traced function.
  bind: Callable[[Params], Any]
  abstract: Params  # the parameters' shapes and dtypes
  info: Params  # a `ParamInfo` for each array, in a tree like the parameters

  @functools.cached_property
  def axes(self) -> Params:
    """The parameters' logical axis names, a tuple of strings for each array."""
    return jax.tree.map(lambda info: info.axes, self.info)

  @property
  def token_counts(self) -> Params:
    """The number of parameter tokens of every array, or 0."""
    return jax.tree.map(
      lambda info, array: 0 if info.token_axis is None else array.shape[info.token_axis],
      self.info,
      self.abstract,
    )

  def counts_in(self, other: 'Definition') -> Params:
    """Return the number of parameter tokens of every array in another model, 0 where it has none.

    The other model has the arrays of this one but for parameter tokens.
    """
    known = dict(jax.tree_util.tree_leaves_with_path(other.token_counts))
    return jax.tree.map_with_path(lambda path, _: known.get(path, 0), self.abstract)

  @property
  def group_count(self) -> int:
    """The largest number of groups of a projection; 0 for a model without parameter tokens."""
    return max(len(info.groups) for info in jax.tree.leaves(self.info))

  @property
  def count(self) -> int:
    """The number of parameters; allocates none."""
    return sum(leaf.size for leaf in jax.tree.leaves(self.abstract))

  @property
  def active(self) -> int:
    """The number of parameters without the experts that a token does not choose."""
    pairs = zip(jax.tree.leaves(self.abstract), jax.tree.leaves(self.info), strict=True)
    return sum(round(leaf.size * info.active) for leaf, info in pairs)

  @property
  def counts(self) -> str:
    """The number of parameters as text, and of active ones if they are fewer."""
    active = f' ({self.active:,} active)' if self.active != self.count else ''
    return f'{self.count:,} parameters{active}'


def define(make: Callable[[nnx.Rngs], nnx.Module]) -> Definition:
  """Take the module that `make` builds apart, without allocating arrays."""
  graphdef, state = nnx.split(make(_Shapes()))

  def init(key: jax.Array) -> Params:
    return nnx.to_pure_dict(nnx.state(make(_Keys(key)), nnx.Param))

  def bind(params: Params) -> nnx.Module:
    bound = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(bound, params)
    return nnx.merge(graphdef, bound)

  return Definition(
    init=init,
    bind=bind,
    abstract=nnx.to_pure_dict(state),
    info=nnx.to_pure_dict(_map_variables(lambda v: v.get_metadata('info'), state)),
  )


def define_model(
  module: Callable[..., nnx.Module], config: ModelConfig, execution: Execution
) -> Definition:
  """Return the definition of `module(config, execution, rngs=…)`; every size is filled in."""
  return _define_model(module, config, config.init, execution)


@functools.cache
def _define_model(
  module: Callable[..., nnx.Module], config: ModelConfig, init: InitConfig, execution: Execution
) -> Definition:
  del init  # Equality of configs ignores the initialization, so the cache's key holds it as well.
  return define(lambda rngs: module(config, execution, rngs=rngs))


def stack(
  make: Callable[[nnx.Rngs], nnx.Module],
  layers: int,
  *,
  rngs: nnx.Rngs,
  depths: Sequence[int] | None = None,
  runs: int = 1,
) -> nnx.Module:
  """Make `layers` modules as one; every parameter has a leading axis `layers`.

  `depths` are the modules' numbers among all layers of the model, from 1 on; None: 1 … `layers`.
  `runs`: how often each of them runs: see `ParamInfo.runs`.
  """
  graphdef, state = nnx.split(make(_Shapes()))

  def init(key: jax.Array) -> nnx.State:
    return nnx.state(make(_Keys(key)), nnx.Param)

  def stacked(info: ParamInfo) -> ParamInfo:
    return dataclasses.replace(
      info,
      axes=('layers', *info.axes),
      initializer=_layer_by_layer(info.initializer),
      first=None if info.first is None else _layer_by_layer(info.first),
      depth=tuple(depths or range(1, layers + 1)),
      runs=runs,
    )

  def shape(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((layers, *one.shape), one.dtype)

  if isinstance(rngs, _Shapes):
    state = jax.tree.map(shape, state)
  else:
    state = jax.vmap(init)(jax.random.split(rngs.params(), layers))
  named = _map_variables(lambda v: v.replace(info=stacked(v.get_metadata('info'))), state)
  return nnx.merge(graphdef, named)


def _layer_by_layer(init: Initializer) -> Initializer:
  """Return an initializer of [L, …] that draws one layer at a time, in half the time on a CPU."""

  def layers(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    keys = jax.random.split(key, shape[0])
    return jax.lax.map(lambda key: init(key, shape[1:], dtype), keys)

  return layers


def matrix_entries(
  module: nnx.Module, which: Callable[[ParamInfo], bool] = lambda info: True
) -> int:
  """Count the entries that one token uses in the module's matrices that `which` selects.

  Entries of tied layers count as often as they run.
  """
  variables = jax.tree.leaves(nnx.state(module, nnx.Param), is_leaf=_is_variable)
  infos = [(variable.get_metadata('info'), variable.size) for variable in variables]
  return sum(
    info.runs * round(size * info.active)
    for info, size in infos
    if info.role in _MATRICES and which(info)
  )


def _map_variables(f: Callable[[nnx.Variable], Any], state: nnx.State) -> nnx.State:
  return jax.tree.map(f, state, is_leaf=_is_variable)


def _is_variable(node: Any) -> bool:
  return isinstance(node, nnx.Variable)
