"""Tokens are drawn from the distribution that was asked for, row by row."""

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tokenformer_jax.decoding.sampling import (
  GREEDY,
  Draws,
  Sampling,
  choose,
  draw,
  draw_by_bisection,
  draw_by_rejection,
  draw_by_rejection_or_sort,
  lowest_by_bisection,
  lowest_by_sort,
  needs,
)
from tokenformer_jax.errors import UserError

_compiled = jax.jit(draw, static_argnames='need')


def _draw(logits_BxV: np.ndarray, sampling: Sampling) -> np.ndarray:
  rows = len(logits_BxV)
  draws = Draws.from_samplings([sampling] * rows)
  return np.asarray(_compiled(logits_BxV, draws, np.arange(rows), need=needs([sampling])))


def _drawn(logits: np.ndarray, sampling: Sampling) -> set[int]:
  """The tokens that come up in so many draws that one of a probability of 1 % is not missed."""
  return set(_draw(np.broadcast_to(logits, (4096, len(logits))), sampling).tolist())


# Different by 0.25 at least, so that none is too rare to be drawn and none is drawn with another.
LOGITS = st.permutations(range(8)).map(lambda order: np.float32(order) / 4)


@pytest.mark.parametrize('temperature', [0.5, 2.0])
def test_draws_have_the_probabilities_of_the_model(temperature):
  logits = np.array([0, 1, 2], np.float32)
  ids = _draw(np.broadcast_to(logits, (20_000, 3)), Sampling(temperature, top_p=1.0))
  want = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
  np.testing.assert_allclose(
    np.bincount(ids, minlength=3) / 20_000, want, atol=0.015, err_msg='not softmax(logits / T)'
  )


@pytest.mark.parametrize('temperature', [0, 1e-38, 9e-6, 1e-5])
def test_a_temperature_near_0_takes_the_likeliest(temperature):
  logits = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
  settings = [Sampling(temperature, 3, 0.5), *[Sampling(1.0, 1)] * 3]
  got = np.asarray(_compiled(logits, Draws.from_samplings(settings), np.arange(4)))
  assert got.tolist() == logits.argmax(axis=-1).tolist()
  assert (needs(settings[:1]) == 'likeliest') == (temperature < 1e-5)


@settings(deadline=None, max_examples=20)
@given(
  logits=LOGITS,
  k=st.integers(0, 10),
  p=st.floats(0.01, 0.999) | st.sampled_from([1e-40, 1.0]),
  temperature=st.sampled_from([0.7, 1.0, 1.5]),
)
def test_top_p_counts_among_the_k_likeliest(logits, k, p, temperature):
  order = np.argsort(-logits)[: k or None]
  probabilities = np.exp(np.float64(logits[order]) / temperature)
  reached = np.cumsum(probabilities / probabilities.sum())
  assume(p == 1 or np.min(np.abs(reached - p)) > 1e-4)
  want = set(order if p == 1 else order[: np.searchsorted(reached, p) + 1])
  drawn = _drawn(logits, Sampling(temperature, top_k=k, top_p=p))
  assert drawn == want, 'p is not of what top_k leaves'


@pytest.mark.parametrize('lowest', [lowest_by_sort, lowest_by_bisection])
@pytest.mark.parametrize('step', [0, 0.25], ids=['different logits', 'equal logits'])
def test_both_ways_to_the_limit_are_the_definition(lowest, step):
  """CPUs and accelerators compute it in different ways."""
  logits = np.random.default_rng(0).normal(size=(6, 500)).astype(np.float32)
  logits = np.round(logits / step) * np.float32(step) if step else logits
  top_k = np.array([0, 0, 20, 20, 600, 0], np.int32)
  top_p = np.array([0.95, 1, 0.9, 1, 0.5, 1e-40], np.float32)
  got = np.asarray(jax.jit(lowest)(logits, Draws(np.ones(6), top_k, top_p, np.zeros(6))))
  for row, k, p, limit in zip(logits, top_k, top_p, got[:, 0], strict=True):
    ordered = np.sort(row)[::-1][: k or None]
    mass = np.cumsum(np.exp(np.float64(ordered)))
    want = ordered[-1] if p == 1 else ordered[np.searchsorted(mass, p * mass[-1])]
    assert want == limit or (p == 1 and k == 0 and limit == -np.inf), f'top_k={k} top_p={p}'


_DRAWS = (draw_by_bisection, draw_by_rejection, draw_by_rejection_or_sort)


@pytest.mark.parametrize('way', _DRAWS)
@pytest.mark.parametrize(
  'logits', [[2, 1.5, 1, 0.5, -3], [1, 1, 0, 0, -3]], ids=['', 'equal logits']
)
def test_every_way_to_draw_has_the_probabilities_of_the_tokens_that_top_p_leaves(way, logits):
  """Chi-square with three degrees of freedom is above 16.3 once in a thousand times."""
  rows, probabilities = 20_000, np.exp(np.float64(logits)) / np.exp(np.float64(logits)).sum()
  draws = Draws.from_samplings([Sampling(1.0, top_p=0.95)] * rows)
  ids = np.asarray(jax.jit(way)(np.tile(np.float32(logits), (rows, 1)), draws, np.arange(rows)))
  want = rows * probabilities[:4] / probabilities[:4].sum()  # the fifth token is beyond 0.95
  counts = np.bincount(ids, minlength=5)
  assert counts[4] == 0 and np.sum((counts[:4] - want) ** 2 / want) < 16.3


def test_a_row_is_drawn_by_its_own_settings_on_accelerators_too():
  """Rows are drawn by rejection or after a sort; without an accepted draw, it is the likeliest."""
  ways = [Sampling(1.0, 0, 0.95, 3), Sampling(1.0, 3, 0.95, 3), Sampling(1.0, 0, 0.5, 3)]
  logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
  draws, position = Draws.from_samplings(ways), np.arange(3)
  bisected, rejected, together = (jax.jit(f)(logits, draws, position) for f in _DRAWS)
  assert together.tolist() == [rejected[0], *bisected[1:].tolist()]
  assert needs(ways) == 'limited' and needs(ways[:1]) == 'likely', 'sorts without need'
  nothing = draws._replace(top_p_B=np.full(3, 1e-30, np.float32))
  likeliest = jax.jit(draw_by_rejection)(logits, nothing, position)
  assert likeliest.tolist() == logits.argmax(-1).tolist()


def test_what_is_given_wins_over_what_a_folder_states_and_that_over_ours():
  stated = {'temperature': 0.6, 'top_k': 20, 'top_p': 0.9}
  assert choose({}, temperature=None, seed=3) == Sampling(seed=3)
  assert choose(stated, temperature=None, top_k=None, top_p=1.0) == Sampling(0.6, 20, 1.0)
  assert choose(stated, temperature=0, top_k=None).is_greedy


def test_every_row_is_drawn_by_its_own_settings():
  ways = [GREEDY, Sampling(1.0, top_p=1.0, seed=1), Sampling(2.0, 3, 0.9, 2), Sampling(0.5, 2, 1.0)]
  rows = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
  together = np.asarray(_compiled(rows, Draws.from_samplings(ways), np.arange(4) + 7))
  for i, way in enumerate(ways):
    settings, position = Draws.from_samplings([way]), np.array([7 + i])
    alone = _compiled(rows[i : i + 1], settings, position, need=needs([way]))
    assert together[i] == alone[0], f'{way} is drawn otherwise beside other rows'


@pytest.mark.parametrize(
  ('options', 'sentence'),
  [
    ({'temperature': -0.1}, 'temperature is -0.1; it must be finite and at least 0'),
    ({'temperature': np.nan}, 'temperature is nan; it must be finite and at least 0'),
    ({'temperature': np.inf}, 'temperature is inf; it must be finite and at least 0'),
    ({'top_k': 2**31}, 'top_k is 2147483648; it must be from 0 to 2147483647'),
    ({'top_k': np.nan}, 'top_k is nan; it must be an integer'),
    ({'top_p': 0.0}, 'top_p is 0.0; it must lie between 0 (excluded) and 1'),
    ({'top_p': np.nan}, 'top_p is nan; it must lie between 0 (excluded) and 1'),
    ({'seed': np.inf}, 'seed is inf; it must be an integer'),
  ],
)
def test_sampling_that_cannot_be(options, sentence):
  with pytest.raises(UserError) as error:
    Sampling(**options)
  assert str(error.value) == sentence, 'the sentence does not say what is allowed'
