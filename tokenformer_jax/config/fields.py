"""Fields of a config that describe themselves completely, and the checks that read them.

`key` makes a field of a frozen dataclass with its default, its meaning, the values it allows and
the runs it is for. `one_of` makes a field that holds one of several dataclasses, its *variants*.
Each variant has a name, its `kind`. In a config file such a field is a section of keys with `kind`
and the keys of every variant. Checks, `--help` and flags read everything from the fields.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from tokenformer_jax.config import conditions
from tokenformer_jax.errors import UserError, nearest

MODEL_KINDS = ('lm', 'vit')  # the values of `model.kind`
_METADATA, _VARIANTS = 'key', 'variants'
_Section = TypeVar('_Section')


@dataclasses.dataclass(frozen=True, repr=False)
class Key:
  """The description of a field besides its name, type and default.

  Attributes:
    meaning: what the value is, as `--help` prints it.
    choices: the values that are allowed, or the entries of a tuple; empty: not a choice.
    above: exclusive lower bound of a number.
    least: inclusive lower bound.
    most: inclusive upper bound.
    below: exclusive upper bound.
    bits: width of an integer, its sign included.
    only: the runs that the key applies to: a `model.kind`, or `grown` for models that have grown.
      Empty: all runs.
    when: the condition on other keys of the section for which the key has a meaning, such as
      `KEY=VALUE|VALUE` (`config.conditions`). Empty: all values.
    growth: the condition on what a growth changes (`config.sections.CHANGES`), and on other keys of
      the section, for which the key has an effect. Empty: all.
  """

  meaning: str = ''
  choices: tuple[str, ...] = ()
  above: float = -math.inf
  least: float = -math.inf
  most: float = math.inf
  below: float = math.inf
  bits: int = 32
  only: str = ''
  when: str = ''
  growth: str = ''

  def __repr__(self) -> str:
    changed = [
      f'{field.name}={value!r}'
      for field in dataclasses.fields(self)
      if (value := getattr(self, field.name)) != field.default
    ]
    return f'Key({", ".join(changed)})'

  def check(self, path: str, value: Any) -> None:
    """Check a value of the right type; `path` names its key in the message.

    Raises:
      UserError: the value is not one of the choices, or is out of bounds.
    """
    if wrong := self.wrong(value):
      raise UserError(f'config.{path} is {value!r}; {wrong}')

  def wrong(self, value: Any) -> str:
    """Return the requirement that a value violates, such as 'it must be finite'; '' for none."""
    if isinstance(value, tuple):
      return self._wrong_entry(value)
    if self.choices and value not in self.choices:
      names = ', '.join(choice or "'' (empty)" for choice in self.choices)
      return f'it must be one of {names}'
    if isinstance(value, bool | str):
      return ''
    if value in (math.inf, -math.inf):
      return 'it must be finite'
    # A NaN fails every comparison.
    if not (self.above < value < self.below and self.least <= value <= self.most):
      return f'it must {self._bounds()}'
    limit = 2 ** (self.bits - 1)
    if isinstance(value, int) and abs(value) >= limit:
      return f'it must be less than {limit}'
    return ''

  def _wrong_entry(self, names: tuple[str, ...]) -> str:
    """Return what is wrong with the names in a tuple, each one of the choices; '' for nothing."""
    for i, name in enumerate(names):
      if name not in self.choices:
        return f'{name!r} is unknown{nearest(name, self.choices)}'
      if name in names[:i]:
        return f'it names {name} twice; leave one out'
    return ''

  def _bounds(self) -> str:
    """Return the bounds as the end of a sentence: "it must …"."""
    low, high = max(self.above, self.least), min(self.most, self.below)
    excludes_low, excludes_high = low == self.above, high == self.below
    if math.isinf(high):
      not_below = f'be at least {_exactly(low)}' if low else 'not be negative'
      return f'be greater than {_exactly(low)}' if excludes_low else not_below
    if math.isinf(low):
      return f'be {"less than" if excludes_high else "at most"} {_exactly(high)}'
    if excludes_low and not excludes_high:
      return f'be greater than {_exactly(low)} and at most {_exactly(high)}'
    ending = ', both excluded' if excludes_low else ' (excluded)' if excludes_high else ''
    return f'lie between {_exactly(low)} and {_exactly(high)}{ending}'


def _exactly(bound: float) -> str:
  short = f'{bound:g}'
  return short if float(short) == bound else str(bound)


# Types of arguments: see `arguments.checked`.
Count = Annotated[int, Key(least=1)]
Natural = Annotated[int, Key(least=0)]


def key(default: Any, meaning: str, **attributes: Any) -> Any:
  """Return a dataclass field that describes a key completely, by the attributes of `Key`."""
  return dataclasses.field(default=default, metadata={_METADATA: Key(meaning, **attributes)})


class Named(Mapping[str, _Section]):
  """Sections of keys by a name that the user chooses: an immutable mapping with a hash."""

  def __init__(self, sections: Mapping[str, _Section] | None = None):
    self._sections = dict(sections or {})

  def __getitem__(self, name: str) -> _Section:
    return self._sections[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._sections)

  def __len__(self) -> int:
    return len(self._sections)

  def __hash__(self) -> int:
    return hash(frozenset(self._sections.items()))

  def __repr__(self) -> str:
    return f'{type(self).__name__}({self._sections})'


Variants = Mapping[str, type]  # dataclasses by their `kind`


def table(*variants: type) -> dict[str, type]:
  """Return dataclasses by their class attribute `kind`."""
  return {variant.kind: variant for variant in variants}


def one_of(default: Any, variants: Variants, meaning: str) -> Any:
  """Return a dataclass field that holds an instance of one of several dataclasses.

  The table of variants may grow later.
  """
  metadata = {_METADATA: Key(meaning), _VARIANTS: variants}
  return dataclasses.field(default=default, metadata=metadata)


def field_variants(field: dataclasses.Field) -> Variants | None:
  """Return the variants of a field made by `one_of`, or None for any other field."""
  return field.metadata.get(_VARIANTS)


class Member(NamedTuple):
  """A field of a variant, its value, and the kinds that have it; empty: all kinds."""

  field: dataclasses.Field
  value: Any
  kinds: tuple[str, ...]


def members(value: Any, section: dataclasses.Field) -> dict[str, Member]:
  """Return the fields of all variants of a section by name, those of `value` first.

  Args:
    value: the chosen variant. A field that it lacks has the value of the section's default, or else
      the default of its class.
    section: the field that holds the variant, made by `one_of`.
  """
  variants = section.metadata[_VARIANTS]
  kinds: dict[str, list[str]] = {}
  for kind, variant in variants.items():
    for field in dataclasses.fields(variant):
      kinds.setdefault(field.name, []).append(kind)
  found: dict[str, Member] = {}
  for holder in (value, section.default, *(variant() for variant in variants.values())):
    for field in dataclasses.fields(holder):
      having = kinds[field.name]
      scope = () if len(having) == len(variants) else tuple(having)
      found.setdefault(field.name, Member(field, getattr(holder, field.name), scope))
  return found


class Leaf(NamedTuple):
  """A key of a config that is not a section."""

  path: str  # dotted, such as `model.layer.ffn.tokens`
  value: Any  # the value in this config
  default: Any  # the default of its field
  key: Key  # the `Key` of its field; its meaning ends with the meaning of its section
  kinds: tuple[str, ...] = ()  # the kinds of its section that have the key; empty: all


def leaves(config: Any, prefix: str = '', *, every: bool = False) -> Iterator[Leaf]:
  """Yield every key that is not a section, in the order of the fields.

  With `every`, yield the keys of variants that the config did not choose as well, with their
  defaults.
  """
  for field in dataclasses.fields(config):
    yield from _field_leaves(field, getattr(config, field.name), prefix, every)


def _field_leaves(field: dataclasses.Field, value: Any, prefix: str, every: bool) -> Iterator[Leaf]:
  """Yield the keys of one field."""
  own, path = field.metadata.get(_METADATA, Key()), f'{prefix}{field.name}'
  if (variants := field_variants(field)) is not None:
    chosen = Key(own.meaning, choices=tuple(variants))
    yield Leaf(f'{path}.kind', value.kind, field.default.kind, chosen)
    if not every:
      yield from leaves(value, f'{path}.')
      return
    for inner in members(value, field).values():
      for leaf in _field_leaves(inner.field, inner.value, f'{path}.', every):
        yield leaf._replace(kinds=leaf.kinds or inner.kinds)
  elif isinstance(value, Mapping):
    for name, layer in value.items():
      yield from leaves(layer, f'{path}.{name}.', every=every)
  elif dataclasses.is_dataclass(value):
    for inner in leaves(value, f'{path}.', every=every):
      meaning = '. '.join(filter(None, [inner.key.meaning, own.meaning]))
      yield inner._replace(key=dataclasses.replace(inner.key, meaning=meaning))
  else:
    yield Leaf(path, value, field.default, own)


def every_key(config: Any) -> dict[str, Any]:
  """Return the values of a config as nested dicts, including keys of kinds not chosen."""
  return {
    field.name: every_value(field, getattr(config, field.name))
    for field in dataclasses.fields(config)
  }


def every_value(field: dataclasses.Field, value: Any) -> Any:
  """Return the value of a field; a section of keys has the form of `every_key`."""
  if field_variants(field) is not None:
    found = members(value, field)
    return {'kind': value.kind} | {
      name: every_value(member.field, member.value) for name, member in found.items()
    }
  if isinstance(value, Mapping):
    return {name: every_key(layer) for name, layer in value.items()}
  return every_key(value) if dataclasses.is_dataclass(value) else value


class Difference(NamedTuple):
  """A key that two configs have with different values."""

  path: str
  ours: Any
  theirs: Any


def differences(ours: Any, theirs: Any, prefix: str = '') -> Iterator[Difference]:
  """Yield the keys whose values make two configs of one class unequal.

  Sections of different kinds yield only `kind`; layers with different names yield only the names.
  """
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
    elif field_variants(field) is not None and a.kind != b.kind:
      yield Difference(f'{path}.kind', a.kind, b.kind)
    else:
      yield from differences(a, b, f'{path}.')


def check(config: Any) -> None:
  """Raise a UserError if a value is not one of its choices, or is out of bounds."""
  for leaf in leaves(config):
    leaf.key.check(leaf.path, leaf.value)


def check_scope(config: Any, kind: str) -> None:
  """Check that a config of a run, of this `model.kind`, changes no key without a meaning for it.

  Raises:
    UserError: a key for another kind of model, or for another value of a key of its section, does
      not have its default.
  """
  found = list(leaves(config))
  values = {leaf.path: leaf.value for leaf in found}
  for leaf in found:
    if leaf.value == leaf.default:
      continue
    if leaf.key.only in MODEL_KINDS and leaf.key.only != kind:
      raise meaningless(leaf.path, leaf.value, f'model.kind={leaf.key.only}', kind)
    if leaf.key.when:
      section = f'{leaf.path.rpartition(".")[0]}.'
      near = {path.removeprefix(section): value for path, value in values.items()}
      if not conditions.holds(leaf.key.when, near):
        here = near[conditions.first_unmet(leaf.key.when, near)]
        raise meaningless(leaf.path, leaf.value, _spell(leaf.key.when, section), here)


def _spell(condition: str, section: str) -> str:
  """Return a condition on the keys of a section in words; `section` is its path with a dot."""
  text = conditions.spell(
    condition, lambda name: f'{section}{name}', lambda name, values: f'{section}{name}={values}'
  )
  return text.removeprefix('with ')


def meaningless(path: str, value: Any, needed: str, kind: str) -> UserError:
  """Return the error for a key that needs a choice such as `model.kind=lm`, not `kind`.

  An empty `kind` is a key without a value.
  """
  shown = 'given' if isinstance(value, Mapping) else repr(value)
  here = f'this is {kind}' if kind else 'that is not set'
  return UserError(
    f'config.{path} is {shown}, which has a meaning for {needed} only, and {here}; leave it out'
  )
