"""Convert configs to nested dicts and back.

A config has two forms as nested dicts. `to_json` returns only the keys of the kinds that the config
chose; a run stores this form. `defaults` and `to_config_dict` return the keys of all kinds, so that
a file or a flag can set them. `from_dict` reads both forms.
"""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from tokenformer_jax.config import fields, names, run
from tokenformer_jax.config.model import BASE, Layers
from tokenformer_jax.config.run import Config
from tokenformer_jax.config.sections import SourceConfig, Sources
from tokenformer_jax.errors import UserError


def defaults() -> ml_collections.ConfigDict:
  """Return every key with its default value, as the `ConfigDict` that a config file starts from."""
  return to_config_dict(Config())


def to_config_dict(config: Config) -> ml_collections.ConfigDict:
  """Return every key with its value in a config, as the `ConfigDict` that flags change."""
  return ml_collections.ConfigDict(fields.every_key(config))


def to_json(config: Any) -> dict[str, Any]:
  """Return the values of a config dataclass as nested dicts, without keys of other kinds."""
  values = {}
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if isinstance(value, Mapping):
      values[field.name] = {name: to_json(layer) for name, layer in value.items()}
    elif dataclasses.is_dataclass(value):
      kind = {} if fields.field_variants(field) is None else {'kind': value.kind}
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

  A key of a kind that is not chosen may repeat its default or its value in `base`. So a change of
  `kind` is enough: the keys of the former kind can stay.

  Args:
    cls: the class.
    values: nested dicts of either form. A missing key has its value in `base`; inside
      `model.variants`, its value in `model.layer`.
    base: the config that the values change; None: the defaults.

  Raises:
    UserError: a key is unknown or has no meaning for the chosen kind, or a value has the wrong
      type.
  """
  return _build(cls, base, values, [] if base is None else [fields.every_key(base)], '')


def _build(
  cls: type, base: Any, values: Mapping[str, Any], known: Sequence[Mapping[str, Any]], prefix: str
) -> Any:
  """Return a config dataclass; see `from_dict`.

  `known` are nested dicts of the values that keys of kinds not chosen may repeat.
  """
  types = typing.get_type_hints(cls)
  own = {field.name: field for field in dataclasses.fields(cls)}
  for name in values:
    if name not in own:
      raise names.unknown(name, prefix, own)
  new: dict[str, Any] = {}
  for name, field in own.items():
    if name not in values:
      continue
    path, inner = f'{prefix}{name}', _inside(known, name)
    if types[name] is Layers:
      layer = new.get(BASE) or getattr(base or cls(), BASE)
      new[name] = _layers(layer, values[name], inner, _inside(known, BASE), path)
    elif types[name] is Sources:
      new[name] = _sources(getattr(base, name, Sources()), values[name], path)
    else:
      was = _default(field, types[name]) if base is None else getattr(base, name)
      new[name] = _convert(field, types[name], was, values[name], inner, path)
  return cls(**new) if base is None else dataclasses.replace(base, **new)


def _inside(known: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
  """Return the values at a name in several nested dicts, from those that have it."""
  return [values[name] for values in known if name in values]


def _default(field: dataclasses.Field, expected: type) -> Any:
  """Return the default of a field, else that of its class if the field is a section, else None."""
  if field.default is not dataclasses.MISSING:
    return field.default
  if field.default_factory is not dataclasses.MISSING:
    return field.default_factory()
  return expected() if dataclasses.is_dataclass(expected) else None


def _convert(
  field: dataclasses.Field, expected: type, base: Any, value: Any, known: Sequence[Any], path: str
) -> Any:
  """Return the value of a field in the right type; for `base` and `known` see `_build`.

  Raises:
    UserError: the value has the wrong type.
  """
  if dataclasses.is_dataclass(base):
    _check_section(value, path)
    if fields.field_variants(field) is not None:
      return _choose(field, base, value, known, path)
    return _build(type(base), base, value, known, f'{path}.')
  if getattr(value, 'ndim', None) == 0:
    value = value.item()  # a number of numpy or JAX
  if expected is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if typing.get_origin(expected) is tuple:
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
      return tuple(value)
    raise UserError(f'config.{path} is {value!r}; it must be a list of names, such as {base!r}')
  if type(value) is not expected:
    raise UserError(
      f'config.{path} is {value!r}, of type {type(value).__name__}; it must be {expected.__name__}'
    )
  return value


def _check_section(value: Any, path: str) -> None:
  if not isinstance(value, Mapping):
    raise UserError(f'config.{path} is {value!r}; it is a section of keys')


def _layers(
  base: Any, values: Any, known: Sequence[Any], known_bases: Sequence[Any], path: str
) -> Layers:
  """Return layers by name, each a version of the layer `base`.

  Args:
    base: `model.layer`.
    values: nested dicts by name.
    known: the values that keys of other kinds may repeat (see `_build`), by layer name.
    known_bases: such values of `model.layer`. A layer of a config file repeats `model.layer` in
      every key that it does not set, including keys of other kinds.
    path: the path of the layers, for messages.
  """
  _check_section(values, path)
  layers = {}
  for name, own in values.items():
    names.check_layer_name(path, name)
    _check_section(own, f'{path}.{name}')
    repeatable = [fields.every_key(base), *known_bases, *_inside(known, name)]
    layers[name] = _build(type(base), base, own, repeatable, f'{path}.{name}.')
  return Layers(layers)


def _sources(base: Sources, values: Any, path: str) -> Sources:
  """Return sources by name, each with the values of the source of that name in `base`, changed."""
  _check_section(values, path)
  sources = {}
  for name, own in values.items():
    names.check_source_name(path, name)
    _check_section(own, f'{path}.{name}')
    sources[name] = _build(SourceConfig, base.get(name), own, [], f'{path}.{name}.')
  return Sources(sources)


def _choose(
  field: dataclasses.Field,
  base: Any,
  values: Mapping[str, Any],
  known: Sequence[Mapping[str, Any]],
  path: str,
) -> Any:
  """Return the variant that `kind` names, with the values of its own keys."""
  variants, default = fields.field_variants(field), field.default
  kind = values.get('kind', base.kind)
  if type(kind) is not str or kind not in variants:
    raise UserError(f'config.{path}.kind is {kind!r}; it must be one of {", ".join(variants)}')
  chosen = base if base.kind == kind else _like(base, default, variants[kind])
  own = {field.name for field in dataclasses.fields(chosen)}
  mine = {name: value for name, value in values.items() if name in own}
  others = {name: value for name, value in values.items() if name not in {'kind', *own}}
  _check_others(field, chosen, others, [fields.every_value(field, default), *known], path)
  return _build(type(chosen), chosen, mine, known, f'{path}.')


def _like(base: Any, default: Any, variant: type) -> Any:
  """Return another variant with its defaults, and the values of `base` for their common keys."""
  chosen = default if isinstance(default, variant) else variant()
  names = {field.name for field in dataclasses.fields(base)}
  common = [field.name for field in dataclasses.fields(chosen) if field.name in names]
  return dataclasses.replace(chosen, **{name: getattr(base, name) for name in common})


def _check_others(
  field: dataclasses.Field,
  chosen: Any,
  others: Mapping[str, Any],
  known: Sequence[Mapping[str, Any]],
  path: str,
) -> None:
  """Check that keys not in the chosen variant belong to another one and repeat a known value.

  Raises:
    UserError: no variant has the key, or its value is new.
  """
  members = fields.members(chosen, field)
  for name, value in others.items():
    if name not in members:
      raise names.unknown(name, f'{path}.', ['kind', *members])
    if not any(_repeats(value, repeatable) for repeatable in _inside(known, name)):
      kinds = ' or '.join(members[name].kinds)
      raise fields.meaningless(f'{path}.{name}', value, f'{path}.kind={kinds}', chosen.kind)


def _repeats(value: Any, known: Any) -> bool:
  """Return whether nested dicts have the same values as others, or a part of them."""
  if not isinstance(known, Mapping):
    return value == known
  return isinstance(value, Mapping) and all(
    name in known and _repeats(inner, known[name]) for name, inner in value.items()
  )
