"""kill -9 of the grow command at any moment: the target is whole or not there at all."""

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


def test_kills_at_random_moments(tmp_path):
  """One of them anywhere, one of them after the first file of the target is seen."""
  text = tiny_run.write_corpus(tmp_path / 'corpus')
  write_run(tmp_path / 'run', text, tmp_path / 'cache')
  source = contents(tmp_path / 'run')
  home = tmp_path / 'targets'
  home.mkdir()

  def command(name):
    return command_line(f'--source={tmp_path}/run', f'--target={home}/{name}', LARGER)

  begun = time.monotonic()
  process = _start(command('whole'))
  writing = None
  while process.poll() is None:
    if writing is None and (home / '.whole.partial').exists():
      writing = time.monotonic() - begun
    time.sleep(0.001)
  duration = time.monotonic() - begun
  assert process.returncode == 0 and writing is not None, 'the growth failed by itself'
  whole = read(home / 'whole')

  rng = random.Random(0)
  outcomes = []
  for i in range(KILLS):
    process, begun = _start(command(i)), time.monotonic()
    if i % 2:
      while process.poll() is None and not (home / f'.{i}.partial').exists():
        time.sleep(0.001)
      time.sleep(rng.uniform(0, 0.6 * (duration - writing)))  # the end of the process is in it
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
