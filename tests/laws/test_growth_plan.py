"""Chains are the cheapest of the model of growth, and fall back to training from scratch."""

import itertools
import json

import numpy as np
import pytest
from synthetic import PUBLISHED

from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import formulas, growth, stages
from tokenformer_jax.laws.growth import Assumptions, Stage

ONE = {name: np.array([value]) for name, value in PUBLISHED.items()}
SIZES = (1e8, 4e8, 1.6e9)
STAGES = [Stage(n, (6 * n, 6 * n)) for n in SIZES]


def _plan(**assumed) -> growth.Plan:
  return growth.plan(PUBLISHED, ONE, STAGES, 2.5, Assumptions(**assumed))


@pytest.mark.parametrize('handover', [0.0, 0.3])
def test_a_chain_reaches_the_target_that_it_was_planned_for(handover):
  found = _plan(handover=handover)
  legs = [(leg.parameters, leg.tokens) for leg in found.legs]
  assert len(legs) > 1
  assert growth.chain_loss(ONE, legs, Assumptions(handover))[0] == pytest.approx(2.5, rel=1e-6)
  assert found.total < found.scratch.cost <= found.scratch_last.cost


def test_a_growth_that_gains_much_has_no_part_of_negative_length():
  found = _plan(handover=-1.3)
  legs = [(leg.parameters, leg.tokens) for leg in found.legs]
  assert len(legs) > 1 and min(tokens for _, tokens in legs) >= 0
  reached = growth.chain_loss(ONE, legs, Assumptions(-1.3))[0]
  assert reached == pytest.approx(2.5, rel=1e-6) and np.isfinite(found.saving).all()


def test_no_chain_of_two_sizes_is_cheaper():
  """Every growth point of every pair of sizes, by hand."""
  assumed = Assumptions(0.1)
  found = growth.plan(PUBLISHED, ONE, STAGES[:2], 2.7, assumed)
  best = np.inf
  for tokens in np.geomspace(1e8, 1e11, 2000):
    loss = formulas.loss(PUBLISHED, SIZES[0], tokens / 0.8)
    worth = 0.9 * 0.8 * formulas.tokens_for_loss(PUBLISHED, SIZES[1], loss)
    more = formulas.tokens_for_loss(PUBLISHED, SIZES[1], np.array(2.7)) - worth
    best = min(best, 6 * (SIZES[0] * tokens + SIZES[1] * more))
  assert found.total == pytest.approx(best, rel=1e-3)


def test_a_growth_that_loses_everything_is_not_worth_it():
  found = _plan(handover=0.99)
  assert len(found.legs) == 1 and found.total == pytest.approx(found.scratch.cost)


def test_a_growth_that_costs_more_than_it_saves_is_not_made():
  free, dear = _plan(), _plan(growth_cost=1e30)
  assert len(free.legs) > len(dear.legs) == 1


def test_the_handover_of_a_chain_is_found_again():
  assumed = Assumptions(handover=0.35, decay_share=0.2)
  loss = growth.chain_loss(ONE, [(1e8, 1e9), (4e8, 5e9)], assumed)[0]
  found = growth.handover(PUBLISHED, (1e8, 1e9), (4e8, 5e9), float(loss), 0.2)
  assert found == pytest.approx(0.35)


def test_intervals_come_from_the_draws():
  draws = {name: np.repeat(value, 50) for name, value in ONE.items()}
  draws['E'] = draws['E'] * np.linspace(0.98, 1.02, 50)
  found = growth.plan(PUBLISHED, draws, STAGES, 2.5, Assumptions())
  for ends, value in ((found.cost, found.total), (found.reached, 2.5)):
    assert ends[0] < value < ends[1]


def test_the_saving_is_that_of_the_planned_chain_in_every_draw():
  draws = {name: np.repeat(value, 20) for name, value in ONE.items()}
  same = growth.plan(PUBLISHED, draws, STAGES, 2.5, Assumptions())
  share = 1 - same.total / same.scratch.cost
  assert same.cost == pytest.approx((same.total,) * 2)
  assert same.saving == pytest.approx((share,) * 2, abs=1e-6) and share > 0
  lossy = Assumptions(np.repeat([-0.9, 0.0, 0.9], [5, 10, 5]))
  found = growth.plan(PUBLISHED, draws, STAGES, 2.5, lossy)
  assert found.saving[0] < 0 < share < found.saving[1], 'a draw has chosen a chain of its own'


def test_a_loss_below_the_limit_is_refused():
  with pytest.raises(UserError, match='out of reach'):
    growth.plan(PUBLISHED, ONE, STAGES, 1.7, Assumptions())


def test_stages_are_read_from_plans_and_tables(tmp_path):
  table, planned = tmp_path / 'stages.csv', tmp_path / 'plan.json'
  table.write_text('parameters,tokens_per_second,chips\n1e8,36000,2\n')
  data = {'batch_size': 10, 'sequence_length': 100}
  one = {'parameters': 1e8, 'chips': 4, 'step_seconds': [0.9, 1.8], 'config': {'data': data}}
  planned.write_text(json.dumps({'stages': [one]}))
  assert stages.read_file(str(table)) == (
    [Stage(1e8, (pytest.approx(2 / 36000 / 3600),) * 2)],
    'chip-hours',
  )
  (stage,), _ = stages.read_file(str(planned))
  assert stage.cost == (pytest.approx(1e-6), pytest.approx(2e-6)), 'chip-hours of a token'


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('', 'neither the JSON file'),
    ('{}', 'not the JSON file of plan'),
    ('{"stages": []}', 'not the JSON file of plan'),
    ('{"stages": 3}', 'not the JSON file of plan'),
    ('{"stages": ["step_seconds"]}', 'not the JSON file of plan'),
    ('[]', 'not the JSON file of plan'),
    ('{', 'not the JSON file of plan'),
    ('{"stages": [{"step_seconds": [1, 2]}]}', "lacks 'config'"),
    ('parameters,speed\n1,2\n', "has a column 'speed'"),
    ('parameters,tokens_per_second\n1,fast\n', "tokens_per_second='fast'"),
  ],
)
def test_malformed_stages_are_refused(tmp_path, text, message):
  path = tmp_path / 'stages'
  path.write_text(text)
  with pytest.raises(UserError, match=message):
    stages.read_file(str(path))


def test_more_stages_never_cost_more():
  costs = [
    growth.plan(PUBLISHED, ONE, [*some, STAGES[2]], 2.5, Assumptions(0.1)).total
    for count in range(3)
    for some in itertools.combinations(STAGES[:2], count)
  ]
  assert costs[-1] <= min(costs) * (1 + 1e-9), 'the whole chain is one of the choices'
