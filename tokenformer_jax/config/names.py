"""Find keys of a config by dotted path, and the nearest name for an unknown one."""

import re
from collections.abc import Collection, Sequence
from typing import Any

from tokenformer_jax.config.fields import every_key, leaves
from tokenformer_jax.config.layer import LayerConfig
from tokenformer_jax.config.model import BASE
from tokenformer_jax.config.run import Config
from tokenformer_jax.config.sections import SourceConfig
from tokenformer_jax.errors import UserError, misspelt, nearest

# The section of named layers, and the section that each of these layers is a version of.
_VARIANTS, _LAYER = 'model.variants', 'model.layer'
# Sections whose entries the user names, and what such an entry is.
NAMED = {_VARIANTS: 'layer', 'data.mixture': 'source'}


def paths() -> list[str]:
  """Return the dotted path of every key that is not a section."""
  return [leaf.path for leaf in leaves(Config(), every=True)]


def choices(path: str) -> tuple[str, ...]:
  """Return the values that a key such as `grow.method` allows, or none if they are not listed."""
  return {leaf.path: leaf.key.choices for leaf in leaves(Config(), every=True)}[path]


def lookup(config: Any, path: str) -> Any:
  """Return the value at a dotted path such as `model.layer.ffn.tokens`."""
  for name in path.split('.'):
    config = getattr(config, name)
  return config


def check_key(path: str, *, single: bool = False) -> None:
  """Check that a dotted path names a key; with `single`, one that is not a section of keys.

  Raises:
    UserError: there is no such key; the message has the nearest name.
  """
  known: Any = every_key(Config())
  for i, name in enumerate(parts := path.split('.')):
    section = '.'.join(parts[:i])
    inside = known if isinstance(known, dict) else {}
    if section == _VARIANTS:
      check_layer_name(section, name)
      inside = {name: every_key(LayerConfig())}
    elif section in NAMED:
      check_source_name(section, name)
      inside = {name: every_key(SourceConfig())}
    if name not in inside:
      raise unknown(name, f'{section}.' if section else '', inside, path)
    known = inside[name]
  if single and path in NAMED:
    raise UserError(
      f'config.{path} is a section of {NAMED[path]}s; set keys of one, {path}.NAME.KEY'
    )
  if single and isinstance(known, dict):
    raise UserError(f'config.{path} is a section of keys; set one of {", ".join(known)}')


def check_layer_name(section: str, name: str) -> None:
  """Raise a UserError if a pattern could not have this name of a layer in `model.variants`."""
  if not (name.isidentifier() and name.isascii()) or name == BASE:
    raise UserError(
      f'config.{section}.{name} cannot be the name of a layer; take a word of letters, digits and '
      f'_ that is not {BASE!r}'
    )


def check_source_name(section: str, name: str) -> None:
  """Check the name of a source in the section of keys `data.mixture`.

  Raises:
    UserError: figures, flags and files could not have this name.
  """
  if not (name.isidentifier() and name.isascii()):
    raise UserError(
      f'config.{section} names a source {name!r}, which cannot be its name; take a word of '
      'letters, digits and _'
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
  found = keys_named(parts[-1])
  found = [key for key in found if _has_in_order(key.split('.'), parts)] or found
  return [re.sub(rf'^{_LAYER}\b', layer[0], key) for key in found] if layer else found


def _has_in_order(whole: Sequence[str], parts: Sequence[str]) -> bool:
  rest = iter(whole)
  return all(part in rest for part in parts)


def keys_named(name: str) -> list[str]:
  """Return the keys whose last part is `name`; if there is none, those with the nearest name."""
  last = {path: path.rpartition('.')[2] for path in paths()}
  if name not in last.values():
    name = misspelt(name, last.values())
  return [path for path, own in last.items() if own == name]
