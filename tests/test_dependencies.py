"""A change of dependencies is tried with the newest Python before it counts as tested."""

import importlib.util
import json

import dependencies
from tiny_run import ROOT


def test_the_newest_python_was_tried_with_these():
  tried = json.loads(dependencies.RECORD.read_text())
  assert tried['dependencies'] == dependencies.digest(), (
    'pyproject.toml or constraints.txt changed since the quick tests last ran on Python '
    f'{tried["python"]}; run .ci/newest_python and commit .ci/newest_python.json'
  )


def test_no_script_hides_a_package():
  """A script's folder is first on Python's path, so a file there hides a package of its name."""
  files = (path for folder in ('benchmarks', 'experiments') for path in ROOT.glob(f'{folder}/*.py'))
  specs = (importlib.util.find_spec(path.stem) for path in files)
  hidden = [spec.origin for spec in specs if spec and spec.origin]
  assert not [origin for origin in hidden if not origin.startswith(f'{ROOT}/tests/')]
