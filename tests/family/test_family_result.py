"""A finished family has a table and a JSON file."""

import json

import pytest
import tiny_run
import written_runs

from tokenformer_jax.errors import UserError
from tokenformer_jax.family import jobs as jobs_lib
from tokenformer_jax.family import make, result
from tokenformer_jax.family.jobs import Family
from tokenformer_jax.resolve.facts import complete

TOKENS = 25_600  # 100 steps


def _finish(jobs, out):
  """Leave the files of finished runs, with losses of 4, 3 …."""
  for loss, job in zip((4.0, 3.0, 2.0), (job for job in jobs if job.final), strict=False):
    steps = job.config.train.steps
    lines = [{'step': steps, 'eval/loss': loss}]
    workdir = written_runs.write(out / job.name, lines, complete(job.config))
    (workdir / f'checkpoints/{steps}').mkdir(parents=True)


@pytest.fixture
def finished(tmp_path):
  config = tiny_run.config('files:corpus', tmp_path / 'cache')
  family = Family([1.0, 2.0], TOKENS, 'apart')
  jobs = jobs_lib.list_jobs(config, family, str(tmp_path))
  _finish(jobs, tmp_path)
  return config, family, jobs


def test_members_are_the_final_models_in_rising_order(finished, tmp_path):
  _, family, jobs = finished
  assert all(make.is_done(job, str(tmp_path)) for job in jobs)
  small, large = result.members(jobs, str(tmp_path))
  assert (small.size, small.loss, large.size, large.loss) == (1, 4.0, 2, 3.0)
  assert small.tokens == large.tokens == TOKENS
  assert (large.flops, large.flops_alone) == (jobs[1].flops, jobs[1].flops)
  assert 'scratch/size_2' in result.table([small, large])
  shrunken = Family([1.0, 2.0], TOKENS, 'top_down')
  assert '50.0% of' in result.totals(jobs, shrunken, 2 * sum(job.flops for job in jobs))
  path = result.write(str(tmp_path), family, 1e9, jobs, [small, large])
  content = json.loads((tmp_path / 'apart.json').read_text())
  assert str(path) == str(tmp_path / 'apart.json') and content['flops_apart'] == 1e9
  assert [one['loss'] for one in content['sizes']] == [4.0, 3.0]


def test_a_loss_that_is_not_finite_is_a_sentence(finished, tmp_path):
  _, _, jobs = finished
  line = json.dumps({'step': jobs[0].config.train.steps, 'eval/loss': None})
  (tmp_path / jobs[0].name / 'metrics.jsonl').write_text(f'{line}\n')
  with pytest.raises(UserError, match=r'last loss of .*scratch/size_1 is not finite; lower'):
    result.members(jobs, str(tmp_path))


def test_a_run_of_another_config_is_refused(finished, tmp_path):
  config, _, _ = finished
  slower = Family([1.0, 2.0], TOKENS, 'apart', rate_power=-1.0)
  jobs = jobs_lib.list_jobs(config, slower, str(tmp_path))
  with pytest.raises(UserError, match=r'optim\.learning_rate is .* there and 0\.0015 here'):
    make.is_done(jobs[1], str(tmp_path))


def test_a_family_of_one_trunk_says_what_it_saves_and_others_where_it_stands():
  config = tiny_run.config('files:corpus', '/nothing')
  jobs = jobs_lib.list_jobs(config, family := Family([1.0, 4.0], 10**6, 'bottom_up'), '')
  said = result.will_it_pay(jobs, family)
  cost = {job.factor: job.size.flops_per_token for job in jobs}
  assert f'× {cost[4] / cost[1]:.2f} after 75 %' in said
  spent, apart = sum(job.flops for job in jobs), sum(cost.values()) * jobs[-1].tokens
  assert f'each size from scratch on {100 * spent / apart:.0f} %' in said
  assert 'not known of the largest' in said or 'the law alone' in said
  others = Family([1.0, 4.0], 10**6, 'top_down')
  assert 'docs/growth_trials.md has what each method saved' in result.will_it_pay(jobs, others)
