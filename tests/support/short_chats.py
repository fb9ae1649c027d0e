"""Short conversations, and a template that writes little more than their text."""

import json
from pathlib import Path

import numpy as np

_TEMPLATE = (
  '{% for m in messages %}{% if m.role == "user" %}?{{ m.content }}!{% else %}'
  '{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}'
)


def write(folder: Path, *more: dict[str, str]) -> dict[str, str]:
  """Write 300 rows and `more` of them; return the keys of `data` that name them."""
  rng = np.random.default_rng(0)

  def text(most: int) -> str:
    return ''.join(rng.choice(list('abcdefgh'), rng.integers(1, most)))

  rows = [{'prompt': text(10), 'response': text(30)} for _ in range(300)]
  (folder / 'rows.jsonl').write_text('\n'.join(map(json.dumps, [*rows, *more])))
  (folder / 'short.jinja').write_text(_TEMPLATE)
  template = str(folder / 'short.jinja')
  return {'source': f'files:{folder}/rows.jsonl', 'rows': 'chat', 'chat_template': template}
