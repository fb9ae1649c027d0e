"""Heat maps of the weights: input tokens × parameter tokens."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenformer_jax.errors import UserError

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure
  from matplotlib.image import AxesImage

SUFFIXES = ('.png', '.pdf', '.svg')

_COLUMNS_PER_INCH = 64  # parameter tokens that can be told apart
_ROW_INCHES = 0.13  # of an input token: room for its label
_LONGEST_NAME = 14  # characters of a label
_HIGHEST = 20_000  # pixels


def draw(
  maps: Mapping[int, Mapping[str, np.ndarray]],
  names: Sequence[str],
  old: Mapping[str, int] | None = None,
) -> 'Figure':
  """A row of panels for each layer, a column for each kind.

  All panels of a kind have the same colours. They end where 1 of 1000 weights is larger, and are
  finer for small weights (arsinh), so that a few large ones do not hide the others. Where there are
  more parameter tokens than can be told apart, a column is several neighbours, and shows the
  largest weight of them.

  Args:
    maps: by layer and kind, weights [T, N].
    names: of the input tokens.
    old: how many parameter tokens of each kind are old; a line parts them from the new ones.

  Raises:
    UserError: matplotlib is not installed.
  """
  try:
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415
  except ImportError as error:
    raise UserError(
      'matplotlib, which draws the heat map, is not installed; run pip install -e ".[plot]"'
    ) from error
  kinds = list(next(iter(maps.values())))
  widths = [_panel_width(of_layer.shape[1]) for of_layer in next(iter(maps.values())).values()]
  row = _ROW_INCHES * len(names) + 0.5
  height = len(maps) * row + 0.7
  figure = Figure(
    figsize=(sum(widths) + 1, height), dpi=min(150, _HIGHEST / height), layout='constrained'
  )
  heights = [*[row] * len(maps), 0.12]
  panels = figure.subplots(len(heights), len(kinds), width_ratios=widths, height_ratios=heights)
  panels = panels.reshape(len(heights), len(kinds))
  for kind, width, (*column, bar) in zip(kinds, widths, panels.T, strict=True):
    sizes = np.concatenate([np.abs(of_layer[kind]).ravel() for of_layer in maps.values()])
    limit = float(np.quantile(sizes, 0.999)) or 1.0
    label = 'parameter token'
    for axes, (layer, of_layer) in zip(column, maps.items(), strict=True):
      image = _panel(axes, of_layer[kind], limit, round(width * _COLUMNS_PER_INCH))
      axes.set_title(f'layer {layer}, {kind}', fontsize=9)
      if old is not None and old[kind] < of_layer[kind].shape[1]:
        axes.axvline(old[kind] - 0.5, color='black', linewidth=0.8)
        label = 'parameter token: old | new'
    column[-1].set_xlabel(label, fontsize=8)
    bar_options = {'orientation': 'horizontal', 'extend': 'both', 'format': '{x:g}'}
    figure.colorbar(image, cax=bar, ticks=MaxNLocator(5), **bar_options)
    bar.tick_params(labelsize=7)
    bar.set_xlabel('weight', fontsize=8)
  for axes in panels[:-1, 0]:
    axes.set_yticks(range(len(names)), [_drawable(name) for name in names])
    axes.set_ylabel('input token', fontsize=8)
  return figure


def _panel(axes: 'Axes', map_TxN: np.ndarray, limit: float, columns: int) -> 'AxesImage':
  from matplotlib.colors import AsinhNorm  # noqa: PLC0415

  pooled, count = _pooled(map_TxN, columns)
  image = axes.imshow(
    pooled,
    cmap='RdBu_r',
    norm=AsinhNorm(limit / 5, vmin=-limit, vmax=limit),
    aspect='auto',
    interpolation='nearest',
    extent=(-0.5, count - 0.5, len(map_TxN) - 0.5, -0.5),
  )
  axes.set_xlim(right=map_TxN.shape[1] - 0.5)
  axes.set_yticks([])
  axes.tick_params(labelsize=7, length=2)
  return image


def _panel_width(tokens: int) -> float:
  """Inches: more for more parameter tokens, within reason."""
  return min(max(2.5, tokens / _COLUMNS_PER_INCH), 8)


def _pooled(map_TxN: np.ndarray, columns: int) -> tuple[np.ndarray, int]:
  """At most so many columns, each of neighbours the largest weight, and how many they stand for."""
  length, tokens = map_TxN.shape
  each = -(-tokens // columns)
  count = -(-tokens // each) * each
  groups = np.pad(map_TxN, ((0, 0), (0, count - tokens))).reshape(length, -1, each)
  largest = np.abs(groups).argmax(axis=-1)[..., None]
  return np.take_along_axis(groups, largest, axis=-1)[..., 0], count


def _drawable(name: str) -> str:
  """A label that is not too long, and of characters that matplotlib's own font has."""
  from matplotlib import font_manager  # noqa: PLC0415

  font = font_manager.get_font(font_manager.findfont('DejaVu Sans'))
  known = (c if font.get_char_index(ord(c)) else ascii(c)[1:-1] for c in name)
  text = ''.join(known)
  text = text if len(text) <= _LONGEST_NAME else f'{text[: _LONGEST_NAME - 1]}…'
  return text.replace('$', r'\$')  # which would start a formula
