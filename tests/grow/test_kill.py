"""kill -9 of the grow command at any moment: the target is whole or not there at all."""

import os
import random
import signal
import subprocess
import time

import pytest
import tiny_run
from grow_commands import LARGER, command_line, contents, meta_of, read, write_run
from outcomes import assert_same

pytestmark = pytest.mark.slow

KILLS = 2


def _start(command):
  return subprocess.Popen(
    command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=tiny_run.environment()
  )


def _count_files(folder):
  return sum(len(files) for _, _, files in os.walk(folder))


def test_kills_at_random_moments(tmp_path):
  """One of them anywhere, one of them while the target has some of its files."""
  text = tiny_run.write_corpus(tmp_path / 'corpus')
  write_run(tmp_path / 'run', text, tmp_path / 'cache')
  source = contents(tmp_path / 'run')
  home = tmp_path / 'targets'
  home.mkdir()

  def command(name):
    return command_line(f'--source={tmp_path}/run', f'--target={home}/{name}', LARGER)

  begun = time.monotonic()
  assert _start(command('whole')).wait() == 0, 'the growth failed by itself'
  duration = time.monotonic() - begun
  whole = read(home / 'whole')

  rng = random.Random(0)
  outcomes = []
  for i in range(KILLS):
    process = _start(command(i))
    if i % 2:
      count = rng.randint(1, _count_files(home / 'whole') // 2)
      while process.poll() is None and _count_files(home / f'.{i}.partial') < count:
        time.sleep(0.001)
    else:
      time.sleep(duration * (i + 2 * rng.random()) / KILLS)
    process.send_signal(signal.SIGKILL)
    process.wait()
    outcomes.append(((home / f'.{i}.partial').exists(), (home / f'{i}').exists()))
    if (home / f'{i}').exists():
      assert_same(read(home / f'{i}'), whole, f'killed at moment {i}, yet there')
    assert contents(tmp_path / 'run') == source, 'the source was touched'
  assert (True, False) in outcomes, f'no kill was while the target was written: {outcomes}'

  for i, (_, there) in enumerate(outcomes):
    if not there and i == KILLS - 1:
      done = tiny_run.run(command(i))
      assert done.returncode == 0, done.stderr
      assert_same(read(home / f'{i}'), whole, f'run again after kill {i}')
      assert meta_of(home / f'{i}').checksums == meta_of(home / 'whole').checksums
      assert not (home / f'.{i}.partial').exists(), 'the rest of the killed growth is left'
