"""From nested dicts to a validated config, and back.

Changes are nested dicts, merged in order over a base: over the defaults the values of a file, over
these those of flags. The result is validated once. A layer in `model.variants` starts as
`model.layer`. A new `kind` of a section drops the keys that only the former kind has; keys that
both have keep their values.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tokenformer_jax.config import names
from tokenformer_jax.config.check_run import check
from tokenformer_jax.config.run import Config
from tokenformer_jax.config.section import (
  adapter,
  field_types,
  kinds_of,
  members,
  sections_of,
  sentence,
)
from tokenformer_jax.errors import UserError


def defaults() -> ml_collections.ConfigDict:
  """Return the default config as the `ConfigDict` that a config file starts from."""
  return to_config_dict(Config())


def to_config_dict(section: Any) -> ml_collections.ConfigDict:
  """Return the keys of a config, or of one of its sections, as a `ConfigDict`."""
  return ml_collections.ConfigDict(to_json(section))


def from_dotted(values: Mapping[str, Any]) -> dict[str, Any]:
  """Return values by dotted path, such as `model.width`, as nested dicts."""
  nested: dict[str, Any] = {}
  for path, value in values.items():
    *sections, name = path.split('.')
    inner = nested
    for section in sections:
      inner = inner.setdefault(section, {})
    inner[name] = value
  return nested


def to_json(section: Any) -> dict[str, Any]:
  """Return the keys of a config, or of one of its sections, as nested dicts."""
  kind = {'kind': section.kind} if isinstance(getattr(type(section), 'kind', None), str) else {}
  return kind | {name: _as_json(getattr(section, name)) for name in field_types(type(section))}


def _as_json(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {name: to_json(inner) for name, inner in value.items()}
  return to_json(value) if dataclasses.is_dataclass(value) else value


def resolve(
  *changes: Mapping[str, Any] | ml_collections.ConfigDict, base: Config | None = None
) -> Config:
  """Return a config with changes, later ones over earlier ones, validated as a whole.

  Raises:
    UserError: an unknown key, a value of the wrong type, or values that do not fit together.
  """
  resolved = from_dict(Config, *changes, base=base)
  check(resolved)
  return resolved


def from_dict(
  cls: type, *changes: Mapping[str, Any] | ml_collections.ConfigDict, base: Any = None
) -> Any:
  """Return a section of a class from nested dicts, merged in order over `base` or the defaults.

  Raises:
    UserError: a key is unknown or has no meaning for the chosen kind, or a value does not fit.
  """
  values = _merged(cls, {} if base is None else to_json(base), list(map(_plain, changes)), '')
  try:
    return adapter(cls).validate_python(values)
  except ValidationError as error:
    raise UserError(sentence(error, cls)) from None


def _plain(value: Any) -> Any:
  """Return a section in any form as nested dicts, and any other value as it is."""
  if isinstance(value, ml_collections.ConfigDict):
    return value.to_dict()
  return (
    to_json(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
  )


def _check_section(value: Any, path: str) -> None:
  """Raise a UserError if the value of a section of keys is no mapping."""
  if not isinstance(value, Mapping):
    raise UserError(f'config.{path} is {value!r}; it is a section of keys')


def _merged(
  cls: type, base: Mapping[str, Any], changes: Sequence[Any], prefix: str
) -> dict[str, Any]:
  """Return the values of a section with changes; `prefix` is its path with a dot."""
  fields, values = field_types(cls), dict(base)
  for change in changes:
    _check_section(change, prefix[:-1])
    for name in change:
      if name not in fields:
        raise names.unknown(name, prefix, fields)
  for name, field in fields.items():
    new, path = [_plain(change[name]) for change in changes if name in change], f'{prefix}{name}'
    was = values.get(name, _default_values(field))
    if section_type := sections_of(field):
      follows = values.get(field.annotation.follows) if field.annotation.follows else None
      values[name] = _merged_by_name(section_type, was or {}, follows, new, path)
    elif not new:
      if was is not None:
        values[name] = was
    elif kinds_of(field) is not None:
      values[name] = _merged_kind(field, was, new, path)
    elif dataclasses.is_dataclass(field.annotation):
      values[name] = _merged(field.annotation, was or {}, new, f'{path}.')
    else:
      values[name] = new[-1]
  return values


def _default_values(field: FieldInfo) -> dict[str, Any] | None:
  """Return the default of a field that holds a section, as nested dicts; None for other fields."""
  default = field.default
  return to_json(default) if dataclasses.is_dataclass(default) else None


def _merged_by_name(
  cls: type, base: Mapping[str, Any], follows: Any, changes: Sequence[Any], path: str
) -> dict[str, Any]:
  """Return sections by name with changes; one that `base` lacks starts as `follows`."""
  for change in changes:
    _check_section(change, path)
  values = dict(base)
  for name in dict.fromkeys(name for change in changes for name in change):
    names.check_name(path, name)
    own = [_plain(change[name]) for change in changes if name in change]
    values[name] = _merged(cls, values.get(name, follows or {}), own, f'{path}.{name}.')
  return values


def _merged_kind(field: FieldInfo, base: Any, changes: Sequence[Any], path: str) -> dict[str, Any]:
  """Return a section of the kind that the last change names, with the values of its own keys.

  Keys that a change sets for a kind that a later change replaces are left out.
  """
  kinds, default = kinds_of(field), _default_values(field)
  kind, after = base['kind'], []
  for change in changes:
    _check_section(change, path)
    kind = change.get('kind', kind)
    if type(kind) is not str or kind not in kinds:
      raise UserError(f'config.{path}.kind is {kind!r}; it must be one of {", ".join(kinds)}')
    after.append(kind)
  own = field_types(kinds[kind])
  start = default if kind == default['kind'] != base['kind'] else {}
  kept = {name: value for name, value in {**start, **base}.items() if name in own}
  given = []
  for change, kind_after in zip(changes, after, strict=True):
    given.append({name: value for name, value in change.items() if name in own})
    others = {name: value for name, value in change.items() if name not in {'kind', *own}}
    if kind_after == kind:
      _check_repeated(field, others, (base, default), f'{path}.', kind)
  return {'kind': kind, **_merged(kinds[kind], kept, given, f'{path}.')}


def _check_repeated(
  field: FieldInfo,
  values: Mapping[str, Any],
  known: Sequence[Mapping[str, Any]],
  prefix: str,
  kind: str,
) -> None:
  """Check that keys of other kinds repeat known values, as those of a file that changes `kind`.

  Raises:
    UserError: no kind has a key, or its value is new.
  """
  having = {key: kinds for key, _, kinds in members(field.default, field.default, kinds_of(field))}
  for name, value in values.items():
    if name not in having:
      raise names.unknown(name, prefix, ['kind', *having])
    if not any(name in one and _repeats(_plain(value), one[name]) for one in known):
      needed = f'{prefix}kind={" or ".join(having[name])}'
      raise names.meaningless(f'{prefix}{name}', value, needed, kind)


def _repeats(value: Any, known: Any) -> bool:
  """Return whether nested dicts have the same values as others, or a part of them."""
  if not isinstance(known, Mapping):
    return value == known
  return isinstance(value, Mapping) and all(
    name in known and _repeats(inner, known[name]) for name, inner in value.items()
  )
