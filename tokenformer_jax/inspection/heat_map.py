"""Draw heat maps of weights, input tokens × parameter tokens."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenformer_jax.runs import pictures

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure
  from matplotlib.image import AxesImage

_WIDTH = 14  # inches, of the figure
_COLUMNS = 3  # panels side by side
_SHOWN = 320  # the most parameter tokens of a panel that a reader can distinguish
_ROW_INCHES = (0.13, 0.25)  # the least and the largest height of an input token's row
_LEAST_INCHES = 1.5  # the least height of a panel
_FRAME_INCHES = 0.5  # room above and below a panel for title and numbers
_LONGEST_NAME = 14  # the most characters of a label
_HIGHEST = 20_000  # the most pixels of the figure's height
_STYLE = pictures.styled('draws the heat map')
_COLOURS = (
  'Weights: red above zero, white zero, blue below. Each panel has a scale of its own, finer for '
  'small weights;\nit ends at the 99.9th percentile of their sizes, and larger ones have its '
  'darkest colours.'
)
_POOLED = ' Where tokens are many, a column is the largest weight of several neighbours.'
_GROWN = '\nA line parts old tokens, on its left, from those of the last growth.'


@_STYLE
def check() -> None:
  """Check, before any long computation, that heat maps can be drawn."""


@_STYLE
def draw(
  maps: Mapping[int, Mapping[str, np.ndarray]],
  names: Sequence[str],
  old: Mapping[int, Mapping[str, int]] | None = None,
) -> 'Figure':
  """Return a figure with a panel for each layer and Pattention of `maps`: weights [T, N].

  Each panel has a colour scale of its own, because the weights of a layer may be a hundredth of
  those of another. It ends at the 99.9th percentile of the panel's weights and is finer for small
  weights (arsinh), so that a few large weights do not hide the others. If there are more parameter
  tokens than a reader can distinguish, a column shows the largest weight of several neighbours. A
  line separates `old` parameter tokens from new ones. New tokens whose weights are all zero, as
  after a growth, are hatched. `names` are labels of the input tokens. The title says all this.
  """
  from matplotlib.figure import Figure  # noqa: PLC0415

  columns = min(_COLUMNS, max(map(len, maps.values())))
  lines = [
    (layer, [*own][begin : begin + columns])
    for layer, own in maps.items()
    for begin in range(0, len(own), columns)
  ]
  row = float(np.clip(3 / len(names), *_ROW_INCHES))
  height = len(lines) * (max(_LEAST_INCHES, row * len(names)) + _FRAME_INCHES) + _FRAME_INCHES
  figure = Figure((_WIDTH, height), dpi=min(150, _HIGHEST / height))
  grid = figure.subplots(len(lines), columns, squeeze=False)
  for line, (layer, kinds) in zip(grid, lines, strict=True):
    for axes, kind in itertools.zip_longest(line, kinds):
      if kind is None:
        axes.remove()
        continue
      map_TxN = maps[layer][kind]
      image, end = _panel(axes, map_TxN)
      bar = figure.colorbar(image, ax=axes, ticks=[-end, -end / 5, 0, end / 5, end])
      bar.ax.set_yticklabels([f'{tick:.2g}' for tick in bar.get_ticks()], fontsize=7)
      axes.set_title(f'layer {layer}, {kind}', fontsize=9)
      if old is not None and old[layer][kind] < map_TxN.shape[1]:
        _mark_new(axes, map_TxN, old[layer][kind])
    size = 7 if row < 0.2 else 9
    line[0].set_yticks(range(len(names)), [_drawable(label) for label in names], fontsize=size)
  shapes = [own.shape[1] for kinds in maps.values() for own in kinds.values()]
  caption = _COLOURS + _POOLED * (max(shapes) > _SHOWN) + _GROWN * (old is not None)
  figure.suptitle(caption, fontsize=9, x=0.01, horizontalalignment='left')
  figure.supxlabel('parameter token', fontsize=9)
  figure.supylabel('input token', fontsize=9)
  return figure


def _panel(axes: 'Axes', map_TxN: np.ndarray) -> tuple['AxesImage', float]:
  """Draw the weights of a panel, without labels; return their image and the end of its scale."""
  from matplotlib.colors import AsinhNorm  # noqa: PLC0415

  pools, count = pooled(map_TxN, _SHOWN)
  sizes = np.abs(map_TxN)
  end = float(np.quantile(sizes, 0.999)) or float(sizes.max()) or 1.0
  image = axes.imshow(
    pools,
    cmap='RdBu_r',
    norm=AsinhNorm(end / 5, vmin=-end, vmax=end),
    aspect='auto',
    interpolation='nearest',
    extent=(-0.5, count - 0.5, len(map_TxN) - 0.5, -0.5),
  )
  axes.set_xlim(right=map_TxN.shape[1] - 0.5)
  axes.grid(False)
  axes.spines[['top', 'right']].set_visible(True)
  axes.set_yticks([])
  axes.tick_params(labelsize=7, length=2)
  return image, end


def _mark_new(axes: 'Axes', map_TxN: np.ndarray, old: int) -> None:
  """Separate new parameter tokens from old ones, and hatch the new ones if all weigh nothing."""
  axes.axvline(old - 0.5, color='black', linewidth=0.8)
  title = f'{axes.get_title()}: {map_TxN.shape[1] - old} new'
  if not map_TxN[:, old:].any():
    title += ', weight 0'
    end = map_TxN.shape[1] - 0.5
    axes.axvspan(old - 0.5, end, facecolor='none', edgecolor='0.7', hatch='///', linewidth=0)
  axes.set_title(title, fontsize=9)


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
  text = ''.join(c if font.get_char_index(ord(c)) else ascii(c)[1:-1] for c in name)
  text = text if len(text) <= _LONGEST_NAME else f'{text[: _LONGEST_NAME - 1]}…'
  return text.replace('$', r'\$')  # A plain $ would start a formula.
