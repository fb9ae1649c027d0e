"""Draw heat maps of weights, input tokens × parameter tokens."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenformer_jax.errors import check_installed

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.colors import Normalize
  from matplotlib.figure import Figure

_COLOURS = 'RdBu_r'
_COLUMNS_PER_INCH = 64  # the most parameter tokens that a reader can distinguish
_ROW_INCHES = (0.13, 0.25)  # the least and the largest height of an input token's row
_LEAST_INCHES = 1.0  # the least height of a panel
_FRAME_INCHES = 0.5  # room above and below a panel for title and numbers
_BAR_INCHES = 0.65  # the height of the colour bars with their numbers
_LINE_INCHES = 12  # the width of a line of low panels; a line of high panels is wider
_LONGEST_NAME = 14  # the most characters of a label
_HIGHEST = 20_000  # the most pixels of the figure's height


def check() -> None:
  """Check, before any long computation, that heat maps can be drawn."""
  check_installed('matplotlib', 'draws the heat map', 'plot')


def draw(
  maps: Mapping[int, Mapping[str, np.ndarray]],
  names: Sequence[str],
  old: Mapping[int, Mapping[str, int]] | None = None,
) -> 'Figure':
  """Return a figure with a panel for each layer and Pattention of `maps`: weights [T, N].

  For a long text the panels of a layer stand side by side. For a short text they stand in several
  lines, to avoid a figure that is a thin strip. Each panel has a colour scale of its own, because
  the weights of a layer may be a hundredth of those of another. It ends at the 99.9th percentile of
  the panel's weights, which stands above the panel, and is finer for small weights (arsinh), so
  that a few large weights do not hide the others. If there are more parameter tokens than a reader
  can distinguish, a column shows the largest weight of several neighbours. A line separates `old`
  parameter tokens from new ones. New tokens whose weights are all zero, as after a growth, are
  hatched. `names` are labels of the input tokens.
  """
  check()
  from matplotlib.figure import Figure  # noqa: PLC0415

  widths = {
    layer: {name: _panel_width(map_TxN.shape[1]) for name, map_TxN in layer_maps.items()}
    for layer, layer_maps in maps.items()
  }
  row = float(np.clip(3 / len(names), *_ROW_INCHES))
  panel = max(_LEAST_INCHES, row * len(names)) + _FRAME_INCHES
  most = max(_LINE_INCHES, 2.5 * panel)
  rows = [(layer, line) for layer, own in widths.items() for line in _lines(own, most)]
  height = len(rows) * panel + _BAR_INCHES
  figure = Figure(
    figsize=(max(sum(widths[layer][name] for name in line) for layer, line in rows) + 1, height),
    dpi=min(150, _HIGHEST / height),
    layout='constrained',
  )
  grid = figure.add_gridspec(len(rows) + 1, 1, height_ratios=[*[panel] * len(rows), _BAR_INCHES])
  for number, (layer, line) in enumerate(rows):
    cells = grid[number].subgridspec(
      1, len(line), width_ratios=[widths[layer][name] for name in line]
    )
    for i, name in enumerate(line):
      axes, map_TxN = figure.add_subplot(cells[i]), maps[layer][name]
      _panel(axes, map_TxN, round(widths[layer][name] * _COLUMNS_PER_INCH))
      axes.set_title(f'layer {layer}, {name}', fontsize=9)
      if layer == list(maps)[-1]:
        axes.set_xlabel('parameter token', fontsize=8)
      if old is not None and old[layer][name] < map_TxN.shape[1]:
        _mark_new(axes, map_TxN, old[layer][name])
      if i == 0:
        axes.set_yticks(range(len(names)), [_drawable(label) for label in names])
        axes.set_ylabel('input token', fontsize=8)
      axes.tick_params(labelsize=7 if row < 0.2 else 9, length=2)
  _draw_bar(figure, figure.add_subplot(grid[-1]))
  return figure


def _draw_bar(figure: 'Figure', axes: 'Axes') -> None:
  """Draw the colour bar of all panels; its scale is a weight over the limit of its panel."""
  from matplotlib.cm import ScalarMappable  # noqa: PLC0415

  bar = figure.colorbar(
    ScalarMappable(_norm(1.0), _COLOURS),
    cax=axes,
    orientation='horizontal',
    extend='both',
    ticks=[-1, -0.5, -0.2, 0, 0.2, 0.5, 1],
    format='{x:g}',
  )
  bar.minorticks_off()
  axes.set_box_aspect(0.18 / figure.get_figwidth())  # 0.18 inches high
  axes.tick_params(labelsize=7)
  axes.set_xlabel('weight, as a share of the number above its panel', fontsize=8)


def _lines(widths: Mapping[str, float], most: float) -> list[list[str]]:
  """Return the Pattentions of a layer in lines, each at most `most` inches wide."""
  lines: list[list[str]] = [[]]
  for name, width in widths.items():
    if lines[-1] and sum(widths[k] for k in lines[-1]) + width > most:
      lines.append([])
    lines[-1].append(name)
  return lines


def limit(map_TxN: np.ndarray) -> float:
  """Return the weight at which the colour scale of a panel ends."""
  sizes = np.abs(map_TxN)
  return float(np.quantile(sizes, 0.999)) or float(sizes.max()) or 1.0


def _mark_new(axes: 'Axes', map_TxN: np.ndarray, old: int) -> None:
  """Separate new parameter tokens from old ones, and hatch the new ones if all weigh nothing."""
  axes.axvline(old - 0.5, color='black', linewidth=0.8)
  if label := axes.get_xlabel():
    axes.set_xlabel(f'{label}: old | new', fontsize=8)
  count = map_TxN.shape[1] - old
  if not map_TxN[:, old:].any():
    end = map_TxN.shape[1] - 0.5
    axes.axvspan(old - 0.5, end, facecolor='none', edgecolor='0.7', hatch='///', linewidth=0)
    axes.set_title(f'{axes.get_title()}: {count} new, weight 0', fontsize=9)


def _norm(limit: float) -> 'Normalize':
  """Return the scale of colours for weights from −limit to limit."""
  from matplotlib.colors import AsinhNorm  # noqa: PLC0415

  return AsinhNorm(limit / 5, vmin=-limit, vmax=limit)


def _panel(axes: 'Axes', map_TxN: np.ndarray, columns: int) -> None:
  """Draw a panel, with the end of its colour scale above it at the right."""
  pools, count = pooled(map_TxN, columns)
  end = limit(map_TxN)
  axes.set_title(f'±{end:.2g}', fontsize=8, loc='right')
  axes.imshow(
    pools,
    cmap=_COLOURS,
    norm=_norm(end),
    aspect='auto',
    interpolation='nearest',
    extent=(-0.5, count - 0.5, len(map_TxN) - 0.5, -0.5),
  )
  axes.set_xlim(right=map_TxN.shape[1] - 0.5)
  axes.set_yticks([])


def _panel_width(tokens: int) -> float:
  """Return the width in inches, which grows with the parameter tokens within bounds."""
  return min(max(2.5, tokens / _COLUMNS_PER_INCH), 8)


def pooled(map_TxN: np.ndarray, columns: int) -> tuple[np.ndarray, int]:
  """Pool neighbouring columns by their largest weight; return them and the tokens they cover."""
  length, tokens = map_TxN.shape
  each = -(-tokens // columns)
  count = -(-tokens // each) * each
  pools = np.pad(map_TxN, ((0, 0), (0, count - tokens))).reshape(length, -1, each)
  largest = np.abs(pools).argmax(axis=-1)[..., None]
  return np.take_along_axis(pools, largest, axis=-1)[..., 0], count


def _drawable(name: str) -> str:
  """Shorten a label, and replace characters that matplotlib's own font lacks by codes."""
  from matplotlib import font_manager  # noqa: PLC0415

  font = font_manager.get_font(font_manager.findfont('DejaVu Sans'))
  known = (c if font.get_char_index(ord(c)) else ascii(c)[1:-1] for c in name)
  text = ''.join(known)
  text = text if len(text) <= _LONGEST_NAME else f'{text[: _LONGEST_NAME - 1]}…'
  return text.replace('$', r'\$')  # A plain $ would start a formula.
