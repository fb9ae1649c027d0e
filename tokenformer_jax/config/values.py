"""From dicts of values to a config, and back.

A config has two forms as nested dicts. `to_json` has what the config says and no more, and is what
a run stores. `defaults` and `to_config_dict` have every key that there is, so that a file or a flag
can set it: also the keys of the variants that a config did not choose, with their defaults.
`from_dict` reads both.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections

from tokenformer_jax.config import fields, names, run
from tokenformer_jax.config.fields import Variants
from tokenformer_jax.config.model import BASE, Layers
from tokenformer_jax.config.run import Config
from tokenformer_jax.errors import UserError


def defaults() -> ml_collections.ConfigDict:
  """Return every key with its default value, as the `ConfigDict` that a config file starts from."""
  return to_config_dict(Config())


def to_config_dict(config: Config) -> ml_collections.ConfigDict:
  """Return every key with its value in a config, as the `ConfigDict` that flags change."""
  return ml_collections.ConfigDict(fields.every_key(config))


def to_json(config: Any) -> dict[str, Any]:
  """Return the values of a config dataclass as nested dicts, each variant with its `kind`."""
  values = {}
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if isinstance(value, Mapping):
      values[field.name] = {name: to_json(one) for name, one in value.items()}
    elif dataclasses.is_dataclass(value):
      kind = {} if fields.variants_of(field) is None else {'kind': value.kind}
      values[field.name] = kind | to_json(value)
    else:
      values[field.name] = value
  return values


def resolve(config: ml_collections.ConfigDict, base: Config | None = None) -> Config:
  """Validate a `ConfigDict` and freeze it; for `base` see `from_dict`.

  Raises:
    UserError: an unknown key, a value of the wrong type, or values that do not fit together.
  """
  resolved = from_dict(Config, config.to_dict(), base)
  run.check(resolved)
  return resolved


def from_dict(cls: type, values: Mapping[str, Any], base: Any = None) -> Any:
  """Build a config dataclass from nested dicts.

  Args:
    cls: the class.
    values: in either form. Keys that are left out have the values of `base`; in `model.variants`,
      those of `model.layer`.
    base: the config that the values change; None: the defaults. A key of a variant that is not
      chosen may keep its value there, so that a change of `kind` is enough.

  Raises:
    UserError: an unknown key, or a value of the wrong type.
  """
  return _build(cls, base, values, '')


def _build(cls: type, base: Any, values: Mapping[str, Any], prefix: str) -> Any:
  """Return a config dataclass.

  Args:
    cls: its class.
    base: an instance with the values that are left out, or None.
    values: nested dicts.
    prefix: of the path of each key, for messages.
  """
  types = typing.get_type_hints(cls)
  known = {field.name: field for field in dataclasses.fields(cls)}
  for name in values:
    if name not in known:
      raise names.unknown(name, prefix, known)
  new: dict[str, Any] = {}
  for name in known.keys() & values.keys():
    was = _default(known[name], types[name]) if base is None else getattr(base, name)
    new[name] = _convert(known[name], types[name], was, values[name], f'{prefix}{name}')
  if isinstance(variants := new.get('variants'), Mapping):
    layer = new.get(BASE) or (cls() if base is None else base).layer
    new['variants'] = _layers(layer, variants, f'{prefix}variants.')
  return cls(**new) if base is None else dataclasses.replace(base, **new)


def _default(field: dataclasses.Field, expected: type) -> Any:
  """Return the default of a field; of a group without one, that of its class; else None."""
  if field.default is not dataclasses.MISSING:
    return field.default
  if field.default_factory is not dataclasses.MISSING:
    return field.default_factory()
  return expected() if dataclasses.is_dataclass(expected) else None


def _convert(field: dataclasses.Field, expected: type, base: Any, value: Any, path: str) -> Any:
  """Return the value of a field, of the right type; layers by name are as they were given."""
  is_group = dataclasses.is_dataclass(base) or isinstance(base, Layers)
  if is_group and not isinstance(value, Mapping):
    raise UserError(f'config.{path} is {value!r}; it is a group of keys')
  if isinstance(base, Layers):
    return value
  if (variants := fields.variants_of(field)) is not None:
    return _variant(base, variants, field.default, value, path)
  if is_group:
    return _build(type(base), base, value, f'{path}.')
  if expected is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if type(value) is not expected:
    raise UserError(
      f'config.{path} is {value!r}, of type {type(value).__name__}; it must be {expected.__name__}'
    )
  return value


def _layers(base: Any, values: Mapping[str, Any], prefix: str) -> Layers:
  """Return layers by name, each a version of another one."""
  layers = {}
  for name, own in values.items():
    if not name.isidentifier() or name == BASE:
      raise UserError(
        f'config.{prefix}{name} cannot be the name of a layer; take a word of letters, digits and '
        f'_ that is not {BASE!r}'
      )
    if not isinstance(own, Mapping):
      raise UserError(f'config.{prefix}{name} is {own!r}; it is a group of keys')
    layers[name] = _build(type(base), base, own, f'{prefix}{name}.')
  return Layers(layers)


def _variant(
  base: Any, variants: Variants, default: Any, values: Mapping[str, Any], path: str
) -> Any:
  """Return the variant that `kind` names, with the values of its own keys.

  The keys of other variants may be there as `to_config_dict` writes them: with their defaults, or
  with the values of `base`.
  """
  kind = values.get('kind', base.kind)
  if kind not in variants:
    raise UserError(f'config.{path}.kind is {kind!r}; it must be one of {", ".join(variants)}')
  chosen = base if base.kind == kind else _like(base, default, variants[kind])
  own = {field.name for field in dataclasses.fields(chosen)}
  usual = [dict(fields.members(one, variants)) for one in (base, default)]
  for name in values.keys() - own - {'kind'}:
    if name not in usual[0]:
      raise names.unknown(name, f'{path}.', ['kind', *own])
    known = [fields.every_value(one[name].field, one[name].value) for one in usual]
    if not any(_says(values[name], one) for one in known):
      shown = 'given' if isinstance(values[name], Mapping) else repr(values[name])
      raise UserError(
        f'config.{path}.{name} is {shown}, which has a meaning for {path}.kind='
        f'{" or ".join(usual[0][name].kinds)} only, and this is {kind}; leave it out'
      )
  return _build(
    type(chosen), chosen, {name: values[name] for name in own & values.keys()}, f'{path}.'
  )


def _like(base: Any, default: Any, variant: type) -> Any:
  """Return another variant with its defaults, and the values of `base` for the keys of both."""
  chosen = default if isinstance(default, variant) else variant()
  names = {field.name for field in dataclasses.fields(base)}
  both = [field.name for field in dataclasses.fields(chosen) if field.name in names]
  return dataclasses.replace(chosen, **{name: getattr(base, name) for name in both})


def _says(value: Any, known: Any) -> bool:
  """Whether nested dicts have the values of others, or a part of them."""
  if not isinstance(known, Mapping):
    return value == known
  return isinstance(value, Mapping) and all(
    name in known and _says(one, known[name]) for name, one in value.items()
  )
