"""Matplotlib figures in one style, for the pictures of laws, families and plans."""

from typing import TYPE_CHECKING, Any

from tokenformer_jax.errors import check_installed

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure


def make(**options: Any) -> 'Figure':
  """Return an empty figure with the given options of matplotlib.

  Raises:
    UserError: matplotlib is missing.
  """
  check_installed('matplotlib', 'draws the pictures', 'plot')
  from matplotlib.figure import Figure  # noqa: PLC0415

  return Figure(**{'figsize': (8, 5), 'dpi': 150, 'layout': 'constrained', **options})


def finish(axes: 'Axes', x: str, y: str) -> None:
  """Label the axes, and give them a grid."""
  axes.set_xlabel(x)
  axes.set_ylabel(y)
  axes.grid(color='0.9', linewidth=0.8)
  axes.set_axisbelow(True)
  axes.spines[['top', 'right']].set_visible(False)


def use_log_losses(axes: 'Axes') -> None:
  """Make the y axis logarithmic, with plain numbers of losses."""
  from matplotlib.ticker import MaxNLocator, NullFormatter  # noqa: PLC0415

  axes.set_yscale('log')
  axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
  axes.yaxis.set_major_formatter(lambda value, _: f'{value:g}')
  axes.yaxis.set_minor_formatter(NullFormatter())
