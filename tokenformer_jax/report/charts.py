"""Make the curves of a report: columns of figures, and of the steps on each axis."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokenformer_jax.report.record import Line, Record, digits, is_number
from tokenformer_jax.runs import curves, pictures

_AXES = {  # the label of each axis, in the order of the choice
  'steps': 'training step',
  'tokens': 'tokens of training',
  'images': 'images of training',
  'flops': 'model FLOPs of training',
  'hours': 'hours of this run’s processes',
}
_ALL_POINTS = 8000  # of a kind of figures, over all runs
_POINTS = (160, 1600)  # the least and the most of a run
_FIRST = ('loss', 'bits_per_byte', 'perplexity', 'accuracy')  # of the choices, after the main one
MAIN = {'eval/bits_per_byte': 'bits per byte', 'eval/loss': 'loss (nats)'}  # see `main_figure`
_EXTREMES = ('train/loss', 'train/grad_norm', 'eval/loss')

_FLOPS_AXIS = {'tickformat': '.3~g', 'nticks': 4}  # as `tables.flops` writes them

Figure = dict[str, Any]  # `data` and `layout` of plotly
Point = tuple[float, float, int]  # x, y and step


def data(records: Sequence[Record]) -> dict[str, Any]:
  """Return the curves of runs, their axes and the figures to choose from, for `page.js`."""
  tables = [_tables(run, len(records)) for run in records]
  counted = sorted({run.config.data.loss_unit if run.config else 'token' for run in records})
  return {
    'runs': [
      {'name': run.name, 'colour': _colour(i), 'tables': tables[i]} for i, run in enumerate(records)
    ],
    'axes': _AXES,
    'flops_axis': _FLOPS_AXIS,
    'choices': choices(tables, counted[::-1], main_figure(records)),
  }


def _tables(record: Record, runs: int) -> dict[str, dict[str, list[float | None]]]:
  """Return the columns of a run's figures: those of training and speed, and those of validation.

  Of a long run only some lines remain, those of the extremes of the loss and of the gradient among
  them. `runs` is the number of runs on the page.
  """
  most = int(np.clip(_ALL_POINTS / runs, *_POINTS))
  lines = {k: [line for line in record.lines if _names(line, k)] for k in ('train', 'eval')}
  return {k: _columns(record, thinned(some, most), k) for k, some in lines.items() if some}


def thinned(lines: Sequence[Line], most: int) -> list[Line]:
  """Return about `most` lines: of every stretch the first, and those with an extreme figure."""
  if len(lines) <= most:
    return [*lines]
  kept = {0, len(lines) - 1}
  for stretch in np.array_split(np.arange(len(lines)), max(1, most // 4)):
    indices = stretch.tolist()
    kept.add(indices[0])
    for name in _EXTREMES:
      values = [(lines[i][name], i) for i in indices if is_number(lines[i].get(name))]
      kept |= {min(values)[1], max(values)[1]} if values else set()
      # A loss that is not finite is a gap that must stay.
      kept |= {i for i in indices if name in lines[i] and lines[i][name] is None}
  return [lines[i] for i in sorted(kept)]


def choices(
  runs: Sequence[Mapping[str, Mapping[str, Any]]], counted: Sequence[str], main: str
) -> list[dict[str, Any]]:
  """Return the figures to choose from, with label and names; training and validation are one.

  `runs` holds the tables of each run. `counted` holds the units that losses are means over.
  `main` is the figure that comes first.
  """
  first = (main.removeprefix('eval/'), *_FIRST)
  names = {name for run in runs for table in run.values() for name in table if '/' in name}
  by_figure: dict[str, list[str]] = {}
  for name in sorted(names, key=lambda name: (name.startswith('eval/'), name)):
    split, _, figure = name.partition('/')
    by_figure.setdefault(f'{split}/{figure}' if split == 'perf' else figure, []).append(name)

  def rank(figure: str) -> tuple[int, str]:
    return (first.index(figure) if figure in first else len(first)), figure

  return [
    {
      'label': curves.metric_label(figure.rpartition('/')[2], counted),
      'group': 'speed and memory' if figure.startswith('perf/') else 'training and validation',
      'names': by_figure[figure],
    }
    for figure in sorted(by_figure, key=lambda figure: (figure.startswith('perf/'), rank(figure)))
  ]


def loss_by_flops(records: Sequence[Record], parents: Mapping[int, int]) -> Figure | None:
  """Return the main figure of validation of runs against all FLOPs of their models' training.

  The curve of a run that continues another one of the page (`parents`, by number) begins on it, and
  is dashed if it is a decay. None if no run has a loss and FLOPs, or there is only one plain run.
  """
  main = main_figure(records)
  points = [_points(record, main) for record in records]
  data = []
  for i, (record, shown) in enumerate(zip(records, points, strict=True)):
    if not shown:
      continue
    decays = bool(record.config and record.config.train.decay_from)
    parent = points[parents[i]] if i in parents else []
    before = [point for point in parent if point[2] <= record.first_step]
    if before and shown[0][2] > record.first_step:
      shown = [(*before[-1][:2], record.first_step), *shown]
    xs, ys, steps = ([*column] for column in zip(*shown, strict=True))
    data.append(
      {
        'type': 'scatter',
        'name': record.name,
        'x': xs,
        'y': ys,
        'customdata': steps,
        'mode': 'lines+markers',
        'line': {
          'color': _colour(i),
          'width': 1.5 if decays else 2,
          'dash': 'dash' if decays else 'solid',
        },
        'marker': {'size': [4] * (len(xs) - 1) + [9]},
        'hovertemplate': f'{MAIN[main]} %{{y:.4f}}<br>%{{x:.2e}} FLOPs, step %{{customdata:,}}',
      }
    )
  if not data or (len(data) == 1 and not any(record.lineage for record in records)):
    return None
  return {
    'data': data,
    'layout': {
      'height': 440,
      'xaxis': {'title': {'text': _AXES['flops']}, 'rangemode': 'tozero', **_FLOPS_AXIS},
      'yaxis': {'title': {'text': f'validation: {MAIN[main]}'}},
      'hovermode': 'closest',
    },
  }


def _colour(run: int) -> str:
  return pictures.COLOURS[run % len(pictures.COLOURS)]


def main_figure(records: Sequence[Record]) -> str:
  """Return the figure to compare runs by: bits per byte if all runs have it, or else the loss.

  Bits per byte do not depend on the tokenizer.
  """
  bits, loss = MAIN
  pairs = [(line, split) for run in records for line in run.lines for split in ('train', 'eval')]
  has_bits = [
    is_number(line.get(f'{split}/bits_per_byte'))
    for line, split in pairs
    if is_number(line.get(f'{split}/loss'))
  ]
  return bits if has_bits and all(has_bits) else loss


def last_value(lines: Sequence[Line], name: str, step: float) -> float | None:
  """Return the last value of a figure up to a step."""
  values = [line[name] for line in lines if is_number(line.get(name)) and line['step'] <= step]
  return values[-1] if values else None


def _points(record: Record, name: str) -> list[Point]:
  """Return FLOPs, a figure of validation and step of the evaluations of a run."""
  lines = thinned([line for line in record.lines if is_number(line.get(name))], 400)
  flops = [digits(record.at('flops', line['step'])) for line in lines]
  return [
    (x, line[name], line['step'])
    for x, line in zip(flops, lines, strict=True)
    if x is not None and x > 0
  ]


def _names(line: Line, kind: str) -> list[str]:
  """Return the names of a line's figures of a kind."""
  return [name for name in line if '/' in name and name.startswith('eval/') == (kind == 'eval')]


def _columns(record: Record, lines: Sequence[Line], kind: str) -> dict[str, list[float | None]]:
  steps = [line['step'] for line in lines]
  columns: dict[str, list[float | None]] = {
    axis: [digits(float(x)) for x in np.atleast_1d(along(np.array(steps, float)))]
    for axis, along in record.axes.items()
  }
  names = dict.fromkeys(name for line in lines for name in _names(line, kind))
  for name in names:
    values = [digits(line.get(name)) for line in lines]
    if any(value is not None for value in values):
      columns[name] = values
  return columns
