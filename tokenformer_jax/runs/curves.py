"""Read the points of a run's metric, and draw the figure of the command `plot`."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenformer_jax.config import Config
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs import batches as batches_lib
from tokenformer_jax.runs import checkpoint, metrics, pictures, saved_config
from tokenformer_jax.runs.checkpoint_meta import Lineage
from tokenformer_jax.storage import paths

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.axis import Axis
  from matplotlib.figure import Figure

_UNITS = {
  'loss': 'loss (nats per {one})',
  'bits_per_byte': 'bits per byte',
  'accuracy': 'accuracy (fraction of {many})',
  'top5_accuracy': 'top-5 accuracy (fraction of images)',
  'calibration_error': 'expected calibration error',
  'learning_rate': 'learning rate',
  'grad_norm': 'gradient norm',
  'tokens_per_second': 'tokens per second',
  'images_per_second': 'images per second',
  'step_seconds': 'seconds per step',
  'mfu': 'MFU (fraction of peak)',
}
_FALLING = ('loss', 'perplexity', 'bits_per_byte')  # metrics that fall steeply at first
_START = 0.1  # A curve that begins within this fraction of its steps gets a logarithmic x axis.
# Labels of a logarithmic axis in every decade, by the largest ratio of the axis's values.
_TICKS = (
  (2.5, ()),  # linear steps
  (20, (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)),
  (300, (1, 2, 5)),
  (math.inf, (1, 3)),
)
_VALIDATION = {'linestyle': 'none', 'marker': 'o', 'markersize': 5}


def curves(source: str | paths.Path, x: str, y: str) -> dict[str, tuple[list[float], list[float]]]:
  """Return the points of a metric, and of the same metric on the validation data.

  Args:
    source: a work directory.
    x: `steps`, or the `examples` (sequences or images), `tokens` or model `flops` of training. The
      FLOPs of a grown run are those of all stages, each at its own size.
    y: the metric's name. For `train/NAME`, `eval/NAME` is returned as well if the run has it.

  Returns:
    Values along x and y by metric name; NaN for a value that was not finite.
  """
  run = paths.parse_path(source)
  lines, along = read(run), _axis(run, x)
  names = {name for line in lines for name in line if name != 'step'}
  if y not in names:
    raise UserError(f'{run} has no metric {y!r}; it has {", ".join(sorted(names))}')
  points_by_name = {}
  for name in (y, y.replace('train/', 'eval/')):
    points = [(along(line['step']), line[name]) for line in lines if name in line]
    if points:
      xs, ys = zip(*points, strict=True)
      points_by_name[name] = [*xs], [value if is_number(value) else math.nan for value in ys]
  if not any(map(is_number, points_by_name[y][1])):
    raise UserError(f'{run} has no finite value of {y}, so there is nothing to draw')
  return points_by_name


def read(run: paths.Path) -> list[dict[str, float]]:
  """Return the lines of a run's metrics.jsonl, at least one."""
  try:
    lines = metrics.read(run)
  except (paths.errors(run), ValueError, RecursionError) as error:
    raise UserError(
      f'{run} is not a run: its metrics.jsonl cannot be read ({paths.reason(error)}); give the '
      '--workdir of a training run'
    ) from error
  if not lines:
    raise UserError(f'{run} has no figures yet; the first come after config.train.log_every steps')
  if not all(is_number(line['step']) for line in lines):
    raise UserError(f'{run} is not a run: a step in its metrics.jsonl is not a number; give a run')
  return lines


def is_number(value: Any) -> bool:
  """Return whether a value from a file is a finite number."""
  return type(value) in (int, float) and math.isfinite(value)


def _axis(run: paths.Path, x: str) -> Callable[[float], float]:
  """Return the function from a step of a run to its value on the x axis."""
  if x == 'steps':
    return lambda step: step
  config = saved_config.read(run / 'config.json', f'use {arg.x}=steps', needed_by=f'{arg.x}={x}')
  lineage, batches = _past(run, config, x)
  if x == 'flops':
    return functools.partial(batches_lib.all_flops, lineage, config, batches)
  if x == 'examples':
    return lambda step: batches_lib.samples(batches, step)
  if config.model.kind != 'lm':
    raise UserError(f'{run} trains on images, which have no tokens; use {arg.x}=examples')
  return lambda step: batches_lib.tokens(batches, step)


def _past(run: paths.Path, config: Config, x: str) -> tuple[Lineage, batches_lib.History]:
  """Return the lineage and the batches of a run by its newest checkpoint; print assumptions."""
  try:
    meta = checkpoint.open_directory(run).meta
  except UserError:
    if config.init_from and x == 'flops':
      messages.say(
        f'{run} has no checkpoint that tells of the training before {config.init_from}; its FLOPs '
        'are counted at the size of this run'
      )
    return (), batches_lib.of_run(None, config.data)
  return meta.lineage, batches_lib.of_run(meta, config.data)


@pictures.styled('draws the curves')
def draw(sources: Sequence[str | paths.Path], x: str, y: str) -> 'Figure':
  """Return a figure with one colour for each run: `train/…` as a line, and `eval/…` as points.

  A metric that falls steeply at first, such as a loss, gets logarithmic axes, which show the whole
  curve and keep its end readable.
  """
  from matplotlib.figure import Figure  # noqa: PLC0415

  runs = [*dict.fromkeys(map(paths.parse_path, sources))]
  drawn = {name: curves(run, x, y) for name, run in zip(run_names(runs), runs, strict=True)}
  figure = Figure()
  axes = figure.add_subplot()
  for i, (name, by_metric) in enumerate(drawn.items()):
    colour = pictures.COLOURS[i % len(pictures.COLOURS)]
    for metric, (xs, ys) in by_metric.items():
      if metric == y:
        marker = 'o' if metric.startswith('eval/') or len(xs) == 1 else None
        axes.plot(xs, ys, color=colour, marker=marker, label=name)
      else:
        axes.plot(xs, ys, color=colour, clip_on=False, **_VALIDATION)
  if any(len(by_metric) > 1 for by_metric in drawn.values()):
    axes.plot([], [], color='grey', label='validation', **_VALIDATION)
  _finish(axes, x, y, sorted({_counted(run) for run in runs}, reverse=True))
  return figure


def _counted(run: paths.Path) -> str:
  """Return the unit that the loss of a run is a mean over; `token` without a config."""
  try:
    return saved_config.read(run / 'config.json', '').data.loss_unit
  except UserError:
    return 'token'


def run_names(runs: Sequence[paths.Path]) -> list[str]:
  """Return the directories' names, or their whole paths if two runs have the same name."""
  names = [run.resolve().name for run in runs]
  return names if len(set(names)) == len(names) else [str(run) for run in runs]


def _finish(axes: 'Axes', x: str, y: str, counted: Sequence[str]) -> None:
  """Set labels, scales and limits; `counted` holds the units that the losses are means over."""
  from matplotlib.ticker import EngFormatter  # noqa: PLC0415

  split, _, name = y.rpartition('/')
  falls = name in _FALLING and all(value > 0 for _, ys in _points(axes) for value in ys)
  from_start = all(0 < xs[0] <= _START * xs[-1] for xs, _ in _points(axes))
  if x == 'flops':
    axes.set_xscale('log')
    axes.set_xlabel('model FLOPs of training')
  else:
    axes.set_xlabel(f'training {x}')
    if falls and from_start:
      axes.set_xscale('log')
      _label_plainly(axes.xaxis, [at for xs, _ in _points(axes) for at in xs])
    else:
      axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=''))
  if falls:
    axes.set_yscale('log')
    _label_plainly(axes.yaxis, [value for _, ys in _points(axes) for value in ys])
  label = metric_label(name, counted)
  axes.set_ylabel(f'validation {label}' if split == 'eval' else label)
  axes.legend()


def metric_label(name: str, counted: Sequence[str]) -> str:
  """Return the label of a metric, given its name without `train/` or another prefix.

  `counted` holds the units that the losses are means over: see `DataConfig.loss_unit`.
  """
  return _UNITS.get(name, name.replace('_', ' ')).format(
    one=' or '.join(counted), many=' or '.join(f'{unit}s' for unit in counted)
  )


def _points(axes: 'Axes') -> list[tuple[list[float], list[float]]]:
  """Return the finite points of every line that has any."""
  lines = [np.asarray(line.get_xydata(), float) for line in axes.lines]
  finite = [points[np.isfinite(points[:, 1])] for points in lines]
  return [(points[:, 0].tolist(), points[:, 1].tolist()) for points in finite if len(points)]


def _label_plainly(axis: 'Axis', values: list[float]) -> None:
  """Label a logarithmic axis with plain numbers, in linear steps if the values span little."""
  from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter  # noqa: PLC0415

  span = max(values) / min(values)
  within_decade = next(subs for most, subs in _TICKS if span < most)
  even = MaxNLocator(8, steps=[1, 2, 2.5, 5, 10])
  axis.set_major_locator(LogLocator(subs=within_decade) if within_decade else even)
  axis.set_major_formatter(lambda value, position: f'{value:,g}')
  axis.set_minor_formatter(NullFormatter())
