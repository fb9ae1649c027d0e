"""Heat maps of the weights: input tokens × parameter tokens."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenformer_jax.errors import UserError

if TYPE_CHECKING:
  from matplotlib.figure import Figure

SUFFIXES = ('.png', '.pdf', '.svg')

_PANEL_INCHES = 3.0  # wide
_ROW_INCHES = 0.13  # of an input token: room for its label
_HIGHEST = 20_000  # pixels


def draw(
  maps: Mapping[int, Mapping[str, np.ndarray]],
  names: Sequence[str],
  old: Mapping[str, int] | None = None,
) -> 'Figure':
  """A row of panels for each layer, a column for each kind.

  All panels of a kind have the same colours. They end where 1 of 1000 weights is larger, so that
  a few do not hide the others.

  Args:
    maps: by layer and kind, weights [T, N].
    names: of the input tokens.
    old: how many parameter tokens of each kind are old; a line parts them from the new ones.

  Raises:
    UserError: matplotlib is not installed.
  """
  try:
    from matplotlib.figure import Figure  # noqa: PLC0415
  except ImportError as error:
    raise UserError(
      'matplotlib, which draws the heat map, is not installed; run pip install -e ".[plot]"'
    ) from error
  kinds = list(next(iter(maps.values())))
  height = len(maps) * (_ROW_INCHES * len(names) + 0.6) + 0.8
  figure = Figure(
    figsize=(_PANEL_INCHES * len(kinds) + 0.8, height),
    dpi=min(150, _HIGHEST / height),
    layout='constrained',
  )
  panels = figure.subplots(len(maps), len(kinds), sharey=True, squeeze=False)
  for column, kind in enumerate(kinds):
    sizes = np.concatenate([np.abs(of_layer[kind]).ravel() for of_layer in maps.values()])
    limit = float(np.quantile(sizes, 0.999)) or 1.0
    for axes, (layer, of_layer) in zip(panels[:, column], maps.items(), strict=True):
      image = axes.imshow(
        of_layer[kind], cmap='RdBu_r', vmin=-limit, vmax=limit, aspect='auto', resample=True
      )
      axes.set_title(f'layer {layer}, {kind}', fontsize=9)
      axes.tick_params(labelsize=7, length=2)
      if old is not None and old[kind] < of_layer[kind].shape[1]:
        axes.axvline(old[kind] - 0.5, color='black', linewidth=0.8)
    panels[-1, column].set_xlabel('parameter token', fontsize=8)
    bar = figure.colorbar(image, ax=panels[:, column], location='bottom', extend='both', pad=0.01)
    bar.set_label('weight', fontsize=8)
    bar.ax.tick_params(labelsize=7)
  for axes in panels[:, 0]:
    # $ would start a formula.
    axes.set_yticks(range(len(names)), [name.replace('$', r'\$') for name in names], fontsize=7)
    axes.set_ylabel('input token', fontsize=8)
  return figure
