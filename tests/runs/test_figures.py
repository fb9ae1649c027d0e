"""Figures on storage that fails, is full or loses them: whole lines, or a sentence."""

import contextlib
import json
import os
import resource
import time

import pytest

from tokenformer_jax.errors import UserError
from tokenformer_jax.runs import metrics

pytestmark = pytest.mark.usefixtures('short_pauses')

TENSORBOARD = ('tensorboard',)


@contextlib.contextmanager
def room(path, bytes_left):
  """Lets files grow by so much beyond the size of one: a disk that is full then."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + bytes_left, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def open_metrics(workdir, first_step=0, trackers=()):
  return metrics.Metrics(workdir, first_step=first_step, steps=9, trackers=trackers)


def until(found):
  """Waits until a function returns something true, and returns that."""
  for _ in range(1000):
    if value := found():
      return value
    time.sleep(0.01)
  raise AssertionError('nothing came in 10 s')


def test_a_full_disk_leaves_whole_lines_and_a_sentence(tmp_path):
  figures = open_metrics(tmp_path)
  figures.write(1, {'train/loss': 1.0})
  with (
    room(tmp_path / 'metrics.jsonl', 10),
    pytest.raises(UserError, match=r'figures could not be written to .*; make room, then run the'),
  ):
    figures.write(2, {'train/loss': 2.0})
  figures.write(3, {'train/loss': 3.0})
  figures.close()
  content = (tmp_path / 'metrics.jsonl').read_text()
  assert [json.loads(line)['step'] for line in content.splitlines()] == [1, 3], content


def test_a_full_disk_stops_tensorboard_and_not_the_run(tmp_path, capsys):
  """Room is left for the lines, which are fewer bytes than the events."""
  figures = open_metrics(tmp_path, trackers=TENSORBOARD)
  many = {f'train/{i}': 1.0 for i in range(500)}
  figures.write(1, many)
  (events,) = until(lambda: list(tmp_path.glob('tensorboard/*')))
  until(lambda: events.stat().st_size > 20_000)
  os.truncate(tmp_path / 'metrics.jsonl', 0)
  with room(events, 10):
    figures.write(2, many)
    figures.write(3, {'train/loss': 1.0})
    figures.close()
  said = capsys.readouterr().err
  assert said.count('tensorboard failed (OSError') == 1, said
  assert [line['step'] for line in metrics.read(tmp_path)] == [2, 3]


def test_lines_after_half_a_line_are_read(tmp_path):
  whole = [{'step': step, 'train/loss': 1.0} for step in (1, 2, 3)]
  lines = [json.dumps(line).encode() for line in whole]
  lines.insert(1, lines[1][:9])
  lines.insert(3, b'\0' * 9 + b'\xff')
  (tmp_path / 'metrics.jsonl').write_bytes(b'\n'.join(lines))
  assert metrics.read(tmp_path) == whole, 'half a line hides those after it'
  open_metrics(tmp_path, first_step=2).close()
  assert metrics.read(tmp_path) == whole[:2]


@pytest.mark.parametrize('has_figures', [True, False])
def test_a_run_says_which_figures_it_lacks(tmp_path, has_figures, capsys):
  figures = metrics.Metrics(tmp_path, first_step=6, steps=9, has_figures=has_figures)
  figures.close()
  said = capsys.readouterr().err
  assert ('no figures up to step 6' in said) == has_figures, said
  assert metrics.read(tmp_path) == []
