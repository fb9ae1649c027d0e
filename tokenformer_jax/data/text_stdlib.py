"""Read text that every machine has: the standard library of the running Python."""

import os
import sysconfig
import tokenize
from collections.abc import Iterator

from tokenformer_jax.data import reading
from tokenformer_jax.data.text_files import Files
from tokenformer_jax.errors import UserError

_NOT_LIBRARY = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', '__pycache__'}


class PythonFiles(Files):
  """Python source files in their declared encodings (PEP 263). Undecodable files are skipped."""

  def _texts(self) -> Iterator[str]:
    for path in self.identities:
      try:
        with reading.reading(path), tokenize.open(path) as file:
          text = file.read()
      except (UnicodeDecodeError, SyntaxError):  # SyntaxError: the declared encoding is unknown.
        continue
      yield text


def open_stdlib(name: str, text_field: str, setting: str, splits: tuple[str, ...]) -> PythonFiles:
  """Return the standard library of the running interpreter without its tests, about 12 MB."""
  del name, text_field, splits
  root = sysconfig.get_path('stdlib')
  paths = []
  for folder, folders, names in os.walk(root):
    folders[:] = set(folders) - _NOT_LIBRARY
    paths += [os.path.join(folder, name) for name in names if name.endswith('.py')]
  if not paths:
    raise UserError(
      f'{setting} is stdlib, but this Python has no .py files in {root}; use files:GLOB'
    )
  return PythonFiles({path: reading.identity(path) for path in sorted(paths)})
