"""Draw the stages that models grew through as a tree, with their sizes, losses and costs.

A stage is the training of one model in one work directory. It begins from a growth or another
action, as a branch whose rate decays, from another run's checkpoint, or from nothing.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import ModelConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import models
from tokenformer_jax.report import charts, record, tables
from tokenformer_jax.report.charts import Figure
from tokenformer_jax.report.record import Line, Record
from tokenformer_jax.runs import metrics
from tokenformer_jax.storage import paths

_OTHER_COLOUR = '#9aa0a6'  # of a stage that is not a run of the page


@dataclasses.dataclass
class Stage:
  """A stage, as far as it is known; figures are those at its end.

  Attributes:
    directory: its work directory.
    name: its name on the page.
    run: its number on the page, None if it was not given.
    action: how it begins: `grow` and other actions, `decay`, `continue`, or '' from nothing.
    parent: the directory of the stage that it begins from, or ''.
    begin: the FLOPs of all training before it.
    begin_tokens: the tokens of all training before it.
    begin_step: its step when it begins, in the count of its parent.
  """

  directory: str
  name: str
  run: int | None = None
  action: str = ''
  parent: str = ''
  begin: float = 0.0
  begin_tokens: float = 0.0
  begin_step: int = 0
  model: ModelConfig | None = None
  step: int | None = None
  flops: float | None = None
  tokens: float | None = None
  loss: float | None = None
  bits: float | None = None
  seconds: float | None = None
  grown: str = ''  # what the action made larger


def stages(records: Sequence[Record]) -> dict[str, Stage]:
  """Return the stages of all runs by directory, each after the one that it begins from."""
  found: dict[str, Stage] = {}
  directories = [str(paths.absolute(run.directory)) for run in records]
  for i, run in enumerate(records):
    _add_ancestors(found, run)
    _add_run(found, i, run, directories)
  for stage in found.values():
    if stage.run is None:
      _read_figures(stage)
    before = found[stage.parent].model if stage.parent else None
    if before and stage.model:
      stage.grown = _changes(before, stage.model)
  return {stage.directory: stage for stage in _in_order(found)}


def parents(records: Sequence[Record], found: Mapping[str, Stage]) -> dict[int, int]:
  """Return the number of the run that each run of the page begins from, by its number."""
  numbers = {
    stage.run: found[stage.parent].run
    for stage in found.values()
    if stage.run is not None and stage.parent
  }
  return {run: parent for run, parent in numbers.items() if parent is not None}


def figure(found: Mapping[str, Stage]) -> Figure | None:
  """Return the tree: a bar for each stage over the FLOPs, and lines to the stages it led to.

  None if no stage begins from another one, or FLOPs are not known.
  """
  if not any(stage.parent for stage in found.values()):
    return None
  rows = {directory: row for row, directory in enumerate(found)}
  spent = {key: one.flops - one.begin for key, one in found.items() if one.flops is not None}
  drawn = [found[key] for key in spent]
  if not drawn:
    return None
  bars = {
    'type': 'bar',
    'orientation': 'h',
    'y': [rows[stage.directory] for stage in drawn],
    'base': [stage.begin for stage in drawn],
    'x': [*spent.values()],
    'width': 0.5,
    'marker': {'color': [_colour(stage) for stage in drawn]},
    'hovertext': [
      '<br>'.join(f'{a}: {b}' for a, b in zip(_HEAD, _row(s), strict=True)) for s in drawn
    ],
    'hoverinfo': 'text',
    'showlegend': False,
  }
  links = {
    'type': 'scatter',
    'mode': 'lines',
    'line': {'color': '#5f6368', 'width': 1.2, 'dash': 'dot'},
    'hoverinfo': 'skip',
    'showlegend': False,
    'x': [],
    'y': [],
  }
  for stage in drawn:
    if stage.parent:
      links['x'] += [stage.begin, stage.begin, None]
      links['y'] += [rows[stage.parent], rows[stage.directory], None]
  return {
    'data': [links, bars],
    'layout': {
      'height': 130 + 48 * len(found),
      'xaxis': {
        'title': {'text': 'model FLOPs of all training'},
        'rangemode': 'tozero',
        **charts.FLOPS_AXIS,
        'nticks': 6,
      },
      'yaxis': {
        'title': {'text': 'stage'},
        'tickvals': [*rows.values()],
        'ticktext': [stage.name for stage in found.values()],
        'autorange': 'reversed',
        'showgrid': False,
        'zeroline': False,
      },
      'hovermode': 'closest',
      'bargap': 0.3,
      # A text above each bar, which has the whole width of the chart also on a phone.
      'annotations': [
        {
          'text': _bar_text(stage),
          'showarrow': False,
          'font': {'size': 11},
          'bgcolor': 'rgba(255, 255, 255, 0.8)',
          'xref': 'paper',
          'x': 0,
          'xanchor': 'left',
          'y': rows[stage.directory],
          'yshift': 20,
          'borderpad': 0,
        }
        for stage in drawn
      ],
    },
  }


def table(found: Mapping[str, Stage]) -> str:
  """Return the stages as a table of HTML."""
  return tables.table(_HEAD, [_row(stage) for stage in found.values()], texts=3)


_HEAD = (
  'stage',
  'begins by',
  'change',
  'parameters',
  'steps',
  'tokens of it',
  'FLOPs of it',
  'FLOPs of all',
  'time of it',
  'bits per byte',
  'validation loss',
)


def _row(stage: Stage) -> tuple[str, ...]:
  own = None if stage.flops is None else stage.flops - stage.begin
  tokens = None if stage.tokens is None else stage.tokens - stage.begin_tokens
  steps = tables.ABSENT if stage.step is None else f'{stage.begin_step:,} to {stage.step:,}'
  return (
    stage.name,
    stage.action or 'scratch',
    stage.grown or tables.ABSENT,
    tables.amount(_parameters(stage)),
    steps,
    tables.amount(tokens),
    tables.flops(own),
    tables.flops(stage.flops),
    tables.duration(stage.seconds),
    tables.loss(stage.bits),
    tables.loss(stage.loss),
  )


def _add_ancestors(found: dict[str, Stage], run: Record) -> None:
  """Add the sources of the growths of a run, and the runs that these were branches of."""
  parent = ('', '')  # directory and action
  begin, begin_tokens, begin_step = 0.0, 0.0, 0
  for entry in run.lineage:
    if entry.branch_of and entry.branch_of != parent[0]:
      branch = found.setdefault(entry.branch_of, Stage(entry.branch_of, _name(entry.branch_of)))
      branch.model = branch.model or entry.model
      _set_parent(branch, parent, begin, begin_tokens, begin_step)
      parent = (entry.branch_of, 'decay')
    stage = found.setdefault(entry.source, Stage(entry.source, _name(entry.source)))
    _set_parent(stage, parent, begin, begin_tokens, begin_step)
    if stage.flops is None or (stage.run is None and entry.flops > stage.flops):
      stage.model, stage.step = entry.model, entry.step
      stage.flops, stage.tokens = entry.flops, entry.tokens
    parent = (entry.source, entry.action)
    begin, begin_tokens, begin_step = entry.flops, entry.tokens, entry.first_step


def _add_run(found: dict[str, Stage], number: int, run: Record, directories: Sequence[str]) -> None:
  """Add a run of the page, with its own figures; `directories` are those of the runs."""
  directory = directories[number]
  source, action = '', ''
  if run.lineage:
    source, action = run.lineage[-1].source, run.lineage[-1].action
  if run.config and run.config.init_from:
    named = _locate(run.config.init_from, [source, *directories])
    if named != source:
      source, action = named, 'decay' if run.config.train.decay_from else 'continue'
  stage = found.setdefault(directory, Stage(directory, run.name))
  stage.name, stage.run, stage.step = run.name, number, run.last_step
  stage.model = run.config.model if run.config else stage.model
  stage.flops, stage.tokens = run.at('flops', run.last_step), run.at('tokens', run.last_step)
  _set_figures(stage, run.lines, run.last_step)
  if run.times:
    stage.seconds = sum(run.sessions.seconds.values())
  if source and source != directory:
    found.setdefault(source, Stage(source, _name(source)))
    begin = run.at('flops', run.first_step), run.at('tokens', run.first_step)
    _set_parent(stage, (source, action), begin[0] or 0.0, begin[1] or 0.0, run.first_step)


def _locate(source: str, known: Sequence[str]) -> str:
  """Return the work directory that `init_from` names.

  It may be relative to the folder where the run was started. So if it is not here, it is the one of
  the known directories that ends in the same names.
  """
  directory = paths.split_source(source)[0]
  absolute = str(paths.absolute(directory))
  if absolute in known or paths.exists(paths.parse_path(absolute)):
    return absolute
  tail = directory.parts
  ends = {one for one in known if one and PurePath(one).parts[-len(tail) :] == tail}
  return ends.pop() if len(ends) == 1 else absolute


def _set_parent(
  stage: Stage, parent: tuple[str, str], begin: float, tokens: float, step: int
) -> None:
  if parent[0] and not stage.parent and parent[0] != stage.directory:
    stage.parent, stage.action = parent
    stage.begin, stage.begin_tokens, stage.begin_step = begin, tokens, step


def _read_figures(stage: Stage) -> None:
  """Read the loss and the time of a stage that is not on the page, if its files are here."""
  try:
    directory = paths.parse_path(stage.directory)
    lines = metrics.read(directory)
    times = metrics.read_lines(directory / 'times.jsonl')
  except (UserError, OSError, ValueError):
    return
  lines = [line for line in lines if record.is_number(line['step'])]
  last = stage.step if stage.step is not None else float('inf')
  _set_figures(stage, lines, last)
  if times := [line for line in times if record.is_number(line['step']) and line['step'] <= last]:
    stage.seconds = sum(record.sessions(times).seconds.values())


def _set_figures(stage: Stage, lines: Sequence[Line], step: float) -> None:
  """Set the last figures of validation up to a step."""
  stage.bits, stage.loss = (charts.last_value(lines, name, step) for name in charts.MAIN)


def _in_order(found: Mapping[str, Stage]) -> Iterator[Stage]:
  """Yield each stage after the stage it begins from."""
  children: dict[str, list[Stage]] = {}
  for stage in found.values():
    children.setdefault(stage.parent if stage.parent in found else '', []).append(stage)

  def walk(directory: str) -> Iterator[Stage]:
    for stage in children.get(directory, ()):
      yield stage
      yield from walk(stage.directory)

  yield from walk('')


def _changes(before: ModelConfig, after: ModelConfig) -> str:
  """Return what a stage has more or less of than the one before it."""
  old, new = (
    {name: part.tokens for name, part in config_lib.pattentions(model).items()}
    for model in (before, after)
  )
  pairs = [(f'{name} tokens', old.get(name, 0), count) for name, count in new.items()]
  pairs += [('layers', before.depth, after.depth), ('width', before.width, after.width)]
  return ', '.join(f'{name} {a:,} → {b:,}' for name, a, b in pairs if a != b)


def _bar_text(stage: Stage) -> str:
  text = f'{tables.amount(_parameters(stage))} parameters'
  if stage.bits is not None:
    return f'{text}, {tables.loss(stage.bits)} bits per byte'
  return text if stage.loss is None else f'{text}, loss {tables.loss(stage.loss)}'


def _parameters(stage: Stage) -> int | None:
  return models.define(stage.model).count if stage.model else None


def _colour(stage: Stage) -> str:
  return _OTHER_COLOUR if stage.run is None else charts.colour(stage.run)


def _name(directory: str) -> str:
  return directory.rstrip('/').rpartition('/')[2]
