"""The interface of layers: their inputs, their auxiliary results, and their methods."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from tokenformer_jax.parallel.sharding import constrain


class Context(NamedTuple):
  """The inputs that all layers of a forward pass share.

  Attributes:
    start: the slot of the first token; the Python number 0 if no slot comes before it.
    padding_B: the number of leading slots of each row without a token, so that rows of unequal
      lengths end together; None: no row has any. The outputs at these slots are meaningless.
    ends_B: the slot after the last token of each row, where padding begins; None: no row has any.
      It needs causal layers, whose tokens see no later slot, and no caches.
    starts_BxT: the slot of the first token of each token's document, which sees no earlier slot;
      None: each row is one document. It has the needs of `ends_B`, and excludes `padding_B`.
    restart: whether positions restart at 0 with each document.
    embedding_BxTxD: the output of the layers before the first one with a boundary; None: no layer
      had one yet.
    training: whether this is the pass of a training step; known while a program is traced.
  """

  start: jax.Array | int = 0
  padding_B: jax.Array | None = None
  ends_B: jax.Array | None = None
  starts_BxT: jax.Array | None = None
  restart: bool = False
  embedding_BxTxD: jax.Array | None = None
  training: bool = False

  @classmethod
  def from_ids(
    cls,
    ids_BxT: jax.Array,
    begins_BxT: jax.Array | None = None,
    documents: str = 'joined',
    *,
    training: bool = False,
  ) -> 'Context':
    """Return the context of whole rows of token ids, where −1 is padding at the end of a row.

    `begins_BxT` is whether a token is the first one of a document, and `documents` how those of a
    row are told apart, as `data.documents`. Without `begins_BxT` each row is one document. Where
    the end of a document begins the next one, it is the last target of its own.
    """
    context = cls(ends_B=jnp.sum(ids_BxT >= 0, axis=1), training=training)
    if begins_BxT is None or documents == 'joined':
      return context
    slots_1xT = jnp.arange(ids_BxT.shape[1])[None]
    starts_BxT = jax.lax.cummax(jnp.where(begins_BxT, slots_1xT, 0), axis=1)
    starts_BxT = constrain(starts_BxT, 'batch', 'slots')
    return context._replace(starts_BxT=starts_BxT, restart=documents == 'separate')

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
    losses: list[Any] = [total / getattr(counts, name) for name, total in self.losses.items()]
    figures = jax.tree.map(lambda total: total / counts.tokens, dict(self.figures))
    total: Any = sum(losses) if losses else None
    return total, figures


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
  by_name: dict[str, list[Any]] = {}
  for name, stacks in figures.items():
    for values in stacks:
      entries = {name: values} if values.ndim == 1 else _entries(name, values)
      if name == LOAD:
        entries[MAX_VIOLATION] = values.shape[1] * values.max(axis=1) - 1
      for entry, one in entries.items():
        by_name.setdefault(entry, []).append(one)
  return {
    name: sum(one.sum() for one in values) / sum(map(len, values))
    for name, values in by_name.items()
  }


def _entries(name: str, value_LxN: Any) -> dict[str, Any]:
  """Return the entries of vectors by names that sort as their numbers do."""
  digits = len(str(value_LxN.shape[1] - 1))
  return {f'{name}/{i:0{digits}}': value_LxN[:, i] for i in range(value_LxN.shape[1])}


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
