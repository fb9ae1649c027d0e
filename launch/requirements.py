"""Print what pip must install for the package and its extras, without the package itself.

  python launch/requirements.py EXTRA… > requirements.txt

The Dockerfile uses it in a folder that has only this file and pyproject.toml.
"""

import sys
import tomllib
from pathlib import Path


def read_requirements(extras: list[str]) -> list[str]:
  """Return the requirements of the package and of some extras, from ./pyproject.toml."""
  project = tomllib.loads(Path('pyproject.toml').read_text())['project']
  optional = project['optional-dependencies']
  return project['dependencies'] + [need for extra in extras for need in optional[extra]]


if __name__ == '__main__':
  print('\n'.join(read_requirements(sys.argv[1:])))
