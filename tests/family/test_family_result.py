"""A finished family has a table, a JSON file that methods share, and a picture."""

import json

import pytest
import tiny_run

from tokenformer_jax.errors import UserError
from tokenformer_jax.family import jobs as jobs_lib
from tokenformer_jax.family import make, result
from tokenformer_jax.family.jobs import Family
from tokenformer_jax.runs import saved_config
from tokenformer_jax.training import sizes

TOKENS = 25_600  # 100 steps


def _finish(jobs, out):
  """Leave the files of finished runs, with losses of 4, 3 …."""
  for loss, job in zip((4.0, 3.0, 2.0), (job for job in jobs if job.final), strict=False):
    steps = job.config.train.steps
    workdir = out / job.name
    (workdir / f'checkpoints/{steps}').mkdir(parents=True)
    (workdir / 'config.json').write_text(saved_config.to_text(sizes.fill_in(job.config)))
    (workdir / 'metrics.jsonl').write_text(json.dumps({'step': steps, 'eval/loss': loss}) + '\n')


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
  assert result.totals(jobs, family, 1.0).endswith('FLOPs')
  shrunken = Family([1.0, 2.0], TOKENS, 'top_down')
  assert '50.0% of' in result.totals(jobs, shrunken, 2 * sum(job.flops for job in jobs))


def test_a_loss_that_is_not_finite_is_a_sentence(finished, tmp_path):
  _, _, jobs = finished
  line = json.dumps({'step': jobs[0].config.train.steps, 'eval/loss': None})
  (tmp_path / jobs[0].name / 'metrics.jsonl').write_text(f'{line}\n')
  with pytest.raises(UserError, match=r'last loss of .*scratch/size_1 is not finite; lower'):
    result.members(jobs, str(tmp_path))


def test_methods_share_one_file(finished, tmp_path):
  config, family, jobs = finished
  out = str(tmp_path)
  result.write(out, family, 1e9, jobs, result.members(jobs, out))
  elastic = Family([1.0, 2.0], TOKENS, 'elastic')
  other = jobs_lib.list_jobs(config, elastic, out)
  _finish(other, tmp_path)
  content = result.write(out, elastic, 1e9, other, result.members(other, out))
  assert json.loads((tmp_path / 'family.json').read_text()) == content
  assert list(content['methods']) == ['apart', 'elastic']
  assert content['methods']['elastic']['settings']['drop_groups'] == 0.5
  assert [one['loss'] for one in content['methods']['apart']['sizes']] == [4.0, 3.0]


def test_another_family_in_the_same_place_is_refused(finished, tmp_path):
  _, family, jobs = finished
  out = str(tmp_path)
  result.write(out, family, 1e9, jobs, result.members(jobs, out))
  with pytest.raises(UserError, match='tokens is 25600 there and 512 here; choose another --out'):
    result.read(out, Family([1.0, 2.0], 512, 'apart'))
  (tmp_path / 'family.json').write_text('[]')
  with pytest.raises(UserError, match='is not a file that this command wrote'):
    result.read(out, family)


def test_a_run_of_another_config_is_refused(finished, tmp_path):
  config, _, _ = finished
  slower = Family([1.0, 2.0], TOKENS, 'apart', rate_power=-1.0)
  jobs = jobs_lib.list_jobs(config, slower, str(tmp_path))
  with pytest.raises(UserError, match=r'optim\.learning_rate is .* there and 0\.0015 here'):
    make.is_done(jobs[1], str(tmp_path))


@pytest.mark.slow
def test_the_picture_has_a_line_for_each_method(finished, tmp_path):
  pytest.importorskip('matplotlib')
  _, family, jobs = finished
  out = str(tmp_path)
  content = result.write(out, family, 1e9, jobs, result.members(jobs, out))
  (axes,) = result.draw(content).axes
  (line,) = axes.get_lines()
  assert line.get_label().startswith('apart: ') and list(line.get_ydata()) == [4.0, 3.0]
  assert [text.get_text() for text in axes.texts] == ['×1', '×2']
  result.write_picture(content, out)
  assert (tmp_path / 'family.png').read_bytes().startswith(b'\x89PNG')
