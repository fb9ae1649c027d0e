"""Fields of a config that say everything about themselves, and the checks that read them.

`key` makes a field of a frozen dataclass with its default, its meaning, the values it allows and
the runs it is for. Checks, `--help` and flags of other commands read it from there.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenformer_jax.errors import UserError

KINDS = ('lm', 'vit')  # what `model.kind` can be
_METADATA = 'key'


@dataclasses.dataclass(frozen=True)
class Key:
  """What a field says besides its name, type and default.

  Attributes:
    meaning: what the value is, as `--help` prints it.
    choices: all values that are allowed, if they are few.
    above: every value is greater.
    least: no value is smaller.
    most: no value is larger.
    below: every value is smaller.
    bits: of an integer, its sign included.
    only: the runs that the key has a meaning for: a `model.kind`, or `grown` for models that have
      grown. Empty: all runs.
  """

  meaning: str = ''
  choices: tuple[str, ...] = ()
  above: float = -math.inf
  least: float = -math.inf
  most: float = math.inf
  below: float = math.inf
  bits: int = 32
  only: str = ''

  def check(self, path: str, value: Any) -> None:
    """Check a value by itself.

    Args:
      path: of the key, for the message.
      value: of the right type.

    Raises:
      UserError: the value is none of the choices, or out of its bounds.
    """
    if self.choices and value not in self.choices:
      names = ', '.join(choice or "'' (empty)" for choice in self.choices)
      raise UserError(f'config.{path} is {value!r}; it must be one of {names}')
    if isinstance(value, bool | str):
      return
    if value in (math.inf, -math.inf):
      raise UserError(f'config.{path} is {value}; it must be finite')
    # A NaN fails every comparison.
    if not (self.above < value < self.below and self.least <= value <= self.most):
      raise UserError(f'config.{path} is {value}; it must {self._bounds()}')
    limit = 2 ** (self.bits - 1)
    if isinstance(value, int) and abs(value) >= limit:
      raise UserError(f'config.{path} is {value}; it must be less than {limit}')

  def _bounds(self) -> str:
    """Return the bounds as the end of a sentence: "it must …"."""
    low, high = max(self.above, self.least), min(self.most, self.below)
    excludes_low, excludes_high = low == self.above, high == self.below
    if math.isinf(high):
      return f'be greater than {low:g}' if excludes_low else _at_least(low)
    if math.isinf(low):
      return f'be {"less than" if excludes_high else "at most"} {high:g}'
    if excludes_low and not excludes_high:
      return f'be greater than {low:g} and at most {high:g}'
    ending = ', both excluded' if excludes_low else ' (excluded)' if excludes_high else ''
    return f'lie between {low:g} and {high:g}{ending}'


def _at_least(low: float) -> str:
  return f'be at least {low:g}' if low else 'not be negative'


def key(default: Any, meaning: str, **says: Any) -> Any:
  """Return a dataclass field that says everything about a key.

  Args:
    default: the value unless a config sets another one.
    meaning: what the value is, in a few words.
    **says: other attributes of `Key`.
  """
  return dataclasses.field(default=default, metadata={_METADATA: Key(meaning, **says)})


class Leaf(NamedTuple):
  """A key of a config that is not a group.

  Attributes:
    path: such as `model.param_tokens.qkv`.
    value: in this config.
    key: what its field says, followed by what the field of its group says.
  """

  path: str
  value: Any
  key: Key


def leaves(config: Any, prefix: str = '') -> Iterator[Leaf]:
  """Yield every key that is not a group, in the order of the fields.

  Args:
    config: a config dataclass.
    prefix: of the paths.
  """
  for field in dataclasses.fields(config):
    own = field.metadata.get(_METADATA, Key())
    value, path = getattr(config, field.name), f'{prefix}{field.name}'
    if not dataclasses.is_dataclass(value):
      yield Leaf(path, value, own)
      continue
    for inner in leaves(value, f'{path}.'):
      meaning = '. '.join(filter(None, [inner.key.meaning, own.meaning]))
      yield inner._replace(key=dataclasses.replace(inner.key, meaning=meaning))


def check(config: Any) -> None:
  """Check every value of a config by itself.

  Raises:
    UserError: a value is none of its choices, or out of its bounds.
  """
  for path, value, own in leaves(config):
    own.check(path, value)


def check_scope(config: Any, kind: str) -> None:
  """Check that what a config sets has a meaning for the kind of its model.

  Args:
    config: the dataclass of a whole run; without arguments its class makes the defaults.
    kind: of the model.

  Raises:
    UserError: a key of another kind has another value than its default.
  """
  for (path, value, own), default in zip(leaves(config), leaves(type(config)()), strict=True):
    if own.only in KINDS and own.only != kind and value != default.value:
      raise UserError(
        f'config.{path} is {value!r}, which has a meaning for model.kind={own.only} only, and this '
        f'is {kind}; leave it out'
      )
