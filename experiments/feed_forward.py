r"""Compare Pattention with an MLP and with a Transformer at equal cost.

  python experiments/feed_forward.py --out=runs/feed_forward --scales=tiny,small   make missing runs
  python experiments/feed_forward.py --csv=experiments/feed_forward_runs.csv       tables of docs
  python experiments/feed_forward.py --csv=experiments/feed_forward_runs.csv \
    --picture=docs/feed_forward.png

Byte language models on the text of the Python standard library: text, scales, tokens and schedule
are those of growth.py, at 20 tokens for each parameter of the layers. All arms have four layers,
heads eight wide, and the FLOPs of a token of the TokenFormer, which the number of hidden units or
of feed-forward tokens gives them. With the first seed, the first arms have fifteen tries at the
first scale, the others the four that were best for these; at a larger scale an arm tries fractions
of its best rate below, and then smaller initial values. The best try gets the other seeds.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import growth
import trials
from branches import Runs as Branches

from tokenformer_jax.config import Config
from tokenformer_jax.model import flops, models
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.runs.pictures import styled

PREDICTED = Path(__file__).with_name('feed_forward_predicted.json')
RATE, RATES = 4e-3, (2.0, 1.0, 0.5)  # the rate, and factors of it
INITS = (0.0, 0.4, 1.0, 2.5)  # factors on the initial values of growth.py; 0: the config's default
FRACTIONS = {'small': (0.5, 0.25), 'large': (0.5,)}  # of the best rate a scale below
CORE = 4  # the first arms, which have all tries at the first scale
FEW = [(2.0, 1.0), (2.0, 2.5), (1.0, 1.0), (1.0, 2.5)]  # rates and initial values of the others
MORE = [(4.0, 1.0), (4.0, 2.5), (2.0, 6.0)]  # beyond the best of the first arms


@dataclasses.dataclass(frozen=True)
class Arm:
  """A model: its width in widths of the TokenFormer, its layer, and its parameter tokens."""

  width: float = 1.0
  layer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  tokens: float = 2.0  # of each Pattention that is a projection of attention, in widths
  groups: int = 1  # of the tokens of every Pattention, each with a norm of its own
  by_width: bool = False  # the default initial values, but init.std falls with the width's root


_PROJECTIONS = ('mixer__qkv', 'mixer__proj')
_MLP = {'ffn__kind': 'mlp'}
_MATRICES = {f'{part}__kind': 'dense' for part in _PROJECTIONS}
_LINEAR = {f'{part}__score__kind': 'linear' for part in _PROJECTIONS}
_TRANSFORMER = _MATRICES | {'norm': 'affine'}
_GELU_NORM = {f'{part}__score__kind': 'gelu_l2_norm' for part in (*_PROJECTIONS, 'ffn')}
_SOFTMAX = {'ffn__score__kind': 'softmax', 'ffn__reference': 1}
ARMS = {
  'TokenFormer': Arm(),
  'TokenFormer, MLP': Arm(layer=_MLP),
  'Transformer': Arm(1.5, _TRANSFORMER | _MLP),
  'Transformer, Pattention': Arm(1.5, _TRANSFORMER),
  'TokenFormer, wide': Arm(1.5, tokens=1.0),
  'Transformer, width of the TokenFormer': Arm(layer=_MATRICES | _MLP),
  'TokenFormer, linear projections, MLP': Arm(layer=_LINEAR | _MLP),
  'TokenFormer, by width': Arm(by_width=True),
  'Transformer, by width': Arm(1.5, _TRANSFORMER | _MLP, by_width=True),
  'TokenFormer, gelu_l2_norm': Arm(layer=_GELU_NORM),
  'TokenFormer, 4 groups': Arm(groups=4),
  'Transformer, softmax, τ = 1': Arm(1.5, _TRANSFORMER | _SOFTMAX),
}


@dataclasses.dataclass(frozen=True)
class Row:
  """A run that has ended: its arm and try, and its loss in bits a byte on held-out text."""

  scale: str
  arm: str
  rate: float
  init: float
  seed: int
  loss: float
  step_seconds: float = 0.0  # of the processor


def token_flops(made: Config) -> float:
  """Return the FLOPs of a token in training."""
  return flops.train_flops(complete(made).model, made.data.sequence_length)


def config(scale: str, name: str, rate: float = 1.0, init: float = 1.0, seed: int = 0) -> Config:
  """Return the config of a run; the FLOPs of its token are those of the TokenFormer."""
  arm, base = ARMS[name], growth.SCALES[scale].width
  width = round(base * arm.width)
  changes: dict[str, Any] = {'train__seed': seed, 'optim__learning_rate': RATE * rate}
  changes |= {'model__width': width, 'model__layer__mixer__heads': width // 8}
  changes['train__eval_batches'] = 8  # of 64 rows: 32 kB
  changes |= {f'model__layer__{key}': value for key, value in arm.layer.items()}
  std, output = (0.1 * init, init / (8 * width**0.5)) if init else (0.02, 0.0)
  std *= (768 / width) ** 0.5 if arm.by_width else 1
  changes |= {'model__init__std': std, 'model__init__output_std': output}
  if 'mixer__qkv__kind' not in arm.layer:
    tokens = round(arm.tokens * width)
    changes |= {f'model__layer__{part}__tokens': tokens for part in _PROJECTIONS}
  if arm.groups > 1:
    for part, tokens in (*((one, 2 * base) for one in _PROJECTIONS), ('ffn', 8 * base)):
      changes[f'model__layer__{part}__groups'] = f'{tokens // arm.groups}*{arm.groups}'
    return growth.config(scale, '4x2u', **changes)
  unit = f'model__layer__ffn__{"width" if "ffn__kind" in arm.layer else "tokens"}'
  made = lambda units: growth.config(scale, '4x2u', **changes | {unit: units})  # noqa: E731
  wanted = token_flops(growth.config(scale, '4x2u'))
  one, two = token_flops(made(1)), token_flops(made(2))
  return made(1 + round((wanted - one) / (two - one)))


def run(branches: Branches, scale: str, arm: str, rate: float, init: float, seed: int) -> Row:
  """Make a run, unless it is made."""
  steps, name = growth.SCALES[scale].steps, f'{scale}/{arm}/{rate:g}/{init:g}/{seed}'
  end, decay = steps(growth.MAIN), steps((1 - growth.DECAY) * growth.MAIN)
  made = config(scale, arm, rate, init, seed)
  ended, points = branches.train(name, made, ends=[end], decay_from=decay)
  points[end].path.unlink(missing_ok=True)  # no run goes on from it
  return Row(scale, arm, rate, init, seed, ended.loss, ended.step_seconds)


def make(
  branches: Branches, rows: list[Row], scale: str, arm: str, seeds: Sequence[int]
) -> list[Row]:
  """Return the runs of an arm at a scale: its tries, and more seeds of the best one."""
  is_core = list(ARMS).index(arm) < CORE
  tries = [*itertools.product(RATES, INITS), *MORE] if is_core else FEW
  if ARMS[arm].by_width:
    tries = [(2.0, 0.0), (1.0, 0.0)]
  if scale in FRACTIONS:
    below = list(growth.SCALES)[list(growth.SCALES).index(scale) - 1]
    rate, init, _ = best(rows, below, arm)
    tries = [(rate * fraction, init) for fraction in FRACTIONS[scale]]
  made = [run(branches, scale, arm, rate, init, seeds[0]) for rate, init in tries]
  if scale in FRACTIONS and not ARMS[arm].by_width:
    rate, init, _ = best(made, scale, arm)
    made.append(run(branches, scale, arm, rate, INITS[INITS.index(init) - 1], seeds[0]))
  rate, init, _ = best(made, scale, arm)
  return made + [run(branches, scale, arm, rate, init, seed) for seed in seeds[1:]]


def tried(rows: Sequence[Row], scale: str, arm: str) -> dict[tuple[float, float], dict[int, float]]:
  """Return the losses of an arm by rate and initial values, and by seed."""
  losses: dict[tuple[float, float], dict[int, float]] = {}
  for row in rows:
    if (row.scale, row.arm) == (scale, arm):
      losses.setdefault((row.rate, row.init), {})[row.seed] = row.loss
  return losses


def best(rows: Sequence[Row], scale: str, arm: str) -> tuple[float, float, dict[int, float]]:
  """Return the rate and the initial values that are best with the first seed, and the losses."""
  by_try = tried(rows, scale, arm)
  if not by_try:
    return 0.0, 0.0, {}
  rate, init = min(by_try, key=lambda one: by_try[one].get(0, 99.0))
  return rate, init, by_try[rate, init]


def behind(rows: Sequence[Row], scale: str, arm: str) -> list[float]:
  """Return for each seed by how many bits an arm is behind the TokenFormer."""
  losses, others = (best(rows, scale, name)[2] for name in (arm, 'TokenFormer'))
  return [losses[seed] - others[seed] for seed in sorted(losses.keys() & others.keys())]


def report(rows: Sequence[Row]) -> None:
  """Print each arm's cost, best try and loss, how far it is behind, and what was predicted."""
  predicted = json.loads(PREDICTED.read_text())['behind the TokenFormer']
  for scale in dict.fromkeys(row.scale for row in rows):
    head = [scale, 'width', 'parameters', 'kFLOPs', 'ms of CPU a step', 'rate', 'initial values']
    lines = [[*head, 'bits a byte', 'behind', 'predicted', 'default values']]
    for arm in [arm for arm in ARMS if tried(rows, scale, arm)]:
      rate, init, losses = best(rows, scale, arm)
      made = complete(config(scale, arm))
      times = [row.step_seconds for row in rows if (row.scale, row.arm) == (scale, arm)]
      default = [one[0] for (_, i), one in tried(rows, scale, arm).items() if i == 0]
      expected = ' … '.join(map(str, predicted[scale].get(arm, ()))) or '–'
      line = [arm, str(made.model.width), f'{models.define(made.model).count:,}']
      line += [f'{token_flops(made) / 1e3:.0f}', f'{1e3 * statistics.median(times):.1f}']
      line += [f'{RATE * rate:g}', f'× {init:g}', trials.spread(losses.values())]
      line += [trials.spread(behind(rows, scale, arm)), expected]
      lines.append([*line, f'{min(default):.3f}' if default else '–'])
    trials.table(lines)


@styled()
def draw(rows: Sequence[Row], path: Path) -> None:
  """Draw how far each arm is behind the TokenFormer, and its best loss by initial values."""
  import matplotlib.pyplot as plt  # noqa: PLC0415 (only for the picture)

  figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
  scales = list(dict.fromkeys(row.scale for row in rows))
  for (number, scale), (y, arm) in itertools.product(enumerate(scales), enumerate(ARMS)):
    if y and (each := behind(rows, scale, arm)):
      spread = statistics.stdev(each) if len(each) > 1 else 0.0
      style = {'fmt': 'osD'[number], 'color': f'C{number}', 'capsize': 3, 'ms': 5}
      named = f'{scale}: {growth.SCALES[scale].parameters:,} parameters'
      label = named if arm == 'Transformer' else None
      at = [-y - 0.2 * number]
      left.errorbar([statistics.mean(each)], at, xerr=[spread], label=label, **style)
  left.set_yticks([-y for y in range(1, len(ARMS))], list(ARMS)[1:], fontsize=8)
  left.axvline(0, color='0.8', zorder=0)
  left.set(xlabel='bits a byte behind the TokenFormer', xlim=(None, 0.25))
  left.set_xticks([-0.1, 0, 0.1, 0.2])
  left.legend(fontsize=7, loc='lower right')
  for arm in list(ARMS)[:CORE]:
    by_try = tried(rows, 'tiny', arm).items()
    least = [min(one[0] for (_, i), one in by_try if i == init) for init in INITS]
    right.plot(range(len(INITS)), least, 'o-', ms=4, label=arm)
  right.set_xticks(range(len(INITS)), ['default', *(f'× {init:g}' for init in INITS[1:])])
  right.set(xlabel='initial values', ylabel='tiny: bits a byte at the best rate')
  right.legend(fontsize=7)
  figure.savefig(path)


def main() -> None:
  """Make the runs, and print the tables."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', type=Path, help='make the runs that are missing in this folder')
  parser.add_argument('--csv', type=Path, help='of the runs: read it, or write it with --out')
  parser.add_argument('--scales', default='tiny')
  parser.add_argument('--seeds', default='0,1,2', help='the first is that of the tries')
  parser.add_argument('--arms', default=';'.join(ARMS), help='separated by ;')
  parser.add_argument('--picture', type=Path)
  args = parser.parse_args()
  rows = trials.read(args.csv, Row) if args.csv and args.csv.exists() else []
  if args.out:
    trials.keep_programs(args.out)
    branches, seeds = Branches(args.out), [int(seed) for seed in args.seeds.split(',')]
    for scale, arm in itertools.product(args.scales.split(','), args.arms.split(';')):
      rows += make(branches, rows, scale, arm, seeds)
    rows = trials.latest(rows)
    if args.csv:
      trials.write(rows, args.csv)
  report(rows)
  if args.picture:
    draw(rows, args.picture)


if __name__ == '__main__':
  main()
