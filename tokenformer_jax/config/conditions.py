"""Conditions under which a flag or a key has an effect, as one text that check and help share.

A condition is alternatives, joined by `or`, of terms, joined by `and`:

  layers or pattern                     one of both is given
  not requests                          requests is not given
  tokens and method=group|random        tokens is given, and method has one of two values

A value that is None, false, zero or empty is not given. The condition `never` does not hold.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

NEVER = 'never'


class _Term(NamedTuple):
  """One term: a name, the values that it may have (none: any), and whether it is negated."""

  name: str
  values: tuple[str, ...]
  negated: bool


def holds(condition: str, values: Mapping[str, Any]) -> bool:
  """Return whether a condition holds for values by name; the empty condition always does."""
  if not condition or condition == NEVER:
    return not condition
  return any(all(_term_holds(term, values) for term in terms) for terms in _parse(condition))


def names(condition: str) -> list[str]:
  """Return the names in a condition, in order."""
  return [term.name for terms in _parse(condition) for term in terms]


def first_unmet(condition: str, values: Mapping[str, Any]) -> str:
  """Return the first name whose term does not hold, given that the condition does not."""
  terms = itertools.chain.from_iterable(_parse(condition))
  return next(term.name for term in terms if not _term_holds(term, values))


def first_terms(condition: str) -> str:
  """Return the condition without the terms that stand behind `and`."""
  parts = (part.partition(' and ')[0] for part in condition.split(' or '))
  return ' or '.join(dict.fromkeys(parts))


def spell(condition: str, name: Callable[[str], str], value: Callable[[str, str], str]) -> str:
  """Return a condition in words, such as `with --layers=N or --pattern=…`.

  Args:
    condition: not empty.
    name: spells a name that is given.
    value: spells a name with its allowed values, such as `method` and `group or random`.
  """
  parts = []
  for terms in _parse(condition):
    spelled, before = [], None
    for term in terms:
      text = value(term.name, ' or '.join(term.values)) if term.values else name(term.name)
      preposition = 'without' if term.negated else 'with'
      spelled.append(text if preposition == before else f'{preposition} {text}')
      before = preposition
    parts.append(' and '.join(spelled))
  repeated = all(part.startswith('with ') for part in parts)
  rest = (part.removeprefix('with ') if repeated else part for part in parts[1:])
  return ' or '.join([parts[0], *rest])


def _parse(condition: str) -> list[list[_Term]]:
  return [[_term(text) for text in part.split(' and ')] for part in condition.split(' or ')]


def _term(text: str) -> _Term:
  negated = text.startswith('not ')
  name, equals, values = text.removeprefix('not ').strip().partition('=')
  return _Term(name, tuple(values.split('|')) if equals else (), negated)


def _term_holds(term: _Term, values: Mapping[str, Any]) -> bool:
  value = values[term.name]
  if term.values:
    text = f'{value:g}' if isinstance(value, float) else str(value)
    return (text in term.values) != term.negated
  return bool(value) != term.negated
