"""launch/Dockerfile: by a linter, and its commands without Docker."""

import re
import subprocess
import sys
from pathlib import Path

import checkers
import tiny_run

LAUNCH = tiny_run.ROOT / 'launch'


def test_the_image_is_without_known_mistakes():
  checkers.check('hadolint', LAUNCH / 'Dockerfile')


def instructions(name):
  """The arguments of an instruction of the Dockerfile, each time it occurs."""
  text = (LAUNCH / 'Dockerfile').read_text().replace('\\\n', ' ')
  return re.findall(rf'^{name} (.*)$', text, re.MULTILINE)


def test_the_image_installs_the_dependencies_and_then_the_package(tmp_path):
  """The `RUN` lines, with a pip that prints; the image itself cannot be built here."""
  first, second = instructions('RUN')
  for files in instructions('COPY'):
    *names, target = files.split()
    for name in names:
      copied = tmp_path / target / Path(name).name if target.endswith('/') else tmp_path / target
      copied.symlink_to(tiny_run.ROOT / name)
  pip = f'python() {{ {sys.executable} "$@"; }}; pip() {{ echo pip "$@"; cat requirements.txt; }}\n'
  for command in (first, second):
    done = subprocess.run(
      ['bash', '-euc', pip + command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    asked, *requirements = done.stdout.splitlines()
    assert {'jax[tpu]>=0.10.2', 'pyarrow>=21'} <= set(requirements), requirements
  assert asked.endswith('--no-deps -e .')
  assert (tmp_path / 'train.py').exists() and (tmp_path / 'launch' / 'restart.sh').exists()
