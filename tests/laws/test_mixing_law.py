"""A chain by the law of mixing: between its sizes, cheapest where planned, and found again."""

import dataclasses
import itertools
import types

import numpy as np
import pytest
from synthetic import PUBLISHED

from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import formulas, mixing, stages
from tokenformer_jax.laws.growth import Assumptions, Stage
from tokenformer_jax.laws.runs import FinishedRun, Growth, Size

ONE = {name: np.array([value]) for name, value in PUBLISHED.items()}
SIZES = (1e8, 4e8, 1.6e9)
STAGES = [Stage(n, (6 * n, 6 * n)) for n in SIZES]
GAMMA = np.array([2.5])


def _plan(target=2.4, gamma=GAMMA, stages=STAGES, draws=ONE, **assumed):
  return mixing.plan(PUBLISHED, draws, stages, target, Assumptions(mixing=gamma, **assumed))


@pytest.mark.parametrize(('share', 'left'), [(0.5, 0.5**2.5), (0.75, 0.75**2.5)])
def test_a_power_of_the_share_is_left_of_the_gap(share, left):
  tokens = 2e10
  small, large = (formulas.loss(PUBLISHED, n, tokens) for n in SIZES[:2])
  legs = [(SIZES[0], share * tokens), (SIZES[1], (1 - share) * tokens)]
  assert mixing.chain_loss(ONE, legs, GAMMA)[0] == pytest.approx(large + left * (small - large))


def test_a_growth_at_once_is_from_scratch_and_one_at_the_end_is_none():
  for tokens, size in (((1, 2e10), SIZES[1]), ((2e10, 1e-3), SIZES[0])):
    found = mixing.chain_loss(ONE, list(zip(SIZES[:2], tokens, strict=True)), GAMMA)[0]
    assert found == pytest.approx(formulas.loss(PUBLISHED, size, 2e10), rel=1e-6)


def test_two_growths_at_once_are_one():
  one = [(SIZES[0], 1e10), (SIZES[2], 1e10)]
  two = [one[0], (SIZES[1], 0.0), one[1]]
  found = [mixing.chain_loss(ONE, legs, GAMMA)[0] for legs in (one, two)]
  assert found[0] == pytest.approx(found[1])


def test_the_exponent_of_grown_runs_is_found_again():
  runs = []
  for share, tokens in itertools.product((0.4, 0.7), (1e9, 1e10)):
    legs = (SIZES[0], share * tokens), (SIZES[1], (1 - share) * tokens)
    runs.append((*legs, float(mixing.chain_loss(ONE, legs, GAMMA)[0])))
  draws = {name: np.repeat(value, 2) for name, value in ONE.items()}
  np.testing.assert_allclose(mixing.exponent(draws, runs), GAMMA[0], atol=0.01)
  assert mixing.exponent(ONE, [(*runs[0][:2], 1.0)]) == mixing.LARGEST


def test_a_chain_reaches_the_target_that_it_was_planned_for():
  found = _plan()
  legs = [(leg.parameters, leg.tokens) for leg in found.legs]
  assert len(legs) > 1
  assert mixing.chain_loss(ONE, legs, GAMMA)[0] == pytest.approx(2.4, rel=1e-6)
  assert found.total < found.scratch.cost <= found.scratch_last.cost
  assert legs[-1][1] >= 0.2 * sum(tokens for _, tokens in legs), 'the decay is after the growth'


def test_no_chain_of_two_sizes_is_cheaper():
  found, best = _plan(stages=STAGES[:2]), np.inf
  for share in np.linspace(0.01, 0.8, 80):
    low, high = 1e8, 1e13
    for _ in range(80):
      tokens = (low * high) ** 0.5
      legs = [(SIZES[0], share * tokens), (SIZES[1], (1 - share) * tokens)]
      low, high = (low, tokens) if mixing.chain_loss(ONE, legs, GAMMA)[0] <= 2.4 else (tokens, high)
    best = min(best, 6 * sum(size * tokens for size, tokens in legs))
  alone = min(6 * n * formulas.tokens_for_loss(PUBLISHED, n, np.array(2.4)) for n in SIZES[:2])
  assert found.total == pytest.approx(min(best, alone), rel=1e-3)


def test_a_model_that_forgets_nothing_is_not_grown():
  slow, dear = _plan(gamma=np.array([0.01])), _plan(growth_cost=1e30)
  assert len(slow.legs) == len(dear.legs) == 1
  assert slow.total == pytest.approx(slow.scratch.cost)


def test_intervals_come_from_the_draws():
  draws = {name: np.repeat(value, 20) for name, value in ONE.items()}
  found = _plan(draws=draws, gamma=np.linspace(2, 3, 20))
  for ends, value in ((found.cost, found.total), (found.reached, 2.4)):
    assert ends[0] < value < ends[1]


def test_the_saving_is_that_of_the_planned_chain_in_every_draw():
  """In draws that forget slowly this chain loses, though another one would not."""
  draws = {name: np.repeat(value, 20) for name, value in ONE.items()}
  same = _plan(draws=draws)
  share = 1 - same.total / same.scratch.cost
  assert same.cost == pytest.approx((same.total,) * 2)
  assert same.scratch_cost == pytest.approx((same.scratch.cost,) * 2)
  assert same.saving == pytest.approx((share,) * 2, abs=1e-9) and share > 0
  gamma = np.repeat([0.5, 2.5, 4.5], [5, 10, 5])
  found = _plan(draws=draws, gamma=gamma)
  assert found.saving[0] < 0 < share < found.saving[1]
  longer = (1 - found.saving[0]) * found.scratch.cost / found.total
  legs = [(leg.parameters, longer * leg.tokens) for leg in found.legs]
  assert mixing.chain_loss(ONE, legs, np.array([0.5]))[0] == pytest.approx(2.4)


def test_a_size_from_scratch_saves_nothing_in_any_draw():
  draws = {name: np.repeat(value, 20) for name, value in ONE.items()}
  draws['alpha'] = draws['alpha'] * np.linspace(0.98, 1.02, 20)
  found = _plan(draws=draws, growth_cost=1e30)
  assert len(found.legs) == 1 and found.saving == (0.0, 0.0)


def test_draws_that_do_not_reach_the_loss_have_no_end_of_their_interval():
  draws = {name: np.repeat(value, 20) for name, value in ONE.items()}
  draws['E'] = np.where(np.arange(20) < 5, 2.5, draws['E'])
  found = _plan(draws=draws)
  assert np.isinf([found.cost[1], found.scratch_cost[1]]).all()
  assert np.isfinite(found.saving).all(), 'these draws say nothing about the saving'


def test_a_long_decay_leaves_few_chains():
  assert len(_plan(decay_share=0.99).legs) == 1, 'no share is left for a growth'
  assert len(_plan(decay_share=0.97, gamma=np.array([30.0])).legs) <= 2


def test_a_loss_below_the_limit_is_refused():
  with pytest.raises(UserError, match='out of reach'):
    _plan(target=1.7)


def _grown_run(share, tokens, gamma):
  size = [Size(int(n), int(n), int(n), int(n), 6 * n) for n in SIZES[:2]]
  legs = [(SIZES[0], share * tokens), (SIZES[1], (1 - share) * tokens)]
  loss = float(mixing.chain_loss(ONE, legs, np.array([gamma]))[0])
  past = Growth(size[0], round(share * tokens))
  return FinishedRun('grown', size[1], round(tokens), 1.0, loss, True, {}, past)


def test_grown_runs_are_predicted_by_the_others_and_mixing_does_better():
  law = types.SimpleNamespace(values=PUBLISHED, drawn=ONE)
  grown = [_grown_run(share, 1e10, 2.5) for share in (0.25, 0.5, 0.75)]
  by_mixing, by_handover = stages.left_out(grown, law, 'all', 0.2)
  assert by_mixing < 1e-4 < by_handover
  assert mixing.exponent(ONE, stages.legs(grown, 'all')) == pytest.approx(2.5, abs=0.01)


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    ({'growth': None}, 'which has not grown'),
    ({'decayed': False}, 'whose learning rate has not decayed'),
    ({'loss': np.nan}, 'whose loss is nan'),
    ({'loss': np.inf}, 'whose loss is inf'),
  ],
)
def test_a_run_that_says_nothing_about_mixing_is_refused(change, said):
  runs = [_grown_run(share, 1e10, 2.5) for share in (0.5, 0.75)]
  with pytest.raises(UserError, match=f'--grown names grown, {said}'):
    stages.legs([runs[0], dataclasses.replace(runs[1], **change)], 'all')
