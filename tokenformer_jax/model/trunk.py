"""The trunk of a model: layers of one or several kinds, run in the order of a pattern.

A pattern (`config/pattern.py`) gives groups of equal rows of layers. The layers at one place of a
row have their parameters stacked along a leading axis, `layers`, and a group is one loop over
those stacks. In a trunk with one stack the parameters have paths such as
`blocks/attention/query/keys`. With several stacks the path includes the stack's name, which is the
layer's name and the number of the stack: `blocks/local_0/…`, `blocks/full_1/…`.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config.pattern import Group
from tokenformer_jax.model.compute import Compute
from tokenformer_jax.model.params import Params, stack
from tokenformer_jax.model.stack import scan_rows
from tokenformer_jax.parallel.sharding import constrain


class Context(NamedTuple):
  """The inputs that all layers of a forward pass share.

  Attributes:
    start: the slot of the first token; the Python number 0 if no slot comes before it.
    padding_B: the number of leading slots of each row without a token, so that rows of unequal
      lengths end together; None: no row has any. The outputs at these slots are meaningless.
    ends_B: the slot after the last token of each row, from which on a row has padding at its end;
      None: no row has any. It needs causal layers, whose tokens see no later slot, and no caches.
    training: whether the pass is one of a training step; known while a program is traced.
  """

  start: jax.Array | int = 0
  padding_B: jax.Array | None = None
  ends_B: jax.Array | None = None
  training: bool = False

  @classmethod
  def from_ids(cls, ids_BxT: jax.Array, *, training: bool = False) -> 'Context':
    """Return the context of whole rows of token ids, where −1 is padding at the end of a row."""
    return cls(ends_B=jnp.sum(ids_BxT >= 0, axis=1), training=training)

  @property
  def is_beginning(self) -> bool:
    """Whether no slot comes before the first token; known while a program is traced."""
    return isinstance(self.start, int) and self.start == 0

  def positions(self, length: int) -> jax.Array:
    """Return the positions of the next `length` slots, [B, T], or [1, T] if all rows agree.

    The first token of a padded row has position 0; the slots before it have negative positions.
    """
    slots_1xT = self.start + jnp.arange(length)[None]
    return slots_1xT if self.padding_B is None else slots_1xT - self.padding_B[:, None]

  def is_token(self, length: int) -> jax.Array | None:
    """Return whether each of the next `length` slots has a token, bool [B, T]; None: all have."""
    if self.padding_B is None and self.ends_B is None:
      return None
    is_token_BxT = self.positions(length) >= 0
    if self.ends_B is None:
      return is_token_BxT
    return is_token_BxT & (self.start + jnp.arange(length)[None] < self.ends_B[:, None])


FROM_START = Context()


class Inputs(NamedTuple):
  """The inputs of one layer; for the whole trunk every array has a leading axis, `layers`.

  Attributes:
    branch_scales_Bx2: for each row, factors of the outputs of a layer's two branches; or None.
    key: the key for the layer's random draws, or None.
  """

  branch_scales_Bx2: jax.Array | None = None
  key: jax.Array | None = None


NO_INPUTS = Inputs()


class Aux(NamedTuple):
  """Auxiliary results of layers.

  Attributes:
    loss: a weighted float32 loss that training minimizes besides the task's loss, or None. A trunk
      returns the sum over its layers.
    figures: float32 numbers, or vectors of numbers, to report, by name. A trunk returns means over
      the layers that have them.
  """

  loss: jax.Array | None
  figures: Mapping[str, jax.Array]


NOTHING = Aux(loss=None, figures={})


def both(one: Aux, other: Aux) -> Aux:
  """Return the `Aux` of two parts of a layer, which report different figures."""
  losses = [aux.loss for aux in (one, other) if aux.loss is not None]
  return Aux(sum(losses) if losses else None, {**one.figures, **other.figures})


class Layer(Protocol):
  """A layer of a trunk: an `nnx.Module` with these methods."""

  def __call__(
    self, x_BxTxD: jax.Array, context: Context, cache: Any, inputs: Inputs
  ) -> tuple[jax.Array, Any, Aux]:
    """Return the output, the cache with the new slots (None for None), and the `Aux`."""

  def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Any:
    """Return the layer's empty cache for texts of up to `length` slots, a NamedTuple of arrays."""

  def cache_axes(self) -> Any:
    """Return the logical axes of each array of that cache, in the same NamedTuple."""

  def length_flops(self, length: int) -> float:
    """Count the length-dependent FLOPs of one of `length` positions."""


class Maker(Protocol):
  """Makes a layer."""

  def __call__(self, *, compute: Compute, rngs: nnx.Rngs) -> nnx.Module:
    """Return a new layer."""


class Architecture(NamedTuple):
  """The layers of a trunk.

  Attributes:
    groups: from `pattern.parse`.
    makers: the maker of each layer name in the groups.
  """

  groups: tuple[Group, ...]
  makers: Mapping[str, Maker]

  @property
  def size(self) -> int:
    """The number of layers."""
    return sum(group.size for group in self.groups)


class Stacks(nnx.Module):
  """Several stacks of layers, each an attribute with the stack's name."""

  def __init__(self, stacks: Mapping[str, nnx.Module]):
    for name, layers in stacks.items():
      setattr(self, name, layers)


class Place(NamedTuple):
  """The place of a layer's parameters: its stack ('' for the only stack) and its index there."""

  stack: str
  index: int


def make(architecture: Architecture, *, compute: Compute, rngs: nnx.Rngs) -> nnx.Module:
  """Return the layers as one module: a stack, several stacks, or a list in execution order."""
  groups, makers = architecture
  if compute.layers == 'list':
    names = [name for group in groups for name in group.layers * group.count]
    return nnx.List([makers[name](compute=compute, rngs=rngs) for name in names])

  depths: dict[str, list[int]] = {}
  for number, place in enumerate(places(groups), start=1):
    depths.setdefault(place.stack, []).append(number)

  def stacked(own: str, name: str, group: Group) -> nnx.Module:
    how = compute if group.count > 1 else dataclasses.replace(compute, layers='unrolled')
    one = functools.partial(makers[name], compute=how)
    return stack(lambda rngs: one(rngs=rngs), group.count, rngs=rngs, depths=depths[own])

  stacks = {
    own: stacked(own, name, group)
    for group, names in zip(groups, _stack_names(groups), strict=True)
    for own, name in zip(names, group.layers, strict=True)
  }
  return stacks[''] if '' in stacks else Stacks(stacks)


def _stack_names(groups: Sequence[Group]) -> list[list[str]]:
  """Return the names of each group's stacks; a single stack has the name ''."""
  if sum(len(group.layers) for group in groups) == 1:
    return [['']]
  names, number = [], 0
  for group in groups:
    names.append([f'{name}_{number + i}' for i, name in enumerate(group.layers)])
    number += len(group.layers)
  return names


def places(groups: Sequence[Group]) -> Iterator[Place]:
  """Yield the place of each layer's parameters, in execution order."""
  for group, names in zip(groups, _stack_names(groups), strict=True):
    for index in range(group.count):
      for name in names:
        yield Place(name, index)


def named_stacks(blocks: nnx.Module, groups: Sequence[Group]) -> list[dict[str, nnx.Module]]:
  """Return the stacks of each group by name, in the execution order of a row.

  Args:
    blocks: stacks from `make`.
    groups: the groups of the architecture.
  """
  return [
    {name: getattr(blocks, name) if name else blocks for name in names}
    for names in _stack_names(groups)
  ]


def length_flops(blocks: nnx.Module, groups: Sequence[Group], length: int) -> float:
  """Count the length-dependent FLOPs of one of `length` positions.

  Args:
    blocks: stacks from `make`.
    groups: the groups of the architecture.
    length: T.
  """
  return sum(
    group.count * layers.length_flops(length)
    for group, stacks in zip(groups, named_stacks(blocks, groups), strict=True)
    for layers in stacks.values()
  )


def unstack(blocks: Params, groups: Sequence[Group]) -> Params:
  """Return the parameters of stacks as those of a list of layers, in execution order."""

  def layer(place: Place) -> Params:
    stacked = blocks[place.stack] if place.stack else blocks
    return jax.tree.map(lambda array: array[place.index], stacked)

  return {i: layer(place) for i, place in enumerate(places(groups))}


def run(
  blocks: Any,
  groups: Sequence[Group],
  x_BxTxD: jax.Array,
  context: Context = FROM_START,
  caches: Sequence[Any] | None = None,
  inputs: Inputs = NO_INPUTS,
  *,
  compute: Compute,
) -> tuple[jax.Array, tuple[Any, ...] | None, Aux]:
  """Run the layers one after the other.

  Args:
    blocks: from `make`, for the same groups and the same `compute.layers`.
    groups: the groups of the architecture.
    x_BxTxD: the input of the first layer.
    context: the inputs that all layers share.
    caches: one for each layer, in execution order; needs `compute.layers='list'`. None: no later
      call continues from here.
    inputs: the inputs of each layer, with a leading axis `layers`.
    compute: how layers run, and the values that they save for the backward pass.

  Returns:
    The output of the last layer, the caches with the new slots, and the layers' combined `Aux`.

  Raises:
    ValueError: there are caches without `compute.layers='list'`, or with padding at the end.
  """
  if caches is not None and context.ends_B is not None:
    raise ValueError(
      'Context.ends_B puts padding at the end of rows, where caches go on; pad the rows at their '
      'beginning, with Context.padding_B'
    )
  if compute.layers == 'list':
    return _run_list(blocks, x_BxTxD, context, caches, inputs)
  if caches is not None:
    raise ValueError("caches need Compute.layers='list'")
  said: list[Aux] = []
  first = 0
  for group, stacks in zip(groups, named_stacks(blocks, groups), strict=True):
    own = inputs
    if len(groups) > 1:
      own = jax.tree.map(lambda array, first=first, n=group.size: array[first : first + n], inputs)
    x_BxTxD, of_group = _run_group(list(stacks.values()), group, x_BxTxD, context, own, compute)
    said.extend(of_group)
    first += group.size
  return x_BxTxD, None, _combine(said)


def _run_list(
  blocks: Sequence[Layer],
  x_BxTxD: jax.Array,
  context: Context,
  caches: Sequence[Any] | None,
  inputs: Inputs,
) -> tuple[jax.Array, tuple[Any, ...] | None, Aux]:
  said, written = [], []
  for i, layer in enumerate(blocks):
    own = jax.tree.map(lambda array, i=i: array[i], inputs)
    cache = None if caches is None else caches[i]
    x_BxTxD, cache, aux = layer(x_BxTxD, context, cache, own)
    said.append(jax.tree.map(lambda value: jnp.asarray(value)[None], aux))
    written.append(cache)
  return x_BxTxD, None if caches is None else tuple(written), _combine(said)


def _run_group(
  stacks: Sequence[nnx.Module],
  group: Group,
  x_BxTxD: jax.Array,
  context: Context,
  inputs: Inputs,
  compute: Compute,
) -> tuple[jax.Array, tuple[Aux, ...]]:
  """Run the rows of a group; return x, and for each place of the row its stacked `Aux`."""

  def apply(layer: Layer, x_BxTxD: jax.Array, own: Inputs) -> tuple[jax.Array, Aux]:
    x_BxTxD, _, aux = layer(x_BxTxD, context, None, own)
    return x_BxTxD, aux

  return scan_rows(
    stacks,
    apply,
    x_BxTxD,
    [_of_place(inputs, group, i) for i in range(len(stacks))],
    remat=compute.remat,
    # XLA unrolls a loop that runs once, and could then merge the recomputation with the forward
    # pass.
    loop=compute.layers == 'scan' and group.count > 1,
  )


def _of_place(inputs: Inputs, group: Group, place: int) -> Inputs:
  """Return the inputs of the layers at one place of the rows."""
  if len(group.layers) == 1:
    return inputs
  return jax.tree.map(lambda array: array[place :: len(group.layers)], inputs)


def _combine(said: Sequence[Aux]) -> Aux:
  """Combine the `Aux` of stacks, whose arrays have a leading axis, into that of the trunk.

  An entry i of a vector of figures becomes the figure `NAME/i`.
  """
  losses = [jnp.sum(aux.loss) for aux in said if aux.loss is not None]
  figures: dict[str, list[jax.Array]] = {}
  for aux in said:
    for name, value in aux.figures.items():
      entries = {name: value} if value.ndim == 1 else _entries(name, value)
      for one, values in entries.items():
        figures.setdefault(one, []).append(values)
  return Aux(
    loss=sum(losses) if losses else None,
    figures={name: jnp.mean(jnp.concatenate(values)) for name, values in figures.items()},
  )


def _entries(name: str, value_LxN: jax.Array) -> dict[str, jax.Array]:
  """Return the entries of vectors by names that sort as their numbers do."""
  digits = len(str(value_LxN.shape[1] - 1))
  return {f'{name}/{i:0{digits}}': value_LxN[:, i] for i in range(value_LxN.shape[1])}


def init_caches(
  blocks: Sequence[Layer], batch: int, length: int, dtype: jnp.dtype
) -> tuple[Any, ...]:
  """Return an empty cache for each layer of a list, partitioned on the mesh.

  Args:
    blocks: from `make` with `compute.layers='list'`.
    batch: B, the number of rows.
    length: the slots for a text, including its padding.
    dtype: the dtype of activations.
  """
  return place_caches(blocks, tuple(layer.init_cache(batch, length, dtype) for layer in blocks))


def place_caches(blocks: Sequence[Layer], caches: Sequence[Any]) -> tuple[Any, ...]:
  """Return the caches, each array partitioned by its layer's `cache_axes`."""
  axes = tuple(layer.cache_axes() for layer in blocks)
  return jax.tree.map(lambda array, names: constrain(array, *names), tuple(caches), axes)
