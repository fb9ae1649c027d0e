"""Look into the models of runs: usage and weights of parameter tokens, and load of experts."""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tokenformer_jax.data import held_out
from tokenformer_jax.decoding.trained import Trained
from tokenformer_jax.errors import UserError
from tokenformer_jax.inspection import heat_map
from tokenformer_jax.inspection import model as inspect_model
from tokenformer_jax.inspection import report as inspect_report
from tokenformer_jax.inspection.usage import Usage, tokens_for
from tokenformer_jax.inspection.weights import pattentions
from tokenformer_jax.model import models
from tokenformer_jax.report import record
from tokenformer_jax.report.charts import Figure
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.storage import paths

MOST_PARAMETERS = 10**9  # of a model that is read for a report
_SHOWN = 48  # tokens of text in a map
_MEASURED = 8192  # tokens of text to measure usage on
_COLUMNS = 160  # of a map
_LAYERS = 16  # of a model whose maps are kept, evenly spread
_NUMBERED = 16  # experts of a layer whose loads are written into their map
_LEVELS = 127  # of a weight in a map, on each side of zero
_BEND = 5  # of the colour scale, which is finer for small weights: arsinh(5 w / limit)

_PARTS = {'zmin': 0, 'zmax': 1, 'colorscale': [[0, '#ffffff'], [1, '#7fb2d6']]}
_MULTIPLES = {
  'zmin': 0,
  'zmax': 2,
  'colorscale': [[0, '#67a9cf'], [0.5, '#ffffff'], [1, '#ef8a62']],
}

Parts = dict[int, dict[str, list[tuple[str, int, int]]]]  # name, first and end of groups


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
  """Return what the page shows of a model, for JSON, on text that it was not trained on.

  The result has `step`, `text` (its name), `labels` of the tokens of the maps, `maps` by layer and
  Pattention, `usage` as rows for each group, and `load` of experts by layer.
  """
  corpus, name = held_out.held_out_tokens(model.config.data, model.tokenizer, _MEASURED)
  ids = model.tokenizer.start(corpus)[:_SHOWN].astype(np.int32)
  if model.config.model.position_embedding == 'learned':
    ids = ids[: model.config.model.max_length]
  found: dict[str, Any] = {'step': model.meta.step, 'text': name, 'measured': len(corpus)}
  if any(pattentions(model.definition)):
    parts = _parts(model)
    depth = model.config.model.depth
    layers = [*record.spread(depth, _LAYERS)]
    maps = inspect_model.maps(model, ids, layers)
    found['labels'] = inspect_report.labels(model.tokenizer, ids.tolist())
    found['maps'] = {
      layer: {kind: _map(weights, parts[layer][kind]) for kind, weights in kinds.items()}
      for layer, kinds in maps.items()
      if kinds
    }
    found['usage'] = _usage_rows(inspect_model.measure(model, corpus), parts)
  if model.config.model.experts:
    answers = inspect_model.answers(model, corpus)
    found['load'] = {layer: [*map(float, answer.load)] for layer, answer in answers.items()}
  return found


def usage_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
  """Return heat maps, layers × groups of each Pattention, of how much parameter tokens are used.

  The key of a map is its title, which stands above it.
  """
  panels = {
    'Tokens in use': (lambda row: 1 - row['nearly_unused'] / row['tokens'], '.0%', _PARTS),
    'Tokens that make 90% of the contribution': (lambda row: row['for_90_percent'], '.0%', _PARTS),
  }
  if any(row['part'] for row in rows):
    title = 'Contribution of a token, as a multiple of the mean of its projection'
    panels[title] = (lambda row: row['relative'], '.2f', _MULTIPLES)
  return {title: _usage_figure(rows, *panel) for title, panel in panels.items()}


def _usage_figure(
  rows: Sequence[Mapping[str, Any]],
  value: Callable[[Mapping[str, Any]], float],
  form: str,
  scale: Mapping[str, Any],
) -> Figure:
  columns = [*dict.fromkeys(_column(row) for row in rows)]
  layers = sorted({row['layer'] for row in rows})
  by_place = {(row['layer'], _column(row)): row for row in rows}
  grid = [[by_place.get((layer, column)) for column in columns] for layer in layers]
  return _heat_map(
    layers,
    columns,
    [[round(value(row), 4) if row else None for row in line] for line in grid],
    {
      'text': [[format(value(row), form) if row else '' for row in line] for line in grid],
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
  how = {
    **_MULTIPLES,
    'showscale': most > _NUMBERED,
    'texttemplate': '' if most > _NUMBERED else '%{z:.2f}',
    'colorbar': {'thickness': 12},
    'hovertemplate': 'layer %{y}, expert %{x}: %{z:.2f} × the even load<extra></extra>',
  }
  return _heat_map(layers, [str(expert) for expert in range(most)], grid, how, 'expert')


def _heat_map(
  layers: Sequence[int],
  columns: Sequence[str],
  grid: Sequence[Sequence[float | None]],
  how: Mapping[str, Any],
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
    **how,
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


def _parts(model: Trained) -> Parts:
  """Return the groups of each Pattention; a single group that has grown is split in old and new."""
  old = inspect_model.old_tokens(model)
  found: Parts = {}
  for layer, kinds in enumerate(pattentions(model.definition)):
    found[layer] = {}
    for name, pattention in kinds.items():
      ends = np.cumsum(pattention.groups).tolist()
      before = old[layer][name] if old else 0
      if len(ends) == 1 and 0 < before < ends[0]:
        found[layer][name] = [('old', 0, before), ('new', before, ends[0])]
      elif len(ends) == 1:
        found[layer][name] = [('', 0, ends[0])]
      else:
        begins = [0, *ends[:-1]]
        found[layer][name] = [
          (f'group {i}', *bounds)
          for i, bounds in enumerate(zip(begins, ends, strict=True), start=1)
        ]
  return found


def _usage_rows(usage: Mapping[int, Mapping[str, Usage]], parts: Parts) -> list[dict[str, Any]]:
  rows = []
  for layer, kinds in usage.items():
    for kind, found in kinds.items():
      for name, begin, end in parts[layer][kind]:
        share = float(found.share[begin:end].sum())
        rows.append(
          {
            'layer': layer,
            'kind': kind,
            'part': name,
            'tokens': end - begin,
            'dead': int(found.dead[begin:end].sum()),
            'unused': int(found.unused[begin:end].sum()),
            'nearly_unused': int(found.nearly_unused[begin:end].sum()),
            'for_90_percent': tokens_for(0.9, found.share[begin:end]) / (end - begin),
            'share': share,
            'relative': share * len(found.mean) / (end - begin),
          }
        )
  return rows


def _map(map_TxN: np.ndarray, parts: Sequence[tuple[str, int, int]]) -> dict[str, Any]:
  """Return a map for JSON: weights as bytes on a scale that is finer for small ones."""
  pooled, covered = heat_map.pooled(map_TxN, _COLUMNS)
  limit = heat_map.limit(map_TxN)
  levels = np.arcsinh(_BEND * pooled / limit) / np.arcsinh(_BEND) * _LEVELS
  content = np.clip(np.rint(levels), -_LEVELS, _LEVELS).astype(np.int8)
  return {
    'rows': len(map_TxN),
    'each': covered // pooled.shape[1],
    'tokens': map_TxN.shape[1],
    'limit': float(f'{limit:.4g}'),
    'levels': base64.b64encode(content.tobytes()).decode(),
    'parts': [{'name': name, 'end': end} for name, _, end in parts] if len(parts) > 1 else [],
  }


def _column(row: Mapping[str, Any]) -> str:
  return f'{row["kind"]} {row["part"].removeprefix("group ")}'.rstrip()


def _hover(row: Mapping[str, Any]) -> str:
  return '<br>'.join(
    [
      f'layer {row["layer"]}, {_column(row)}: {row["tokens"]:,} parameter tokens',
      f'{row["nearly_unused"]:,} nearly unused, {row["unused"]:,} unused, {row["dead"]:,} dead',
      f'{row["share"]:.1%} of the contribution, {row["relative"]:.2f} × the even share',
    ]
  )
