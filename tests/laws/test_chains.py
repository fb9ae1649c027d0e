"""Chains by the law of mixing: between their sizes, cheapest where planned, and found again."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from synthetic import PUBLISHED

from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import chains, formulas, mixing
from tokenformer_jax.laws.chains import PricedSize
from tokenformer_jax.laws.runs import FinishedRun, Growth, Size

ONE = {name: np.array([value]) for name, value in PUBLISHED.items()}
MANY = {name: np.repeat(value, 20) for name, value in ONE.items()}
SIZES = (1e8, 4e8, 1.6e9)
PRICED = [PricedSize(n, (6 * n, 6 * n)) for n in SIZES]
GAMMA = np.array([2.5])


def _find(target=2.4, gamma=GAMMA, sizes=PRICED, draws=ONE, growth_cost=0.0):
  return chains.find(PUBLISHED, draws, sizes, target, gamma, growth_cost)


@pytest.mark.parametrize(('share', 'left'), [(0.5, 0.5**2.5), (0.75, 0.75**2.5)])
def test_the_gap_left_is_a_power_of_the_share(share, left):
  tokens = 2e10
  small, large = (formulas.loss(PUBLISHED, n, tokens) for n in SIZES[:2])
  legs = [(SIZES[0], share * tokens), (SIZES[1], (1 - share) * tokens)]
  assert mixing.chain_loss(ONE, legs, GAMMA)[0] == pytest.approx(large + left * (small - large))


def test_growth_at_once_is_from_scratch_and_growth_at_the_end_is_none():
  for tokens, size in (((1, 2e10), SIZES[1]), ((2e10, 1e-3), SIZES[0])):
    reached = mixing.chain_loss(ONE, list(zip(SIZES[:2], tokens, strict=True)), GAMMA)[0]
    assert reached == pytest.approx(formulas.loss(PUBLISHED, size, 2e10), rel=1e-6)


def test_two_growths_at_once_are_one():
  one = [(SIZES[0], 1e10), (SIZES[2], 1e10)]
  two = [one[0], (SIZES[1], 0.0), one[1]]
  first, second = (mixing.chain_loss(ONE, legs, GAMMA)[0] for legs in (one, two))
  assert first == pytest.approx(second)


def test_the_exponent_of_grown_runs_is_recovered():
  runs = []
  for share, tokens in itertools.product((0.4, 0.7), (1e9, 1e10)):
    legs = (SIZES[0], share * tokens), (SIZES[1], (1 - share) * tokens)
    runs.append((*legs, float(mixing.chain_loss(ONE, legs, GAMMA)[0])))
  np.testing.assert_allclose(mixing.exponent(MANY, runs), GAMMA[0], atol=0.01)
  assert mixing.exponent(ONE, [(*runs[0][:2], 1.0)]) == mixing.LARGEST_MIXING
  assert mixing.left_out(PUBLISHED, runs) < 1e-4


def test_a_chain_reaches_its_target_and_ends_with_the_decay():
  best = _find()
  legs = [(leg.parameters, leg.tokens) for leg in best.legs]
  assert len(legs) > 1
  assert mixing.chain_loss(ONE, legs, GAMMA)[0] == pytest.approx(2.4, rel=1e-6)
  assert best.total < best.scratch.cost <= best.scratch_last.cost
  assert legs[-1][1] >= chains.DECAY * sum(tokens for _, tokens in legs)


def test_no_chain_of_two_sizes_is_cheaper():
  best, least = _find(sizes=PRICED[:2]), np.inf
  for share in np.linspace(0.01, 0.8, 80):
    low, high = 1e8, 1e13
    for _ in range(80):
      tokens = (low * high) ** 0.5
      legs = [(SIZES[0], share * tokens), (SIZES[1], (1 - share) * tokens)]
      low, high = (low, tokens) if mixing.chain_loss(ONE, legs, GAMMA)[0] <= 2.4 else (tokens, high)
    least = min(least, 6 * sum(size * tokens for size, tokens in legs))
  alone = min(6 * n * formulas.tokens_for_loss(PUBLISHED, n, 2.4) for n in SIZES[:2])
  assert best.total == pytest.approx(min(least, alone), rel=1e-3)


def test_growth_that_does_not_pay_is_not_planned():
  slow, dear = _find(gamma=np.array([0.01])), _find(growth_cost=1e30, draws=MANY)
  assert len(slow.legs) == len(dear.legs) == 1
  assert slow.total == pytest.approx(slow.scratch.cost)
  assert dear.saving == (0.0, 0.0)


def test_intervals_are_those_of_the_planned_chain_in_every_draw():
  """In draws that forget slowly this chain loses, though another one would not."""
  same = _find(draws=MANY)
  share = 1 - same.total / same.scratch.cost
  assert same.cost == pytest.approx((same.total,) * 2)
  assert same.saving == pytest.approx((share,) * 2, abs=1e-9) and share > 0
  best = _find(draws=MANY, gamma=np.repeat([0.5, 2.5, 4.5], [5, 10, 5]))
  assert best.saving[0] < 0 < share < best.saving[1]
  for ends, value in ((best.cost, best.total), (best.reached, 2.4)):
    assert ends[0] < value < ends[1]
  longer = (1 - best.saving[0]) * best.scratch.cost / best.total
  legs = [(leg.parameters, longer * leg.tokens) for leg in best.legs]
  assert mixing.chain_loss(ONE, legs, np.array([0.5]))[0] == pytest.approx(2.4)


def test_draws_that_do_not_reach_the_loss_have_no_end_of_their_interval():
  draws = {**MANY, 'E': np.where(np.arange(20) < 5, 2.5, MANY['E'])}
  best = _find(draws=draws)
  assert np.isinf([best.cost[1], best.scratch_cost[1]]).all()
  assert np.isfinite(best.saving).all(), 'these draws say nothing about the saving'


def test_a_loss_below_the_limit_is_refused():
  with pytest.raises(UserError, match='out of reach'):
    _find(target=1.7)


def test_sizes_are_read_from_a_plan(tmp_path):
  path = tmp_path / 'plan.json'
  one = {'parameters': 1e8, 'chips': 4, 'tokens_per_second': [1000 / 0.9, 1000 / 1.8]}
  path.write_text(json.dumps({'stages': [one]}))
  (size,), unit = chains.read_stages(str(path))
  assert (size.parameters, unit) == (1e8, 'chip-hours')
  assert size.cost == (pytest.approx(1e-6), pytest.approx(2e-6))


@pytest.mark.parametrize('text', ['{', '[]', '{"stages": [{"step_seconds": [1, 2]}]}'])
def test_other_files_are_refused_as_plans(tmp_path, text):
  path = tmp_path / 'stages'
  path.write_text(text)
  with pytest.raises(UserError, match='is not the JSON file of plan'):
    chains.read_stages(str(path))


def _grown_run(share):
  sizes = [Size(int(n), int(n), 6 * n) for n in SIZES[:2]]
  legs = [(SIZES[0], share * 1e10), (SIZES[1], (1 - share) * 1e10)]
  loss = float(mixing.chain_loss(ONE, legs, GAMMA)[0])
  growth = Growth(sizes[0], round(share * 1e10))
  return FinishedRun('grown', sizes[1], 10**10, loss, True, {}, growth)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'growth': None}, 'grown, which has not grown'),
    ({'decayed': False}, 'grown, whose learning rate has not decayed'),
    ({'loss': np.nan}, 'the loss of grown is nan'),
    ({'size': Size(8000, 2000, 1.0)}, 'is a mixture of experts'),
  ],
)
def test_runs_that_say_nothing_about_growth_are_refused(change, message):
  runs = [_grown_run(share) for share in (0.5, 0.75)]
  assert mixing.exponent(ONE, mixing.read_grown(runs)) == pytest.approx(2.5, abs=0.01)
  with pytest.raises(UserError, match=message):
    mixing.read_grown([runs[0], dataclasses.replace(runs[1], **change)])
