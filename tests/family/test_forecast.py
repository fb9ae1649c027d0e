"""The losses of a family are forecast before its runs by a law."""

import json

import pytest
import tiny_run

from tokenformer_jax.errors import UserError
from tokenformer_jax.family import forecast
from tokenformer_jax.family import jobs as jobs_lib
from tokenformer_jax.family.jobs import Family
from tokenformer_jax.laws import mixing

TOKENS = 51_200  # 200 steps
LAW = {'E': 1.5, 'A': 20.0, 'B': 300.0, 'alpha': 0.3, 'beta': 0.5}


@pytest.fixture
def config(tmp_path):
  return tiny_run.config('files:corpus', tmp_path / 'cache')


def _jobs(config, method, **changes):
  return jobs_lib.list_jobs(config, Family((1.0, 2.0), TOKENS, method, **changes), 'out')


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


def test_models_that_the_law_does_not_describe_have_no_loss(config, tmp_path):
  law = _law(tmp_path)
  assert (law.gamma, law.measured) == (mixing.TYPICAL, False)
  assert not forecast.losses(_jobs(config, 'elastic'), law)
  (whole,) = forecast.losses(_jobs(config, 'top_down'), law)
  assert whole == 'scratch/size_2'
  text = forecast.describe(_jobs(config, 'top_down'), _jobs(config, 'apart'), law)
  assert 'because the law has none' in text and 'the family costs' not in text


def test_another_file_is_no_law(tmp_path):
  (tmp_path / 'other.json').write_text('{"E": 1}')
  with pytest.raises(UserError, match='is not the JSON file of laws'):
    forecast.read_law(str(tmp_path / 'other.json'))


def test_a_law_says_what_a_family_saves_at_equal_loss(config, tmp_path):
  apart, jobs = _jobs(config, 'apart'), _jobs(config, 'bottom_up', grow_at=(0.5,))
  law = _law(tmp_path, mixing={'value': 2.0, 'interval': [1, 3]})
  predicted = forecast.losses(jobs, law).values()
  needed = [
    (300 / (loss - 1.5 - 20 / job.size.parameters**0.3)) ** 2 * job.size.flops_per_token
    for loss, job in zip(predicted, apart, strict=True)
  ]
  saved = 1 - sum(job.flops for job in jobs) / sum(needed)
  text = forecast.describe(jobs, apart, law)
  assert f'by the law the family costs {saved:.0%} less than its sizes apart' in text
