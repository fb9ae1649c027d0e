"""Draw the fitted laws: loss against compute, IsoFLOP parabolas, residuals, and grown chains."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenformer_jax.errors import UserError, check_installed
from tokenformer_jax.laws import formulas, growth
from tokenformer_jax.laws.analysis import Analysis, optimum
from tokenformer_jax.laws.report import number

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

_MOST_CURVES = 12  # sizes in one picture
# Numbers of a logarithmic axis in every decade, by the largest ratio of its values.
_TICKS = ((2, ()), (8, (1, 1.5, 2, 3, 5)), (30, (1, 2, 5)), (300, (1, 3)), (np.inf, (1,)))
_BAND = {'alpha': 0.15, 'linewidth': 0}


def check_folder(folder: Path) -> None:
  """Check, before any long computation, that pictures can be drawn and written.

  Raises:
    UserError: the folder is a file, or matplotlib is missing.
  """
  make_figure()
  if folder.exists() and not folder.is_dir():
    raise UserError(f'--pictures={folder} is a file; give the folder for the pictures')


def make_figure(**options: Any) -> 'Figure':
  """Return an empty figure with the given options of matplotlib.

  Raises:
    UserError: matplotlib is missing.
  """
  check_installed('matplotlib', 'draws the pictures', 'plot')
  from matplotlib.figure import Figure  # noqa: PLC0415

  return Figure(**{'figsize': (8, 5), 'dpi': 150, 'layout': 'constrained', **options})


def _colours(count: int) -> list[Any]:
  from matplotlib import colormaps  # noqa: PLC0415

  return [colormaps['viridis'](x) for x in np.linspace(0, 0.9, max(count, 2))[:count]]


def draw(analysis: Analysis, folder: Path, plan: growth.Plan | None, unit: str) -> list[Path]:
  """Write the pictures, and return their paths.

  Raises:
    UserError: the folder or a picture cannot be written, or matplotlib is missing.
  """
  figures = {
    'loss.png': loss_figure(analysis),
    'isoflop.png': isoflop_figure(analysis),
    'residuals.png': residuals_figure(analysis),
  }
  if plan:
    figures['growth.png'] = growth_figure(analysis, plan, unit)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
      figure.savefig(folder / name)
  except OSError as error:
    raise UserError(f'--pictures={folder} cannot be written: {error.strerror}') from error
  return [folder / name for name in figures]


def finish(axes: 'Axes', x: str, y: str) -> None:
  """Label the axes, and give them the style of all pictures of losses."""
  axes.set_xlabel(x)
  axes.set_ylabel(y)
  axes.grid(color='0.9', linewidth=0.8)
  axes.set_axisbelow(True)
  axes.spines[['top', 'right']].set_visible(False)


def plain_losses(axes: 'Axes') -> None:
  """Label a logarithmic axis of losses with plain numbers."""
  from matplotlib.ticker import MaxNLocator, NullFormatter  # noqa: PLC0415

  axes.set_yscale('log')
  axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
  axes.yaxis.set_major_formatter(lambda value, _: f'{value:g}')
  axes.yaxis.set_minor_formatter(NullFormatter())


def _plain_sizes(axes: 'Axes', values: np.ndarray) -> None:
  """Make the x axis logarithmic, with several numbers such as 30M however little it spans."""
  from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter  # noqa: PLC0415

  axes.set_xscale('log')
  span = values.max() / values.min()
  within_decade = next(subs for most, subs in _TICKS if span < most)
  even = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
  axes.xaxis.set_major_locator(LogLocator(subs=within_decade) if within_decade else even)
  axes.xaxis.set_major_formatter(EngFormatter(sep=''))
  axes.xaxis.set_minor_formatter(NullFormatter())


def loss_figure(analysis: Analysis) -> 'Figure':
  """Return the loss against compute: a curve and points for each size, and the frontier."""
  points, figure = analysis.points, make_figure()
  axes = figure.add_subplot()
  spent = points.spent(analysis.compute)
  sizes = np.unique(points.active)
  if points.is_dense and len(sizes) <= _MOST_CURVES:
    _draw_sizes(axes, analysis, sizes, spent)
  else:
    shown = axes.scatter(spent, points.loss, c=np.log10(points.active), cmap='viridis', s=14)
    figure.colorbar(shown, ax=axes, label='log₁₀ of parameters N')
  least = points.loss.min()
  if not formulas.flat(analysis.main.values):
    budgets = np.geomspace(spent.min(), spent.max() * 10, 100)
    optima = [optimum(analysis, flops) for flops in budgets]
    best = np.array([found.loss for found in optima])
    low, high = np.transpose([found.loss_interval for found in optima])
    axes.fill_between(budgets, low, high, color='k', **_BAND)
    axes.plot(budgets, best, 'k--', linewidth=1.4, label='frontier, with interval')
    least = min(best.min(), least)
  axes.set_xscale('log')
  plain_losses(axes)
  top = points.loss.max() * 1.05
  axes.set_ylim(max(least * 0.97, 1e-3), top)
  finish(axes, f'training FLOPs ({_named(analysis)})', 'loss (nats per token), at the end')
  axes.legend(frameon=False, fontsize=8)
  return figure


def _draw_sizes(axes: 'Axes', analysis: Analysis, sizes: np.ndarray, spent: np.ndarray) -> None:
  """Draw the points and the law's curve of each size."""
  points = analysis.points
  for size, colour in zip(sizes, _colours(len(sizes)), strict=True):
    mine = points.active == size
    label = f'N = {number(size)}'
    axes.plot(spent[mine], points.loss[mine], 'o', color=colour, markersize=4, label=label)
    x = np.geomspace(spent[mine].min() / 1.5, spent[mine].max() * 2, 100)
    y = formulas.loss(analysis.main.values, size, analysis.compute.tokens(size, x))
    axes.plot(x, y, color=colour, linewidth=1)


def _named(analysis: Analysis) -> str:
  return '6 N D' if analysis.compute.name == '6ND' else 'exact'


def isoflop_figure(analysis: Analysis) -> 'Figure':
  """Return the parabolas with their lowest points, and best sizes by three approaches."""
  figure = make_figure(figsize=(12, 5))
  parabolas = analysis.isoflop.parabolas
  left, right = figure.subplots(1, 2, width_ratios=(1, 1) if parabolas else (1, 4))
  for parabola, colour in zip(parabolas, _colours(len(parabolas)), strict=True):
    sizes, label = parabola.sizes, f'{parabola.flops:.2g}'
    left.plot(sizes, parabola.losses, 'o', color=colour, markersize=4, label=label)
    x = np.geomspace(sizes.min(), sizes.max(), 100)
    left.plot(x, np.polyval(parabola.coefficients, np.log(x)), color=colour, linewidth=1)
    if np.isfinite(parabola.best):
      bottom = np.polyval(parabola.coefficients, np.log(parabola.best))
      left.plot(parabola.best, bottom, 'kx', markersize=6)
  if parabolas:
    _plain_sizes(left, np.concatenate([parabola.sizes for parabola in parabolas]))
    finish(left, 'parameters N', 'loss (nats per token)')
    left.legend(title='FLOPs', frameon=False, fontsize=8, title_fontsize=8)
  else:
    left.set_axis_off()
    text = 'no parabolas:\nno budget lies between\nruns of four sizes'
    left.text(0.5, 0.5, text, ha='center', va='center', transform=left.transAxes)
  for name, found, marker in (
    ('1 envelope', analysis.envelope, '.'),
    ('2 IsoFLOP parabolas', analysis.isoflop, 'x'),
  ):
    if len(found.flops):
      every = max(1, len(found.flops) // 60)
      label = f'{name}: a = {found.a:.2f}'
      right.plot(found.flops[::every], found.sizes[::every], marker, label=label)
  if not formulas.flat(analysis.main.values):
    _draw_best_sizes(right, analysis)
  right.set_xscale('log')
  right.set_yscale('log')
  finish(right, f'training FLOPs ({_named(analysis)})', 'best size N*')
  if right.lines:
    right.legend(frameon=False, fontsize=8)
  return figure


def _draw_best_sizes(axes: 'Axes', analysis: Analysis) -> None:
  """Draw the best sizes by the law, with their interval."""
  spent = analysis.points.spent(analysis.compute)
  budgets = np.geomspace(spent.min(), spent.max() * 10, 50)
  optima = [optimum(analysis, flops) for flops in budgets]
  low, high = np.transpose([found.parameters_interval for found in optima])
  best = [found.parameters for found in optima]
  axes.plot(budgets, best, 'k--', label=f'3 the law: a = {analysis.exponent[0]:.2f}')
  if np.all(np.isfinite(high)) and np.all(low > 0):
    axes.fill_between(budgets, low, high, color='k', **_BAND)


def residuals_figure(analysis: Analysis) -> 'Figure':
  """Return the residuals against size and tokens."""
  points = analysis.points
  figure = make_figure(figsize=(10, 4))
  percent = 100 * np.expm1(analysis.main.residuals)
  ratio = np.log10(points.tokens / points.active)
  first, second = figure.subplots(1, 2, sharey=True)
  for axes, x, name in (
    (first, points.active, 'parameters N'),
    (second, points.tokens, 'tokens D'),
  ):
    shown = axes.scatter(x, percent, c=ratio, cmap='viridis', s=18)
    axes.axhline(0, color='k', linewidth=0.8)
    _plain_sizes(axes, x)
    finish(axes, name, 'measured loss over that of the law, % more' if axes is first else '')
  figure.colorbar(shown, ax=axes, label='log₁₀ of tokens a parameter')
  return figure


def growth_figure(analysis: Analysis, plan: growth.Plan, unit: str) -> 'Figure':
  """Return loss against cost of the chain, and of the best and the last size from scratch."""
  values, figure = analysis.main.values, make_figure()
  axes = figure.add_subplot()
  spent = np.cumsum([leg.cost for leg in plan.legs])
  xs, ys = [], []
  for i, leg in enumerate(plan.legs):
    begin = spent[i] - leg.cost
    above = plan.legs[i - 1].loss if i else None
    x, y = _leg_curve(values, leg, begin, above)
    axes.plot(x, y, linewidth=2.4, label=f'stage {i + 1}: {number(leg.parameters)}')
    xs.append(begin)
    ys.append(y[0])
  axes.plot(xs[1:], ys[1:], 'ko', markersize=5, label='growth')
  alone = {'best': plan.scratch, 'last': plan.scratch_last}
  if plan.scratch == plan.scratch_last:
    alone = {'best and last': plan.scratch}
  for (name, leg), colour in zip(alone.items(), ('0.3', '0.6'), strict=False):
    x, y = _leg_curve(values, leg, 0.0, None)
    axes.plot(
      x,
      y,
      '--',
      color=colour,
      linewidth=1.2,
      label=f'{name} size from scratch: {number(leg.parameters)}',
    )
  target, middle = plan.scratch.loss, plan.scratch.loss
  for ends, centre, colour in (
    (plan.cost, plan.total, 'C0'),
    (plan.scratch_cost, plan.scratch.cost, '0.3'),
  ):
    if np.all(np.isfinite(ends)):
      axes.plot(ends, [middle, middle], color=colour, linewidth=5, alpha=0.3)
    axes.plot(centre, target, 'D', color=colour, markersize=6)
    middle *= 0.997
  axes.set_xscale('log')
  plain_losses(axes)
  axes.set_ylim(target * 0.97, max(ys) * 1.1)
  finish(axes, f'{unit} in all (bars: intervals to the target)', 'loss that a decay would reach')
  axes.legend(frameon=False, fontsize=8)
  return figure


def _leg_curve(
  values: formulas.Values, leg: growth.Leg, begin: float, above: float | None
) -> tuple[np.ndarray, Sequence[float]]:
  """Return cost and loss along a leg, from the loss that it starts at."""
  price = leg.cost / leg.tokens
  if above is None:
    tokens = np.geomspace(leg.tokens / 200, leg.tokens, 100)
    ends_at = formulas.tokens_for_loss(values, leg.parameters, np.asarray(leg.loss))
    return begin + tokens * price, formulas.loss(
      values, leg.parameters, tokens * float(ends_at) / leg.tokens
    )
  ends_at = float(formulas.tokens_for_loss(values, leg.parameters, np.asarray(leg.loss)))
  starts_at = float(formulas.tokens_for_loss(values, leg.parameters, np.asarray(above)))
  part = np.linspace(0, 1, 100)
  tokens = starts_at + part * (ends_at - starts_at)
  return begin + part * leg.cost, formulas.loss(values, leg.parameters, tokens)
