"""Find keys of a config by dotted path, and the nearest name for an unknown one."""

import functools
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tokenformer_jax.config.model import BASE
from tokenformer_jax.config.run import Config
from tokenformer_jax.config.section import (
  Leaf,
  field_types,
  fields_inside,
  kinds_of,
  leaves_of_kinds,
  sentence,
)
from tokenformer_jax.errors import UserError, misspelt, nearest

# The section of named layers, and the section that each of these layers is a version of.
_VARIANTS, _LAYER = 'model.variants', 'model.layer'
# Sections whose entries the user names, and what such an entry is.
NAMED = {_VARIANTS: 'layer', 'data.mixture': 'source'}


@functools.cache
def _leaves() -> Mapping[str, Leaf]:
  """Return every key of every kind that is not a section, by its path."""
  return leaves_of_kinds(Config())


def choices(path: str) -> tuple[str, ...]:
  """Return the values that a key such as `grow.moments` allows, or none if they are not listed."""
  return _leaves()[path].choices


def lookup(config: Any, path: str) -> Any:
  """Return the value at a dotted path such as `model.layer.ffn.tokens`."""
  for name in path.split('.'):
    config = getattr(config, name)
  return config


def type_of(path: str) -> type:
  """Return the type of the key at a dotted path, a key of any kind of its section: int, str, …."""
  known: dict[str, FieldInfo | None] = dict(field_types(Config))
  field: FieldInfo | None = None
  for i, name in enumerate(parts := path.split('.')):
    section = '.'.join(parts[:i])
    if section in NAMED:
      check_name(section, name)
      continue
    if name not in known:
      raise unknown(name, f'{section}.' if section else '', known, path)
    field = known[name]
    known = {} if field is None else dict(fields_inside(field))
    if field is not None and kinds_of(field):
      known = {'kind': None, **known}
  if path in NAMED:
    raise UserError(
      f'config.{path} is a section of {NAMED[path]}s; set keys of one, {path}.NAME.KEY'
    )
  if field is not None and kinds_of(field):
    return str  # its kind
  if known:
    raise UserError(f'config.{path} is a section of keys; set one of {", ".join(known)}')
  annotation: Any = None if field is None else field.annotation
  origin = typing.get_origin(annotation)
  if annotation is None or origin is Literal or isinstance(annotation, types.UnionType):
    return str  # of groups: their short form
  return origin or annotation


def check_name(section: str, name: str) -> None:
  """Check the name of a layer in `model.variants`, or of a source in `data.mixture`."""
  name = str(name)  # Python code may use any key.
  is_word = name.isidentifier() and name.isascii()
  if section == _VARIANTS and (not is_word or name == BASE):
    raise UserError(
      f'config.{section}.{name} cannot be the name of a layer; take a word of letters, digits and '
      f'_ that is not {BASE!r}'
    )
  if not is_word:
    raise UserError(
      f'config.{section} names a source {name!r}, which cannot be its name; take a word of '
      'letters, digits and _'
    )


def mistake(error: ValidationError, cls: type, values: Mapping[str, Any]) -> UserError:
  """Return the first error of a section that was made from nested dicts, in one sentence."""
  first = error.errors(include_url=False)[0]
  if cls is not Config or first['type'] not in ('unexpected_keyword_argument', 'invalid_key'):
    return UserError(sentence(error, cls, values=values))
  *sections, name = map(str, first['loc'])
  path = ''.join(f'{section}.' for section in sections)
  field, known, inside = None, dict(field_types(Config)), values
  for section in sections:
    inside = inside[section]
    if section in known:  # else the name of a layer or a source
      field, known = known[section], fields_inside(known[section])
  kinds = kinds_of(field) if field else None
  if name in known:
    having = [kind for kind, one in (kinds or {}).items() if name in field_types(one)]
    needed = f'{path}kind={" or ".join(having)}'
    return needs(f'{path}{name}', first['input'], needed, inside['kind'])
  return unknown(name, path, [*(['kind'] if kinds else []), *known])


def needs(path: str, value: Any, needed: str, present: str) -> UserError:
  """Return the error for a key that needs a choice such as `model.kind=lm`, not `present`.

  `present` is empty if the other key has no value.
  """
  shown = 'given' if isinstance(value, Mapping) else repr(value)
  here = f'this is {present}' if present else 'that is not set'
  return UserError(
    f'config.{path} is {shown}, which has a meaning for {needed} only, and {here}; leave it out'
  )


def unknown(name: str, section: str, known: Collection[str], path: str = '') -> UserError:
  """Return the error for an unknown name in a section of keys.

  Args:
    name: the unknown name.
    section: the path of the section with a dot at its end; empty for the whole config.
    known: the names in the section; empty if `section` is a single value.
    path: the requested path, which may continue after `name`.
  """
  name = str(name)  # Python code may use any key.
  message = f'config key {section + name!r} is unknown'
  if not known:
    return UserError(f'{message}; config.{section[:-1]} is a single value')
  if near := misspelt(name, known):
    return UserError(f'{message}; did you mean {section + near!r}?')
  if elsewhere := _elsewhere(path or section + name):
    return UserError(f'{message}; did you mean {" or ".join(map(repr, elsewhere))}?')
  return UserError(message + nearest(name, known))


def _elsewhere(path: str) -> list[str]:
  """Return the keys with the last part of a path, or only those with all its parts if any exist."""
  layer = re.match(rf'{re.escape(_VARIANTS)}\.\w+', path)
  if layer:
    path = _LAYER + path[layer.end() :]
  parts = path.split('.')
  same = keys_named(parts[-1])
  same = [key for key in same if _has_in_order(key.split('.'), parts)] or same
  return [re.sub(rf'^{_LAYER}\b', layer[0], key) for key in same] if layer else same


def _has_in_order(whole: Sequence[str], parts: Sequence[str]) -> bool:
  rest = iter(whole)
  return all(part in rest for part in parts)


def keys_named(name: str) -> list[str]:
  """Return the keys whose last part is `name`; if there is none, those with the nearest name."""
  last = {path: path.rpartition('.')[2] for path in _leaves()}
  if name not in last.values():
    name = misspelt(name, last.values()) or name
  return [path for path, own in last.items() if own == name]
