r"""Teach a trained Transformer other text, by tokens beside its matrices and in the known ways.

  python experiments/pretrained.py --out=runs/transformers --picture=docs/transformers.png

A byte Transformer of 2 layers learns the text of the Python standard library, then Python's
language reference for a fifth of the steps. Each arm tries the rates of RATES with seed 0, and at
the one that is best on the new text it runs the other seeds, and half and twice the steps. The old
text is a source of weight 0, which is only evaluated. The picture has what is forgotten, and the
FLOPs of learning, against what is learned.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trials

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.model import flops, models
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.runs.pictures import styled

FIRST, SECOND = 3000, 600  # steps on the old text, and on the new one
LENGTHS = (SECOND // 2, SECOND, 2 * SECOND)
WIDTH, TOKENS = 64, 8  # of the model, and beside each matrix of attention; LoRA's rank
RATES = (1e-3, 3e-3, 1e-2, 3e-2)


@dataclasses.dataclass(frozen=True)
class Arm:
  """A way to learn other text."""

  tokens: int = 0  # beside each matrix of attention; four times as many beside the MLP
  each: int = 0  # beside each matrix of the MLP instead
  score: str = 'l2_norm_gelu'  # of the tokens; `linear` makes them LoRA
  frozen: bool = False  # whether the Transformer stays what it was
  factor: int = 1  # of its width
  layers: int = 1  # the factor of its layers
  grow: dict[str, Any] = dataclasses.field(default_factory=dict)  # changes to the config


ARMS = {
  'fine-tuning': Arm(),
  'frozen base and LoRA': Arm(TOKENS, score='linear', frozen=True),
  # As PEFT begins and places it, with about as many parameters.
  'frozen base and LoRA of PEFT': Arm(
    TOKENS, each=6, score='linear', frozen=True, grow={'model.init.std': (3 * WIDTH) ** -0.5}
  ),
  'frozen base and tokens': Arm(TOKENS, frozen=True),
  'frozen base and GELU tokens': Arm(TOKENS, score='gelu', frozen=True),
  'frozen base and many tokens': Arm(8 * TOKENS, frozen=True),
  'many tokens': Arm(8 * TOKENS),
  'net2net': Arm(factor=2, grow={'grow.method.kind': 'net2net', 'grow.method.noise': 0.01}),
  'hypercloning': Arm(
    factor=2, grow={'grow.method.kind': 'hypercloning', 'grow.method.noise': 0.01}
  ),
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

  def beside(tokens: int, where: str = 'beside') -> dict[str, Any]:
    tokens_beside = {'kind': 'pattention', 'tokens': tokens, 'score': {'kind': arm.score}}
    return {where: tokens_beside} if tokens else {}

  mixer.qkv = mixer.proj = {'kind': 'dense', **beside(arm.tokens)}
  of_mlp = beside(arm.each, 'each') if arm.each else beside(4 * arm.tokens)
  layer.ffn = {'kind': 'mlp', **of_mlp}
  c.data.update(source='stdlib', tokenizer='bytes', sequence_length=128, batch_size=8)
  c.optim.update(learning_rate=3e-3, warmup_steps=50, new_token_warmup=50)
  c.optim.schedule = {'kind': 'constant'}
  c.train.update(steps=FIRST, seed=seed, log_every=100, eval_every=0, eval_batches=64)
  c.train.update(checkpoint_every=10**9, sample_tokens=0, trackers=())
  if text:
    c.data.mixture.new = {'source': text, 'weight': 1.0}
    c.data.mixture.old = {'source': 'stdlib', 'weight': 0.0}
  return config_lib.resolve(c, config_lib.from_dotted(changes))


def learn(
  out: Path, text: str, name: str, rate: float, seed: int, steps: int = SECOND
) -> tuple[float, float]:
  """Run an arm on a base of this seed; return the bits per byte of the new and of the old text."""
  arm, base = ARMS[name], trials.once(out, f'base/{seed}', make_config(Arm(), seed, {}))
  changes = {
    'init_from': str(base),
    'train.steps': FIRST + steps,
    'optim.schedule.kind': 'wsd',
    'optim.learning_rate': rate,
    'optim.schedule.final_fraction': 0.0,
    'train.decay_from': FIRST + steps // 2,
    'optim.old_tokens': 'freeze' if arm.frozen else 'train',
    **arm.grow,
  }
  run = f'{name}/{rate:g}/{seed}' + (f'-{steps}' if steps != SECOND else '')
  last = trials.evaluations(trials.once(out, run, make_config(arm, seed, changes, text)))[-1]
  return last['eval/new/bits_per_byte'], last['eval/old/bits_per_byte']


def size(arm: Arm) -> tuple[int, float]:
  """Return the number of parameters of an arm's model, and the FLOPs of a step.

  A frozen matrix has a product forward and one backward, for the gradient of its input.
  """
  config, base = (complete(make_config(a, 0, {})) for a in (arm, Arm()))
  frozen = flops.forward_flops(base.model, 0) if arm.frozen else 0
  examples = config.data.batch_size * config.data.sequence_length
  return models.define(config.model).count, flops.step_flops(config) - examples * frozen


@dataclasses.dataclass(frozen=True)
class Found:
  """The results of an arm, in bits per byte for each seed."""

  rate: float  # the best of RATES
  new: dict[int, list[float]]  # the new text, for each number of steps
  old: list[float]  # the old text
  forgotten: list[float]  # the same, minus the base's


def find(out: Path, text: str, name: str, seeds: Sequence[int]) -> Found:
  """Run an arm at all rates, with all seeds, and at all lengths."""
  rate = min(RATES, key=lambda rate: learn(out, text, name, rate, 0)[0])
  reached = {n: [learn(out, text, name, rate, seed, n) for seed in seeds] for n in LENGTHS}
  bases = [trials.evaluations(out / f'base/{seed}')[-1] for seed in seeds]
  old = [old for _, old in reached[SECOND]]
  forgotten = [a - base['eval/bits_per_byte'] for a, base in zip(old, bases, strict=True)]
  return Found(rate, {n: [new for new, _ in pairs] for n, pairs in reached.items()}, old, forgotten)


@styled()
def draw(arms: dict[str, Found], path: str) -> None:
  """Draw what is forgotten, and the FLOPs, against what is learned."""
  from matplotlib import pyplot  # noqa: PLC0415 (needed for the picture only)

  figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.4))
  for (name, arm), marker in zip(arms.items(), 'o^sDv*<>P', strict=False):
    new = arm.new[SECOND]
    spread = [statistics.stdev(x) if len(x) > 1 else 0 for x in (new, arm.forgotten)]
    at = statistics.mean(new), statistics.mean(arm.forgotten)
    left.errorbar(*at, xerr=spread[0], yerr=spread[1], fmt=marker, capsize=2, label=name)
    spent = [n * size(ARMS[name])[1] / 1e12 for n in arm.new]
    right.plot(spent, [statistics.mean(x) for x in arm.new.values()], f'{marker}-', label=name)
  left.set_xlabel('new text, bits per byte')
  left.set_ylabel('forgotten of the old text, bits per byte')
  right.set_xscale('log')
  right.set_xticks([0.2, 0.5, 1, 2, 4], ['0.2', '0.5', '1', '2', '4'])
  right.set_xticks([], minor=True)
  right.set_xlabel('FLOPs of learning the new text, 10¹²')
  right.set_ylabel('new text, bits per byte')
  right.legend(fontsize=8)
  figure.savefig(path)


def main() -> None:
  """Train all runs, and print a table."""
  parser = trials.parser(__doc__.splitlines()[0], list(ARMS))
  parser.add_argument('--picture', default='', help='the PNG to write')
  args, out, parts, seeds = trials.begin(parser, list(ARMS))
  text = f'files:{trials.write_second_corpus(out)}/*.txt'
  arms = {name: find(out, text, name, seeds) for name in parts}
  (small, step), rows = size(Arm()), []
  for name, arm in arms.items():
    count, flops_of_step = size(ARMS[name])
    lengths = [trials.spread(arm.new[n]) for n in LENGTHS]
    figures = *lengths, trials.spread(arm.old), trials.spread(arm.forgotten)
    relative = f'{flops_of_step / step:.2f}'
    rows.append([name, f'{count - small:,}', relative, *figures, f'{arm.rate:g}', str(len(seeds))])
  learned = [f'new text, {n} steps' for n in LENGTHS]
  head = ['', 'new parameters', 'FLOPs', *learned, 'old text', 'forgotten', 'rate', 'seeds']
  trials.table([head, *rows])
  if args.picture:
    draw(arms, args.picture)


if __name__ == '__main__':
  main()
