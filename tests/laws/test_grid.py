"""A grid has the sizes and lengths asked for, and trains what is missing."""

import dataclasses

import pytest
import tiny_run
import written_runs
from tiny import tiny_model

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import PattentionConfig
from tokenformer_jax.config.groups import named_groups
from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import grid, grid_runs, points
from tokenformer_jax.laws.grid import Grid
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.runs import saved_config


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


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'init_from': 'runs/other'}, 'config.init_from'),
    ({'train': {'steps': 1000, 'epochs': 2.0}}, 'config.train.epochs'),
    ({'train': {'nested_rows': 8}}, 'config.train.nested_rows'),
  ],
)
def test_configs_that_are_no_base_of_a_sweep_are_refused(config, changes, message):
  with pytest.raises(UserError, match=message):
    grid.jobs(config_lib.resolve(changes, base=config), Grid('width', (1,), (25_600,)), 'out')


def test_a_length_within_the_warm_up_is_refused(config):
  with pytest.raises(UserError, match='decay would begin at step 4, within the warm-up'):
    grid.jobs(config, Grid('width', (1,), (1280,)), 'out')


def test_a_run_is_finished_after_its_last_save_and_one_of_another_config_is_refused(
  config, tmp_path
):
  job = grid.jobs(config, Grid('width', (1,), (25_600,)), str(tmp_path))[1]
  assert not grid_runs.is_done(job, str(tmp_path))
  filled = complete(job.config)
  workdir = written_runs.write(tmp_path / job.name, [{'step': 100, 'eval/loss': 2.0}], filled)
  assert not grid_runs.is_done(job, str(tmp_path)), 'killed before its last save, it is half done'
  (workdir / 'checkpoints/100').mkdir(parents=True)
  assert grid_runs.is_done(job, str(tmp_path))
  assert '1 jobs are finished; 0 FLOPs are left' in grid_runs.table([job], [True])
  other = dataclasses.replace(filled, optim=dataclasses.replace(filled.optim, learning_rate=1.0))
  (workdir / 'config.json').write_text(saved_config.to_text(other))
  with pytest.raises(UserError, match=r'optim.learning_rate is 1.0 there and 0.003 here'):
    grid_runs.is_done(job, str(tmp_path))


def test_a_length_before_the_end_of_the_stable_run_is_refused_unless_it_is_made(config, tmp_path):
  jobs = grid.jobs(config, Grid('width', (1,), (25_600, 51_200)), str(tmp_path))
  stable, short, _, _ = jobs
  workdir = written_runs.write(tmp_path / stable.name, [], complete(jobs[2].config))
  (workdir / 'checkpoints/160').mkdir(parents=True)
  said = r'--lengths has 25,600 tokens, whose decay begins at step 80, but .*width_1/stable is at '
  with pytest.raises(UserError, match=f'{said}step 160 and kept no checkpoint there'):
    grid_runs.finished(jobs, str(tmp_path))
  assert grid_runs.finished(jobs[2:], str(tmp_path)) == [True, False]
  done = {short.name: True}
  finished = grid_runs.finished(jobs, str(tmp_path), lambda job, _: done.get(job.name, False))
  assert finished == [False, True, False, False], 'a branch that is made needs no checkpoint'
  (workdir / 'checkpoints/80').mkdir()
  assert grid_runs.finished(jobs, str(tmp_path)) == [True, False, True, False]


def test_the_time_that_is_left_follows_from_the_flops(config, monkeypatch, capsys):
  jobs = grid.jobs(config, Grid('width', (1, 2), (25_600,)), 'out')
  clock, made = [0.0], set()

  def make(job, out):
    clock[0] += 60
    made.add(job.name)
    return True

  monkeypatch.setattr(grid_runs.time, 'monotonic', lambda: clock[0])
  assert grid_runs.make_missing(jobs, 'out', make, lambda job, _: job.name in made)
  seconds = 60 * sum(job.flops for job in jobs[1:]) / jobs[0].flops
  said = capsys.readouterr().err
  assert f'3 runs left, about {grid_runs.hours(seconds)}' in said
  assert said.count('left') == 3


@pytest.mark.slow
def test_a_grid_trains_and_resumes(one_device, monkeypatch, tmp_path):
  monkeypatch.setattr(grid_runs.jax, 'clear_caches', lambda: None)
  source = tiny_run.write_corpus(tmp_path / 'corpus')
  smaller = {'model__pattern': 'layer', 'train__eval_batches': 1, 'train__checkpoint_every': 100}
  config = tiny_run.config(source, tmp_path / 'cache', optim__schedule='wsd', **smaller)
  out = str(tmp_path / 'grid')
  jobs = grid.jobs(config, Grid('width', (0.5,), (2560, 5120)), out)
  assert grid_runs.make_missing(jobs[:2], out)
  first = tmp_path / 'grid' / jobs[1].name / 'metrics.jsonl'
  before = first.stat().st_mtime_ns
  assert grid_runs.finished(jobs, out) == [True, True, False, False]
  assert grid_runs.make_missing(jobs[:3], out), 'the stable run does not go on'
  assert grid_runs.finished(jobs, out) == [True, True, True, False]
  assert first.stat().st_mtime_ns == before, 'a finished run was made again'
  law_points = points.from_runs(points.read_all([out])[0])
  assert law_points.tokens.tolist() == [2560]
  assert law_points.notes == ('1 run whose learning rate had not decayed is left out',)
  shorter = grid.jobs(config, Grid('width', (0.5,), (2048, 5120)), out)
  with pytest.raises(UserError, match='--lengths has 2,048 tokens, whose decay begins at step 6,'):
    grid_runs.finished(shorter, out)
