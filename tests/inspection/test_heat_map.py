"""Heat maps show the weights, where they are, and what is old."""

import sys

import numpy as np
import pytest
from PIL import Image

from tokenformer_jax.errors import UserError
from tokenformer_jax.inspection import heat_map

NAMES = ['⟨end⟩', '$x', '你', 'a' * 30, '⏎']


def _maps(**counts: int) -> dict[int, dict[str, np.ndarray]]:
  rng = np.random.default_rng(0)
  return {
    layer: {kind: rng.normal(size=(5, n)).astype(np.float32) for kind, n in counts.items()}
    for layer in (1, 4)
  }


def test_every_layer_and_kind_has_its_panel(tmp_path):
  maps = _maps(query=7, ffn=20)
  figure = heat_map.draw(maps, NAMES)
  panels = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
  assert list(panels) == ['layer 1, query', 'layer 1, ffn', 'layer 4, query', 'layer 4, ffn']
  for title, axes in panels.items():
    layer, kind = title.removeprefix('layer ').split(', ')
    np.testing.assert_array_equal(axes.images[0].get_array(), maps[int(layer)][kind])
    assert not axes.lines, 'a model that did not grow has no new tokens'
  labels = [label.get_text() for label in panels['layer 1, query'].get_yticklabels()]
  assert labels == ['⟨end⟩', r'\$x', r'\u4f60', 'a' * 13 + '…', '⏎']
  figure.savefig(tmp_path / 'heat.png')
  assert np.std(np.asarray(Image.open(tmp_path / 'heat.png').convert('L'))) > 10, 'it is blank'


def test_each_panel_has_a_scale_of_its_own():
  maps = _maps(proj=50)
  maps[1]['proj'] /= 100
  for axes in (axes for axes in heat_map.draw(maps, NAMES).axes if axes.get_title()):
    image = axes.images[0]
    end = float(axes.get_title(loc='right').removeprefix('±'))
    assert end == pytest.approx(np.quantile(np.abs(image.get_array().data), 0.999), rel=0.05)
    assert image.norm.vmax == pytest.approx(end, rel=0.05)


def test_a_line_parts_new_tokens_from_old_ones():
  figure = heat_map.draw(
    _maps(query=7, ffn=20), NAMES, {1: {'query': 7, 'ffn': 12}, 4: {'query': 7, 'ffn': 12}}
  )
  lines = {axes.get_title(): [line.get_xdata()[0] for line in axes.lines] for axes in figure.axes}
  assert lines['layer 4, ffn'] == [11.5], 'the last old token is 11'
  assert lines['layer 4, query'] == [], 'this kind did not grow'


def test_new_tokens_without_a_weight_are_hatched_and_counted():
  """A blank half of a picture looks like one that could not be drawn."""
  maps = _maps(query=7, ffn=20)
  for of_layer in maps.values():
    of_layer['ffn'][:, 12:] = 0
  figure = heat_map.draw(maps, NAMES, {1: {'query': 3, 'ffn': 12}, 4: {'query': 3, 'ffn': 12}})
  panels = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
  grown = panels['layer 4, ffn: 8 new, weight 0']
  (hatched,) = [patch for patch in grown.patches if patch.get_hatch()]
  left, right = hatched.get_extents().transformed(grown.transData.inverted()).intervalx
  assert (round(left, 3), round(right, 3)) == (11.5, 19.5), 'something else is hatched'
  assert not panels['layer 4, query'].patches, 'new tokens that have weights are hatched'


@pytest.mark.parametrize('tokens', [2, 40])
def test_a_picture_is_never_a_thin_strip(tmp_path, tokens):
  """All kinds of the default model, for texts from one token to what the command shows at most."""
  rng = np.random.default_rng(0)
  counts = {'query': 192, 'key': 192, 'value': 192, 'proj': 192, 'ffn': 768}
  maps = {0: {kind: rng.normal(size=(tokens, n)) for kind, n in counts.items()}}
  figure = heat_map.draw(maps, ['token'] * tokens)
  figure.draw_without_rendering()
  width, height = figure.get_size_inches()
  assert width < 4 * height, f'{width:.0f} × {height:.0f} inches: on a screen nothing can be read'
  panels = [axes for axes in figure.axes if axes.get_title()]
  sizes = [
    axes.get_window_extent().transformed(figure.dpi_scale_trans.inverted()) for axes in panels
  ]
  assert min(size.height for size in sizes) > 0.6 and min(size.width for size in sizes) > 1.5
  assert min(size.height for size in sizes) / tokens > 0.11, 'labels overlap'
  for i, a in enumerate(sizes):
    assert not any(a.overlaps(b) for b in sizes[i + 1 :]), 'panels overlap'


def test_many_tokens_share_columns_by_their_largest_weight():
  map_TxN = np.zeros((2, 3000), np.float32)
  map_TxN[0, 1700], map_TxN[1, 1701] = -5, 3
  figure = heat_map.draw({0: {'ffn': map_TxN}}, ['a', 'b'])
  image = figure.axes[0].images[0]
  columns = image.get_array()
  assert columns.shape[1] <= 600, 'columns are narrower than a pixel'
  assert (columns.min(), columns.max()) == (-5, 3), 'a large weight is averaged away'
  left, right, _, _ = image.get_extent()
  at = left + (np.argmin(columns[0]) + 0.5) * (right - left) / columns.shape[1]
  assert abs(at - 1700) < 6, 'it is drawn at another parameter token'


def test_a_map_of_zeros_can_be_drawn():
  heat_map.draw({0: {'ffn': np.zeros((1, 4), np.float32)}}, ['a'])


def test_without_matplotlib_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(UserError, match=r'pip install -e "\.\[plot\]"'):
    heat_map.draw(_maps(ffn=3), NAMES)
