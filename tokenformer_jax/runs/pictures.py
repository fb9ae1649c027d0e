"""The style of every picture: `plot`, `laws`, `inspect`, the notebooks and the experiments."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from tokenformer_jax.errors import check_installed

XAxis = Literal['steps', 'examples', 'tokens', 'flops']

COLOURS = (
  *('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000'),  # Okabe and Ito
  *('#7F7F7F', '#8C564B', '#17BECF'),
)
STYLE: Any = {  # of matplotlib
  'axes.axisbelow': True,
  'axes.grid': True,
  'axes.prop_cycle': f'cycler("color", {list(COLOURS)})',
  'axes.spines.right': False,
  'axes.spines.top': False,
  'figure.constrained_layout.use': True,
  'figure.dpi': 150,
  'figure.figsize': (8, 4.5),
  'grid.color': '0.9',
  'legend.frameon': False,
  'lines.linewidth': 1.6,
  'lines.markersize': 4.0,
}


@contextlib.contextmanager
def styled(use: str = 'draws the picture') -> Iterator[None]:
  """Draw in this style; also a decorator.

  Raises:
    UserError: matplotlib is not installed, which `use` names the need for.
  """
  check_installed('matplotlib', use, 'plot')
  import matplotlib  # noqa: PLC0415

  with matplotlib.rc_context(STYLE):
    yield
