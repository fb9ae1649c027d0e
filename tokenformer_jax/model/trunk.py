"""The trunk of a model: layers in the order of a pattern.

A pattern (`config/pattern.py`) gives repeats of rows of layers. The layers at one place of a row
have their parameters stacked along a leading axis, `layers`, and a repeat is one loop over those
stacks. In a trunk with one stack the parameters have paths such as
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

from tokenformer_jax.config.pattern import Repeat
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.params import Params, stack
from tokenformer_jax.model.stack import scan_rows
from tokenformer_jax.parallel.sharding import constrain


class Documents(NamedTuple):
  """How the documents in a row are read apart.

  Attributes:
    first: the id of the first token of a document, which is the last target of the document before
      it: the end of that document, as in generation, or what the tokenizer begins texts with.
    restart: whether positions restart at 0 with each document.
  """

  first: int
  restart: bool

  @classmethod
  def from_choice(cls, choice: str, first: int) -> 'Documents | None':
    """Return what a value of `data.documents` asks for; None for `joined`."""
    return None if choice == 'joined' else cls(first, restart=choice == 'separate')


class Context(NamedTuple):
  """The inputs that all layers of a forward pass share.

  Attributes:
    start: the slot of the first token; the Python number 0 if no slot comes before it.
    padding_B: the number of leading slots of each row without a token, so that rows of unequal
      lengths end together; None: no row has any. The outputs at these slots are meaningless.
    ends_B: the slot after the last token of each row, where padding begins; None: no row has any.
      It needs causal layers, whose tokens see no later slot, and no caches.
    starts_BxT: the slot of the first token of each token's document, which sees no earlier slot;
      None: each row is one document. It has the needs of `ends_B`, and no `padding_B` beside it.
    restart: whether positions restart at 0 with each document.
    training: whether this is the pass of a training step; known while a program is traced.
  """

  start: jax.Array | int = 0
  padding_B: jax.Array | None = None
  ends_B: jax.Array | None = None
  starts_BxT: jax.Array | None = None
  restart: bool = False
  training: bool = False

  @classmethod
  def from_ids(
    cls, ids_BxT: jax.Array, documents: Documents | None = None, *, training: bool = False
  ) -> 'Context':
    """Return the context of whole rows of token ids, where −1 is padding at the end of a row.

    Without `documents` each row is read as one document.
    """
    context = cls(ends_B=jnp.sum(ids_BxT >= 0, axis=1), training=training)
    if documents is None:
      return context
    slots_1xT = jnp.arange(ids_BxT.shape[1])[None]
    starts_BxT = jax.lax.cummax(jnp.where(ids_BxT == documents.first, slots_1xT, 0), axis=1)
    starts_BxT = constrain(starts_BxT, 'batch', 'slots')
    return context._replace(starts_BxT=starts_BxT, restart=documents.restart)

  @property
  def is_beginning(self) -> bool:
    """Whether no slot comes before the first token; known while a program is traced."""
    return isinstance(self.start, int) and self.start == 0

  def positions(self, length: int) -> jax.Array:
    """Return the positions of the next `length` slots, [B, T], or [1, T] if all rows agree.

    The first token of a padded row has position 0; the slots before it have negative positions.
    """
    slots_1xT = self.start + jnp.arange(length)[None]
    if self.starts_BxT is not None and self.restart:
      return slots_1xT - self.starts_BxT
    return slots_1xT if self.padding_B is None else slots_1xT - self.padding_B[:, None]

  def document_positions(self, positions_BxT: jax.Array) -> jax.Array:
    """Return the positions in each token's document, whether or not `positions` restart.

    `positions_BxT` are those of whole rows. The results are the numbers of earlier tokens that a
    token may see.
    """
    if self.starts_BxT is None or self.restart:
      return positions_BxT
    return positions_BxT - self.starts_BxT

  def is_token(self, length: int) -> jax.Array | None:
    """Return whether each of the next `length` slots has a token, bool [B, T]; None: all have."""
    if self.padding_B is None and self.ends_B is None:
      return None
    is_token_BxT = self.positions(length) >= 0
    if self.ends_B is None:
      return is_token_BxT
    return is_token_BxT & (self.start + jnp.arange(length)[None] < self.ends_B[:, None])


FROM_START = Context()


class LayerInputs(NamedTuple):
  """The inputs of one layer; for the whole trunk every array has a leading axis, `layers`."""

  branch_scales_Bx2: jax.Array | None = None  # factors of the outputs of the layer's two branches
  key: jax.Array | None = None  # for the layer's random draws


NO_INPUTS = LayerInputs()


class Counts(NamedTuple):
  """The divisors of the sums of a batch.

  Sums of microbatches are divided by the counts of the whole batch, so they add up to its means.
  """

  targets: jax.Array  # of the task's loss
  tokens: jax.Array  # those that layers see, without padding
  sequences: jax.Array  # those with tokens


class Aux(NamedTuple):
  """Auxiliary results of layers: float32 sums over the tokens or sequences of a batch.

  Attributes:
    losses: weighted sums that training minimizes besides the task's loss, by the name of the
      divisor in `Counts`. A trunk returns the sums over its layers.
    figures: sums over tokens to report, numbers or vectors, by name. A trunk returns lists with
      the values [L, …] of each stack of layers: see `layer_means`.
  """

  losses: Mapping[str, jax.Array]
  figures: Mapping[str, Any]

  def divided(self, counts: Counts) -> tuple[jax.Array | None, dict[str, Any]]:
    """Return the loss, None if no layer has one, and the figures, as parts of means."""
    losses = [total / getattr(counts, name) for name, total in self.losses.items()]
    figures = jax.tree.map(lambda total: total / counts.tokens, dict(self.figures))
    return sum(losses) if losses else None, figures


EMPTY_AUX = Aux(losses={}, figures={})
LOAD, MAX_VIOLATION = 'router/load', 'router/max_violation'


def add_aux(*auxes: Aux) -> Aux:
  """Add the losses of parts of a model, and join their figures, whose names differ."""
  losses: dict[str, jax.Array] = {}
  for aux in auxes:
    for name, total in aux.losses.items():
      losses[name] = losses[name] + total if name in losses else total
  return Aux(losses, {name: value for aux in auxes for name, value in aux.figures.items()})


def layer_means(figures: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
  """Return means over the layers that have a figure, from a trunk's figures of a whole batch.

  An entry i of a vector of figures becomes the figure `NAME/i`. `router/max_violation` is the
  largest entry of a router's load, relative to even load, minus 1.
  """
  found: dict[str, list[Any]] = {}
  for name, stacks in figures.items():
    for values in stacks:
      entries = {name: values} if values.ndim == 1 else _entries(name, values)
      if name == LOAD:
        entries[MAX_VIOLATION] = values.shape[1] * values.max(axis=1) - 1
      for entry, one in entries.items():
        found.setdefault(entry, []).append(one)
  return {
    name: sum(one.sum() for one in values) / sum(map(len, values)) for name, values in found.items()
  }


class Layer(Protocol):
  """A layer of a trunk: an `nnx.Module` with these methods."""

  def __call__(
    self, x_BxTxD: jax.Array, context: Context, cache: Any, inputs: LayerInputs
  ) -> tuple[jax.Array, Any, Aux]:
    """Return the output, the cache with the new slots (None without a cache), and the `Aux`."""
    ...

  def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Any:
    """Return the layer's empty cache for texts of up to `length` slots, a NamedTuple of arrays."""

  def cache_axes(self) -> Any:
    """Return the logical axes of each array of that cache, in the same NamedTuple."""

  def length_flops(self, length: int) -> float:
    """Count the length-dependent FLOPs of one of `length` positions."""
    ...


class Maker(Protocol):
  """Make a layer."""

  def __call__(self, *, execution: Execution, rngs: nnx.Rngs) -> nnx.Module:
    """Return a new layer."""
    ...


class Architecture(NamedTuple):
  """The layers of a trunk."""

  repeats: tuple[Repeat, ...]  # from `pattern.parse`
  makers: Mapping[str, Maker]  # the maker of each layer name in the repeats


class Stacks(nnx.Module):
  """Several stacks of layers, each an attribute with the stack's name."""

  def __init__(self, stacks: Mapping[str, nnx.Module]):
    for name, layers in stacks.items():
      setattr(self, name, layers)


class Place(NamedTuple):
  """The place of a layer's parameters: its stack ('' for the only stack) and its index there."""

  stack: str
  index: int


def make(architecture: Architecture, *, execution: Execution, rngs: nnx.Rngs) -> Any:
  """Make the layers as one module: a stack, several stacks, or a list in execution order."""
  repeats, makers = architecture
  if execution.layers == 'list':
    names = [name for repeat in repeats for name in repeat.layers * repeat.count]
    return nnx.List([makers[name](execution=execution, rngs=rngs) for name in names])

  depths: dict[str, list[int]] = {}
  for number, place in enumerate(places(repeats), start=1):
    depths.setdefault(place.stack, []).append(number)

  def stacked(own: str, name: str, repeat: Repeat) -> nnx.Module:
    whole = _rows_together(execution.layers, repeat) == repeat.count
    how = dataclasses.replace(execution, layers='unrolled') if whole else execution
    make_layer = functools.partial(makers[name], execution=how)
    return stack(lambda rngs: make_layer(rngs=rngs), repeat.count, rngs=rngs, depths=depths[own])

  stacks = {
    own: stacked(own, name, repeat)
    for repeat, names in zip(repeats, _stack_names(repeats), strict=True)
    for own, name in zip(names, repeat.layers, strict=True)
  }
  return stacks[''] if '' in stacks else Stacks(stacks)


def _stack_names(repeats: Sequence[Repeat]) -> list[list[str]]:
  """Return the names of each repeat's stacks; a single stack has the name ''."""
  if sum(len(repeat.layers) for repeat in repeats) == 1:
    return [['']]
  names, number = [], 0
  for repeat in repeats:
    names.append([f'{name}_{number + i}' for i, name in enumerate(repeat.layers)])
    number += len(repeat.layers)
  return names


def places(repeats: Sequence[Repeat]) -> Iterator[Place]:
  """Yield the place of each layer's parameters, in execution order."""
  for repeat, names in zip(repeats, _stack_names(repeats), strict=True):
    for index in range(repeat.count):
      for name in names:
        yield Place(name, index)


def named_stacks(blocks: nnx.Module, repeats: Sequence[Repeat]) -> list[dict[str, Any]]:
  """Return the stacks from `make` of each repeat by name, in the execution order of a row."""
  return [
    {name: getattr(blocks, name) if name else blocks for name in names}
    for names in _stack_names(repeats)
  ]


def length_flops(blocks: nnx.Module, repeats: Sequence[Repeat], length: int) -> float:
  """Count the length-dependent FLOPs of one of `length` positions in stacks from `make`."""
  return sum(
    repeat.count * layers.length_flops(length)
    for repeat, stacks in zip(repeats, named_stacks(blocks, repeats), strict=True)
    for layers in stacks.values()
  )


def unstack(blocks: Params, repeats: Sequence[Repeat]) -> dict[int, Params]:
  """Return the parameters of stacks as those of a list of layers, in execution order."""

  def layer(place: Place) -> Params:
    stacked = blocks[place.stack] if place.stack else blocks
    return jax.tree.map(lambda array: array[place.index], stacked)

  return {i: layer(place) for i, place in enumerate(places(repeats))}


def run(
  blocks: Any,
  repeats: Sequence[Repeat],
  x_BxTxD: jax.Array,
  context: Context = FROM_START,
  caches: Sequence[Any] | None = None,
  inputs: LayerInputs = NO_INPUTS,
  *,
  execution: Execution,
) -> tuple[jax.Array, tuple[Any, ...] | None, Aux]:
  """Run layers from `make`, which had the same repeats and the same `execution.layers`.

  `caches` has one for each layer in execution order, and needs `execution.layers='list'`; None: no
  later call continues from here. `inputs` has a leading axis `layers`.

  Returns:
    The output of the last layer, the caches with the new slots, and the layers' combined `Aux`.

  Raises:
    ValueError: there are caches without `execution.layers='list'`, with padding at the end, or with
      several documents in a row.
  """
  if caches is not None and context.starts_BxT is not None:
    raise ValueError(
      'Context.starts_BxT has the documents of whole rows, and a cache holds one document a row'
    )
  if caches is not None and context.ends_B is not None:
    raise ValueError(
      'Context.ends_B puts padding at the end of rows, where caches go on; pad the rows at their '
      'beginning, with Context.padding_B'
    )
  if execution.layers == 'list':
    return _run_list(blocks, x_BxTxD, context, caches, inputs)
  if caches is not None:
    raise ValueError("caches need Execution.layers='list'")
  auxes: list[Aux] = []
  first = 0
  for repeat, stacks in zip(repeats, named_stacks(blocks, repeats), strict=True):
    own = inputs
    if len(repeats) > 1:
      own = jax.tree.map(lambda array, first=first, n=repeat.size: array[first : first + n], inputs)
    x_BxTxD, stacked = _run_repeat(list(stacks.values()), repeat, x_BxTxD, context, own, execution)
    auxes.extend(stacked)
    first += repeat.size
  return x_BxTxD, None, _combine(auxes)


def _run_list(
  blocks: Sequence[Layer],
  x_BxTxD: jax.Array,
  context: Context,
  caches: Sequence[Any] | None,
  inputs: LayerInputs,
) -> tuple[jax.Array, tuple[Any, ...] | None, Aux]:
  auxes, written = [], []
  for i, layer in enumerate(blocks):
    own = jax.tree.map(lambda array, i=i: array[i], inputs)
    cache = None if caches is None else caches[i]
    x_BxTxD, cache, aux = layer(x_BxTxD, context, cache, own)
    auxes.append(jax.tree.map(lambda value: jnp.asarray(value)[None], aux))
    written.append(cache)
  return x_BxTxD, None if caches is None else tuple(written), _combine(auxes)


def _run_repeat(
  stacks: Sequence[nnx.Module],
  repeat: Repeat,
  x_BxTxD: jax.Array,
  context: Context,
  inputs: LayerInputs,
  execution: Execution,
) -> tuple[jax.Array, tuple[Aux, ...]]:
  """Run the rows of a repeat; return x, and the stacked `Aux` of each place of the row."""

  def apply(layer: Layer, x_BxTxD: jax.Array, own: LayerInputs) -> tuple[jax.Array, Aux]:
    x_BxTxD, _, aux = layer(x_BxTxD, context, None, own)
    return x_BxTxD, aux

  return scan_rows(
    stacks,
    apply,
    x_BxTxD,
    [_inputs_at(inputs, repeat, i) for i in range(len(stacks))],
    remat=execution.remat,
    together=_rows_together(execution.layers, repeat),
  )


def _rows_together(layers: str, repeat: Repeat) -> int:
  """Return the rows of a repeat in the body of a loop, for a value of `Execution.layers`.

  A number is the most layers of a body, which holds as many whole rows of the repeat as divide it.
  """
  if layers in ('scan', 'unrolled'):
    return 1 if layers == 'scan' else repeat.count
  most = max(1, int(layers) // len(repeat.layers))
  return max(rows for rows in range(1, most + 1) if repeat.count % rows == 0)


def _inputs_at(inputs: LayerInputs, repeat: Repeat, place: int) -> LayerInputs:
  """Return the inputs of the layers at one place of the rows."""
  if len(repeat.layers) == 1:
    return inputs
  return jax.tree.map(lambda array: array[place :: len(repeat.layers)], inputs)


def _combine(auxes: Sequence[Aux]) -> Aux:
  """Combine the `Aux` of stacks, whose arrays have a leading axis, into that of the trunk."""
  figures: dict[str, list[jax.Array]] = {}
  for aux in auxes:
    for name, values in aux.figures.items():
      figures.setdefault(name, []).append(values)
  losses = add_aux(*(Aux(jax.tree.map(jnp.sum, aux.losses), {}) for aux in auxes)).losses
  return Aux(losses, figures)


def _entries(name: str, value_LxN: Any) -> dict[str, Any]:
  """Return the entries of vectors by names that sort as their numbers do."""
  digits = len(str(value_LxN.shape[1] - 1))
  return {f'{name}/{i:0{digits}}': value_LxN[:, i] for i in range(value_LxN.shape[1])}


def init_caches(
  blocks: Sequence[Layer], batch: int, length: int, dtype: jnp.dtype
) -> tuple[Any, ...]:
  """Return an empty cache for each layer of a list, partitioned on the mesh.

  `length` is the number of slots for a text, including its padding.
  """
  return place_caches(blocks, tuple(layer.init_cache(batch, length, dtype) for layer in blocks))


def place_caches(blocks: Sequence[Layer], caches: Sequence[Any]) -> tuple[Any, ...]:
  """Return the caches, each array partitioned by its layer's `cache_axes`."""
  axes = tuple(layer.cache_axes() for layer in blocks)
  return jax.tree.map(lambda array, names: constrain(array, *names), tuple(caches), axes)
