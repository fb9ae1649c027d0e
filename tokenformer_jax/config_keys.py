"""The keys of a config with their comments, as the source of the dataclasses has them.

The comment of a field stands behind it, or in the lines above it; one that an empty line separates
from the next field is the heading of the fields after it.
"""

import ast
import dataclasses
import inspect
import io
import tokenize
import typing
from collections.abc import Iterator
from typing import Any

from tokenformer_jax import config, usage

_NAMES = 34  # columns of a key and its default


@dataclasses.dataclass(frozen=True)
class Key:
  """A key of a config.

  Attributes:
    path: such as `model.param_tokens.qkv`.
    default: its value unless a config sets another one.
    choices: all values that are allowed, if they are few.
    comment: what it means.
    heading: which runs it is for, if not for all.
  """

  path: str
  default: Any
  choices: tuple[str, ...]
  comment: str
  heading: str


def all_keys() -> list[Key]:
  """Return every key in the order of the dataclasses."""
  return [*_keys_of(config.Config, config.Config(), '', _comments())]


def render() -> str:
  """Return the keys as lines of text, each with its default, choices and comment."""
  lines, group, heading = [], '', ''
  for key in all_keys():
    if (now := key.path.rpartition('.')[0].partition('.')[0]) != group:
      group, heading = now, ''
      lines.append('')
    if key.heading != heading:
      heading = key.heading
      lines.append(f'    {heading}')
    lines.extend(_lines(key))
  return '\n'.join(lines)


def _lines(key: Key) -> list[str]:
  left = f'  {key.path}={key.default}'
  choices = ' | '.join(choice or "''" for choice in key.choices)
  text = '; '.join(filter(None, [choices, key.comment]))
  return usage.columns(left, text, _NAMES)


def _keys_of(
  cls: type, values: Any, prefix: str, comments: dict[tuple[str, str], tuple[str, str]]
) -> Iterator[Key]:
  types = typing.get_type_hints(cls)
  for field in dataclasses.fields(cls):
    path, value = f'{prefix}{field.name}', getattr(values, field.name)
    comment, heading = comments[cls.__name__, field.name]
    if dataclasses.is_dataclass(types[field.name]):
      for key in _keys_of(types[field.name], value, f'{path}.', comments):
        both = '. '.join(filter(None, [key.comment, comment]))
        yield dataclasses.replace(key, comment=both)
    else:
      yield Key(path, value, config.choices(path), comment, heading)


def _comments() -> dict[tuple[str, str], tuple[str, str]]:
  """The comment and the heading of each field, by the names of its class and its own."""
  source = inspect.getsource(config)
  code = source.splitlines()
  at = {
    token.start[0]: token.string.removeprefix('#').strip()
    for token in tokenize.generate_tokens(io.StringIO(source).readline)
    if token.type == tokenize.COMMENT
  }

  def alone(line: int) -> bool:
    return line in at and code[line - 1].lstrip().startswith('#')

  found = {}
  for cls in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
    heading, line = '', cls.lineno
    for field in (node for node in cls.body if isinstance(node, ast.AnnAssign)):
      above = field.lineno
      while alone(above - 1):
        above -= 1
      for earlier in range(line + 1, above):
        heading = at[earlier] if alone(earlier) else heading
      line = field.end_lineno
      said = [at[i] for i in range(above, line + 1) if i in at]
      found[cls.name, field.target.id] = ' '.join(said), heading
  return found
