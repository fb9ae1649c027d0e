"""List the stages that models grew through, with their sizes, losses and costs.

A stage is the training of one model in one work directory. It begins from a growth or another
action, as a branch whose rate decays, from another run's checkpoint, or from nothing.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import ModelConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import models
from tokenformer_jax.report import charts, record, tables
from tokenformer_jax.report.record import Line, Record
from tokenformer_jax.runs import metrics
from tokenformer_jax.storage import paths


class Birth(NamedTuple):
  """The beginning of a stage: what it begins from, and the training before it."""

  parent: str = ''  # the work directory of the stage that it begins from; '': from nothing
  action: str = 'scratch'  # `grow` and other actions, `decay`, `continue`
  flops: float = 0.0
  tokens: float = 0.0
  step: int = 0  # in the count of the parent


_SCRATCH = Birth()


@dataclasses.dataclass
class Stage:
  """A stage as far as it is known; figures are those at its end, with all training before it."""

  directory: str
  name: str  # on the page
  birth: Birth = _SCRATCH
  run: int | None = None  # its number on the page, None if it was not given
  model: ModelConfig | None = None
  step: int | None = None
  flops: float | None = None
  tokens: float | None = None
  loss: float | None = None
  bits: float | None = None
  seconds: float | None = None  # of its processes


Stages = Mapping[str, Stage]  # by directory


def stages(records: Sequence[Record]) -> Stages:
  """Return the stages of all runs, each after the one that it begins from."""
  known: dict[str, Stage] = {}
  for number, run in enumerate(records):
    _add_run(known, number, run)
  for stage in known.values():
    if stage.run is None:
      _read_figures(stage)
  return {stage.directory: stage for stage in _in_order(known)}


def parents(known: Stages) -> dict[int, int]:
  """Return the number of the run that each run of the page begins from, by its number."""
  numbers = {}
  for stage in known.values():
    parent = known[stage.birth.parent].run if stage.birth.parent else None
    if stage.run is not None and parent is not None:
      numbers[stage.run] = parent
  return numbers


def table(known: Stages) -> str:
  """Return the stages as a table of HTML, '' if none begins from another one."""
  if not any(stage.birth.parent for stage in known.values()):
    return ''
  rows = [_row(known, stage) for stage in known.values()]
  return tables.table_of_dicts(rows, texts=4)


def _row(known: Stages, stage: Stage) -> dict[str, str]:
  birth, model = stage.birth, stage.model
  before = known[birth.parent] if birth.parent else None
  changes = before and before.model and model and _changes(before.model, model)
  tokens = None if stage.tokens is None else stage.tokens - birth.tokens
  flops = None if stage.flops is None else stage.flops - birth.flops
  return {
    'stage': stage.name,
    'begins by': birth.action,
    'from': before.name if before else tables.ABSENT,
    'change': changes or tables.ABSENT,
    'parameters': tables.amount(models.define(model).count if model else None),
    'steps': tables.ABSENT if stage.step is None else f'{birth.step:,} to {stage.step:,}',
    'tokens of it': tables.amount(tokens),
    'FLOPs of it': tables.flops(flops),
    'FLOPs of all': tables.flops(stage.flops),
    'time of it': tables.duration(stage.seconds),
    'bits per byte': tables.loss(stage.bits),
    'validation loss': tables.loss(stage.loss),
  }


def _add_run(known: dict[str, Stage], number: int, run: Record) -> None:
  """Add a run of the page, the sources of its growths, and the runs that these were branches of."""

  def add(directory: str) -> Stage:
    """Return the stage in a directory, which begins by `birth` unless it is known better."""
    stage = known.setdefault(directory, Stage(directory, directory.rstrip('/').rpartition('/')[2]))
    if not stage.birth.parent and birth.parent != directory:
      stage.birth = birth
    return stage

  birth = _SCRATCH
  for entry in run.lineage:
    if entry.branch_of and entry.branch_of != birth.parent:
      branch = add(entry.branch_of)
      branch.model = branch.model or entry.model
      birth = birth._replace(parent=entry.branch_of, action='decay')
    stage = add(entry.source)
    if stage.flops is None or (stage.run is None and entry.flops > stage.flops):
      stage.model, stage.step = entry.model, entry.step
      stage.flops, stage.tokens = entry.flops, entry.tokens
    birth = Birth(entry.source, entry.action, entry.flops, entry.tokens, entry.first_step)
  first, last = run.first_step, run.last_step
  if run.config and run.config.init_from:
    source = str(paths.absolute(paths.split_source(run.config.init_from)[0]))
    if source != birth.parent:
      add(source)
      action = 'decay' if run.config.train.decay_from else 'continue'
      flops, tokens = run.at('flops', first), run.at('tokens', first)
      birth = Birth(source, action, flops or 0.0, tokens or 0.0, first)
  stage = add(str(paths.absolute(run.directory)))
  stage.name, stage.run, stage.step = run.name, number, last
  stage.model = run.config.model if run.config else stage.model
  stage.flops, stage.tokens = run.at('flops', last), run.at('tokens', last)
  _set_figures(stage, run.lines, run.times)


def _read_figures(stage: Stage) -> None:
  """Read the loss and the time of a stage that is not on the page, if its files are here."""
  try:
    directory = paths.parse_path(stage.directory)
    lines = metrics.read(directory)
    times = metrics.read_lines(directory / 'times.jsonl')
  except (UserError, OSError, ValueError):
    return
  _set_figures(stage, lines, times)


def _set_figures(stage: Stage, lines: Sequence[Line], times: Sequence[Line]) -> None:
  """Set the last figures of validation, and the time, up to the step of a stage."""
  last = stage.step if stage.step is not None else float('inf')
  lines, times = (
    [one for one in some if record.is_number(one['step']) and one['step'] <= last]
    for some in (lines, times)
  )
  stage.bits, stage.loss = (charts.last_value(lines, name, last) for name in charts.MAIN)
  if times:
    stage.seconds = sum(record.sessions(times).seconds.values())


def _in_order(known: Stages) -> Iterator[Stage]:
  """Yield each stage after the stage it begins from."""
  children: dict[str, list[Stage]] = {}
  for stage in known.values():
    children.setdefault(stage.birth.parent, []).append(stage)

  def walk(directory: str) -> Iterator[Stage]:
    for stage in children.get(directory, ()):
      yield stage
      yield from walk(stage.directory)

  yield from walk('')


def _changes(before: ModelConfig, after: ModelConfig) -> str:
  """Return what a stage has more or less of than the one before it."""
  old, new = (
    {name: group.tokens for name, group in config_lib.pattentions(model).items()}
    for model in (before, after)
  )
  pairs = [(f'{name} tokens', old.get(name, 0), count) for name, count in new.items()]
  pairs += [('layers', before.depth, after.depth), ('width', before.width, after.width)]
  return ', '.join(f'{name} {a:,} → {b:,}' for name, a, b in pairs if a != b)
