"""Compute log-probabilities of given continuations, in batches of few shapes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tokenformer_jax.data import marks
from tokenformer_jax.decoding import buckets
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.loss import LossSums, row_loss_sums
from tokenformer_jax.model.params import Definition, Params
from tokenformer_jax.parallel import sharding

# Limits for each shard of a batch.
_BATCH_TOKENS = 8192  # rows times length, if no batch size is given
_LOGIT_ROWS = 2048  # rows of logits in memory at once


class Row(NamedTuple):
  """Token ids of a context, and of the continuation to score.

  They are one document, unless ids say that they begin one: see `marks.begin`.
  """

  context: Sequence[int] | np.ndarray  # at least one
  continuation: Sequence[int] | np.ndarray


class Score(NamedTuple):
  """The score of a continuation under a model."""

  log_prob: float  # Σ log p(token | everything before it), in nats
  is_greedy: bool  # whether every token of it has the largest logit


class Scorer:
  """A scorer of rows of any lengths with one model, compiled once for each bucket of lengths."""

  def __init__(
    self,
    definition: Definition,
    params: Params,
    mesh: Mesh,
    *,
    max_length: int,
    batch_size: int | None = None,
    documents: str = 'joined',
  ):
    """Define the programs for a language model without compiling them.

    The parameters are on the mesh, and every process must score the same rows. Contexts that exceed
    `max_length` tokens of input are cut on the left. `batch_size` is rounded up to a number of rows
    that the mesh can split; None: enough rows for several thousand tokens. `documents` is how rows
    of several are read, as `data.documents`.
    """
    self.mesh, self.max_length, self.batch_size = mesh, max_length, batch_size
    self._params = params

    def sums(params: Params, batch_Bx2xT: jax.Array) -> LossSums:
      model = definition.bind(params)
      ids_BxT = batch_Bx2xT[:, 0]
      context = Context.from_ids(ids_BxT, ids_BxT >= marks.BEGINS, documents)
      ids_BxT = jnp.maximum(marks.ids_alone(ids_BxT), 0)
      hidden_BxTxD, _, _ = model.hidden(ids_BxT, context)
      chunk = max(1, _LOGIT_ROWS * buckets.rows(1) // batch_Bx2xT.shape[0])
      head, targets_BxT = model.output_embedding, batch_Bx2xT[:, 1]
      return row_loss_sums(hidden_BxTxD, head, targets_BxT, chunk=chunk, cap=model.logit_cap)

    # Every host needs all sums.
    self._sums = jax.jit(sums, out_shardings=sharding.replicated(mesh))

  def __call__(
    self, rows: Sequence[Row], progress: Callable[[int], Any] = lambda done: None
  ) -> list[Score]:
    """Score rows and return the scores in their order.

    An empty continuation has the probability 1. `progress` gets the number of rows done since its
    last call.
    """
    for row in rows:
      if len(row.continuation) > self.max_length:
        raise UserError(
          f'a text to score has {len(row.continuation)} tokens, but the model is '
          f'evaluated on at most {self.max_length}; raise max_length if its positions allow it'
        )
    given = (len(row.context) + len(row.continuation) - 1 for row in rows)
    lengths = [min(length, self.max_length) for length in given]
    scores = [Score(0.0, is_greedy=True)] * len(rows)
    with jax.set_mesh(self.mesh):
      for indices, size, length in self._batches(lengths):
        tokens_BxT = fill([rows[i] for i in indices], size, length)
        sums = jax.device_get(self._sums(self._params, self._on_mesh(tokens_BxT)))
        for i, nats, correct, tokens in zip(
          indices, sums.nats, sums.correct, sums.tokens, strict=False
        ):
          scores[i] = Score(-float(nats), bool(correct == tokens))
        progress(len(indices))
    return scores

  def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
    """Yield the indices of each batch, its number of rows after filling up, and its length.

    The number of rows is a function of the length, so each length compiles one program. The longest
    batches come first, so that a lack of memory shows at once.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    first = 0
    while first < len(order):
      length = min(buckets.bucket(lengths[order[first]]), self.max_length)
      fitting = max(1, _BATCH_TOKENS // length) * buckets.rows(1)
      size = buckets.rows(self.batch_size or fitting)
      yield order[first : first + size], size, length
      first += size

  def _on_mesh(self, batch: np.ndarray) -> jax.Array:
    shards = sharding.batch_sharding(self.mesh)
    return jax.make_array_from_callback(batch.shape, shards, lambda index: batch[index])


def fill(batch: Sequence[Row], size: int, length: int) -> np.ndarray:
  """Return at most `size` rows as one array of inputs and targets, int32 [size, 2, length].

  An input of −1 is padding at the end, and a target of −1 is not scored. Contexts too long for
  `length` lose their beginnings.
  """
  filled = np.full((size, 2, length), -1, np.int32)
  for (inputs, targets), row in zip(filled, batch, strict=False):
    tokens = np.concatenate([row.context, row.continuation]).astype(np.int32)[-(length + 1) :]
    end = len(tokens) - 1
    inputs[:end] = tokens[:-1]
    start = end - len(row.continuation)
    targets[start:end] = marks.ids_alone(tokens[start + 1 :])
  return filled
