"""Sections of a config: frozen pydantic dataclasses whose fields describe themselves completely.

`section` makes the dataclass, and `key` a field with its default, its meaning and its bounds. The
annotation of a field is its type; a `Literal` lists the values that it allows. A field that holds
one of several sections has `OneOf` in its annotation, the table of these sections by their class
attribute `kind`. In nested dicts such a section is its keys and `kind`.
"""

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, Strict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from tokenformer_jax.errors import UserError, misspelt

_T = TypeVar('_T')


def _as_python(value: Any) -> Any:
  """Return a number of numpy or JAX as a number of Python, and anything else as it is."""
  return value.item() if getattr(value, 'ndim', None) == 0 else value


class _Bits(int):
  """Check that an integer fits into so many bits, its sign included."""

  def __call__(self, value: int) -> int:
    if abs(value) >= 2 ** (self - 1):
      raise PydanticCustomError('bits', 'be less than {limit}', {'limit': 2 ** (self - 1)})
    return value


_PYTHON = BeforeValidator(_as_python)
Bool = Annotated[bool, Strict(), _PYTHON]
Int = Annotated[int, Strict(), AfterValidator(_Bits(32)), _PYTHON]
Long = Annotated[int, Strict(), AfterValidator(_Bits(64)), _PYTHON]
Float = Annotated[float, Strict(), _PYTHON, Field(allow_inf_nan=False)]
Str = Annotated[str, Strict()]


# What a key decides of the order of samples: the samples, their weights and the sizes of batches by
# step, or the text itself, of which a digest says whether it is another one.
Order = Literal['', 'samples', 'weights', 'sizes', 'text']


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
      raise UserError(sentence(error, f'{made.__name__}.')) from None

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
  quiet: bool = False,
  order: Order = '',
) -> Any:
  """Return a field with its default, its meaning as `--help` prints it, and its bounds.

  `above` and `below` are excluded, `least` and `most` are included. A `quiet` key changes neither
  the resulting model nor its figures, so that a resumed run does not report another value.
  """
  more = {'quiet': quiet, 'order': order}
  return Field(
    default, description=meaning, gt=above, ge=least, le=most, lt=below, json_schema_extra=more
  )


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
      raise PydanticCustomError('dataclass_type', 'be a section of keys')
    kind = value.get('kind')
    if not isinstance(kind, str) or kind not in self.kinds:
      context = {'names': ', '.join(self.kinds), 'kinds': self.kinds, 'given': kind}
      raise PydanticCustomError('kind', 'be one of {names}', context)
    own = {name: inner for name, inner in value.items() if name != 'kind'}
    return adapter(self.kinds[kind]).validate_python(own)


def table(*kinds: Any) -> dict[str, type]:
  """Return sections, or those of a union, by their class attribute `kind`."""
  return {one.kind: one for given in kinds for one in typing.get_args(given) or (given,)}


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
def adapter(cls: Any) -> TypeAdapter[Any]:
  """Return the validator of a section or of another type."""
  return TypeAdapter(cls)


# The description of a field.


def field_types(cls: type) -> Mapping[str, FieldInfo]:
  """Return the fields of a section with their types and metadata, by name."""
  return getattr(cls, 'written_as', cls).__pydantic_fields__


def as_written(section: Any) -> Any:
  """Return the section of keys that a section is written as: mostly itself."""
  return section.as_written() if hasattr(section, 'written_as') else section


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
  type: type  # of the text of a flag: bool, int, float, str or tuple
  quiet: bool = False  # this and the next one as in `key`
  order: Order = ''


def kind_leaf(path: str, section: Any, field: FieldInfo) -> Leaf:
  """Return the key `kind` of a field that holds one of several sections."""
  meaning, kind = field.description or '', field.default.kind
  return Leaf(f'{path}.kind', section.kind, kind, meaning, choices_of(field), str)


def leaves(config: Any, prefix: str = '') -> Iterator[Leaf]:
  """Yield every key that is not a section, in the order of the fields."""
  config = as_written(config)
  for name, field in field_types(type(config)).items():
    path, value, meaning = f'{prefix}{name}', getattr(config, name), field.description or ''
    if kinds_of(field) is not None:
      yield kind_leaf(path, value, field)
      yield from leaves(value, f'{path}.')
    elif isinstance(value, Mapping):
      for inner, held in value.items():
        yield from leaves(held, f'{path}.{inner}.')
    elif dataclasses.is_dataclass(value):
      for leaf in leaves(value, f'{path}.'):
        yield leaf._replace(meaning='. '.join(filter(None, [leaf.meaning, meaning])))
    else:
      default = field.get_default(call_default_factory=True)
      plain = typing.get_origin(field.annotation) or field.annotation
      kind = plain if plain in (bool, int, float, tuple) else str
      more: Any = field.json_schema_extra or {}
      yield Leaf(path, value, default, meaning, choices_of(field), kind, **more)


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
  ours, theirs = as_written(ours), as_written(theirs)
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


def requirement(errors: Sequence[Any]) -> str:
  """Return what a value must be, such as `be greater than 0`.

  `errors` are entries of `ValidationError.errors`; those of members of a union are alternatives,
  and a violated bound says more than another type.
  """
  errors = [one for one in errors if not one['type'].endswith(('_type', '_of'))] or errors
  texts = [_FORMS.get(one['type']) or one['msg'].removeprefix('Input should ') for one in errors]
  text = ' or '.join(dict.fromkeys(texts)).replace('an instance of Sequence', 'a list')
  return text + _hint(errors[0])


def _hint(error: Any) -> str:
  """Return `; did you mean X?` for a misspelt kind or choice, else ''."""
  context = error.get('ctx', {})
  choices = context.get('kinds') or re.findall(r"'([^']+)'", str(context.get('expected', '')))
  near = misspelt(str(context.get('given', error['input'])), choices)
  return f'; did you mean {near!r}?' if near else ''


_FORMS = {
  'dataclass_type': 'be a section of keys',
  'tuple_type': 'be a list',
  'sequence_str': 'be a list',
}


def sentence(error: ValidationError, prefix: str = 'config.') -> str:
  """Return the first error of a section as one sentence: path, value and what is allowed."""
  first = error.errors(include_url=False)[0]
  location, value, verb = first['loc'], first['input'], 'is'
  if location and isinstance(location[-1], int):  # an entry of a list
    location, verb = location[:-1], 'has'
  path = f'{prefix}{".".join(map(str, location))}'
  match first['type']:
    case 'unexpected_keyword_argument':
      return f'{path} is unknown'
    case 'unexpected_positional_argument':
      return f'{prefix[:-1]} has fewer keys than values were given; give the values by key=value'
    case 'groups':
      return f'{path.removesuffix(".")}.{first["msg"]}'
    case 'kind':
      path, value = f'{path}.kind', value.get('kind') if isinstance(value, Mapping) else value
  return f'{path} {verb} {value!r}; it must {requirement([first])}'
