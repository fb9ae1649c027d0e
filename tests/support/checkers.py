"""Programs of the extra [test] that find mistakes in scripts."""

import os
import shutil
import subprocess
import sys


def check(checker, *files):
  """Assert that such a program finds no mistake in some files."""
  path = os.pathsep.join([os.path.dirname(sys.executable), os.environ['PATH']])
  program = shutil.which(checker, path=path)
  assert program, f'{checker} is not installed; pip install -e ".[test]"'
  done = subprocess.run([program, *files], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout
