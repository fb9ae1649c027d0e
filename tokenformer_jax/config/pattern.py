"""Parse a pattern, the short text that lists the layers of a trunk in order."""

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
  count: int

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

  Raises:
    UserError: the text is not a pattern, or names an unknown layer.
  """
  parser = _Parser(pattern, known, where)
  repeats: list[Repeat] = []
  for repeat in parser.repeats():
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


class _Parser:
  """Reads a pattern from left to right."""

  def __init__(self, pattern: str, known: Collection[str], where: str):
    self._pattern, self._known, self._where = pattern, known, where
    self._tokens = [match[1] for match in _TOKEN.finditer(pattern)]
    self._next = 0

  def repeats(self) -> list[Repeat]:
    repeats = self._sequence(0)
    if self._peek() == ')':
      raise self._error("a ')' closes nothing")
    if not repeats:
      raise self._error('it names no layer')
    return repeats

  def _sequence(self, depth: int) -> list[Repeat]:
    """Parse repeats up to the end, or up to a ')' that closes a '(' before this sequence."""
    repeats: list[Repeat] = []
    while self._peek() not in ('', ')'):
      repeats.extend(self._item(depth))
      self._check_size(repeats, 1)
    return repeats

  def _item(self, depth: int) -> list[Repeat]:
    """Parse a name or a parenthesis, with its count."""
    token = self._take()
    if token == '(':
      if depth == _MOST_DEEP:
        raise self._error(f'it has more than {_MOST_DEEP} nested parentheses')
      inner = self._sequence(depth + 1)
      if self._take() != ')':
        raise self._error("a '(' is not closed")
      if not inner:
        raise self._error('a parenthesis is empty')
    elif token in self._known:
      inner = [Repeat((token,), 1)]
    elif token.isidentifier():
      raise self._error(f'{token!r} is not a layer{nearest(token, self._known)}')
    elif token.isdigit():
      raise self._error(
        f'{token} is not a layer; did you mean "{next(iter(self._known))}*{token}"?'
      )
    else:
      raise self._error(f'{token!r} stands where the name of a layer is expected')
    count = self._count()
    self._check_size(inner, count)
    if count == 1:
      return inner
    row = tuple(name for repeat in inner for name in repeat.layers * repeat.count)
    return [
      Repeat(row, count) if len(inner) > 1 else Repeat(inner[0].layers, inner[0].count * count)
    ]

  def _count(self) -> int:
    if self._peek() != '*':
      return 1
    self._take()
    token = self._take()
    if not _COUNT.fullmatch(token):
      found = f'not {token!r}' if token else 'and there is none'
      raise self._error(f"after '*' comes a number from 1 to {_MOST_LAYERS:,}, {found}")
    return int(token)

  def _check_size(self, repeats: list[Repeat], count: int) -> None:
    if count * sum(repeat.size for repeat in repeats) > _MOST_LAYERS:
      raise self._error(f'it has more than {_MOST_LAYERS:,} layers')

  def _peek(self) -> str:
    return self._tokens[self._next] if self._next < len(self._tokens) else ''

  def _take(self) -> str:
    token = self._peek()
    self._next += 1
    return token

  def _error(self, mistake: str) -> UserError:
    examples = '; patterns are such as "layer*12", "local*23 full" or "(dense moe)*6"'
    hint = '' if mistake.endswith('?') else examples
    return UserError(f'{self._where} is {self._pattern!r}, and {mistake}{hint}')
