"""What a growth is expected to save: the law by hand, its limits, and the sentence of each case."""

import dataclasses
import math

import pytest
import tiny_run
from tiny import tiny_model, tiny_vit

from tokenformer_jax.config import growth
from tokenformer_jax.grow import payoff, plan
from tokenformer_jax.grow.payoff import Leg
from tokenformer_jax.runs.checkpoint_meta import Meta


def _expect(factor=3.0, share=0.5, length=20.0, **arguments):
  legs = Leg(1e6, share * length * 1e5, 3e4), Leg(factor * 1e6, (1 - share) * length * 1e5, 1e5)
  return payoff.expect(legs, **arguments)


def test_the_saving_is_that_of_the_formula():
  behind = payoff.SLOPE * math.log(3) * 0.5**payoff.MIXING
  assert _expect().saved == pytest.approx(1 - (1 - 0.5 * (1 - 1 / 3)) * math.exp(behind))
  longer = _expect(length=40)
  assert longer.saved == pytest.approx(1 - (2 / 3) * math.exp(behind * 2**payoff.LENGTH))


def test_growth_at_once_saves_nothing_and_costs_nothing():
  assert _expect(share=1e-9).saved == pytest.approx(0, abs=1e-6)


def test_two_growths_at_once_are_one():
  one = _expect()
  first, last = one.legs
  two = payoff.expect([first, Leg(2e6, 0, 5e4), last])
  assert two.saved == pytest.approx(one.saved)


OUTSIDE = {
  'factor': ({'factor': 8.0}, '8× the FLOPs of a token, where 1.5 to 4 were tried'),
  'share': ({'share': 0.75}, '0.75 of the tokens before a growth, where 0.1 to 0.6 were tried'),
  'long': ({'length': 300.0}, '3e+02 tokens a parameter, where 5 to 60 were tried'),
  'short': ({'length': 1.3}, 'with fewer the smaller model trained on was as good or better'),
  'kind': ({'unmeasured': ['experts']}, 'measured: experts'),
}


@pytest.mark.parametrize('name', OUTSIDE)
def test_what_was_not_measured_has_its_reason_and_no_interval(name):
  arguments, reason = OUTSIDE[name]
  text = payoff.render(_expect(**arguments))
  assert text.startswith('will it pay? Outside of what was measured: ')
  assert reason in text.splitlines()[0]
  assert '…' not in text, 'an interval stands where none was measured'


def test_the_ends_of_the_ranges_are_inside():
  for factor, length in zip(payoff.FACTORS, payoff.TOKENS, strict=True):
    assert not any(_expect(factor, share, length).outside for share in payoff.SHARES)


def test_a_saving_is_sure_likely_or_none():
  assert 'Yes: it is expected to save 26 % (' in payoff.verdict(0.26, (), 'another')
  assert 'Perhaps: it is expected to save 5 % (−7 % … 16 %)' in payoff.verdict(0.05, (), 'another')
  none = payoff.verdict(-0.05, (), 'another')
  assert 'This will not pay: it is expected to save −5 % (' in none


@pytest.mark.parametrize(
  ('method', 'known'), [('group', ''), ('zero_keys', 'zero_keys'), ('duplicate', 'duplicate')]
)
def test_a_method_that_closes_less_of_the_gap_is_a_reason(method, known):
  before = tiny_model()
  grow = growth(method)
  more = {'qkv': 48, 'proj': 80, 'ffn': 96}
  after = plan.larger_model(before, grow, more, {}, None, None, None)
  reasons = payoff.unmeasured(plan.check(before, after, grow))
  assert known in ' '.join(reasons)
  assert bool(reasons) == bool(known)
  drawn = dataclasses.replace(grow, place='behind')
  deeper = plan.larger_model(before, drawn, None, {}, None, 4, None)
  assert 'half as fast' in ' '.join(payoff.unmeasured(plan.plan_growth(before, deeper, drawn)))


def _of_growth(made=100, config=None, family='', **grow):
  config = config or tiny_run.config('files:corpus', '/nothing', train__steps=200)
  before, how = config.model, growth(**grow)
  after = plan.larger_model(before, how, None, {}, None, 4, None)
  meta = Meta(made, config, {}, family=family)
  return payoff.of_growth(meta, after, plan.check(before, after, how), how)


def test_a_growth_counts_on_the_steps_that_its_command_prints():
  text = _of_growth()
  assert 'after 25 % of' in text and 'trains on to step 400' in text
  assert payoff.next_end(200, 100) == 400
  again = _of_growth(step='restart')
  assert 'after 20 % of' in again and 'trains on to step 400' in again


@pytest.mark.parametrize(
  ('arguments', 'reason'),
  [
    ({'family': 'llama'}, 'the source came from transformers, and what it has seen'),
    ({'made': 0}, 'the source has not been trained'),
    ({'config': dataclasses.replace(tiny_run.vit_config(), model=tiny_vit())}, 'about text'),
  ],
)
def test_a_source_of_unknown_tokens_has_no_figure(arguments, reason):
  text = _of_growth(**arguments)
  assert text.startswith('will it pay? Not known: ') and reason in text
  assert 'saved' not in text and '%' not in text
