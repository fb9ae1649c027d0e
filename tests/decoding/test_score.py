"""A score is what one forward pass over the row alone says of its continuation."""

import functools

import numpy as np
import pytest
from compilations import compilations
from mixtures import mixture, unbalanced
from tiny_trained import LENGTH, log_probs, score, trained

from tokenformer_jax.config import CapacityConfig
from tokenformer_jax.decoding import score as score_lib
from tokenformer_jax.decoding.score import Row, Score, Scorer
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.loss import LossSums

# Lengths of context and continuation: the least, of several buckets, at and over the longest input.
SIZES = [(1, 1), (3, 9), (20, 20), (40, LENGTH - 39), (LENGTH, 8), (200, 30), (1, LENGTH)]
TOLERANCE = 1e-4


def _row(context: int, continuation: int) -> Row:
  ids = np.random.default_rng([context, continuation]).integers(0, 256, context + continuation)
  return Row(ids[:context].tolist(), ids[context:].tolist())


@functools.cache
def _scorer(devices: int = 1, max_length: int = LENGTH, batch_size: int | None = 4) -> Scorer:
  model = trained(devices)
  return Scorer(
    model.definition, model.params, model.mesh, max_length=max_length, batch_size=batch_size
  )


@functools.cache
def _log_probs(devices: int) -> list[float]:
  return [score.log_prob for score in _scorer(devices)([_row(*sizes) for sizes in SIZES])]


@pytest.mark.parametrize('devices', [1, 8])
def test_a_score_is_that_of_the_row_alone(devices):
  """The reference has neither a batch nor padding."""
  wanted = [score(*_row(*sizes), pad=LENGTH)[0] for sizes in SIZES]
  np.testing.assert_allclose(_log_probs(devices), wanted, rtol=0, atol=TOLERANCE)


def test_tokens_before_the_longest_input_are_not_seen():
  """Input is `LENGTH` tokens and the last token is none of it: LENGTH + 1 tokens count."""
  row = _row(100, 10)
  seen = len(row.context) - (LENGTH + 1 - 10)
  scorer = _scorer()
  beyond = Row([7] * seen + row.context[seen:], row.continuation)
  within = Row([7] * (seen + 1) + row.context[seen + 1 :], row.continuation)
  first, same, other = scorer([row, beyond, within])
  assert first.log_prob == same.log_prob, 'a token that was cut off counts'
  assert first.log_prob != other.log_prob, 'the first token that fits does not count'


def test_the_greedy_continuation_is_recognised():
  context, continuation = _row(5, 0).context, []
  for _ in range(6):
    continuation.append(int(log_probs([*context, *continuation], LENGTH)[-1].argmax()))
  changed = [*continuation[:2], (continuation[2] + 1) % 256, *continuation[3:]]
  right, wrong = _scorer()([Row(context, continuation), Row(context, changed)])
  assert right.is_greedy, 'what greedy decoding writes is not called greedy'
  assert not wrong.is_greedy, 'one token that is not the likeliest goes unnoticed'


def test_an_empty_continuation_is_certain():
  assert _scorer()([Row([1, 2], [])]) == [Score(0.0, True)], 'an empty text is not certain'


def test_a_continuation_that_does_not_fit_is_refused():
  with pytest.raises(UserError, match=f'has {LENGTH + 1} tokens, but .* at most {LENGTH}; raise'):
    _scorer()([_row(1, LENGTH + 1)])


def test_logits_come_in_chunks(monkeypatch):
  """4 rows of 48 positions, two positions at a time."""
  monkeypatch.setattr(score_lib, '_LOGIT_ROWS', 8)
  rows = [_row(*sizes) for sizes in SIZES]
  got = [one.log_prob for one in _scorer.__wrapped__()(rows)]
  np.testing.assert_allclose(got, _log_probs(1), rtol=0, atol=TOLERANCE)


def test_a_bucket_is_compiled_once():
  """Inputs of 1 to 69 tokens have the lengths 64 and 70."""
  scorer = _scorer(max_length=70, batch_size=8)
  with compilations() as names:
    scorer([_row(n, 1) for n in range(1, 70, 3)])
    scorer([_row(n, 2) for n in range(2, 69, 3)])
  assert names.count('sums') == 2, 'a task costs more compilations than there are buckets'


def test_rows_fill_a_batch(monkeypatch):
  """Without a given size: as many as make so many tokens on each of the 4 parts of the mesh."""
  monkeypatch.setattr(score_lib, '_BATCH_TOKENS', 2 * LENGTH + 5)
  scorer, sizes = _scorer.__wrapped__(8, batch_size=None), []
  monkeypatch.setattr(
    scorer, '_sums', lambda _, batch: LossSums(*np.zeros((len(LossSums._fields), len(batch))))
  )
  scorer([_row(40, 8)] * 9, sizes.append)
  assert sizes == [2 * 4, 1], 'a batch has more or fewer rows than there is room for'


def test_a_capacity_is_that_of_the_row_alone():
  few = CapacityConfig(eval_factor=0.5, least=1)
  changes = {'layer': mixture(unbalanced(dispatch=few)).layer}
  model = trained(**changes)
  scorer = Scorer(model.definition, model.params, model.mesh, max_length=LENGTH, batch_size=2)
  row = _row(3, 9)
  found, _ = scorer([row, _row(20, 20)])
  assert abs(found.log_prob - score(*row, **changes)[0]) < TOLERANCE
