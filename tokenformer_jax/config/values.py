"""From nested dicts to a validated config, and back.

Changes are nested dicts, merged in order over a base: over the defaults the values of a file, over
these those of flags. The result is validated once. A layer in `model.variants` starts as
`model.layer`. A new `kind` of a section drops the keys that only the former kind has; keys that
both have keep their values.
"""

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tokenformer_jax.config import names
from tokenformer_jax.config.check_config import check
from tokenformer_jax.config.run import Config
from tokenformer_jax.config.section import (
  adapter,
  as_written,
  field_types,
  kinds_of,
  named_sections,
)

_WIDEST = 100  # columns of a line of a printed config


class Values(ml_collections.ConfigDict):
  """The keys of a config or of a section as a file changes them; as text, they fit on a screen.

  A text in the place of a section is its `kind`, as in a flag. Another type than a key has is
  refused where it is assigned.
  """

  _path = ''  # of the section in the config, with a dot at its end

  def __setitem__(self, name: Any, value: Any) -> None:
    if isinstance(value, dict | ml_collections.ConfigDict) and not isinstance(value, Values):
      value = _sections(value, f'{self._path}{name}.')
    if isinstance(value, str) and isinstance(held := self.get(name), Values) and 'kind' in held:
      held['kind'] = value
      return
    try:
      super().__setitem__(name, value)
    except TypeError:
      raise names.wrong_type(f'{self._path}{name}', value, self.get(name)) from None

  def __str__(self) -> str:
    return '\n'.join(_lines(self.copy_and_resolve_references().to_dict(), ''))


def _lines(values: Mapping[str, Any], indent: str) -> Iterator[str]:
  """Yield the lines of nested dicts: as many keys in each as fit, then the longer sections."""
  texts = {name: f'{name}: {_in_line(value)}' for name, value in values.items()}
  long = [name for name in texts if len(texts[name]) > _WIDEST // 2 and values[name]]
  long = [name for name in long if isinstance(values[name], Mapping)]
  short = ', '.join(texts[name] for name in sorted(texts.keys() - long, key=_kind_first))
  yield from textwrap.wrap(short, _WIDEST, initial_indent=indent, subsequent_indent=indent)
  for name in sorted(long):
    yield f'{indent}{name}:'
    yield from _lines(values[name], f'{indent}  ')


def _in_line(value: Any) -> str:
  if not isinstance(value, Mapping):
    return repr(value)
  items = (f'{name}: {_in_line(value[name])}' for name in sorted(value, key=_kind_first))
  return f'{{{", ".join(items)}}}'


def _kind_first(name: str) -> tuple[bool, str]:
  return name != 'kind', name


def defaults(**changes: Any) -> ml_collections.ConfigDict:
  """Return the default config as the `ConfigDict` that a config file starts from.

  `changes` are other values of sections, such as `model='vit', data='images'` for other kinds.
  """
  return to_config_dict(from_dict(Config, changes))


def to_config_dict(section: Any) -> ml_collections.ConfigDict:
  """Return the keys of a config, or of one of its sections, as a `ConfigDict`."""
  return _sections(to_json(section), '')


def _sections(values: Mapping[str, Any] | ml_collections.ConfigDict, path: str) -> Values:
  """Return nested dicts as `Values`; `path` is theirs in the config, with a dot at its end."""
  made = Values()
  object.__setattr__(made, '_path', path)
  keep = (
    {'preserve_field_references': True} if isinstance(values, ml_collections.ConfigDict) else {}
  )
  for name, value in values.items(**keep):
    made[name] = value
  return made


def from_dotted(values: Mapping[str, Any]) -> dict[str, Any]:
  """Return values by dotted path, such as `model.width`, as nested dicts."""
  nested: dict[str, Any] = {}
  for path, value in values.items():
    *sections, name = path.split('.')
    inner = nested
    for section in sections:
      if isinstance(inner.setdefault(section, {}), str):
        inner[section] = {'kind': inner[section]}
      inner = inner[section]
    if isinstance(value, str) and isinstance(inner.get(name), dict):
      inner[name]['kind'] = value
    else:
      inner[name] = value
  return nested


def to_json(section: Any) -> dict[str, Any]:
  """Return the keys of a config, or of one of its sections, as nested dicts."""
  kind = {'kind': section.kind} if isinstance(getattr(type(section), 'kind', None), str) else {}
  keys = as_written(section)
  return kind | {name: _as_json(getattr(keys, name)) for name in field_types(type(keys))}


def _as_json(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {name: to_json(inner) for name, inner in value.items()}
  if isinstance(value, tuple):
    return tuple(map(_as_json, value))
  return to_json(value) if dataclasses.is_dataclass(value) else value


def resolve(
  *changes: Mapping[str, Any] | ml_collections.ConfigDict, base: Config | None = None
) -> Config:
  """Return a config with changes, later ones over earlier ones, validated as a whole."""
  resolved = from_dict(Config, *changes, base=base)
  check(resolved)
  return resolved


def from_dict(
  cls: type, *changes: Mapping[str, Any] | ml_collections.ConfigDict, base: Any = None
) -> Any:
  """Return a section of a class from nested dicts, merged in order over `base` or the defaults."""
  start = {} if base is None else to_json(base)
  start.pop('kind', None)
  values = _merged(cls, start, [_plain(change) for change in changes], '')
  try:
    return adapter(cls).validate_python(values)
  except ValidationError as error:
    raise names.mistake(error, cls, values) from None


def _plain(value: Any) -> Any:
  """Return a section in any form as nested dicts, and any other value as it is."""
  if isinstance(value, ml_collections.ConfigDict):
    return value.to_dict()
  is_section = dataclasses.is_dataclass(value) and not isinstance(value, type)
  return to_json(value) if is_section else value


def _merged(cls: Any, base: Mapping[str, Any], changes: Sequence[Any], path: str) -> Any:
  """Return the values of a section with changes, or the first change that is no section.

  `path` is that of the section, with a dot at its end.
  """
  if wrong := [change for change in changes if not isinstance(change, Mapping)]:
    return wrong[0]
  fields, values = field_types(cls), dict(base)
  given = dict.fromkeys(itertools.chain.from_iterable(changes))
  for name in [*fields, *(name for name in given if name not in fields)]:
    was = values.get(name)
    if name in fields and name not in values:
      was = _default_values(fields[name])
    own = [_plain(change[name]) for change in changes if name in change]
    named = named_sections(fields[name]) if name in fields else None
    if named and (own or was):
      follows = base.get(named.follows), values.get(named.follows)
      values[name] = _merged_by_name(named.of, was or {}, *follows, own, f'{path}{name}.')
    elif not own:
      if was is not None:
        values[name] = was
    elif name not in fields:
      values[name] = own[-1]
    elif kinds := kinds_of(fields[name]):
      default = _default_values(fields[name]) or {}
      values[name] = _merged_kind(kinds, default, was or {}, own, f'{path}{name}.')
    elif dataclasses.is_dataclass(section := fields[name].annotation):
      values[name] = _merged(section, was or {}, own, f'{path}{name}.')
    else:
      values[name] = own[-1]
  return values


def _default_values(field: FieldInfo) -> dict[str, Any] | None:
  """Return the default of a field that holds a section, as nested dicts; None for other fields."""
  default = field.default
  return to_json(default) if dataclasses.is_dataclass(default) else None


def _merged_by_name(
  cls: type,
  base: Mapping[str, Any],
  followed: Any,
  follows: Any,
  changes: Sequence[Any],
  path: str,
) -> Any:
  """Return sections by name with changes.

  A section of layers is its differences from the layer that it is a version of, which is `followed`
  in the base and `follows` after the changes; both are None for other sections.
  """
  if wrong := [change for change in changes if not isinstance(change, Mapping)]:
    return wrong[0]
  values = {}
  for name in dict.fromkeys(itertools.chain(base, *changes)):
    own = [_plain(change[name]) for change in changes if name in change]
    if name not in base:
      names.check_name(path[:-1], name)
      start = follows or {}
    elif follows is None or (followed == follows and not own):
      start = base[name]
    else:
      start = follows
      own.insert(0, _difference(cls, followed, base[name]))
    values[name] = _merged(cls, start, own, f'{path}{name}.')
  return values


def _difference(cls: type, base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
  """Return the values of a section that differ from those of another one, as nested dicts.

  Keys that `base` lacks have their defaults.
  """
  different: dict[str, Any] = {}
  for name, field in field_types(cls).items():
    default = _as_json(field.get_default(call_default_factory=True))
    was, now = base.get(name, default), values[name]
    if was == now:
      continue
    if kinds := kinds_of(field):
      kind, of = {'kind': now['kind']}, kinds[now['kind']]
      if was['kind'] == now['kind']:
        different[name] = _difference(of, was, now)
      else:
        start = _merged_kind(kinds, _default_values(field) or {}, was, [kind], '')
        different[name] = kind | _difference(of, start, now)
    elif isinstance(field.annotation, type) and dataclasses.is_dataclass(field.annotation):
      different[name] = _difference(field.annotation, was, now)
    else:
      different[name] = now
  return different


def _merged_kind(
  kinds: Mapping[str, type],
  default: Mapping[str, Any],
  base: Mapping[str, Any],
  changes: Sequence[Any],
  path: str,
) -> Any:
  """Return a section of the kind that the last change names, with the values of its own keys.

  Keys of other kinds are left out where a later change replaces the kind, and where they repeat
  known values, as in a file that changes `kind` among all keys.
  """
  changes = [{'kind': change} if isinstance(change, str) else change for change in changes]
  if wrong := [change for change in changes if not isinstance(change, Mapping)]:
    return wrong[0]
  chosen = [base.get('kind')]
  for change in changes:
    chosen.append(change.get('kind', chosen[-1]))
  kind = chosen[-1]
  if not isinstance(kind, str) or kind not in kinds:
    return {'kind': kind}
  own = field_types(kinds[kind])
  start = default if kind == default.get('kind') != base.get('kind') else {}
  known = {**default, **base}

  def is_kept(name: str, value: Any, kind_then: Any) -> bool:
    repeats = name in known and _plain(value) == known[name]
    return name in own or (name != 'kind' and kind_then == kind and not repeats)

  kept = {name: value for name, value in {**start, **base}.items() if name in own}
  given = [
    {name: value for name, value in change.items() if is_kept(name, value, kind_then)}
    for change, kind_then in zip(changes, chosen[1:], strict=True)
  ]
  return {'kind': kind, **_merged(kinds[kind], kept, given, path)}
