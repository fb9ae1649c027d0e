"""Print the record of the dependencies that `.ci/newest_python` writes after the tests."""

import hashlib
import json
import platform
import tomllib
from importlib import metadata

import tiny_run

RECORD = tiny_run.ROOT / '.ci/newest_python.json'


def digest() -> str:
  """Return a hash of the dependencies that pip reads."""
  project = tomllib.loads((tiny_run.ROOT / 'pyproject.toml').read_text())['project']
  asked = [project[key] for key in ('requires-python', 'dependencies', 'optional-dependencies')]
  text = json.dumps(asked) + (tiny_run.ROOT / 'constraints.txt').read_text('utf-8')
  return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == '__main__':
  versions = {'python': platform.python_version(), 'jax': metadata.version('jax')}
  print(json.dumps({'dependencies': digest(), **versions}, indent=2))
