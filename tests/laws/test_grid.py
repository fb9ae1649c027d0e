"""A grid has the sizes and lengths asked for, trains what is missing, and writes commands."""

import dataclasses
import json
import shlex

import pytest
import tiny_run
from tiny import tiny_model

from tokenformer_jax import config as config_lib
from tokenformer_jax.cli import config_flag
from tokenformer_jax.config import PattentionConfig
from tokenformer_jax.config.groups import named_groups
from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import grid, grid_runs, points
from tokenformer_jax.laws.grid import Grid
from tokenformer_jax.runs import saved_config
from tokenformer_jax.training import sizes


@pytest.fixture
def config(tmp_path):
  return tiny_run.config('files:corpus', tmp_path / 'cache', optim__schedule='wsd')


def test_width_scales_heads_and_parameter_tokens():
  model = grid.scaled(tiny_model(), 'width', 0.5)
  assert (model.width, model.layer.mixer.heads) == (16, 2)
  assert config_lib.token_counts(model) == {'qkv': 12, 'proj': 20, 'ffn': 24}
  dense = grid.scaled(tiny_model(dense=True, ffn_width=64), 'width', 2)
  assert (dense.width, dense.layer.ffn.width) == (64, 128)


@pytest.mark.parametrize('scale', ['width', 'tokens'])
def test_every_group_of_tokens_scales_with_its_reference(scale):
  model = tiny_model()
  changed = {
    'qkv': PattentionConfig(24, groups='16 8:32'),
    'proj': PattentionConfig(40, groups='8*5'),
    'ffn': PattentionConfig(48, reference=64),
  }
  larger = grid.scaled(config_lib.with_pattentions(model, changed), scale, 1.5)
  sizes = {
    name: tuple((group.tokens, group.reference) for group in groups)
    for name, groups in named_groups(larger).items()
  }
  assert sizes == {
    'qkv': ((24, 24), (12, 48)),
    'proj': ((12, 12),) * 5,
    'ffn': ((72, 96),),
  }
  with pytest.raises(UserError, match=r'makes 7\.2 of qkv\.tokens of group 2=6'):
    qkv = PattentionConfig(26, groups='20 6')
    grid.scaled(config_lib.with_pattentions(model, {'qkv': qkv}), scale, 1.2)


def test_tokens_and_layers_scale_alone():
  model = grid.scaled(tiny_model(), 'tokens', 2)
  assert model.width == 32 and config_lib.token_counts(model)['qkv'] == 48
  assert grid.scaled(tiny_model(), 'layers', 3).depth == 6
  assert grid.scaled(tiny_model(), 'layers', 0.5).depth == 1


@pytest.mark.parametrize(
  ('model', 'scale', 'factor', 'message'),
  [
    (tiny_model(), 'width', 0.3, 'makes 7.2 of qkv.tokens=24; it must make a whole number'),
    (tiny_model(), 'layers', 0.25, 'makes 0.5 of'),
    (tiny_model(dense=True), 'tokens', 2, 'this model is a Transformer'),
  ],
)
def test_sizes_that_are_no_whole_numbers_are_refused(model, scale, factor, message):
  with pytest.raises(UserError, match=message):
    grid.scaled(model, scale, factor)


def test_one_stable_run_serves_all_lengths(config):
  jobs = grid.jobs(config, Grid('width', (1,), (25_600, 51_200)), 'out')
  shown = [(job.stage, job.first, job.config.train.steps, job.config.init_from) for job in jobs]
  assert shown == [
    ('stable', 0, 80, ''),
    ('branch', 80, 100, 'out/width_1/stable@80'),
    ('stable', 80, 160, ''),
    ('branch', 160, 200, 'out/width_1/stable@160'),
  ]
  assert [job.config.optim.schedule.kind for job in jobs[:2]] == ['constant', 'wsd']
  assert sum(job.steps for job in jobs) == 160 + 20 + 40


def test_whole_runs_have_the_schedule_of_the_config(config):
  config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, schedule='cosine'))
  wanted = Grid('width', (1, 2), (25_600,), branches=False, rate_power=-1.0)
  jobs = grid.jobs(config, wanted, 'out')
  assert [job.config.optim.schedule.kind for job in jobs] == ['cosine', 'cosine']
  rates = [job.config.optim.learning_rate for job in jobs]
  assert rates[1] == pytest.approx(rates[0] / 2)


def test_runs_that_cost_too_much_are_left_out(config):
  everything = Grid('width', (1, 2), (25_600, 51_200), branches=False)
  costs = sorted(job.flops for job in grid.jobs(config, everything, 'out'))
  some = dataclasses.replace(everything, most_flops=costs[1])
  assert len(grid.jobs(config, some, 'out')) == 2
  with pytest.raises(UserError, match='leaves out every run'):
    grid.jobs(config, dataclasses.replace(everything, most_flops=1.0), 'out')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'init_from': 'runs/other'}, 'config.init_from'),
    ({'train': {'epochs': 2.0}}, 'config.train.epochs'),
    ({'train': {'drop_groups': 0.5}}, 'config.train.drop_groups'),
  ],
)
def test_configs_that_are_no_base_of_a_sweep_are_refused(config, changes, message):
  with pytest.raises(UserError, match=message):
    grid.jobs(config_lib.resolve(changes, base=config), Grid('width', (1,), (25_600,)), 'out')


def test_a_length_within_the_warm_up_is_refused(config):
  with pytest.raises(UserError, match='decay would begin at step 4, within the warm-up'):
    grid.jobs(config, Grid('width', (1,), (1280,)), 'out')


def test_images_have_no_lengths_in_tokens():
  with pytest.raises(UserError, match='kind is vit'):
    grid.jobs(tiny_run.vit_config(), Grid('width', (1,), (25_600,)), 'out')


def test_a_run_of_another_config_is_refused(config, tmp_path):
  (job,) = grid.jobs(config, Grid('width', (1,), (25_600,), branches=False), str(tmp_path))
  workdir = tmp_path / job.name
  workdir.mkdir(parents=True)
  wanted = sizes.fill_in(job.config)
  optim = dataclasses.replace(wanted.optim, learning_rate=1.0)
  other = dataclasses.replace(wanted, optim=optim)
  (workdir / 'config.json').write_text(saved_config.to_text(other))
  with pytest.raises(UserError, match=r'optim.learning_rate is 1.0 there and 0.003 here'):
    grid_runs.is_done(job, str(tmp_path))


def test_finished_runs_are_known_and_give_times(config, tmp_path):
  (job,) = grid.jobs(config, Grid('width', (1,), (25_600,), branches=False), str(tmp_path))
  assert not grid_runs.progress([job], str(tmp_path)).done[0]
  workdir = tmp_path / job.name
  workdir.mkdir(parents=True)
  (workdir / 'config.json').write_text(saved_config.to_text(sizes.fill_in(job.config)))
  lines = [{'step': 50, 'perf/step_seconds': 0.5}, {'step': 100, 'eval/loss': 2.0}]
  (workdir / 'metrics.jsonl').write_text(''.join(f'{json.dumps(one)}\n' for one in lines))
  assert not grid_runs.is_done(job, str(tmp_path)), 'killed before its last save, it is half done'
  (workdir / 'checkpoints/100').mkdir(parents=True)
  found = grid_runs.progress([job], str(tmp_path))
  assert (found.done, found.seconds, found.measured) == ([True], [50.0], 1)
  assert 'finished' in grid_runs.listing([job], found)
  jobs = grid.jobs(config, Grid('width', (1, 2), (25_600,), branches=False), str(tmp_path))
  found = grid_runs.progress(jobs, str(tmp_path))
  work = jobs[1].size.flops_per_token / jobs[0].size.flops_per_token
  assert found.seconds == [50.0, pytest.approx(50 * work)] and work > 1.5, 'of no measured size'
  assert 'by the steps measured here, of some sizes' in grid_runs.listing(jobs, found)


def test_a_length_before_the_end_of_the_stable_run_is_refused_unless_it_is_made(config, tmp_path):
  jobs = grid.jobs(config, Grid('width', (1,), (25_600, 51_200)), str(tmp_path))
  stable, short, _, _ = jobs
  workdir = tmp_path / stable.name
  (workdir / 'checkpoints/160').mkdir(parents=True)
  (workdir / 'config.json').write_text(saved_config.to_text(sizes.fill_in(jobs[2].config)))
  said = r'--lengths has 25,600 tokens, whose decay begins at step 80, but .*width_1/stable is at '
  with pytest.raises(UserError, match=f'{said}step 160 and kept no checkpoint there'):
    grid_runs.progress(jobs, str(tmp_path))
  assert grid_runs.progress(jobs[2:], str(tmp_path)).done == [True, False]
  done = {short.name: True}
  found = grid_runs.progress(jobs, str(tmp_path), lambda job, _: done.get(job.name, False))
  assert found.done == [False, True, False, False], 'a branch that is made needs no checkpoint'
  (workdir / 'checkpoints/80').mkdir()
  assert grid_runs.progress(jobs, str(tmp_path)).done == [True, False, True, False]


@pytest.mark.slow
def test_times_are_promised_after_the_first_run(config, tmp_path, monkeypatch, capsys):
  jobs = grid.jobs(config, Grid('width', (1, 2), (25_600,), branches=False), str(tmp_path))
  table = grid_runs.listing(jobs, grid_runs.progress(jobs, str(tmp_path)))
  assert table.count('not measured') == 2 and 'the first run measures how long' in table

  def train(config, workdir):
    """Leave a run of 100 steps of 0.5 s that took 60 s."""
    (workdir / 'checkpoints/100').mkdir(parents=True)
    (workdir / 'config.json').write_text(saved_config.to_text(sizes.fill_in(config)))
    lines = [{'step': 50, 'perf/step_seconds': 0.5}, {'step': 100, 'eval/loss': 2.0}]
    (workdir / 'metrics.jsonl').write_text(''.join(f'{json.dumps(one)}\n' for one in lines))
    clock.append(clock[-1] + 60)
    return None, False

  clock = [0.0]
  monkeypatch.setattr(grid_runs.time, 'monotonic', lambda: clock[-1])
  monkeypatch.setattr(grid_runs.loop, 'train_or_stop', train)
  assert grid_runs.make_missing(jobs, str(tmp_path))
  work = jobs[1].size.flops_per_token / jobs[0].size.flops_per_token
  left = grid_runs.hours(10 + 50 * work)
  said = capsys.readouterr().err
  assert f'{jobs[0].name} took 0:01:00; 1 run left, about {left}' in said
  assert said.count('left') == 1


def test_commands_make_the_config_of_each_job(config, monkeypatch):
  jobs = grid.jobs(config, Grid('width', (1, 2), (25_600, 51_200), rate_power=-0.5), 'out')
  lines = grid_runs.commands(jobs, config, ['--config=base.py'], 'tokenformer train', 'out')
  assert len(lines) == 2, 'sizes do not wait for each other'
  for line, mine in zip(lines, (jobs[:4], jobs[4:]), strict=True):
    for command, job in zip(line.split(' && '), mine, strict=True):
      words = shlex.split(command)
      assert words[:3] == ['tokenformer', 'train', '--config=base.py']
      assert words[-1] == f'--workdir=out/{job.name}'
      monkeypatch.setattr(config_flag, 'overrides', {})
      config_flag.take_overrides(words[3:-1])
      changes = config_lib.from_dotted(config_flag.overrides)
      changed = config_lib.from_dict(config_lib.Config, changes, base=config)
      assert changed == job.config, f'{command} trains another config'


@pytest.mark.slow
def test_a_grid_trains_and_resumes(tmp_path):
  source = tiny_run.write_corpus(tmp_path / 'corpus')
  config = tiny_run.config(source, tmp_path / 'cache', optim__schedule='wsd')
  out = str(tmp_path / 'grid')
  jobs = grid.jobs(config, Grid('width', (0.5,), (5120, 10_240)), out)
  assert grid_runs.make_missing(jobs[:2], out)
  first = tmp_path / 'grid' / jobs[1].name / 'metrics.jsonl'
  before = first.stat().st_mtime_ns
  assert grid_runs.progress(jobs, out).done == [True, True, False, False]
  assert grid_runs.make_missing(jobs, out)
  assert grid_runs.progress(jobs, out).done == [True] * 4
  assert first.stat().st_mtime_ns == before, 'a finished run was made again'
  found = points.from_runs(points.read_all([out])[0])
  last = tmp_path / 'grid' / jobs[-1].name / 'checkpoints' / str(jobs[-1].config.train.steps)
  last.rename(tmp_path / 'not saved')
  assert grid_runs.progress(jobs, out).done == [True] * 3 + [False], 'its last steps are lost'
  assert grid_runs.make_missing(jobs, out) and last.exists()
  assert points.from_runs(points.read_all([out])[0]).loss.tolist() == found.loss.tolist()
  assert found.tokens.tolist() == [5120, 10_240]
  assert found.notes == ('1 run whose learning rate had not decayed is left out',)
  shorter = grid.jobs(config, Grid('width', (0.5,), (3840, 10_240)), out)
  with pytest.raises(UserError, match='--lengths has 3,840 tokens, whose decay begins at step 12,'):
    grid_runs.progress(shorter, out)
