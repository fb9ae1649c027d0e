r"""Teach a trained Transformer other text, by tokens beside its matrices and in the known ways.

  python experiments/transformers.py --out=runs/transformers --picture=docs/transformers.png

A byte Transformer of 2 layers learns the text of the Python standard library, then Python's
language reference for a fifth of the steps. Each arm tries the rates of RATES with seed 0 and runs
the other seeds at the one that is best on the new text. The old text is a source of weight 0, which
is only evaluated. Growth of a Transformer on its own text is a part of `experiments/growth.py`:
--only='transformer, group;transformer, group, attention;transformer, as tokens'.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trials
from forgetting import write_second_corpus

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.model import models
from tokenformer_jax.runs import metrics
from tokenformer_jax.training import sizes

FIRST, SECOND = 3000, 600  # steps on the old text, and on the new one
WIDTH, TOKENS = 64, 8  # of the model, and beside each matrix of attention; LoRA's rank
RATES = (1e-3, 3e-3, 1e-2)


@dataclasses.dataclass(frozen=True)
class Arm:
  """A way to learn other text.

  Attributes:
    tokens: beside each matrix of attention; four times as many beside the MLP.
    score: of the tokens; `linear` makes them LoRA.
    frozen: whether the Transformer stays what it was.
    factor: of the Transformer's width.
    layers: factor of its layers.
    grow: changes to the config.
  """

  tokens: int = 0
  score: str = 'l2_norm_gelu'
  frozen: bool = False
  factor: int = 1
  layers: int = 1
  grow: dict[str, Any] = dataclasses.field(default_factory=dict)


ARMS = {
  'fine-tuning': Arm(),
  'frozen base and LoRA': Arm(TOKENS, 'linear', frozen=True),
  'frozen base and tokens': Arm(TOKENS, frozen=True),
  'frozen base and GELU tokens': Arm(TOKENS, 'gelu', frozen=True),
  'frozen base and many tokens': Arm(8 * TOKENS, frozen=True),
  'many tokens': Arm(8 * TOKENS),
  'net2net': Arm(factor=2, grow={'grow.method': 'net2net', 'grow.noise': 0.01}),
  'hypercloning': Arm(factor=2, grow={'grow.method': 'hypercloning', 'grow.noise': 0.01}),
  'copied layers': Arm(layers=2, grow={'grow.place': 'copies'}),
}


def make_config(arm: Arm, seed: int, changes: dict[str, Any], text: str = '') -> Config:
  """Return the config of the Transformer, with the tokens or the size of an arm.

  With `text` it learns that source, and the old text is evaluated as well.
  """
  c = config_lib.defaults()
  layer, mixer = c.model.layer, c.model.layer.mixer
  c.model.pattern, c.model.width = f'layer*{2 * arm.layers}', WIDTH * arm.factor
  mixer.heads, mixer.positions.fraction, layer.norm = 4 * arm.factor, 1.0, 'affine'

  def beside(tokens: int) -> dict[str, Any]:
    tokens_beside = {'kind': 'pattention', 'tokens': tokens, 'score': {'kind': arm.score}}
    return {'beside': tokens_beside} if tokens else {}

  mixer.qkv = mixer.proj = {'kind': 'dense', **beside(arm.tokens)}
  layer.ffn = {'kind': 'mlp', **beside(4 * arm.tokens)}
  c.data.update(source='stdlib', tokenizer='bytes', sequence_length=128, batch_size=8)
  c.optim.update(learning_rate=3e-3, schedule='constant', warmup_steps=50, new_token_warmup=50)
  c.train.update(steps=FIRST, seed=seed, log_every=100, eval_every=0, eval_batches=64)
  c.train.update(checkpoint_every=10**9, sample_tokens=0, tensorboard=False)
  if text:
    c.data.mixture.new = {'source': text, 'weight': 1.0}
    c.data.mixture.old = {'source': 'stdlib', 'weight': 0.0}
  c.update_from_flattened_dict(changes)
  return config_lib.resolve(c)


def last_of(workdir: Path) -> dict[str, Any]:
  """Return the last figures on held-out text of a run."""
  return [line for line in metrics.read(workdir) if 'eval/bits_per_byte' in line][-1]


def learn(out: Path, text: str, name: str, rate: float, seed: int) -> tuple[float, float]:
  """Run an arm on a base of this seed; return the bits per byte of the new and of the old text."""
  arm, base = ARMS[name], trials.once(out, f'base/{seed}', make_config(Arm(), seed, {}))
  changes = {
    'init_from': str(base),
    'train.steps': FIRST + SECOND,
    'optim.schedule': 'wsd',
    'optim.learning_rate': rate,
    'optim.final_fraction': 0.0,
    'train.decay_from': FIRST + SECOND // 2,
    'optim.old_tokens': 'freeze' if arm.frozen else 'train',
    **arm.grow,
  }
  last = last_of(trials.once(out, f'{name}/{rate:g}/{seed}', make_config(arm, seed, changes, text)))
  return last['eval/new/bits_per_byte'], last['eval/old/bits_per_byte']


def count(arm: Arm) -> int:
  """Return the number of parameters of an arm's model."""
  return models.define(sizes.fill_in(make_config(arm, 0, {})).model).count


def draw(found: dict[str, tuple[Sequence[float], Sequence[float]]], path: str) -> None:
  """Draw what is forgotten against what is learned."""
  from matplotlib import pyplot  # noqa: PLC0415 (needed for the picture only)

  figure, axes = pyplot.subplots(figsize=(6.4, 4.4), layout='constrained')
  for name, (new, forgotten) in found.items():
    mean = statistics.mean(new), statistics.mean(forgotten)
    spread = [statistics.stdev(x) if len(x) > 1 else 0 for x in (new, forgotten)]
    axes.errorbar(*mean, xerr=spread[0], yerr=spread[1], fmt='o', capsize=2, label=name)
  axes.set_xlabel('new text, bits per byte')
  axes.set_ylabel('forgotten of the old text, bits per byte')
  axes.grid(alpha=0.3)
  axes.legend(fontsize=8)
  figure.savefig(path, dpi=150)


def main() -> None:
  """Train all runs, and print a table."""
  parser = trials.parser(__doc__.splitlines()[0], list(ARMS))
  parser.add_argument('--picture', default='', help='the PNG to write')
  args, out, parts, seeds = trials.begin(parser, list(ARMS))
  text = f'files:{write_second_corpus(out)}/*.txt'
  rows, points, small = [], {}, count(Arm())
  for name in parts:
    rate = min(RATES, key=lambda rate, name=name: learn(out, text, name, rate, 0)[0])
    new, old = zip(*[learn(out, text, name, rate, seed) for seed in seeds], strict=True)
    before = [last_of(out / f'base/{seed}')['eval/bits_per_byte'] for seed in seeds]
    forgotten = [a - b for a, b in zip(old, before, strict=True)]
    points[name] = new, forgotten
    added = f'{count(ARMS[name]) - small:,}'
    spread = trials.spread(new), trials.spread(old), trials.spread(forgotten)
    rows.append([name, added, *spread, f'{rate:g}', str(len(seeds))])
  head = ['', 'new parameters', 'new text', 'old text', 'forgotten', 'rate', 'seeds']
  trials.table([head, *rows])
  if args.picture:
    draw(points, args.picture)


if __name__ == '__main__':
  main()
