"""Heat maps show the weights, where they are, and what is old."""

import sys

import numpy as np
import pytest

from tokenformer_jax.errors import UserError
from tokenformer_jax.inspection import heat_map

NAMES = ['⟨end⟩', '$x', '你', 'a' * 30, '⏎']


def _maps(**counts: int) -> dict[int, dict[str, np.ndarray]]:
  rng = np.random.default_rng(0)
  return {
    layer: {kind: rng.normal(size=(5, n)).astype(np.float32) for kind, n in counts.items()}
    for layer in (1, 4)
  }


def test_every_layer_and_kind_has_its_panel():
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


def test_each_panel_has_a_scale_of_its_own():
  maps = _maps(proj=50)
  maps[1]['proj'] /= 100
  panels = [axes for axes in heat_map.draw(maps, NAMES).axes if axes.get_title()]
  for axes, of_layer in zip(panels, maps.values(), strict=True):
    end = np.quantile(np.abs(of_layer['proj']), 0.999)
    assert axes.images[0].norm.vmax == pytest.approx(end)


def test_new_tokens_are_counted_behind_a_line_and_hatched_without_a_weight():
  """A blank half of a picture looks like one that could not be drawn."""
  maps = _maps(query=7, proj=9, ffn=20)
  for of_layer in maps.values():
    of_layer['ffn'][:, 12:] = 0
  old = {'query': 3, 'proj': 9, 'ffn': 12}
  figure = heat_map.draw(maps, NAMES, {1: old, 4: old})
  panels = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
  grown = panels['layer 4, ffn: 8 new, weight 0']
  assert [line.get_xdata()[0] for line in grown.lines] == [11.5], 'the last old token is 11'
  (hatched,) = [patch for patch in grown.patches if patch.get_hatch()]
  left, right = hatched.get_extents().transformed(grown.transData.inverted()).intervalx
  assert (round(left, 3), round(right, 3)) == (11.5, 19.5), 'something else is hatched'
  assert not panels['layer 4, query: 4 new'].patches, 'new tokens that have weights are hatched'
  assert not panels['layer 4, proj'].lines, 'this kind did not grow'


def test_a_short_text_makes_no_thin_strip():
  counts = {'query': 192, 'key': 192, 'value': 192, 'proj': 192, 'ffn': 768}
  maps = {0: {kind: np.ones((2, n)) for kind, n in counts.items()}}
  width, height = heat_map.draw(maps, ['token'] * 2).get_size_inches()
  assert width < 4 * height, f'{width:.0f} × {height:.0f} inches: on a screen nothing can be read'


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


def test_without_matplotlib_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(UserError, match=r'pip install -e "\.\[plot\]"'):
    heat_map.draw(_maps(ffn=3), NAMES)
