"""Tell from a run's lineage where each of its groups of parameter tokens comes from.

The functions read only the description of a checkpoint. What is done to arrays is in
`model/group_trees.py`.
"""

import dataclasses
from collections.abc import Sequence

from tokenformer_jax.config import ModelConfig, TokenGroup, token_counts
from tokenformer_jax.config.groups import frozen_groups, groups_of, parse_numbers
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Meta, changes_of_tokens
from tokenformer_jax.storage import paths


@dataclasses.dataclass(frozen=True)
class Addition:
  """A growth or merge that added parameter tokens, or the beginning of a run.

  Attributes:
    number: the place among the additions of a model.
    runs: the runs in which the tokens were first trained; empty where an older version did not
      record them.
    text: a description for a table.
  """

  number: int
  runs: tuple[str, ...]
  text: str


@dataclasses.dataclass(frozen=True)
class GroupHistory:
  """The additions that a group's tokens came by, the oldest first, and the factor of its values."""

  additions: tuple[Addition, ...]
  factor: float = 1.0


History = dict[str, list[GroupHistory]]


def history(meta: Meta, directory: paths.Path) -> History:
  """Return the history of each group, by the name of its projection.

  Where an entry of the lineage does not say what became of a group, the group counts as one with
  tokens of every addition so far, so that nothing is taken for new that may be old.
  """
  runs = [ancestor.source for ancestor in meta.lineage] + [str(paths.absolute(directory))]
  models = [ancestor.model for ancestor in meta.lineage] + [meta.config.model]
  beginning = Addition(0, (runs[0],), f'the beginning of {runs[0]}')
  found = {
    name: [GroupHistory((beginning,))] * len(groups)
    for name, groups in groups_of(models[0]).items()
  }
  every = [beginning]
  for i, ancestor in enumerate(meta.lineage):
    addition = _addition(ancestor, runs[i + 1], len(every))
    if ancestor.action in ('grow', 'merge') and _adds(models[i], models[i + 1]):
      every.append(addition)
    before, after = groups_of(models[i]), groups_of(models[i + 1])
    unknown = GroupHistory(tuple(every))
    found = {
      name: _after(ancestor, addition, found.get(name, []), before.get(name, ()), groups, unknown)
      for name, groups in after.items()
    }
  return found


def _addition(ancestor: Ancestor, run: str, number: int) -> Addition:
  if ancestor.action == 'merge':
    added = tuple(ancestor.tokens_of.splitlines())
    what = f'merge of {", ".join(added) or "another run"} at step {ancestor.step} of'
    return Addition(number, added, f'{what} {ancestor.source}')
  text = f'grow ({ancestor.grow.method}) at step {ancestor.step} of {ancestor.source}'
  return Addition(number, (run,), text)


def _adds(before: ModelConfig, after: ModelConfig) -> bool:
  old = token_counts(before)
  return any(count != old.get(name) for name, count in token_counts(after).items())


def _after(
  ancestor: Ancestor,
  addition: Addition,
  known: list[GroupHistory],
  before: Sequence[TokenGroup],
  after: Sequence[TokenGroup],
  unknown: GroupHistory,
) -> list[GroupHistory]:
  """Return the histories of a projection's groups after an entry of the lineage."""
  numbers = parse_numbers(ancestor.groups, "a lineage's groups")
  new = list(known)
  if ancestor.action in ('remove', 'slice') and numbers:
    new = [one for i, one in enumerate(known, start=1) if i not in numbers]
  elif ancestor.action == 'scale':
    new = [
      dataclasses.replace(one, factor=one.factor * (ancestor.factor if i in numbers else 1))
      for i, one in enumerate(known, start=1)
    ]
  elif ancestor.action == 'remove':
    new = known[: len(after)]
    if len(after) == len(before) and before and after[-1].tokens < before[-1].tokens:
      new[-1] = dataclasses.replace(new[-1], additions=new[-1].additions[:-1])
  elif ancestor.action in ('grow', 'merge'):
    if len(after) > len(before):
      new += [GroupHistory((addition,))] * (len(after) - len(before))
    elif after and before and after[-1].tokens > before[-1].tokens:
      new[-1] = dataclasses.replace(new[-1], additions=(*new[-1].additions, addition))
  if len(new) != len(after) or not all(one.additions for one in new):
    return [unknown] * len(after)
  return new


def additions(found: History, numbers: Sequence[int] | None = None) -> list[Addition]:
  """Return the additions that the groups of a model came by, in their order; each once.

  Args:
    found: the history of each group.
    numbers: only those of the groups with these numbers; None: of all groups.
  """
  all_ = {
    addition.number: addition
    for groups in found.values()
    for i, group in enumerate(groups, start=1)
    if numbers is None or i in numbers
    for addition in group.additions
  }
  return [all_[number] for number in sorted(all_)]


def render(meta: Meta, directory: paths.Path) -> str:
  """Return a table of a model's groups: tokens and τ² of each projection, and their history.

  Projections whose group of a number has another history are in another row.
  """
  found, sizes = history(meta, directory), groups_of(meta.config.model)
  rows: dict[tuple[int, str, str], dict[str, str]] = {}
  for number in range(1, max(map(len, found.values())) + 1):
    for name, groups in found.items():
      if number > len(groups):
        continue
      group, size = groups[number - 1], sizes[name][number - 1]
      text = ', '.join(addition.text for addition in group.additions)
      if group.factor != 1:
        text += f', × {group.factor:g}'
      row = (number, text, _state(meta, name, number))
      rows.setdefault(row, {})[name] = f'{size.tokens}:{size.reference}'
  lines = [
    ['group', *(f'{name} (tokens:τ²)' for name in found), 'added by', 'training'],
    *(
      [str(number), *(cells.get(name, '–') for name in found), text, state]
      for (number, text, state), cells in rows.items()
    ),
  ]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return '\n'.join(
    '  '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    for line in lines
  )


def _state(meta: Meta, name: str, number: int) -> str:
  """Return whether training changes a group of a projection."""
  optim = meta.config.optim
  if number in frozen_groups(optim):
    return 'frozen'
  changes = changes_of_tokens(meta.lineage)
  if optim.old_tokens != 'freeze' or not changes or changes[-1].action not in ('grow', 'merge'):
    return 'trained'
  old = groups_of(changes[-1].model).get(name, ())
  if number > len(old):
    return 'trained'
  now = groups_of(meta.config.model)[name][number - 1]
  return 'frozen' if now.tokens == old[number - 1].tokens else 'new tokens trained'
