"""The trunk of a model: layers of one or several kinds, run as a pattern says.

A pattern (`config/pattern.py`) gives groups of equal rows of layers. The layers at one place of a
row have their parameters stacked along a leading axis, `layers`, and a group is one loop over
those stacks. A trunk with one stack is that stack, so its parameters have paths such as
`blocks/attention/query/keys`; of several stacks each has its own name before that, the layer's with
the number of the stack: `blocks/local_0/…`, `blocks/full_1/…`.
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
  """What all layers of a forward pass have in common.

  Attributes:
    start: slot of the first token; the number 0 if none is before it.
    padding_B: how many of the first slots of each row hold no token, so that rows of unequal
      lengths end together; None: none in any row. What comes out of these slots means nothing.
  """

  start: jax.Array | int = 0
  padding_B: jax.Array | None = None

  @property
  def is_beginning(self) -> bool:
    """Whether no slot comes before the first token: known while a program is traced."""
    return isinstance(self.start, int) and self.start == 0

  def positions(self, length: int) -> jax.Array:
    """Return the positions of the tokens in the next `length` slots, [B, T], or [1, T] for all.

    The first token of a padded row has position 0, and the slots before it negative ones.
    """
    slots_1xT = self.start + jnp.arange(length)[None]
    return slots_1xT if self.padding_B is None else slots_1xT - self.padding_B[:, None]


FROM_START = Context()


class Inputs(NamedTuple):
  """What each layer has for itself; for the whole trunk every array has a leading axis, `layers`.

  Attributes:
    branch_scales_Bx2: factors of what the two halves of a layer add, for each row, or None.
    key: for what the layer draws at random, or None.
  """

  branch_scales_Bx2: jax.Array | None = None
  key: jax.Array | None = None


NO_INPUTS = Inputs()


class Aux(NamedTuple):
  """What layers say besides their output.

  Attributes:
    loss: a float32 number that training minimises besides the task's loss, weighted already; None:
      nothing. That of a trunk is the sum over its layers.
    figures: float32 numbers to report, by name. Those of a trunk are means over the layers that
      have them.
  """

  loss: jax.Array | None
  figures: Mapping[str, jax.Array]


NOTHING = Aux(loss=None, figures={})


class Layer(Protocol):
  """What a trunk is made of: an `nnx.Module` with these methods."""

  def __call__(
    self, x_BxTxD: jax.Array, context: Context, cache: Any, inputs: Inputs
  ) -> tuple[jax.Array, Any, Aux]:
    """Return the output, the cache with the new slots in it (None for None), and what else."""

  def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Any:
    """Return the layer's empty cache for texts of up to `length` slots, a NamedTuple of arrays."""

  def cache_axes(self) -> Any:
    """Return the logical axes of each array of that cache, in the same NamedTuple."""

  def length_flops(self, length: int) -> float:
    """Count the FLOPs for one of `length` positions that depend on how many there are."""


class Maker(Protocol):
  """Makes a layer."""

  def __call__(self, *, compute: Compute, rngs: nnx.Rngs) -> nnx.Module:
    """Return a new layer."""


class Architecture(NamedTuple):
  """Which layers a trunk has.

  Attributes:
    groups: from `pattern.parse`.
    makers: of every name in the groups.
  """

  groups: tuple[Group, ...]
  makers: Mapping[str, Maker]

  @property
  def size(self) -> int:
    """The number of layers."""
    return sum(group.size for group in self.groups)


class Stacks(nnx.Module):
  """Several stacks of layers, each under its name."""

  def __init__(self, stacks: Mapping[str, nnx.Module]):
    for name, layers in stacks.items():
      setattr(self, name, layers)


class Place(NamedTuple):
  """Where the parameters of a layer are: the stack, '' if it is the only one, and the index."""

  stack: str
  index: int


def make(architecture: Architecture, *, compute: Compute, rngs: nnx.Rngs) -> nnx.Module:
  """Return the layers as one module: a stack, several stacks, or a list in the order of the run."""
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
  """Return the names of each group's stacks; the only stack that there is has the name ''."""
  if sum(len(group.layers) for group in groups) == 1:
    return [['']]
  names, number = [], 0
  for group in groups:
    names.append([f'{name}_{number + i}' for i, name in enumerate(group.layers)])
    number += len(group.layers)
  return names


def places(groups: Sequence[Group]) -> Iterator[Place]:
  """Yield where the parameters of each layer are, in the order that the layers run."""
  for group, names in zip(groups, _stack_names(groups), strict=True):
    for index in range(group.count):
      for name in names:
        yield Place(name, index)


def named_stacks(blocks: nnx.Module, groups: Sequence[Group]) -> list[dict[str, nnx.Module]]:
  """Return the stacks of each group by name, in the order that the layers of a row run.

  Args:
    blocks: stacks from `make`.
    groups: of the architecture.
  """
  return [
    {name: getattr(blocks, name) if name else blocks for name in names}
    for names in _stack_names(groups)
  ]


def length_flops(blocks: nnx.Module, groups: Sequence[Group], length: int) -> float:
  """Count the FLOPs for one of `length` positions that depend on how many there are.

  Args:
    blocks: stacks from `make`.
    groups: of the architecture.
    length: T.
  """
  return sum(
    group.count * layers.length_flops(length)
    for group, stacks in zip(groups, named_stacks(blocks, groups), strict=True)
    for layers in stacks.values()
  )


def unstack(blocks: Params, groups: Sequence[Group]) -> Params:
  """Return the parameters of stacks as those of a list of layers, in the order of the run."""

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
    groups: of the architecture.
    x_BxTxD: what the first layer reads.
    context: what all layers have in common.
    caches: one for each layer, in the order of the run, which needs `compute.layers='list'`; None:
      nothing will go on from here.
    inputs: what each layer has for itself, with a leading axis `layers`.
    compute: how layers run, and what they keep for the backward pass.

  Returns:
    What the last layer makes, the caches with the new slots in them, and what the layers say.
  """
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
    said.append(aux)
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
  """Run the rows of a group; what the layers say has a leading axis, for each place of the row."""

  def apply(layer: Layer, x_BxTxD: jax.Array, own: Inputs) -> tuple[jax.Array, Aux]:
    x_BxTxD, _, aux = layer(x_BxTxD, context, None, own)
    return x_BxTxD, aux

  return scan_rows(
    stacks,
    apply,
    x_BxTxD,
    [_of_place(inputs, group, i) for i in range(len(stacks))],
    remat=compute.remat,
    # A loop that runs once is taken apart by XLA, which could then keep what is to be computed
    # again.
    loop=compute.layers == 'scan' and group.count > 1,
  )


def _of_place(inputs: Inputs, group: Group, place: int) -> Inputs:
  """Return the inputs of the layers at one place of the rows."""
  if len(group.layers) == 1:
    return inputs
  return jax.tree.map(lambda array: array[place :: len(group.layers)], inputs)


def _combine(said: Sequence[Aux]) -> Aux:
  """Return what a trunk says, from what its layers say: numbers, or arrays of those of a stack."""
  losses = [jnp.sum(aux.loss) for aux in said if aux.loss is not None]
  figures: dict[str, list[jax.Array]] = {}
  for aux in said:
    for name, value in aux.figures.items():
      figures.setdefault(name, []).append(jnp.ravel(value))
  return Aux(
    loss=sum(losses) if losses else None,
    figures={name: jnp.mean(jnp.concatenate(values)) for name, values in figures.items()},
  )


def init_caches(
  blocks: Sequence[Layer], batch: int, length: int, dtype: jnp.dtype
) -> tuple[Any, ...]:
  """Return an empty cache for each layer of a list, in its place on the mesh.

  Args:
    blocks: from `make` with `compute.layers='list'`.
    batch: B, rows.
    length: slots that a text has room for, those of its padding included.
    dtype: of activations.
  """
  return place_caches(blocks, tuple(layer.init_cache(batch, length, dtype) for layer in blocks))


def place_caches(blocks: Sequence[Layer], caches: Sequence[Any]) -> tuple[Any, ...]:
  """Return the caches with each array partitioned as its layer says."""
  axes = tuple(layer.cache_axes() for layer in blocks)
  return jax.tree.map(lambda array, names: constrain(array, *names), tuple(caches), axes)
