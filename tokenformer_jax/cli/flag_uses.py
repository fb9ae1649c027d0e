"""Declare which flags have an effect in a call of a command, for its check and for `--help`.

A command declares a table once. From it the parser refuses a flag without an effect, with the
reason, and `--help` says when the flag matters.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from absl import flags

from tokenformer_jax.config import conditions
from tokenformer_jax.errors import UserError


class Use(NamedTuple):
  """The condition under which some flags have an effect.

  Attributes:
    flags: their names, separated by spaces.
    when: the condition on other flags (`config.conditions`); empty: always.
    why: the end of a sentence that begins with the flag, instead of the condition.
  """

  flags: str
  when: str = ''
  why: str = ''


# The uses by action, the first positional argument; '' for a command without actions.
Table = Mapping[str, Sequence[Use]]
Named = Mapping[str, str]  # conditions by a name that other conditions use


class _Uses(NamedTuple):
  """The attribute `uses` of a flag: the arguments of `declare`, and the flag's use by action."""

  table: Table
  default: str
  named: Named
  by_action: Mapping[str, Use]


def declare(table: Table, *, default: str = '', named: Named = MappingProxyType({})) -> None:
  """Declare when the flags of this command have an effect.

  A flag that the table lists for some actions has no meaning for the others. A flag that it does
  not list has an effect in every call.

  Args:
    table: the uses by action.
    default: the action of a command line that names none.
    named: conditions that the table may use as if they were flags. A message names their first
      flag.
  """
  found: dict[str, dict[str, Use]] = {}
  for action, uses in table.items():
    for use in uses:
      for name in use.flags.split():
        found.setdefault(name, {})[action] = use
  for name, by_action in found.items():
    flags.FLAGS[name].uses = _Uses(table, default, named, by_action)


def check(words: Sequence[str]) -> None:
  """Check that every given flag has an effect; `words` are the positional arguments.

  The command itself reports an unknown action.

  Raises:
    UserError: a flag has none; the message has the reason.
  """
  known = {name: flags.FLAGS[name] for name in flags.FLAGS if '.' not in name}
  values = {
    name: flag.value is not None if flag.default is None else flag.value
    for name, flag in known.items()
  }
  for name, flag in sorted(known.items()):
    uses: _Uses | None = getattr(flag, 'uses', None)
    if uses is None or not flag.present:
      continue
    action = '' if '' in uses.table else words[0] if words else uses.default
    if action not in uses.table:
      return
    if action not in uses.by_action:
      raise UserError(f'--{name} has no meaning for {action}; leave it out')
    use = uses.by_action[action]
    named = {key: conditions.holds(text, values) for key, text in uses.named.items()}
    if not conditions.holds(use.when, {**values, **named}):
      spelled = _spell(use.when, uses.named, _typed)
      raise UserError(f'--{name} {use.why or f"has an effect only {spelled}; leave it out"}')


def mark(flag: flags.Flag) -> str:
  """Return when a flag has an effect, as a mark such as ` [merge]` for `--help`; empty if always.

  A mark is shorter than the reason in a message: it leaves out the default action, and the terms of
  a condition after `and`.
  """
  uses: _Uses | None = getattr(flag, 'uses', None)
  if uses is None:
    return ''
  others = [action for action in uses.table if action not in uses.by_action]
  if len(others) == 1:
    return f' [not {others[0]}]'
  by_condition: dict[str, list[str]] = {}
  for action, use in uses.by_action.items():
    first = conditions.first_terms(use.when)
    when = _spell(first, uses.named, '--{}'.format).removeprefix('with ') if first else ''
    by_condition.setdefault(when, []).append(action)
  parts = []
  for when, actions in by_condition.items():
    where = ', '.join(actions) if others and actions != [uses.default] else ''
    parts.append(' with '.join(filter(None, [where, when])))
  text = '; '.join(filter(None, parts))
  return f' [{text}]' if text else ''


def _spell(condition: str, named: Named, typed: Callable[[str], str]) -> str:
  def given(name: str) -> str:
    return typed(conditions.names(named[name])[0] if name in named else name)

  return conditions.spell(condition, given, '--{}={}'.format)


def _typed(name: str) -> str:
  """Return a flag as it is typed, such as `--layers=N`."""
  parser = flags.FLAGS[name].parser
  if isinstance(parser, flags.BooleanParser):
    return f'--{name}'
  if isinstance(parser, flags.IntegerParser):
    return f'--{name}=N'
  return f'--{name}=X' if isinstance(parser, flags.FloatParser) else f'--{name}=…'
