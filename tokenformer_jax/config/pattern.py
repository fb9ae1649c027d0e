"""Parse a pattern, the short text that lists the layers of a trunk in order."""

import itertools
import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from tokenformer_jax.errors import UserError, misspelt, nearest

_ITEM = re.compile(r'(?:\(([^()]*)\)|(\w+))\s*(?:([*^])\s*(\w*))?\s*')
_EXAMPLES = '; patterns are such as "layer*12", "local*23 full" or "(dense moe)*6"'
_MOST_LAYERS = 10_000  # more layers are taken for a typing mistake


class Repeat(NamedTuple):
  """A row of layers that runs `count` times."""

  layers: tuple[str, ...]  # the name of each layer of the row
  count: int  # pyright: ignore[reportIncompatibleMethodOverride]
  tied: bool = False  # whether all runs of the row have the same arrays

  @property
  def rows(self) -> int:
    """The number of rows that have arrays of their own."""
    return 1 if self.tied else self.count

  @property
  def size(self) -> int:
    """The number of layers that run."""
    return len(self.layers) * self.count


def parse(pattern: str, known: Collection[str], where: str) -> tuple[Repeat, ...]:
  """Return the repeats of a pattern such as `layer*12`, `local*23 full` or `(dense moe)*6`.

  A name is a layer, `*N` repeats the item before it, and parentheses, which are not nested, make
  several layers one item. A repeated parenthesis is one repeat, whose row has every layer of the
  parenthesis. All other repeats have one kind of layer. Adjacent repeats with equal rows become one
  repeat. `^N` runs the item before it N times with the same arrays: these layers are tied.

  `where` names the pattern in a message, such as `config.model.pattern`.
  """
  try:
    repeats = _repeats(pattern, known)
  except UserError as error:
    raise UserError(f'{where} is {pattern!r}, and {error}') from None
  return tuple(repeats)


def names(repeats: Iterable[Repeat]) -> list[str]:
  """Return the name of each layer of repeats, in execution order."""
  return [name for repeat in repeats for name in repeat.layers * repeat.count]


def as_text(repeats: Iterable[Repeat]) -> str:
  """Return the pattern of repeats, which `parse` reads."""
  items = []
  for layers, count, tied in repeats:
    runs = ((name, len(list(equal))) for name, equal in itertools.groupby(layers))
    row = ' '.join(name if times == 1 else f'{name}*{times}' for name, times in runs)
    row = f'({row})' if len(layers) > 1 else row
    items.append(row if count == 1 else f'{row}{"^" if tied else "*"}{count}')
  return ' '.join(items)


def _repeats(text: str, known: Collection[str]) -> list[Repeat]:
  """Parse items up to the end of a text."""
  repeats: list[Repeat] = []
  text = text.strip()
  if not text:
    raise UserError(f'it, or a parenthesis in it, names no layer{_EXAMPLES}')
  while text:
    match = _ITEM.match(text)
    if match is None:
      raise UserError(f'{text[0]!r} stands where the name of a layer is expected{_EXAMPLES}')
    row, name, sign, count = match.groups()
    text = text[match.end() :]
    inner = [Repeat((_known(name, known),), 1)] if row is None else _repeats(row, known)
    if any(repeat.tied for repeat in inner):
      raise UserError(f"'^' stands in the parenthesis ({row}); tied layers stand outside of one")
    times = 1 if sign is None else _count(sign, count)
    for repeat in _tied(inner, times) if sign == '^' else _repeated(inner, times):
      last = repeats[-1] if repeats else None
      if last and last.layers == repeat.layers and not (last.tied or repeat.tied):
        repeat = Repeat(repeat.layers, repeats.pop().count + repeat.count)
      repeats.append(repeat)
    _check_size(repeats, 1)
  return repeats


def _repeated(repeats: list[Repeat], count: int) -> list[Repeat]:
  """Return an item `count` times."""
  _check_size(repeats, count)
  if len(repeats) == 1:
    return [Repeat(repeats[0].layers, repeats[0].count * count)]
  return repeats if count == 1 else [Repeat(tuple(names(repeats)), count)]


def _tied(repeats: list[Repeat], count: int) -> list[Repeat]:
  """Return an item that runs `count` times with the same arrays."""
  _check_size(repeats, count)
  return [Repeat(tuple(names(repeats)), count, tied=True)] if count > 1 else repeats


def _known(name: str, known: Collection[str]) -> str:
  """Return the name of a layer, checked."""
  if name.isdigit():
    raise UserError(f'{name} is not a layer; did you mean "{next(iter(known))}*{name}"?')
  if name not in known:
    examples = '' if misspelt(name, known) else _EXAMPLES
    raise UserError(f'{name!r} is not a layer{nearest(name, known)}{examples}')
  return name


def _count(sign: str, text: str) -> int:
  """Parse a count, such as the 12 of `*12`."""
  if not re.fullmatch('0*[1-9][0-9]{0,4}', text):
    given = f'not {text!r}' if text else 'and there is none'
    raise UserError(f"after '{sign}' comes a number from 1 to {_MOST_LAYERS:,}, {given}{_EXAMPLES}")
  return int(text)


def _check_size(repeats: list[Repeat], count: int) -> None:
  if count * sum(repeat.size for repeat in repeats) > _MOST_LAYERS:
    raise UserError(f'it has more than {_MOST_LAYERS:,} layers{_EXAMPLES}')
