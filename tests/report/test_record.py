"""A record holds those files of a run that exist, and sums its wall time by kind."""

import dataclasses
import types

import pytest
import written_runs
from written_runs import CONFIG

from tokenformer_jax.config import ImagesConfig, ViTConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import flops
from tokenformer_jax.report import record
from tokenformer_jax.runs import curves
from tokenformer_jax.runs.checkpoint_meta import Meta


def read(path):
  return record.read(path, path.name)


def test_steps_have_a_place_on_every_axis(tmp_path):
  run = written_runs.write(tmp_path / 'run', written_runs.falling(100))
  written_runs.add(run / 'times.jsonl', written_runs.hourly(100))
  recorded = read(run)
  assert [*recorded.axes] == ['steps', 'tokens', 'flops', 'hours']
  assert recorded.at('tokens', 30) == 30 * 16 * 256
  assert recorded.at('flops', 30) == pytest.approx(30 * flops.step_flops(CONFIG))
  assert recorded.at('hours', 30) == pytest.approx(3.2)
  assert (recorded.first_step, recorded.last_step) == (0, 100)
  assert recorded.notes == [f'{run} has no checkpoint, so its growths and its model are not shown']


def test_images_are_counted_as_images(tmp_path):
  model = ViTConfig(channels=3, classes=10)
  config = dataclasses.replace(CONFIG, model=model, data=ImagesConfig(batch_size=16))
  run = written_runs.write(tmp_path / 'run', written_runs.falling(20), config)
  assert read(run).at('images', 20) == 20 * 16
  assert read(run).at('tokens', 20) is None


@pytest.mark.parametrize('config', [None, '{"model": ', '{"format": 0}'])
def test_a_run_without_its_config_has_steps_and_says_so(tmp_path, config):
  run = written_runs.write(tmp_path / 'run', written_runs.falling(20), None)
  if config:
    (run / 'config.json').write_text(config)
  recorded = read(run)
  assert [*recorded.axes] == ['steps']
  assert any('config.json' in note for note in recorded.notes)


def test_lines_that_are_cut_or_of_another_kind_are_left_out(tmp_path):
  run = written_runs.write(tmp_path / 'run', written_runs.falling(20))
  for name in ('metrics', 'samples', 'times'):
    with (run / f'{name}.jsonl').open('a') as file:
      file.write('{"step": 30, "train/loss": "x", "text": 3, "training": "long"}\n{"step": 4')
  written_runs.add(
    run / 'samples.jsonl', [{}, {'step': 9, 'text': 'good'}, {'step': 'a', 'text': ''}]
  )
  recorded = read(run)
  assert len(recorded.values('train/loss')) == 2
  assert [one['text'] for one in recorded.samples] == ['good']
  assert sum(record.sessions(recorded.times).seconds.values()) == 0
  counts = {'metrics': 1, 'samples': 3, 'times': 1}
  for name, count in counts.items():
    assert any(f'{name}.jsonl: {count} line' in note for note in recorded.notes), recorded.notes


def test_figures_that_end_before_the_checkpoint_or_are_lost_are_a_note(tmp_path, monkeypatch):
  run = written_runs.write(tmp_path / 'run', written_runs.falling(20))
  meta = Meta(30, CONFIG, {'kind': 'bytes'})
  opened = types.SimpleNamespace(meta=meta)
  monkeypatch.setattr(record.checkpoint, 'open_directory', lambda _: opened)
  said = f'{run}/metrics.jsonl ends at step 20, and the newest checkpoint is of step 30'
  assert said in read(run).notes
  written_runs.add(run / 'metrics.jsonl', [{'step': 30, 'train/loss': 3.0}])
  assert not any('metrics.jsonl' in note for note in read(run).notes)
  (run / 'metrics.jsonl').write_text('{"step": 10, "train/lo')
  monkeypatch.setattr(curves, 'read', lambda _: [{'step': 30, 'train/loss': 3.0}])
  assert f'{run}/metrics.jsonl is lost' in ' '.join(read(run).notes)


def test_a_checkpoint_that_cannot_be_read_is_a_note(tmp_path):
  run = written_runs.write(tmp_path / 'run', written_runs.falling(20))
  (run / 'checkpoints' / '20').mkdir(parents=True)
  recorded = read(run)
  assert recorded.meta is None and 'no checkpoint of' in recorded.notes[0]


def test_a_run_without_figures_is_named(tmp_path):
  with pytest.raises(UserError, match='no figures yet'):
    read(written_runs.write(tmp_path / 'run', []))


def test_time_of_steps_that_were_made_again_is_lost():
  """A run logs every 10 s, crashes after step 30, and continues from step 10 half an hour later."""
  times = [
    {'step': 0, 'devices': '1 × cpu', 'time': 100.0, 'starting': 7.0, 'compiling': 2.0},
    {'step': 10, 'time': 110.0, 'training': 10.0},
    {'step': 20, 'time': 120.0, 'training': 8.0, 'saving': 2.0},
    {'step': 30, 'time': 130.0, 'training': 10.0},
    {'step': 10, 'devices': '2 × cpu', 'time': 1939.0, 'starting': 9.0},
    {'step': 20, 'time': 1949.0, 'training': 10.0},
  ]
  sessions = record.sessions(times)
  assert sessions.seconds == {
    'training': 20.0,
    'data': 0.0,
    'evaluation': 0.0,
    'saving': 0.0,
    'compiling': 2.0,
    'starting': 16.0,
    record.LOST: 20.0,
  }
  assert (sessions.count, sessions.pauses, sessions.devices) == (2, 1800.0, '2 × cpu')
