"""Keys of a config by name: dotted paths, and the nearest name for one that there is not."""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

from tokenformer_jax import migrate
from tokenformer_jax.config.fields import every_key, leaves
from tokenformer_jax.config.layer import LayerConfig
from tokenformer_jax.config.run import Config
from tokenformer_jax.errors import UserError, misspelt, nearest

# Keys that had another name in earlier versions, and their names now.
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
    path: of the key.
    single: whether a group of keys is refused.

  Raises:
    UserError: it does not; the message has the nearest name.
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
  """Return the error for a name that a group of keys does not have.

  Args:
    name: that there is not.
    group: the path of the group with a dot behind it, or nothing.
    known: the names in the group; none if it is a single value.
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
  """Return the keys whose last part is, or was, a name, or is near to it."""
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
  return f'it is called {", ".join(others)} and {last} now' if others else f'it is called {last} now'
