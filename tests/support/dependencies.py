"""Hash the dependencies of the project, and record the Python that they were tried with.

This file, run by Python, prints the record that `.ci/newest_python` writes after the tests.
"""

import hashlib
import json
import platform
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RECORD = ROOT / '.ci/newest_python.json'


def digest(pyproject: str, constraints: str) -> str:
  """A hash of the dependencies that pip reads; comments and their order do not count."""
  project = tomllib.loads(pyproject)['project']
  optional = project['optional-dependencies']
  pinned = [line.partition('#')[0].strip() for line in constraints.splitlines()]
  content = [
    project['requires-python'],
    sorted(project['dependencies']),
    sorted((name, sorted(needs)) for name, needs in optional.items()),
    sorted(filter(None, pinned)),
  ]
  return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def current() -> str:
  """The hash of the dependencies as they are."""
  return digest(
    (ROOT / 'pyproject.toml').read_text(), (ROOT / 'constraints.txt').read_text('utf-8')
  )


if __name__ == '__main__':
  print(
    json.dumps(
      {
        'dependencies': current(),
        'python': platform.python_version(),
        'jax': metadata.version('jax'),
      },
      indent=2,
    )
  )
