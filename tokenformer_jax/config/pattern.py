"""Parse a pattern, the short text that lists the layers of a trunk in order."""

import collections
import itertools
import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from tokenformer_jax.errors import UserError, nearest

_TOKEN = re.compile(r'\s*([A-Za-z_]\w*|[0-9]+|\S)')
_COUNT = re.compile(r'0*[1-9][0-9]{0,4}')
_MOST_DEEP = 20  # nested parentheses
_MOST_LAYERS = 10_000  # more layers are taken for a typing mistake


class Repeat(NamedTuple):
  """A row of layers that runs `count` times."""

  layers: tuple[str, ...]  # the name of each layer of the row
  count: int  # pyright: ignore[reportIncompatibleMethodOverride]

  @property
  def size(self) -> int:
    """The number of layers that run."""
    return len(self.layers) * self.count


def parse(pattern: str, known: Collection[str], where: str) -> tuple[Repeat, ...]:
  """Return the repeats of a pattern such as `layer*12`, `local*23 full` or `(dense moe)*6`.

  A name is a layer, `*N` repeats the item before it, and parentheses make several layers one item.
  A repeated parenthesis is one repeat, whose row has every layer of the parenthesis. All other
  repeats have one kind of layer. Adjacent repeats with equal rows become one repeat.

  `where` names the pattern in a message, such as `config.model.pattern`.
  """
  try:
    tokens = collections.deque(_TOKEN.findall(pattern))
    items = _sequence(tokens, known, 0)
    if tokens:
      raise UserError("a ')' closes nothing")
    if not items:
      raise UserError('it names no layer')
  except UserError as error:
    examples = '; patterns are such as "layer*12", "local*23 full" or "(dense moe)*6"'
    hint = '' if str(error).endswith('?') else examples
    raise UserError(f'{where} is {pattern!r}, and {error}{hint}') from None
  repeats: list[Repeat] = []
  for repeat in items:
    if repeats and repeats[-1].layers == repeat.layers:
      repeat = Repeat(repeat.layers, repeats.pop().count + repeat.count)
    repeats.append(repeat)
  return tuple(repeats)


def names(repeats: Iterable[Repeat]) -> list[str]:
  """Return the name of each layer of repeats, in execution order."""
  return [name for repeat in repeats for name in repeat.layers * repeat.count]


def as_text(repeats: Iterable[Repeat]) -> str:
  """Return the pattern of repeats, which `parse` reads."""
  items = []
  for layers, count in repeats:
    runs = ((name, len(list(equal))) for name, equal in itertools.groupby(layers))
    row = ' '.join(name if times == 1 else f'{name}*{times}' for name, times in runs)
    row = f'({row})' if len(layers) > 1 else row
    items.append(row if count == 1 else f'{row}*{count}')
  return ' '.join(items)


def _sequence(tokens: collections.deque[str], known: Collection[str], depth: int) -> list[Repeat]:
  """Parse repeats up to the end, or up to a ')' that closes a '(' before this sequence."""
  repeats: list[Repeat] = []
  while tokens and tokens[0] != ')':
    repeats.extend(_item(tokens, known, depth))
    _check_size(repeats, 1)
  return repeats


def _item(tokens: collections.deque[str], known: Collection[str], depth: int) -> list[Repeat]:
  """Parse a name or a parenthesis, with its count."""
  token = tokens.popleft()
  if token == '(':
    if depth == _MOST_DEEP:
      raise UserError(f'it has more than {_MOST_DEEP} nested parentheses')
    inner = _sequence(tokens, known, depth + 1)
    if not tokens:
      raise UserError("a '(' is not closed")
    tokens.popleft()
    if not inner:
      raise UserError('a parenthesis is empty')
  elif token in known:
    inner = [Repeat((token,), 1)]
  elif token.isidentifier():
    raise UserError(f'{token!r} is not a layer{nearest(token, known)}')
  elif token.isdigit():
    raise UserError(f'{token} is not a layer; did you mean "{next(iter(known))}*{token}"?')
  else:
    raise UserError(f'{token!r} stands where the name of a layer is expected')
  count = _count(tokens)
  _check_size(inner, count)
  if len(inner) == 1:
    return [Repeat(inner[0].layers, inner[0].count * count)]
  return inner if count == 1 else [Repeat(tuple(names(inner)), count)]


def _count(tokens: collections.deque[str]) -> int:
  """Parse a count, such as `*12`; without one it is 1."""
  if not tokens or tokens[0] != '*':
    return 1
  tokens.popleft()
  token = tokens.popleft() if tokens else ''
  if not _COUNT.fullmatch(token):
    given = f'not {token!r}' if token else 'and there is none'
    raise UserError(f"after '*' comes a number from 1 to {_MOST_LAYERS:,}, {given}")
  return int(token)


def _check_size(repeats: list[Repeat], count: int) -> None:
  if count * sum(repeat.size for repeat in repeats) > _MOST_LAYERS:
    raise UserError(f'it has more than {_MOST_LAYERS:,} layers')
