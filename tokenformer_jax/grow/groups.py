"""Read from a run's lineage where each of its groups of parameter tokens comes from.

The functions read only the description of a checkpoint. `model/group_trees.py` changes arrays.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tokenformer_jax.config import ModelConfig, former_names, is_of_experts, token_counts
from tokenformer_jax.config.groups import frozen_groups, named_groups, parse_numbers
from tokenformer_jax.config.model import BASE
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Meta, RunName
from tokenformer_jax.steps.last_growth import changes_of_tokens
from tokenformer_jax.storage import paths


@dataclasses.dataclass(frozen=True)
class Addition:
  """A growth or merge that added parameter tokens, or the beginning of a run.

  Attributes:
    number: the place among the additions of a model.
    runs: the runs in which the tokens were first trained.
    text: a description for a table.
  """

  number: int
  runs: tuple[RunName, ...]
  text: str


@dataclasses.dataclass(frozen=True)
class GroupHistory:
  """The additions of a group's tokens, the oldest first, and the factor of its values."""

  additions: tuple[Addition, ...]
  factor: float = 1.0


T = TypeVar('T')
History = dict[str, list[GroupHistory]]


def history(meta: Meta, directory: paths.Path) -> History:
  """Return the history of each group, by the name of its projection.

  Where an entry of the lineage does not account for a group, the group counts as one with tokens
  of every addition so far, so that no old token is taken for a new one.
  """
  runs = [RunName(ancestor.run, ancestor.source) for ancestor in meta.lineage]
  runs.append(RunName(meta.run, str(paths.absolute(directory))))
  models = [ancestor.model for ancestor in meta.lineage] + [meta.config.model]
  beginning = Addition(0, (runs[0],), f'the beginning of {runs[0].path}')
  histories = {
    name: [GroupHistory((beginning,))] * len(groups)
    for name, groups in named_groups(models[0]).items()
  }
  every = [beginning]
  for i, ancestor in enumerate(meta.lineage):
    step = _Step(ancestor, models[i], models[i + 1], _addition(ancestor, runs[i + 1], len(every)))
    if ancestor.action in ('grow', 'merge') and step.adds:
      every.append(step.addition)
    latest = max((addition.number for addition in additions(histories)), default=0)
    unknown = GroupHistory(tuple(every))
    histories = {
      name: step.after_it(
        name, _find_projection(histories, name, step.after) or [], latest, unknown
      )
      for name in named_groups(models[i + 1])
    }
  return histories


def _addition(ancestor: Ancestor, run: RunName, number: int) -> Addition:
  if ancestor.action == 'merge':
    added = ', '.join(name.path for name in ancestor.token_runs)
    text = f'merge of {added} at step {ancestor.step} of {ancestor.source}'
    return Addition(number, ancestor.token_runs, text)
  text = f'grow ({ancestor.grow.method.kind}) at step {ancestor.step} of {ancestor.source}'
  return Addition(number, (run,), text)


@dataclasses.dataclass(frozen=True)
class _Step:
  """An entry of the lineage, the models before and after it, and what it adds if it is a growth."""

  ancestor: Ancestor
  before: ModelConfig
  after: ModelConfig
  addition: Addition

  @property
  def deeper(self) -> bool:
    """Whether the layers differ; new layers have new tokens in all groups."""
    return self.before.repeats != self.after.repeats

  @property
  def adds(self) -> bool:
    """Whether a projection has other tokens than before."""
    return self.deeper or token_counts(self.before) != token_counts(self.after)

  def after_it(
    self, name: str, known: list[GroupHistory], latest: int, unknown: GroupHistory
  ) -> list[GroupHistory]:
    """Return the histories of a projection's groups after the entry, given those before (`known`).

    `latest` is the number of the last addition of which the model has tokens, and `unknown` the
    history of groups that the entry does not account for.
    """
    count = len(named_groups(self.after)[name])
    numbers = parse_numbers(self.ancestor.groups, "a lineage's groups")
    new = list(known)
    if self.ancestor.action in ('remove', 'slice') and numbers:
      new = [group for i, group in enumerate(known, start=1) if i not in numbers]
    elif self.ancestor.action == 'scale':
      new = [
        dataclasses.replace(group, factor=group.factor * self.ancestor.factor)
        if i in numbers
        else group
        for i, group in enumerate(known, start=1)
      ]
    elif self.ancestor.action == 'remove' and not self.ancestor.experts:
      new = [_without(group, latest) for group in known[:count]]
    elif self.ancestor.action in ('grow', 'merge'):
      new = self._added(name, known)
    if len(new) != count or not all(group.additions for group in new):
      return [unknown] * count
    return new

  def _added(self, name: str, known: list[GroupHistory]) -> list[GroupHistory]:
    old = _find_projection(named_groups(self.before), name, self.after) or ()
    now = named_groups(self.after)[name]
    in_old = known
    if self.deeper:
      in_old = [_with(group, self.addition) for group in known]
    elif len(old) == len(now) and old and now[-1].tokens > old[-1].tokens:
      in_old = [*known[:-1], _with(known[-1], self.addition)]
    return [*in_old, *[GroupHistory((self.addition,))] * (len(now) - len(old))]


def _find_projection(by_name: Mapping[str, T], name: str, model: ModelConfig) -> T | None:
  """Return the entry of a projection of a model, also under a name that it had before experts."""
  former = former_names(name, token_counts(model))
  return next((by_name[key] for key in former if key in by_name), None)


def _with(group: GroupHistory, addition: Addition) -> GroupHistory:
  return dataclasses.replace(group, additions=(*group.additions, addition))


def _without(group: GroupHistory, number: int) -> GroupHistory:
  left = tuple(a for a in group.additions if a.number != number)
  return dataclasses.replace(group, additions=left)


def additions(histories: History, numbers: Sequence[int] | None = None) -> list[Addition]:
  """Return the additions of the groups with these numbers, or of all, in order, each once."""
  all_ = {
    addition.number: addition
    for groups in histories.values()
    for i, group in enumerate(groups, start=1)
    if numbers is None or i in numbers
    for addition in group.additions
  }
  return [all_[number] for number in sorted(all_)]


def render(meta: Meta, directory: paths.Path) -> str:
  """Return a table of a model's groups: tokens and τ² of each projection, and their history.

  Projections whose groups of one number have different histories are in different rows.
  """
  histories, sizes = history(meta, directory), named_groups(meta.config.model)
  rows: dict[tuple[int, str, str], dict[str, str]] = {}
  for number in range(1, max(map(len, histories.values())) + 1):
    for name, groups in histories.items():
      if number > len(groups):
        continue
      group, size = groups[number - 1], sizes[name][number - 1]
      text = ', '.join(addition.text for addition in group.additions)
      if group.factor != 1:
        text += f', × {group.factor:g}'
      row = (number, text, _state(meta, name, number))
      rows.setdefault(row, {})[name] = f'{size.tokens}:{size.reference}'
  lines = [
    ['group', *(_heading(name, meta.config.model) for name in histories), 'added by', 'training'],
    *(
      [str(number), *(cells.get(name, '–') for name in histories), text, state]
      for (number, text, state), cells in rows.items()
    ),
  ]
  return messages.aligned(lines, left=range(len(lines[0])))


def _heading(name: str, model: ModelConfig) -> str:
  """Return the heading of a projection's column, with the number of experts that each have it."""
  if not is_of_experts(name):
    return f'{name} (tokens:τ²)'
  layer = name.removesuffix('ffn.expert').removesuffix('.') or BASE
  return f'{name} (tokens:τ², {model.experts[layer].count} experts)'


def _state(meta: Meta, name: str, number: int) -> str:
  """Return whether training changes a group of a projection."""
  optim = meta.config.optim
  if number in frozen_groups(optim):
    return 'frozen'
  changes = changes_of_tokens(meta.lineage)
  if optim.old_tokens != 'freeze' or not changes or changes[-1].action not in ('grow', 'merge'):
    return 'trained'
  old = _find_projection(named_groups(changes[-1].model), name, meta.config.model) or ()
  if number > len(old):
    return 'trained'
  now = named_groups(meta.config.model)[name][number - 1]
  return 'frozen' if now.tokens == old[number - 1].tokens else 'new tokens trained'
