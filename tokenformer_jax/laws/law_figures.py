"""Draw a fitted law: loss against compute, and residuals."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import formulas
from tokenformer_jax.laws.analysis import Analysis, optimum
from tokenformer_jax.laws.report import number
from tokenformer_jax.runs import pictures

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

_MOST_CURVES = 12  # sizes in one picture
_STYLE = pictures.styled('draws the pictures')


@_STYLE
def check_folder(folder: Path) -> None:
  """Check, before any long computation, that pictures can be drawn and written."""
  if folder.exists() and not folder.is_dir():
    raise UserError(f'--pictures={folder} is a file; give the folder for the pictures')


def write(analysis: Analysis, folder: Path) -> list[Path]:
  """Write the pictures, and return their paths."""
  drawn = {'loss.png': draw_losses(analysis), 'residuals.png': draw_residuals(analysis)}
  try:
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
      figure.savefig(folder / name)
  except OSError as error:
    raise UserError(f'--pictures={folder} cannot be written: {error.strerror}') from error
  return [folder / name for name in drawn]


@_STYLE
def draw_losses(analysis: Analysis) -> 'Figure':
  """Return the loss against compute: a curve and points for each size, and the frontier."""
  from matplotlib.figure import Figure  # noqa: PLC0415

  points, figure = analysis.points, Figure()
  axes, spent = figure.add_subplot(), points.flops
  sizes = np.unique(points.parameters)
  if len(sizes) <= _MOST_CURVES:
    _draw_sizes(axes, analysis, sizes)
  else:
    shown = axes.scatter(spent, points.loss, c=np.log10(points.parameters), cmap='viridis', s=14)
    figure.colorbar(shown, ax=axes, label='log₁₀ of parameters N')
  least = points.loss.min()
  if not formulas.flat(analysis.fit.values):
    budgets = np.geomspace(spent.min(), spent.max() * 10, 100)
    optima = [optimum(analysis, budget) for budget in budgets]
    best = np.array([one.loss for one in optima])
    low, high = np.transpose([one.loss_interval for one in optima])
    axes.fill_between(budgets, low, high, color='k', alpha=0.15, linewidth=0)
    axes.plot(budgets, best, 'k--', linewidth=1.4, label='frontier, with interval')
    least = min(best.min(), least)
  axes.set_xscale('log')
  _use_log_losses(axes)
  axes.set_ylim(max(least * 0.97, 1e-3), points.loss.max() * 1.05)
  axes.set(xlabel='training FLOPs (6 N D)', ylabel='loss (nats per token), at the end')
  axes.legend(fontsize=8)
  return figure


def _draw_sizes(axes: 'Axes', analysis: Analysis, sizes: np.ndarray) -> None:
  """Draw the points and the law's curve of each size."""
  from matplotlib import colormaps  # noqa: PLC0415

  points = analysis.points
  colours = colormaps['viridis'](np.linspace(0, 0.9, len(sizes)))
  for size, colour in zip(sizes, colours, strict=True):
    mine, label = points.parameters == size, f'N = {number(size)}'
    x, y = points.flops[mine], points.loss[mine]
    axes.plot(x, y, 'o', color=colour, label=label)
    curve = np.geomspace(x.min() / 1.5, x.max() * 2, 100)
    losses = formulas.loss(analysis.fit.values, size, curve / (6 * size))
    axes.plot(curve, losses, color=colour, linewidth=1)


@_STYLE
def draw_residuals(analysis: Analysis) -> 'Figure':
  """Return the residuals against size and tokens."""
  from matplotlib.figure import Figure  # noqa: PLC0415

  points, figure = analysis.points, Figure((10, 4))
  percent = 100 * np.expm1(analysis.fit.residuals)
  ratio = np.log10(points.tokens / points.parameters)
  first, second = figure.subplots(1, 2, sharey=True)
  panels = ((first, points.parameters, 'parameters N'), (second, points.tokens, 'tokens D'))
  for axes, x, name in panels:
    axes.scatter(x, percent, c=ratio, cmap='viridis', s=18)
    axes.axhline(0, color='k', linewidth=0.8)
    axes.set(xscale='log', xlabel=name)
  first.set_ylabel('measured loss over that of the law, % more')
  figure.colorbar(second.collections[0], ax=second, label='log₁₀ of tokens a parameter')
  return figure


def _use_log_losses(axes: 'Axes') -> None:
  """Make the y axis logarithmic, with plain numbers of losses."""
  from matplotlib.ticker import MaxNLocator, NullFormatter  # noqa: PLC0415

  axes.set_yscale('log')
  axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
  axes.yaxis.set_major_formatter(lambda value, _: f'{value:g}')
  axes.yaxis.set_minor_formatter(NullFormatter())
