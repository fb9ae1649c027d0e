"""A family is forecast before its runs: chip-hours on a topology, and losses by a law."""

import json
import types

import pytest
import tiny_run

from tokenformer_jax.errors import UserError
from tokenformer_jax.family import forecast, ways
from tokenformer_jax.family.jobs import Family
from tokenformer_jax.laws import mixing
from tokenformer_jax.laws.runs import Size
from tokenformer_jax.plan import topology

TOKENS = 51_200  # 200 steps
LAW = {'E': 1.5, 'A': 20.0, 'B': 300.0, 'alpha': 0.3, 'beta': 0.5, 'count': 'all'}


@pytest.fixture
def config(tmp_path):
  return tiny_run.config('files:corpus', tmp_path / 'cache')


def _jobs(config, way, **changes):
  return ways.list_jobs(config, Family((1.0, 2.0), TOKENS, way, **changes), 'out')


def _law(tmp_path, **more):
  (tmp_path / 'law.json').write_text(json.dumps(LAW | more))
  return forecast.read_law(str(tmp_path / 'law.json'))


def test_losses_of_sizes_from_scratch_and_by_growth(config, tmp_path):
  law = _law(tmp_path, mixing={'value': 2.0, 'interval': [1, 3]})
  small, large = forecast.losses(_jobs(config, 'apart'), law).values()
  size = _jobs(config, 'apart')[0].size.parameters
  assert small == pytest.approx(1.5 + 20 / size**0.3 + 300 / TOKENS**0.5)
  grown = forecast.losses(_jobs(config, 'bottom_up', grow_at=(0.5,)), law)
  assert [*grown.values()] == pytest.approx([small, large + (small - large) / 4])


def test_a_mixture_of_experts_counts_as_the_dense_model_with_its_loss(tmp_path):
  law = _law(tmp_path, gamma=0.15)
  size = Size(6000, 3000, 1.0)
  count = law.count_of(types.SimpleNamespace(size=size))
  assert count**0.3 == pytest.approx(3000**0.3 * 2**0.15)


def test_models_that_the_law_does_not_describe_have_no_loss(config, tmp_path):
  law = _law(tmp_path)
  assert (law.gamma, law.measured) == (mixing.TYPICAL, False)
  assert not forecast.losses(_jobs(config, 'elastic'), law)
  (whole,) = forecast.losses(_jobs(config, 'top_down'), law)
  assert whole == 'scratch/size_2'
  text = forecast.describe(_jobs(config, 'top_down'), _jobs(config, 'apart'), None, law)
  assert 'because the law has none' in text and 'chip-hours' not in text


def test_chip_hours_on_gpus_follow_steps_and_teachers(config):
  on, jobs = topology.parse('gpu-h100:2'), _jobs(config, 'top_down')
  hours = forecast.chip_hours(jobs, on)
  whole, shrunk, small = (hours[job.name] for job in jobs)
  assert shrunk == (0, 0) and 0 < whole[0] <= whole[1]
  (alone,) = (forecast.chip_hours([job], on)[job.name] for job in _jobs(config, 'apart')[:1])
  teacher = jobs[2].size.flops_per_token / _jobs(config, 'apart')[0].size.flops_per_token
  assert small[0] == pytest.approx(alone[0] * teacher / 4), 'a quarter of the tokens'
  text = forecast.describe(jobs, _jobs(config, 'apart'), on, None)
  assert 'chip-hours on gpu-h100:2' in text and 'for the sizes apart' in text


def test_another_file_is_no_law(tmp_path):
  (tmp_path / 'other.json').write_text('{"E": 1}')
  with pytest.raises(UserError, match='is not the JSON file of laws'):
    forecast.read_law(str(tmp_path / 'other.json'))


def test_a_law_says_when_to_grow_if_a_family_grows(config, tmp_path):
  apart, law = _jobs(config, 'apart'), _law(tmp_path)
  text = forecast.describe(_jobs(config, 'bottom_up'), apart, None, law)
  assert '\nby the law the family costs ' in text
  assert 'the family costs' not in forecast.describe(_jobs(config, 'top_down'), apart, None, law)
