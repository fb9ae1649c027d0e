"""Find keys of a config by dotted path, and report a wrong key in one sentence."""

import difflib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tokenformer_jax.config.arguments import shown
from tokenformer_jax.config.data import SourceConfig, Sources, TextConfig
from tokenformer_jax.config.model import BASE
from tokenformer_jax.config.run import Config
from tokenformer_jax.config.section import Leaf, leaves_of_kinds, sentence
from tokenformer_jax.errors import UserError, misspelt, nearest

_NEAREST = 3  # of the keys that a message suggests
# The section of named layers, and the section that each of these layers is a version of.
_VARIANTS, _LAYER = 'model.variants', 'model.layer'
# Sections whose entries the user names, and what such an entry is.
_NAMED = {_VARIANTS: 'layer', 'data.mixture': 'source'}
# A config with a source, so that its keys are in lists of all keys.
SHOWN = Config(data=TextConfig(mixture=Sources({'NAME': SourceConfig()})))


@functools.cache
def keys() -> Mapping[str, Leaf]:
  """Return every key of every kind that is not a section, by its path.

  Sources of a mixture are `data.mixture.NAME`; layers of `model.variants` are left out.
  """
  return leaves_of_kinds(SHOWN)


def find(path: str) -> Leaf | None:
  """Return the description of the key at a dotted path, or None if it is a section."""
  return keys().get(_general(path))


def type_of(path: str) -> type:
  """Return the type of the key at a dotted path, a key of any kind of its section: int, str, …."""
  for section in _NAMED:
    if path.startswith(f'{section}.'):
      check_name(section, path.removeprefix(f'{section}.').partition('.')[0])
  general = _general(path)
  if f'{general}.kind' in keys():
    return str
  if general not in keys():
    raise unknown(path)
  return keys()[general].type


def _general(path: str) -> str:
  """Return the path in `keys` of a key of a layer or a source that the user names."""
  path = re.sub(rf'^{_VARIANTS}\.[^.]*', _LAYER, path)
  return re.sub(r'^data\.mixture\.[^.]*', 'data.mixture.NAME', path)


def _names_in(section: str) -> Sequence[str]:
  """Return the names of the keys and sections in a section; none: it is a key."""
  prefix = f'{_general(section)}.' if section else ''
  inside = (path.removeprefix(prefix) for path in (*keys(), *_NAMED) if path.startswith(prefix))
  return list(dict.fromkeys(path.partition('.')[0] for path in inside))


def check_name(section: str, name: str) -> None:
  """Check the name of a layer in `model.variants`, or of a source in `data.mixture`."""
  name = str(name)  # Python code may use any key.
  if not (name.isidentifier() and name.isascii()) or (section, name) == (_VARIANTS, BASE):
    raise UserError(
      f'config.{section} has {name!r}, which cannot be the name of a {_NAMED[section]}; take a '
      f'word of letters, digits and _ that is not {BASE!r}'
    )


def mistake(error: ValidationError, cls: type, values: Mapping[str, Any]) -> UserError:
  """Return the first error of a section that was made from nested dicts, in one sentence."""
  first = error.errors(include_url=False)[0]
  if cls is not Config or first['type'] not in ('unexpected_keyword_argument', 'invalid_key'):
    return UserError(sentence(error))
  *sections, name = map(str, first['loc'])
  section, inside = '.'.join(sections), values
  if not (names := _names_in(section)):  # of a record in a list
    return UserError(sentence(error))
  if name not in names:
    return unknown('.'.join([*sections, name]))
  for one in sections:
    inside = inside[one]
  return idle(f'{section}.{name}', first['input'], f'{section}.kind={inside["kind"]}')


def idle(path: str, value: Any, cause: str) -> UserError:
  """Return the error for a key without effect; the cause is another one, as `optim.kind=lion`."""
  shown = 'given' if isinstance(value, Mapping) else repr(value)
  return UserError(f'config.{path} is {shown}, which has no effect with {cause}; leave it out')


def wrong_type(path: str, value: Any, held: Any) -> UserError:
  """Return the error for a value of another type than the one that a key or a section has."""
  words = {
    bool: 'True or False',
    int: 'an integer',
    float: 'a number',
    str: 'text',
    tuple: 'a list',
  }
  kind = keys().get(f'{_general(path)}.kind')
  section = (
    f'one of {", ".join(kind.choices)}, or a section of keys' if kind else 'a section of keys'
  )
  if path in _NAMED:
    section = f'a section of {_NAMED[path]}s by name, set by {path}.NAME.KEY'
  allowed = words.get(type(held), section)
  return UserError(f'config.{path} is {shown(value)}; it must be {allowed}')


def unknown(path: str) -> UserError:
  """Return the error for a path that is no key, with the nearest keys."""
  parts = path.split('.')
  for i, name in enumerate(parts):
    section = '.'.join(parts[:i])
    if section not in _NAMED and name not in (names := _names_in(section)):
      break
  else:
    if path in _NAMED:
      kind = _NAMED[path]
      return UserError(f'config.{path} is a section of {kind}s; set keys of one, {path}.NAME.KEY')
    inside = ', '.join(_names_in(path))
    return UserError(f'config.{path} is a section of keys; set one of {inside}')
  message = f'config key {".".join(parts[: i + 1])!r} is unknown'
  if not names:
    is_list = keys()[_general(section)].type is tuple
    return UserError(
      f'{message}; config.{section} is {"a list A,B" if is_list else "a single value"}'
    )
  if near := misspelt(name, names):
    return UserError(f'{message}; did you mean {".".join([*parts[:i], near])!r}?')
  elsewhere = _elsewhere(path)
  if elsewhere and (len(elsewhere) <= _NEAREST or not section.startswith('data.mixture.')):
    return UserError(f'{message}; did you mean {any_of(elsewhere, path)}?')
  return UserError(message + nearest(name, names))


def _elsewhere(path: str) -> list[str]:
  """Return the keys with the last name of a path, or only those with all its names if any exist."""
  layer = re.match(rf'{_VARIANTS}\.[^.]*', path)
  names = _general(path).split('.')
  same = keys_named(names[-1])
  same = [key for key in same if _has_in_order(key.split('.'), names)] or same
  return [re.sub(rf'^{_LAYER}\b', layer[0], key) for key in same] if layer else same


def any_of(paths: Sequence[str], wrong: str, form: str = "'{}'") -> str:
  """Return the few keys that are most like a wrong path, and where the others are listed."""
  near = difflib.get_close_matches(wrong, paths, _NEAREST, cutoff=0)
  text = ' or '.join(map(form.format, sorted(near, key=paths.index)))
  if others := len(paths) - len(near):
    text += f' or one of {others} others, which train --help={paths[0].rpartition(".")[2]} lists'
  return text


def _has_in_order(whole: Iterable[str], names: Iterable[str]) -> bool:
  rest = iter(whole)
  return all(name in rest for name in names)


def keys_named(name: str) -> list[str]:
  """Return the keys whose last part is `name`; if there is none, those with the nearest name."""
  last = {path: path.rpartition('.')[2] for path in keys()}
  if name not in last.values():
    name = misspelt(name, last.values()) or name
  return [path for path, own in last.items() if own == name]
