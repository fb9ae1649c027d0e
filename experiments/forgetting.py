"""Grow for another text, and measure what is forgotten (Figure 6 of arXiv 2410.23168)."""

import shutil
from pathlib import Path
from typing import Any

STEPS, DECAY = 300, 100
ARMS = {  # name → factor of the tokens, and what happens to old ones
  'not grown': (1, 'train'),
  'train': (2, 'train'),
  'scale:0.1': (2, 'scale:0.1'),
  'freeze': (2, 'freeze'),
}


def run(plan: Any, sizes: dict[int, Any]) -> None:
  """Train on other text, and measure the loss on the old text before and after.

  Args:
    plan: a `growth.Plan`.
    sizes: the `growth.Size` of each factor.
  """
  source = f'files:{write_second_corpus(plan.out)}/*.txt'
  first = plan.scale.steps
  for seed in plan.seeds:
    base = plan.base('tokenformer', seed)
    for name, (factor, old_tokens) in ARMS.items():
      common = {'grow__method': 'group', 'optim__learning_rate': plan.rate('tokenformer') / 2}
      config = plan.config(
        'tokenformer',
        sizes[factor],
        seed,
        first + STEPS,
        **common,
        init_from=str(base),
        data__source=source,
        optim__old_tokens=old_tokens,
        train__decay_from=first + STEPS - DECAY,
      )
      new = plan.run(f'forgetting/{name}/{seed}', config)
      # A step at rate 0 on the old text yields its evaluation.
      back = plan.config(
        'tokenformer',
        sizes[factor],
        seed,
        first + STEPS + 1,
        **common | {'optim__learning_rate': 1e-30},
        init_from=str(new),
        optim__schedule='constant',
        optim__weight_decay=0.0,
      )
      plan.run(f'forgetting/{name} on the old text/{seed}', back)


def write_second_corpus(out: Path) -> Path:
  """Write English prose: Python's language reference for `help`, with a file for each topic."""
  from pydoc_data import topics  # noqa: PLC0415 (needed for this part only)

  folder = out / 'corpus'
  if not folder.exists():
    temporary = out / 'corpus.partial'
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, text in topics.topics.items():
      (temporary / f'{name}.txt').write_text(text)
    temporary.rename(folder)
  return folder
