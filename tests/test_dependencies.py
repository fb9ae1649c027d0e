"""A change of dependencies is tried with the newest Python before it counts as tested."""

import importlib.util
import json

import dependencies
from tiny_run import ROOT

PYPROJECT = """
[project]
requires-python = ">=3.11"
dependencies = ["b>=2", "a>=1"]
[project.optional-dependencies]
test = ["c"]
"""


def test_the_newest_python_was_tried_with_these():
  tried = json.loads(dependencies.RECORD.read_text())
  assert tried['dependencies'] == dependencies.current(), (
    'pyproject.toml or constraints.txt changed since the quick tests last ran on Python '
    f'{tried["python"]}; run .ci/newest_python and commit .ci/newest_python.json'
  )


def test_a_change_of_dependencies_is_seen():
  before = dependencies.digest(PYPROJECT, 'a==1.5\n')
  assert dependencies.digest(PYPROJECT.replace('3.11', '3.12'), 'a==1.5\n') != before
  assert dependencies.digest(PYPROJECT.replace('"c"', '"c>=1"'), 'a==1.5\n') != before
  assert dependencies.digest(PYPROJECT, 'a==1.6\n') != before, 'a version that is tested'


def test_a_comment_or_another_order_is_no_change():
  before = dependencies.digest(PYPROJECT, 'a==1.5\nb==2\n')
  moved = PYPROJECT.replace('"b>=2", "a>=1"', '"a>=1", "b>=2"')
  assert dependencies.digest(moved, '# tested\nb==2\na==1.5\n') == before


def test_no_script_hides_a_package():
  """A script's folder is first on Python's path, so a file there hides a package of its name."""
  files = (path for folder in ('benchmarks', 'experiments') for path in ROOT.glob(f'{folder}/*.py'))
  specs = (importlib.util.find_spec(path.stem) for path in files)
  hidden = [spec.origin for spec in specs if spec and spec.origin]
  assert not [origin for origin in hidden if not origin.startswith(f'{ROOT}/tests/')]
