"""Read what a run has written, once: config, figures, samples, times and the newest checkpoint."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tokenformer_jax.config import Config
from tokenformer_jax.errors import UserError, counted
from tokenformer_jax.runs import batches as batches_lib
from tokenformer_jax.runs import checkpoint, curves, metrics, saved_config, wall_time
from tokenformer_jax.runs.checkpoint_meta import Lineage, Meta
from tokenformer_jax.runs.curves import is_number
from tokenformer_jax.storage import paths

LOST = 'lost'  # the time of steps that were made again after a crash

Line = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
  """The files of a run, read once."""

  name: str  # on the page
  directory: paths.Path
  lines: Sequence[Line]  # the figures, in the order of their steps; see `metrics.read`
  samples: Sequence[Line]  # the texts of its evaluations
  times: Sequence[Line]  # what its wall time went to; see `wall_time`
  config: Config | None  # None if neither `config.json` nor a checkpoint can be read
  meta: Meta | None  # of the newest checkpoint, None if there is none
  notes: Sequence[str]  # what could not be read, in sentences

  @property
  def last_step(self) -> int:
    """Return the step of the last figures."""
    return int(self.lines[-1]['step'])

  @property
  def first_step(self) -> int:
    """Return the step at which this work directory begins."""
    begin = [line['step'] for line in self.times if is_number(line['step'])]
    return int(min([*begin, self.lines[0]['step']] if begin else [0, self.last_step]))

  @property
  def lineage(self) -> Lineage:
    """Return the growths of the model, none without a checkpoint."""
    return self.meta.lineage if self.meta else ()

  @functools.cached_property
  def axes(self) -> dict[str, Callable[[Any], Any]]:
    """Return the functions from steps to `steps`, `tokens` or `images`, `flops` and `hours`.

    They take a number or an array. An axis that the run lacks the records for is absent.
    """
    axes: dict[str, Callable[[Any], Any]] = {'steps': lambda step: step}
    if self.config:
      batches = batches_lib.of_run(self.meta, self.config.data)
      corners = {0, self.first_step, self.last_step, *(entry.first for entry in batches)}
      steps = sorted(step for step in corners if 0 <= step <= self.last_step)
      if self.config.data.unit == 'tokens':
        count = functools.partial(batches_lib.all_tokens, self.lineage, batches)
        axes['tokens'] = _between(steps, [count(step) for step in steps])
      else:
        count = functools.partial(batches_lib.samples, batches)
        axes['images'] = _between(steps, [count(step) for step in steps])
      spent = functools.partial(batches_lib.all_flops, self.lineage, self.config, batches)
      begin = self.lineage[-1].first_step if self.lineage else 0
      trained = sorted({*(step for step in steps if step >= begin), begin})
      axes['flops'] = _between(trained, [spent(step) for step in trained])
    if hours := self._hours():
      axes['hours'] = _between([*hours], [*hours.values()])
    return axes

  def at(self, axis: str, step: float) -> float | None:
    """Return the value of a step on an axis, None if the run lacks it."""
    return float(self.axes[axis](step)) if axis in self.axes else None

  def _hours(self) -> dict[float, float]:
    """Return the hours that the processes of the run had worked, by step, ascending."""
    total, hours = 0.0, {}
    for line in self.times:
      total += sum(seconds_of(line).values())
      if is_number(line['step']):
        hours[line['step']] = total / 3600
    return dict(sorted(hours.items()))

  @functools.cached_property
  def sessions(self) -> 'Sessions':
    """Return the wall time of all processes of the run."""
    return sessions(self.times)

  def values(self, name: str) -> list[float]:
    """Return the finite values of a figure, in the order of their steps."""
    return [line[name] for line in self.lines if is_number(line.get(name))]


@dataclasses.dataclass(frozen=True)
class Sessions:
  """The wall time of all processes of a run."""

  seconds: Mapping[str, float]  # by kind (`wall_time.KINDS`), and `LOST`
  count: int  # of the processes
  pauses: float  # seconds between them, that of work after the last log point of each included
  devices: str  # of the last one


def read(run: str | paths.Path, name: str) -> Record:
  """Read a run, which may be in progress or have crashed."""
  directory = paths.parse_path(run)
  lines = curves.read(directory)
  notes, meta, config = [], None, None
  if not _read_lines(directory / 'metrics.jsonl', notes):
    notes.append(f'{directory}/metrics.jsonl is lost; its figures are those that other files have')
  try:
    meta = checkpoint.open_directory(directory).meta
  except UserError as error:
    if paths.exists(directory / 'checkpoints') and paths.steps(directory / 'checkpoints'):
      notes.append(str(error))
    else:
      notes.append(f'{directory} has no checkpoint, so its growths and its model are not shown')
  try:
    config = saved_config.read(directory / 'config.json', 'its axes are steps and hours only')
  except UserError as error:
    config = meta.config if meta else None
    if config is None:
      notes.append(str(error))
  last = lines[-1]['step']
  if meta and config and meta.step - last >= config.train.log_every:
    notes.append(
      f'{directory}/metrics.jsonl ends at step {last:,}, and the newest checkpoint is of step '
      f'{meta.step:,}'
    )
  samples = _read_lines(directory / 'samples.jsonl', notes, is_sample=True)
  times = _read_lines(directory / 'times.jsonl', notes)
  if not times:
    notes.append(f'{directory} has no times.jsonl, so its hours are not known')
  return Record(name, directory, lines, samples, times, config, meta, notes)


def _read_lines(path: paths.Path, notes: list[str], *, is_sample: bool = False) -> Sequence[Line]:
  """Return the lines of a file that can be used; add to the notes how many others there are."""
  try:
    content = path.read_bytes()
  except FileNotFoundError:
    return []
  lines = [
    line
    for line in metrics.parse_lines(content)
    if is_number(line['step']) and (not is_sample or isinstance(line.get('text'), str))
  ]
  if broken := sum(bool(line.strip()) for line in content.splitlines()) - len(lines):
    notes.append(f'{path}: {counted(broken, "line")} could not be read')
  return lines


def sessions(times: Sequence[Line]) -> Sessions:
  """Add up the lines of `times.jsonl`."""
  kept: list[tuple[float, dict[str, float]]] = []
  lost, pauses, count, devices, last = 0.0, 0.0, 0, '', None
  for line in times:
    step, seconds = line['step'], seconds_of(line)
    if not is_number(step):
      continue
    if 'devices' in line:  # A process begins.
      count, devices = count + 1, str(line['devices'])
      lost += sum(sum(spent.values()) for at, spent in kept if at > step)
      kept = [(at, spent) for at, spent in kept if at <= step]
      if last is not None and is_number(line.get('time')):
        pauses += max(0.0, line['time'] - sum(seconds.values()) - last)
    kept.append((step, seconds))
    last = line['time'] if is_number(line.get('time')) else last
  total = {kind: sum(spent.get(kind, 0.0) for _, spent in kept) for kind in wall_time.KINDS}
  return Sessions({**total, LOST: lost}, count, pauses, devices)


def seconds_of(line: Line) -> dict[str, float]:
  """Return the seconds in a line of `times.jsonl` by kind."""
  return {
    kind: line[kind] for kind in wall_time.KINDS if is_number(line.get(kind)) and line[kind] > 0
  }


def digits(value: Any) -> float | None:
  """Return a value from a file with six digits, None for anything but a finite number."""
  return float(f'{value:.6g}') if is_number(value) else None


def _between(steps: Sequence[float], values: Sequence[float]) -> Callable[[Any], Any]:
  """Return the linear interpolation between some steps."""
  return lambda step: np.interp(step, steps, values)
