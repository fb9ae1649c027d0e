"""Format the results of `inspect` as rows for JSON and as tables for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.inspection.experts import Answers
from tokenformer_jax.inspection.usage import Usage
from tokenformer_jax.parallel.messages import aligned

TOKEN_DEFINITIONS = """\
contribution   |weight| · ‖value‖₂ of a parameter token, averaged over the positions of the text
unused         contributes less than 1/100 of the mean contribution in its Pattention
dead           key, value and weight are zero, so the token has no gradient and stays dead
for 90 %       the fewest tokens that together make 90 % of the contribution"""
MLP_DEFINITIONS = """\
of an MLP      the hidden units count as parameter tokens: the weight is the activation, the value
               a row of the second matrix"""
DEFINITIONS = f'{TOKEN_DEFINITIONS}\n{MLP_DEFINITIONS}'
EXPERT_DEFINITIONS = """\
load           the share of all choices of a layer's router that an expert has
max violation  the largest load over that at even load, less 1"""

_VISIBLE = str.maketrans({' ': '·', '\n': '⏎', '\t': '⇥', '\r': '␍'})
Row = dict[str, Any]
Columns = Sequence[tuple[str, str]]  # the head of each, and a template of the keys of a row
USAGE = (
  ('layer', '{layer}'),
  ('kind', '{kind}'),
  ('tokens', '{tokens:,}'),
  ('dead', '{dead:,}'),
  ('unused', '{unused:,}'),
  ('for 90 %', '{for_90_percent:,}'),
)
AGE = (
  ('layer', '{layer}'),
  ('kind', '{kind}'),
  ('old', '{old:,}'),
  ('new', '{new:,}'),
  ('new: of tokens', '{new_share_of_tokens:.1%}'),
  ('of contribution', '{new_share_of_contribution:.1%}'),
  ('unused: old', '{unused_old:,}'),
  ('new', '{unused_new:,}'),
)
LOAD = (
  ('layer', '{layer}'),
  ('experts', '{experts}'),
  ('largest load', '{largest:.1%}'),
  ('smallest', '{smallest:.1%}'),
  ('max violation', '{max_violation:.2f}'),
  ('unused', '{unused}'),
)


def labels(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
  """Return each token as text with visible white space; the end of a document is ⟨end⟩."""
  return [
    '⟨end⟩' if token == tokenizer.end_of_document else tokenizer.decode([token]).translate(_VISIBLE)
    for token in ids
  ]


def strongest_rows(maps: Mapping[int, Mapping[str, np.ndarray]], top_k: int) -> list[Row]:
  """Return the parameter tokens with the largest absolute weights, and their positions.

  `maps` has weights [T, N] by layer and Pattention. `top_k` counts parameter tokens of each
  Pattention, and positions of each token.
  """
  rows = []
  for layer, layer_maps in maps.items():
    for name, map_TxN in layer_maps.items():
      sizes_TxN = np.abs(map_TxN)
      for token in np.argsort(-sizes_TxN.max(axis=0), kind='stable')[:top_k].tolist():
        positions = np.argsort(-sizes_TxN[:, token], kind='stable')[:top_k].tolist()
        inputs = [{'position': t, 'weight': float(map_TxN[t, token])} for t in positions]
        rows.append({'layer': layer, 'kind': name, 'token': token, 'inputs': inputs})
  return rows


def expert_rows(answers: Mapping[int, Answers]) -> list[Row]:
  """Return the load of the experts of each layer."""
  return [
    {
      'layer': layer,
      'experts': chosen.count,
      'load': [float(f'{share:.6g}') for share in chosen.load],
      'largest': float(chosen.load.max()),
      'smallest': float(chosen.load.min()),
      'max_violation': float(chosen.count * chosen.load.max() - 1),
      'unused': int(np.sum(chosen.load == 0)),
    }
    for layer, chosen in answers.items()
  ]


def answer_rows(answers: Mapping[int, Answers], tokenizer: Tokenizer, top_k: int) -> list[Row]:
  """Return the `top_k` tokens that each expert gets most often, a layer's busiest experts first."""
  rows = []
  for layer, chosen in answers.items():
    load = chosen.load
    for expert in np.argsort(-load, kind='stable').tolist():
      tokens = chosen.tokens(expert, top_k)
      texts = labels(tokenizer, [token for token, _, _ in tokens])
      listed = [
        {'id': token, 'text': text, 'of_expert': of_expert, 'of_token': of_token}
        for text, (token, of_expert, of_token) in zip(texts, tokens, strict=True)
      ]
      rows.append({'layer': layer, 'expert': expert, 'load': float(load[expert]), 'tokens': listed})
  return rows


def usage_rows(usage: Mapping[int, Mapping[str, Usage]]) -> list[Row]:
  """Return how many parameter tokens of each layer and Pattention are used and unused."""
  return [
    {
      'layer': layer,
      'kind': name,
      'tokens': len(used.mean),
      'dead': int(used.dead.sum()),
      'unused': int(used.unused.sum()),
      'for_90_percent': used.tokens_for(0.9),
    }
    for layer, layer_usage in usage.items()
    for name, used in layer_usage.items()
  ]


def age_rows(
  usage: Mapping[int, Mapping[str, Usage]], old: Mapping[int, Mapping[str, int]]
) -> list[Row]:
  """Compare the old tokens with the new ones for each layer and Pattention that has new tokens.

  `old` has the numbers of tokens before the last growth.
  """
  rows = []
  for layer, layer_usage in usage.items():
    for name, used in layer_usage.items():
      first, count = old[layer][name], len(used.mean)
      if first == count:
        continue
      rows.append(
        {
          'layer': layer,
          'kind': name,
          'old': first,
          'new': count - first,
          'new_share_of_tokens': (count - first) / count,
          'new_share_of_contribution': float(used.share[first:].sum()),
          'unused_old': int(used.unused[:first].sum()),
          'unused_new': int(used.unused[first:].sum()),
        }
      )
  return rows


def token_rows(usage: Mapping[int, Mapping[str, Usage]]) -> list[Row]:
  """Return every figure of every parameter token, as lists for each layer and Pattention."""

  def listed(values: np.ndarray) -> list[float]:
    return [float(f'{value:.6g}') for value in values]

  return [
    {
      'layer': layer,
      'kind': name,
      'mean': listed(used.mean),
      'value_norm': listed(used.value_norms),
      'contribution': listed(used.contribution),
    }
    for layer, layer_usage in usage.items()
    for name, used in layer_usage.items()
  ]


def strongest_table(rows: Sequence[Row], names: Sequence[str]) -> str:
  """Format the rows of `strongest_rows`; `names` are the labels of the input tokens."""
  lines: list[Sequence[str]] = [
    ('layer', 'kind', 'token', 'input tokens (position) and its weights for them')
  ]
  for row in rows:
    inputs = (f'{names[i["position"]]} ({i["position"]}) {i["weight"]:.2f}' for i in row['inputs'])
    lines.append((str(row['layer']), row['kind'], str(row['token']), '  '.join(inputs)))
  return aligned(lines, left=(1, 3))


def answer_table(rows: Sequence[Row], top_k: int) -> str:
  """Format the rows of `answer_rows`, for the first `top_k` experts of each layer."""
  lines: list[Sequence[str]] = [
    ('layer', 'expert', 'load', 'tokens: share of the expert, share of the token')
  ]
  listed: dict[int, int] = {}
  for row in rows:
    listed[row['layer']] = listed.get(row['layer'], 0) + 1
    if listed[row['layer']] > top_k:
      continue
    tokens = (f'{t["text"]} {t["of_expert"]:.0%}, {t["of_token"]:.0%}' for t in row['tokens'])
    lines.append((f'{row["layer"]}', f'{row["expert"]}', f'{row["load"]:.1%}', '  '.join(tokens)))
  return aligned(lines, left=(3,))


def table(rows: Sequence[Row], columns: Columns) -> str:
  """Format rows by the columns that have a head and a template."""
  heads, *lines = cells(rows, columns)
  return aligned([heads, *lines], left=[i for i, head in enumerate(heads) if head == 'kind'])


def cells(rows: Sequence[Row], columns: Columns) -> list[list[str]]:
  """Return the heads of columns, and the text of each row in them."""
  heads = [head for head, _ in columns]
  return [heads, *([template.format_map(row) for _, template in columns] for row in rows)]
