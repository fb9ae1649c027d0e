"""Share files and runs with all tests of mistakes."""

import fcntl
import os
from pathlib import Path

import matplotlib.font_manager  # noqa: F401 (which writes a list of fonts into the cache)
import pytest
import runs_to_misuse


@pytest.fixture(scope='session')
def material(tmp_path_factory) -> Path:
  """A folder with the files of `inputs.py`, and runs of 2 steps; shared by all workers."""
  base = tmp_path_factory.getbasetemp()
  base = base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base
  folder = base / 'mistakes'
  with (base / 'mistakes.lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not folder.exists():
      runs_to_misuse.write(folder)
  return folder
