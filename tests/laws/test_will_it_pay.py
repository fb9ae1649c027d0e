"""The law of what a growth saves, on the stored runs, with one scale left out at a time."""

import importlib
import sys

import pytest
import tiny_run

NAMES = ('branches', 'families', 'growth', 'trials', 'will_it_pay')  # modules of experiments/


@pytest.fixture(scope='module')
def experiment():
  """The experiment that fits the law, the stored growths, and those of others."""
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(tiny_run.ROOT / 'experiments')
    *_, growth, trials, will_it_pay = map(importlib.import_module, NAMES)
    rows = trials.read(will_it_pay.HERE / 'growth_runs.csv', growth.Row)
    outside = trials.read(will_it_pay.HERE / 'outside_runs.csv', will_it_pay.Outside)
  for name in NAMES:
    del sys.modules[name]
  assert sum(row.arm not in growth.RECIPES for row in rows) == 756, 'the law names their number'
  return will_it_pay, list(will_it_pay.points(growth.runs_by_scale(rows))), outside


def test_the_law_holds_for_a_scale_that_its_fit_has_not_seen(experiment):
  will_it_pay, known, _ = experiment
  tested = will_it_pay.left_out(known)
  inside = [(one, law) for one, law in tested if not one.law.outside]
  signs, always, intervals, spread = will_it_pay.score(inside)
  assert (signs, always) == ('14 of 15', '14 of 15'), 'the law is as good as its base rate'
  assert intervals == '15 of 15' and float(spread) == pytest.approx(0.058, abs=0.002)
  assert will_it_pay.score(tested)[:3] == ['21 of 24', '21 of 24', '20 of 24']


def test_the_constants_are_those_of_the_stored_runs(experiment):
  will_it_pay, known, _ = experiment
  payoff = will_it_pay.payoff
  fitted = will_it_pay.slope([one for one in known if one.share >= will_it_pay.LEAST])
  assert fitted == pytest.approx(payoff.SLOPE, abs=0.02)


def test_signs_of_outside_runs_are_counted_with_their_misses(experiment):
  _, _, outside = experiment
  right = {one.source: (one.law.saved > 0) == (one.low + one.high > 0) for one in outside}
  assert not right['marin #7836'], 'the miss of another group is gone'
  inside = [one.source for one in outside if not one.law.outside]
  wrong = [source for source in inside if not right[source]]
  assert len(inside) == 7 and wrong == ['replication 2M, whole copies']  # one seed
