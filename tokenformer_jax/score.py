"""Log-probabilities of given continuations, in batches of few shapes."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tokenformer_jax import buckets, sharding
from tokenformer_jax.errors import UserError
from tokenformer_jax.loss import LossSums, row_loss_sums
from tokenformer_jax.params import Definition, Params

# For each part that the mesh splits a batch into:
_BATCH_TOKENS = 8192  # rows times length, unless the number of rows is given
_LOGIT_ROWS = 2048  # of the vocabulary's size that are alive at once


class Row(NamedTuple):
  """Token ids, of which those of the continuation are scored."""

  context: Sequence[int]  # at least one
  continuation: Sequence[int]


class Score(NamedTuple):
  """What a model says of a continuation."""

  log_prob: float  # Σ log p(token | everything before it), in nats
  is_greedy: bool  # whether every token of it has the largest logit


class Scorer:
  """Scores rows of any lengths with one model, compiled once for each bucket of lengths."""

  def __init__(
    self,
    definition: Definition,
    params: Params,
    mesh: Mesh,
    *,
    max_length: int,
    batch_size: int | None = None,
  ):
    """Defines the programs; nothing is computed yet.

    Args:
      definition: of the language model.
      params: on the mesh.
      mesh: any; every process must score the same rows.
      max_length: of the input. What is before it is not seen: contexts are cut on the left.
      batch_size: rows of a batch, rounded up to what the mesh can split. None: as many as make
        some thousand tokens.
    """
    self.mesh, self.max_length, self.batch_size = mesh, max_length, batch_size
    self._params = params

    def sums(params: Params, batch_Bx2xT: jax.Array) -> LossSums:
      model = definition.bind(params)
      hidden_BxTxD, _, _ = model.hidden(batch_Bx2xT[:, 0])
      chunk = max(1, _LOGIT_ROWS * buckets.rows(1) // batch_Bx2xT.shape[0])
      return row_loss_sums(hidden_BxTxD, model.output_embedding, batch_Bx2xT[:, 1], chunk=chunk)

    # Every host gets all sums.
    self._sums = jax.jit(sums, out_shardings=sharding.replicated(mesh))

  def __call__(
    self, rows: Sequence[Row], progress: Callable[[int], None] = lambda done: None
  ) -> list[Score]:
    """Scores rows, in the order given.

    Args:
      rows: a continuation may be empty; its probability is 1.
      progress: called with the number of rows done since the last call.

    Raises:
      UserError: a continuation is longer than `max_length`.
    """
    for row in rows:
      if len(row.continuation) > self.max_length:
        raise UserError(
          f'a text to be scored as one is {len(row.continuation)} tokens, but the model is '
          f'evaluated on at most {self.max_length}; raise max_length if its positions allow it'
        )
    lengths = [self._input_length(row) for row in rows]
    scores: list[Score | None] = [None] * len(rows)
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

  def _input_length(self, row: Row) -> int:
    return min(len(row.context) + len(row.continuation) - 1, self.max_length)

  def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
    """Indices, the number of rows to fill up to, and the length; the longest first.

    The number of rows is a function of the length, so each length is one program. What takes the
    most memory comes first, so that what does not fit fails at once.
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
    place = sharding.batch_sharding(self.mesh)
    return jax.make_array_from_callback(batch.shape, place, lambda index: batch[index])


def fill(batch: Sequence[Row], size: int, length: int) -> np.ndarray:
  """A batch as one array of inputs and targets.

  Args:
    batch: at most `size` rows. Contexts too long for `length` lose their beginnings.
    size: rows of the array; those that are left over count nothing.
    length: of the input, T.

  Returns:
    int32 [size, 2, T]; a target of −1 is not scored.
  """
  filled = np.zeros((size, 2, length), np.int32)
  filled[:, 1] = -1
  for (inputs, targets), row in zip(filled, batch, strict=False):
    tokens = np.concatenate([row.context, row.continuation]).astype(np.int32)[-(length + 1) :]
    end = len(tokens) - 1
    inputs[:end] = tokens[:-1]
    start = end - len(row.continuation)
    targets[start:end] = tokens[start + 1 :]
  return filled
