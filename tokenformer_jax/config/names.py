"""Find keys of a config by dotted path, and the nearest name for an unknown one."""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

from tokenformer_jax import migrate
from tokenformer_jax.config.fields import every_key, leaves
from tokenformer_jax.config.layer import LayerConfig
from tokenformer_jax.config.run import Config
from tokenformer_jax.errors import UserError, misspelt, nearest

# Keys of earlier versions, each with the keys that have its meaning today.
RENAMED = migrate.renamed_keys()

_NAMED_BY_USERS = 'model.variants'  # the group whose keys are whatever a config calls its layers


def paths() -> list[str]:
  """Return the dotted path of every key that is not a group."""
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
  """Check that a dotted path such as `model.layer.ffn.tokens` names a key.

  Args:
    path: the dotted path.
    single: whether to refuse a group of keys.

  Raises:
    UserError: there is no such key; the message has the nearest name.
  """
  known: Any = every_key(Config())
  for i, name in enumerate(names := path.split('.')):
    group = '.'.join(names[:i])
    inside = known if isinstance(known, dict) else {}
    if group == _NAMED_BY_USERS:
      inside = {name: every_key(LayerConfig())}
    if name not in inside:
      raise unknown(name, f'{group}.' if group else '', inside, names[-1])
    known = inside[name]
  if single and isinstance(known, dict):
    inside = ', '.join(known) or 'layers, each with a name of its own'
    raise UserError(f'config.{path} is a group of keys; set one of {inside}')


def unknown(name: str, group: str, known: Collection[str], last: str = '') -> UserError:
  """Return the error for an unknown name in a group of keys.

  Args:
    name: the unknown name.
    group: the path of the group with a dot at its end; empty for the whole config.
    known: the names in the group; empty if `group` is a single value.
    last: the last part of the path that was asked for, which may be a key of another group.
  """
  said = f'config key {group + name!r} is unknown'
  if not known:
    return UserError(f'{said}; config.{group[:-1]} is a single value')
  if now := RENAMED.get(group + name):
    return UserError(f'{said}; {now_called(now)}')
  if near := misspelt(name, known):
    return UserError(f'{said}; did you mean {group + near!r}?')
  if elsewhere := keys_named(last or name):
    return UserError(f'{said}; did you mean {" or ".join(map(repr, elsewhere))}?')
  return UserError(said + nearest(name, known))


def keys_named(name: str) -> list[str]:
  """Return the keys whose last part is `name`, was `name` in an earlier version, or is near it."""
  last = {path: path.rpartition('.')[2] for path in paths()}
  if name not in last.values():
    if now := renamed(name):
      return now
    name = misspelt(name, last.values())
  return [path for path, own in last.items() if own == name]


def renamed(name: str) -> list[str]:
  """Return today's names of the keys whose last part was `name` in an earlier version."""
  found = (now for old, now in RENAMED.items() if old.rpartition('.')[2] == name)
  return list(dict.fromkeys(itertools.chain.from_iterable(found)))


def now_called(now: Sequence[str]) -> str:
  """Return the part of a sentence that names the keys which an old key has become."""
  *others, last = map(repr, now)
  return (
    f'it is called {", ".join(others)} and {last} now' if others else f'it is called {last} now'
  )
