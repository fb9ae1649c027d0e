"""Sections of a config: frozen pydantic dataclasses whose fields describe themselves completely.

`section` makes the dataclass, and `key` a field with its default, its meaning and its bounds. The
annotation of a field is its type; a `Literal` lists the values that it allows. A field that holds
one of several sections has `OneOf` in its annotation, the table of these sections by their class
attribute `kind`. In nested dicts such a section is its keys and `kind`.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, Strict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from tokenformer_jax.errors import UserError, nearest

_T = TypeVar('_T')


def _as_python(value: Any) -> Any:
  """Return a number of numpy or JAX as a number of Python, and anything else as it is."""
  return value.item() if getattr(value, 'ndim', None) == 0 else value


class _Bits(int):
  """Check that an integer fits into so many bits, its sign included."""

  def __call__(self, value: int) -> int:
    if abs(value) >= 2 ** (self - 1):
      raise PydanticCustomError('bits', 'too large', {'limit': 2 ** (self - 1)})
    return value


_PYTHON = BeforeValidator(_as_python)
Bool = Annotated[bool, Strict(), _PYTHON]
Int = Annotated[int, Strict(), AfterValidator(_Bits(32)), _PYTHON]
Long = Annotated[int, Strict(), AfterValidator(_Bits(64)), _PYTHON]
Float = Annotated[float, Strict(), _PYTHON, Field(allow_inf_nan=False)]
Str = Annotated[str, Strict()]


@typing.dataclass_transform(frozen_default=True, field_specifiers=(Field, dataclasses.field))
def section(cls: type[_T]) -> type[_T]:
  """Make a class a section of keys: a frozen dataclass that validates its values.

  A value that does not fit raises a UserError, by the constructor and by `dataclasses.replace`.
  """
  forbid = pydantic.ConfigDict(extra='forbid')
  made: Any = pydantic.dataclasses.dataclass(cls, frozen=True, config=forbid)
  validated = made.__init__

  @functools.wraps(validated)
  def init(self: Any, *args: Any, **kwargs: Any) -> None:
    try:
      validated(self, *args, **kwargs)
    except ValidationError as error:
      raise UserError(sentence(error, made, f'{made.__name__}.')) from None

  made.__init__ = init
  return made


def key(
  default: Any,
  meaning: str,
  *,
  above: float | None = None,
  least: float | None = None,
  most: float | None = None,
  below: float | None = None,
) -> Any:
  """Return a field with its default, its meaning as `--help` prints it, and its bounds.

  `above` and `below` are excluded, `least` and `most` are included.
  """
  return Field(default, description=meaning, gt=above, ge=least, le=most, lt=below)


@dataclasses.dataclass(frozen=True)
class OneOf:
  """The sections that a field may hold, by `kind`; the table may get more of them later.

  A kind alone, as text, stands for the section of this kind with its defaults.
  """

  kinds: Mapping[str, type]

  def __hash__(self) -> int:
    return id(self.kinds)

  def __deepcopy__(self, memo: Any) -> 'OneOf':
    return self  # pydantic copies the metadata of fields; the table stays one

  def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
    del source, handler
    return core_schema.no_info_plain_validator_function(self._validated)

  def _validated(self, value: Any) -> Any:
    if isinstance(value, tuple(self.kinds.values())):
      return value
    if isinstance(value, str):
      value = {'kind': value}
    if not isinstance(value, Mapping):
      raise PydanticCustomError('dataclass_type', 'not a section')
    kind = value.get('kind')
    if not isinstance(kind, str) or kind not in self.kinds:
      raise PydanticCustomError('kind', 'unknown kind')
    own = {name: inner for name, inner in value.items() if name != 'kind'}
    return adapter(self.kinds[kind]).validate_python(own)


def table(*kinds: type) -> dict[str, type]:
  """Return sections by their class attribute `kind`."""
  return {one.kind: one for one in kinds}


class Named(Mapping[str, _T]):
  """Sections by a name that the user chooses: an immutable mapping with a hash."""

  of: ClassVar[type]  # the type of the sections
  follows: ClassVar[str] = ''  # the section beside this one whose values a new entry starts with

  def __init__(self, sections: Mapping[str, _T] = types.MappingProxyType({})):
    self._sections = dict(sections)

  @classmethod
  def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
    del source
    items = core_schema.dict_schema(core_schema.str_schema(), handler(cls.of))
    return core_schema.no_info_after_validator_function(cls, items)

  def __getitem__(self, name: str) -> _T:
    return self._sections[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._sections)

  def __len__(self) -> int:
    return len(self._sections)

  def __hash__(self) -> int:
    return hash(frozenset(self._sections.items()))

  def __repr__(self) -> str:
    return f'{type(self).__name__}({self._sections})'


@functools.cache
def adapter(cls: type) -> TypeAdapter[Any]:
  """Return the validator of a section."""
  return TypeAdapter(cls)


# The description of a field.


def field_types(cls: type) -> Mapping[str, FieldInfo]:
  """Return the fields of a section with their types and metadata, by name."""
  return cls.__pydantic_fields__


def kinds_of(field: FieldInfo) -> Mapping[str, type] | None:
  """Return the table of a field that holds one of several sections, or None."""
  return next((one.kinds for one in field.metadata if isinstance(one, OneOf)), None)


def named_sections(field: FieldInfo) -> type[Named[Any]] | None:
  """Return the mapping type of a field that holds sections by name, or None."""
  annotation = field.annotation
  return annotation if isinstance(annotation, type) and issubclass(annotation, Named) else None


def choices_of(field: FieldInfo) -> tuple[str, ...]:
  """Return the kinds or the values that a field or its entries may have; none: any."""
  if (kinds := kinds_of(field)) is not None:
    return tuple(kinds)
  for one in (field.annotation, *typing.get_args(field.annotation)[:1]):
    if typing.get_origin(one) is Literal:
      return typing.get_args(one)
  return ()


class Leaf(NamedTuple):
  """A key of a config that is not a section."""

  path: str  # dotted, such as `model.layer.ffn.tokens`
  value: Any  # the value in this config
  default: Any  # the default of its field
  meaning: str  # ends with the meaning of the section
  choices: tuple[str, ...]  # empty: any value


def leaves(config: Any, prefix: str = '') -> Iterator[Leaf]:
  """Yield every key that is not a section, in the order of the fields."""
  for name, field in field_types(type(config)).items():
    path, value, meaning = f'{prefix}{name}', getattr(config, name), field.description or ''
    if kinds_of(field) is not None:
      yield Leaf(f'{path}.kind', value.kind, field.default.kind, meaning, choices_of(field))
      yield from leaves(value, f'{path}.')
    elif isinstance(value, Mapping):
      for inner, held in value.items():
        yield from leaves(held, f'{path}.{inner}.')
    elif dataclasses.is_dataclass(value):
      for leaf in leaves(value, f'{path}.'):
        yield leaf._replace(meaning='. '.join(filter(None, [leaf.meaning, meaning])))
    else:
      default = field.get_default(call_default_factory=True)
      yield Leaf(path, value, default, meaning, choices_of(field))


def leaves_of_kinds(config: Any, prefix: str = '') -> dict[str, Leaf]:
  """Return the keys of every kind of every section by path, those of the chosen kinds first."""
  keys = {leaf.path: leaf for leaf in leaves(config, prefix)}
  for name, field in field_types(type(config)).items():
    value, inside = getattr(config, name), f'{prefix}{name}.'
    kinds = [kind() for kind in (kinds_of(field) or {}).values()]
    for section in [value, *kinds] if dataclasses.is_dataclass(value) else []:
      keys |= {k: leaf for k, leaf in leaves_of_kinds(section, inside).items() if k not in keys}
  return keys


class Difference(NamedTuple):
  """A key that two configs have with different values."""

  path: str
  ours: Any
  theirs: Any


def differences(ours: Any, theirs: Any, prefix: str = '') -> Iterator[Difference]:
  """Yield the keys whose values make two configs of one class unequal.

  Sections of different kinds yield only `kind`; layers with different names yield only the names.
  """
  if type(ours) is not type(theirs):
    yield Difference(f'{prefix}kind', ours.kind, theirs.kind)
    return
  for field in dataclasses.fields(ours):
    a, b, path = getattr(ours, field.name), getattr(theirs, field.name), f'{prefix}{field.name}'
    if a == b or not field.compare:
      continue
    if isinstance(a, Mapping) and a.keys() == b.keys():
      for name in a:
        yield from differences(a[name], b[name], f'{path}.{name}.')
    elif isinstance(a, Mapping):
      yield Difference(path, ', '.join(a), ', '.join(b))
    elif not dataclasses.is_dataclass(a):
      yield Difference(path, a, b)
    else:
      yield from differences(a, b, f'{path}.')


_TYPES = {'int_type': 'int', 'float_type': 'float', 'bool_type': 'bool', 'string_type': 'str'}


def requirement(error: Any) -> str:
  """Return what a value of the right type must do, such as `be at least 1`; '' for other errors.

  `error` is an entry of `ValidationError.errors`.
  """
  context, value = error.get('ctx', {}), error['input']
  if isinstance(value, float) and not math.isfinite(value):
    return 'be finite'
  match error['type']:
    case 'greater_than_equal':
      return f'be at least {context["ge"]:g}' if context['ge'] else 'not be negative'
    case 'greater_than':
      return f'be greater than {context["gt"]:g}'
    case 'less_than_equal':
      return f'be at most {context["le"]:.15g}'
    case 'less_than':
      return f'be less than {context["lt"]:.15g}'
    case 'bits':
      return f'be less than {context["limit"]}'
    case 'literal_error':
      names = context['expected'].replace(' or ', ', ').replace("''", '(empty)').replace("'", '')
      return f'be one of {names}'
  return ''


def fields_inside(field: FieldInfo, kind: Any = None) -> dict[str, FieldInfo]:
  """Return the fields of the sections that a field may hold, by name; of a value: none.

  With a valid `kind`, they are the fields of this kind alone.
  """
  kinds, named = kinds_of(field) or {}, named_sections(field)
  if isinstance(kind, str) and kind in kinds:
    kinds = {kind: kinds[kind]}
  classes: list[Any] = [*kinds.values()] or [named.of if named else field.annotation]
  return {
    name: one for cls in classes for name, one in getattr(cls, '__pydantic_fields__', {}).items()
  }


def sentence(
  error: ValidationError,
  cls: type,
  prefix: str = 'config.',
  values: Mapping[str, Any] = types.MappingProxyType({}),
) -> str:
  """Return the first error of a section as one sentence: path, value and what is allowed.

  `values` are the nested dicts of the section, if it was made from some.
  """
  first = error.errors(include_url=False)[0]
  location, value = [str(name) for name in first['loc']], first['input']
  path, known, field = f'{prefix}{".".join(location)}', dict(field_types(cls)), None
  inside: Any = values
  for i, name in enumerate(location):
    inside = inside.get(name) if isinstance(inside, Mapping) else None
    if field is not None and named_sections(field) and name not in known:
      continue  # the name of a layer or a source
    if name not in known and known:
      return f'{path} is unknown{nearest(name, known)}'
    if field is not None and name not in known:  # an entry of a list of names
      own = f'{prefix}{".".join(location[:i])}'
      return f'{own} has {value!r}, which is unknown{nearest(str(value), choices_of(field))}'
    kind = inside.get('kind') if isinstance(inside, Mapping) else None
    field, known = known[name], fields_inside(known[name], kind)
  if field is None:
    return f'{prefix}{first["msg"]}'
  if expected := _TYPES.get(first['type']):
    return f'{path} is {value!r}, of type {type(value).__name__}; it must be {expected}'
  if first['type'] == 'tuple_type':
    return f'{path} is {value!r}; it must be a list of names, such as {field.default!r}'
  if first['type'] in ('dataclass_type', 'dict_type'):
    return f'{path} is {value!r}; it is a section of keys'
  if first['type'] == 'kind':
    return f'{path}.kind is {value["kind"]!r}; it must be one of {", ".join(kinds_of(field) or ())}'
  if first['type'] == 'groups':
    return f'{path}.{first["msg"]}'
  must = requirement(first)
  return f'{path} is {value!r}; {f"it must {must}" if must else first["msg"]}'
