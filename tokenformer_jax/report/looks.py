"""Look into the models of runs: the usage of parameter tokens, and the load of experts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tokenformer_jax.config import LMConfig, TextConfig
from tokenformer_jax.data import held_out
from tokenformer_jax.decoding.trained import Trained
from tokenformer_jax.errors import UserError
from tokenformer_jax.inspection import model as inspect_model
from tokenformer_jax.inspection.usage import Usage, tokens_for
from tokenformer_jax.inspection.weights import pattentions
from tokenformer_jax.model import models
from tokenformer_jax.report.charts import Figure
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.storage import paths

MOST_PARAMETERS = 10**9  # of a model that is read for a report
_MEASURED = 8192  # tokens of text to measure usage on
_NUMBERED = 16  # experts of a layer whose loads are written into their map

_SHARES = {'zmin': 0, 'zmax': 1, 'colorscale': [[0, '#ffffff'], [1, '#7fb2d6']]}
_MULTIPLES = {
  'zmin': 0,
  'zmax': 2,
  'colorscale': [[0, '#67a9cf'], [0.5, '#ffffff'], [1, '#ef8a62']],
}

Row = dict[str, Any]
Groups = list[tuple[str, int, int]]  # name, first token and end of each group of a Pattention


def can_look(meta: Meta | None, directory: paths.Path) -> bool:
  """Return whether a checkpoint holds a language model with parameter tokens, an MLP or experts."""
  if meta is None:
    return False
  try:
    inspect_model.check_has_tokens(meta, directory)
  except UserError:
    return False
  return True


def parameters(meta: Meta) -> int:
  """Return the number of parameters of a checkpoint's model."""
  return models.define(meta.config.model).count


def look(model: Trained) -> dict[str, Any]:
  """Return what the page shows of a model, on text that it was not trained on.

  The result has `step`, `text` (its name), `measured` (its tokens), `usage` as a row for each group
  of parameter tokens, and `load` of experts by layer.
  """
  config = model.config
  assert isinstance(config.data, TextConfig) and isinstance(config.model, LMConfig)
  corpus, name = held_out.held_out_tokens(config.data, model.tokenizer, _MEASURED)
  result: dict[str, Any] = {'step': model.meta.step, 'text': name, 'measured': len(corpus)}
  if any(pattentions(model.definition)):
    result['usage'] = _usage_rows(model, inspect_model.measure(model, corpus))
  if config.model.experts:
    answers = inspect_model.answers(model, corpus)
    result['load'] = {layer: [*map(float, answer.load)] for layer, answer in answers.items()}
  return result


def usage_figures(rows: Sequence[Row]) -> dict[str, Figure]:
  """Return heat maps, layers × groups of each Pattention, of how much parameter tokens are used.

  The key of a map is its title, which stands above it.
  """
  used, most = 'Tokens in use', 'Tokens that make 90% of the contribution'
  figures = {
    used: _usage_figure(rows, lambda row: 1 - row['nearly_unused'] / row['tokens'], '.0%', _SHARES),
    most: _usage_figure(rows, lambda row: row['for_90_percent'], '.0%', _SHARES),
  }
  if any(row['group'] for row in rows):
    title = 'Contribution of a token, as a multiple of the mean of its projection'
    figures[title] = _usage_figure(rows, lambda row: row['relative'], '.2f', _MULTIPLES)
  return figures


def _usage_figure(
  rows: Sequence[Row], value: Callable[[Row], float], form: str, scale: Mapping[str, Any]
) -> Figure:
  columns = [*dict.fromkeys(_column(row) for row in rows)]
  layers = sorted({row['layer'] for row in rows})
  by_cell = {(row['layer'], _column(row)): row for row in rows}
  grid = [[by_cell.get((layer, column)) for column in columns] for layer in layers]
  text = [[format(value(row), form) if row else '' for row in line] for line in grid]
  return _heat_map(
    layers,
    columns,
    [[round(value(row), 4) if row else None for row in line] for line in grid],
    {
      'text': text,
      'texttemplate': '%{text}',
      'hovertext': [[_hover(row) if row else '' for row in line] for line in grid],
      'hoverinfo': 'text',
      **scale,
    },
  )


def load_figure(load: Mapping[int, Sequence[float]]) -> Figure:
  """Return a heat map, layers × experts, of the load as a multiple of the even load."""
  most = max(map(len, load.values()))
  layers = sorted(load)
  grid = [
    [round(share * len(load[layer]), 4) for share in load[layer]]
    + [None] * (most - len(load[layer]))
    for layer in layers
  ]
  style = {
    **_MULTIPLES,
    'showscale': most > _NUMBERED,
    'texttemplate': '' if most > _NUMBERED else '%{z:.2f}',
    'colorbar': {'thickness': 12},
    'hovertemplate': 'layer %{y}, expert %{x}: %{z:.2f} × the even load<extra></extra>',
  }
  return _heat_map(layers, [str(expert) for expert in range(most)], grid, style, 'expert')


def _heat_map(
  layers: Sequence[int],
  columns: Sequence[str],
  grid: Sequence[Sequence[float | None]],
  style: Mapping[str, Any],
  title: str = '',
) -> Figure:
  """Return a heat map with a row for each layer; `title` is that of the x axis."""
  trace = {
    'type': 'heatmap',
    'x': [*columns],
    'y': [str(layer) for layer in layers],
    'z': grid,
    'showscale': False,
    'xgap': 1,
    'ygap': 1,
    **style,
  }
  return {
    'data': [trace],
    'layout': {
      'height': (114 if title else 84) + (24 if len(layers) <= 24 else 14) * max(3, len(layers)),
      'margin': {'l': 50, 'r': 16, 't': 12, 'b': 60 if title else 30},
      'xaxis': {'title': {'text': title}, 'type': 'category', 'showgrid': False},
      'yaxis': {
        'title': {'text': 'layer'},
        'type': 'category',
        'autorange': 'reversed',
        'showgrid': False,
      },
      'hovermode': 'closest',
    },
  }


def _groups(sizes: Sequence[int], old: int) -> Groups:
  """Return the groups of a Pattention, whose `sizes` are given; `old` tokens it had before growth.

  A single group that has grown is split in old and new tokens.
  """
  if len(sizes) > 1:
    ends = np.cumsum(sizes).tolist()
    sized = enumerate(zip(sizes, ends, strict=True), start=1)
    return [(str(i), end - size, end) for i, (size, end) in sized]
  if 0 < old < sizes[0]:
    return [('old', 0, old), ('new', old, sizes[0])]
  return [('', 0, sizes[0])]


def _usage_rows(model: Trained, usage: Mapping[int, Mapping[str, Usage]]) -> list[Row]:
  """Return a row for each group of each Pattention of each layer."""
  old = inspect_model.old_tokens(model)
  rows = []
  for layer, kinds in enumerate(pattentions(model.definition)):
    for kind, pattention in kinds.items():
      used = usage[layer][kind]
      for group, begin, end in _groups(pattention.groups, old[layer][kind] if old else 0):
        share = float(used.share[begin:end].sum())
        rows.append(
          {
            'layer': layer,
            'kind': kind,
            'group': group,
            'tokens': end - begin,
            'nearly_unused': int(used.nearly_unused[begin:end].sum()),
            'for_90_percent': tokens_for(0.9, used.share[begin:end]) / (end - begin),
            'share': share,
            'relative': share * len(used.mean) / (end - begin),
          }
        )
  return rows


def _column(row: Row) -> str:
  return f'{row["kind"]} {row["group"]}'.rstrip()


def _hover(row: Row) -> str:
  return '<br>'.join(
    [
      f'layer {row["layer"]}, {_column(row)}: {row["tokens"]:,} parameter tokens',
      f'{row["nearly_unused"]:,} nearly unused',
      f'{row["share"]:.1%} of the contribution, {row["relative"]:.2f} × the even share',
    ]
  )
