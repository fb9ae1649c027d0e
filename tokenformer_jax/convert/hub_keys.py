"""Read the keys of a config.json in the hub's layout, with one sentence for what does not fit."""

from collections.abc import Collection, Mapping
from typing import Any

from tokenformer_jax.errors import UserError


class Keys:
  """The keys of a config.json. Each is read once; those never read can be listed.

  An absent key has its value in `defaults`, if there is one. A key that is null has no value, even
  where `defaults` has one, as in `transformers`. The methods take a default for both cases.
  """

  def __init__(self, values: Mapping[str, Any], where: str, defaults: Mapping[str, Any] = {}):
    self._given = {name for name, value in values.items() if value is not None}
    self._values = {k: v for k, v in {**defaults, **values}.items() if v is not None}
    self._where = where
    self.read: set[str] = set()  # the names of keys
    self._tables: dict[str, Keys] = {}

  def get(self, name: str, default: Any = None) -> Any:
    """Return the value of any type of a key."""
    self.read.add(name)
    return self._values.get(name, default)

  def whole(self, name: str, default: int | None = None) -> int:
    """Return a positive integer; without a default the key must be there."""
    value = self._there(name, default, 'a positive integer')
    if type(value) is not int or not 0 < value < 2**31:
      raise self.refusal(name, 'a positive integer below 2**31')
    return value

  def number(self, name: str, default: float | None = None) -> float:
    """Return a number above 0; without a default the key must be there."""
    value = self._there(name, default, 'a number above 0')
    if type(value) not in (int, float) or not 0 < value < 1e300:
      raise self.refusal(name, 'a number above 0')
    return float(value)

  def _there(self, name: str, default: float | None, what: str) -> Any:
    if (value := self.get(name, default)) is None:
      raise UserError(f'{self._where} has no {name}, {what}; fetch the file again')
    return value

  def flag(self, name: str, default: bool) -> bool:
    """Return true or false."""
    value = self.get(name, default)
    if type(value) is not bool:
      raise self.refusal(name, 'true or false')
    return value

  def choice(self, name: str, allowed: Mapping[str, str], default: str) -> Any:
    """Return our name for one of the values of a key."""
    value = self.get(name, default)
    if not isinstance(value, str) or value not in allowed:
      raise self.refusal(name, ' or '.join(sorted(allowed)))
    return allowed[value]

  def table(self, name: str, defaults: Mapping[str, Any] = {}) -> 'Keys':
    """Return the keys of a table, empty if it is absent."""
    values = self.get(name, {})
    if not isinstance(values, dict):
      raise self.refusal(name, 'a table of keys')
    return self._tables.setdefault(name, Keys(values, f'{self._where}: {name}', defaults))

  def only(self, name: str, *allowed: Any) -> None:
    """Check that a key is absent or has an allowed value: with another one the model differs."""
    if name in self._values and self.get(name) not in allowed:
      raise self.refusal(name, ' or '.join(map(repr, allowed)) or 'absent')

  def refusal(self, name: str, allowed: str) -> UserError:
    """Return the error for a value that we cannot convert."""
    value = repr(self._values.get(name))
    return UserError(
      f'{self._where} has {name}={value:.80}, which cannot be converted; it must be {allowed}'
    )

  def unread(self, ignored: Collection[str]) -> list[str]:
    """Return the keys that were not read and are not among those that change nothing.

    Keys inside of tables are named with their table: `rope_scaling.factor`.
    """
    inner = (f'{name}.{key}' for name, keys in self._tables.items() for key in keys.unread(()))
    return sorted({*(self._given - self.read - set(ignored)), *inner})
