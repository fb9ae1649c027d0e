"""Each method makes all sizes of a tiny family, and goes on where it stopped."""

import json
import signal
import subprocess
import sys
import time

import pytest
import tiny_run

from tokenformer_jax.family import jobs as jobs_lib
from tokenformer_jax.family import make, result
from tokenformer_jax.family.jobs import Family
from tokenformer_jax.laws import grid_runs

pytestmark = pytest.mark.slow

TOKENS = 40 * 256  # 40 steps


@pytest.fixture
def config(tmp_path, one_device):
  source = tiny_run.write_corpus(tmp_path / 'corpus')
  smaller = {'model__pattern': 'layer', 'optim__warmup_steps': 2}
  smaller |= {'train__eval_batches': 1, 'train__checkpoint_every': 100}
  return tiny_run.config(source, tmp_path / 'cache', **smaller)


def _make(jobs, out):
  assert grid_runs.make_missing(jobs, out, make.make, make.is_done)
  assert all(grid_runs.finished(jobs, out, make.is_done))
  return result.members(jobs, out)


def _losses(out, run):
  """Return the losses on held-out text by step."""
  lines = grid_runs.read_figures(out / run)
  return {line['step']: line['eval/loss'] for line in lines if 'eval/loss' in line}


def test_top_down_shrinks_and_goes_on(config, tmp_path):
  out = tmp_path / 'family'
  apart = jobs_lib.list_jobs(config, Family([1.0, 2.0], TOKENS, 'apart'), str(out))
  family = Family([1.0, 2.0], TOKENS, 'top_down', share=0.5, distill_weight=0.0)
  jobs = jobs_lib.list_jobs(config, family, str(out))
  whole, shrunk, final = jobs
  members = _make(jobs, str(out))
  assert [one.size for one in members] == [1, 2]
  assert make.is_done(apart[-1], str(out)), 'the largest size is not shared with the method apart'
  assert _losses(out, final.name)[20] < _losses(out, final.name)[0], 'it learned nothing'
  assert (out / shrunk.name / 'checkpoints/0').exists() and whole.steps == 40


def test_elastic_writes_each_prefix_and_measures_it(config, tmp_path):
  out = tmp_path / 'family'
  family = Family([1.0, 2.0], TOKENS, 'elastic')
  jobs = jobs_lib.list_jobs(config, family, str(out))
  members = _make(jobs, str(out))
  assert json.loads((out / jobs[0].name / 'config.json').read_text())['train']['nested_rows'] == 4
  assert [one.run for one in members] == [f'elastic/size_{size}' for size in (1, 2)]
  (out / jobs[1].name / 'metrics.jsonl').unlink()
  assert not make.is_done(jobs[1], str(out)), 'killed before it was measured, it is half done'
  assert _make(jobs, str(out)) == members


def test_bottom_up_stops_goes_on_and_grows_exactly(tmp_path):
  source = tiny_run.write_corpus(tmp_path / 'corpus')
  values = {**tiny_run.CHANGES, 'data.source': source, 'data.cache_dir': str(tmp_path / 'cache')}
  values |= {'model.pattern': 'layer', 'train.eval_batches': 1}
  del values['train.steps']
  out = tmp_path / 'family'
  command = [
    *(sys.executable, '-m', 'tokenformer_jax', 'family'),
    f'--config={tiny_run.ROOT}/configs/lm_stdlib.py',
    *(f'--config.{name}={tiny_run.as_flag(value)}' for name, value in values.items()),
    *(f'--out={out}', '--sizes=1,2', f'--tokens={TOKENS}', '--config.train.log_every=1'),
  ]
  process = subprocess.Popen(
    command, stderr=subprocess.PIPE, text=True, env=tiny_run.environment(), cwd=tmp_path
  )
  while process.poll() is None and not (out / 'bottom_up/size_1/trunk/checkpoints/5').exists():
    time.sleep(0.05)
  process.send_signal(signal.SIGTERM)
  said = process.communicate(timeout=300)[1]
  assert process.returncode == 0 and 'give the same command again to go on' in said, said
  done = tiny_run.run(command, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert 'going on after step' in done.stderr, 'it began again'
  assert 'bottom_up/size_2/final' in done.stdout and 'FLOPs alone' in done.stdout
  small, large = json.loads((out / 'bottom_up.json').read_text())['sizes']
  assert (small['size'], large['size']) == (1, 2)
  assert large['parameters'] - small['parameters'] == 12_288
  assert small['tokens'] == large['tokens'] == TOKENS
  trunk, grown = (_losses(out, f'bottom_up/{run}') for run in ('size_1/trunk', 'size_2/final'))
  step = max(trunk)
  assert grown[step] == pytest.approx(trunk[step], rel=1e-5), 'the growth is not exact'
