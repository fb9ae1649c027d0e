r"""Compare Pattention with an MLP and with a Transformer at equal cost.

  python experiments/feed_forward.py --out=runs/feed_forward --scales=tiny,small   make missing runs
  python experiments/feed_forward.py --csv=experiments/feed_forward_runs.csv       tables of docs
  python experiments/feed_forward.py --csv=experiments/feed_forward_runs.csv \
    --picture=docs/feed_forward.png

Byte language models on the text of the Python standard library: text, scales, tokens and schedule
are those of growth.py, at 20 tokens for each parameter of the layers. All arms have four layers,
heads eight wide, and the FLOPs of a token of the TokenFormer, which the number of hidden units or
of feed-forward tokens gives them. Every arm has the same tries with seed 0: at the first scale all
rates and all initial scales, at a larger one the best there with its rate and fractions of it. The
best try gets more seeds. Held-out losses are in bits a byte.
"""

import argparse
import dataclasses
import functools
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
CORE = 4  # the first arms have all tries at the first scale; the others the four best of these


@dataclasses.dataclass(frozen=True)
class Arm:
  """A model: its width in widths of the TokenFormer, its layer, its groups, and its keys."""

  width: float = 1.0
  layer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  tokens: float = 2.0  # of each Pattention that is a projection of attention, in widths
  groups: int = 1  # of the tokens of every Pattention, each with a norm of its own
  keys: float = 1.0  # factor on the initial keys, or kernels that add nothing to the residual


def _scores(kind: str, *parts: str) -> dict[str, str]:
  return {f'{part}__score__kind': kind for part in parts}


_PROJECTIONS = ('mixer__qkv', 'mixer__proj')
_MLP = {'ffn__kind': 'mlp'}
_MATRICES = {f'{part}__kind': 'dense' for part in _PROJECTIONS}
_TRANSFORMER = _MATRICES | {'norm': 'affine'}
TOKENFORMER, TRANSFORMER = 'TokenFormer', 'Transformer'
ARMS = {
  TOKENFORMER: Arm(),
  'TokenFormer, MLP': Arm(layer=_MLP),
  TRANSFORMER: Arm(1.5, _TRANSFORMER | _MLP),
  'Transformer, Pattention': Arm(1.5, _TRANSFORMER),
  'TokenFormer, gelu_l2_norm': Arm(layer=_scores('gelu_l2_norm', *_PROJECTIONS, 'ffn')),
  'TokenFormer, linear projections': Arm(layer=_scores('linear', *_PROJECTIONS)),
  'TokenFormer, linear projections, MLP': Arm(layer=_scores('linear', *_PROJECTIONS) | _MLP),
  'Transformer, width of the TokenFormer': Arm(layer=_MATRICES | _MLP),
  'Transformer, softmax': Arm(1.5, _TRANSFORMER | _scores('softmax', 'ffn')),
  'Transformer, softmax, τ = 1': Arm(
    1.5, _TRANSFORMER | _scores('softmax', 'ffn') | {'ffn__reference': 1}
  ),
  'TokenFormer, wide': Arm(1.5, tokens=1.0),
  'TokenFormer, wide, half the tokens': Arm(1.5, tokens=0.5),
  'TokenFormer, 2 groups': Arm(groups=2),
  'TokenFormer, 4 groups': Arm(groups=4),
  'TokenFormer, 8 groups': Arm(groups=8),
  'TokenFormer, keys × 3': Arm(keys=3.0),
  'TokenFormer, keys / 3': Arm(keys=1 / 3),
}


@dataclasses.dataclass(frozen=True)
class Row:
  """A run that has ended: its arm and try, and its loss in bits a byte."""

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


@functools.cache
def config(scale: str, name: str, rate: float = 1.0, init: float = 1.0, seed: int = 0) -> Config:
  """Return the config of a run; the FLOPs of its token are those of the TokenFormer."""
  arm, base = ARMS[name], growth.SCALES[scale].width
  width = round(base * arm.width)
  changes: dict[str, Any] = {'train__seed': seed, 'optim__learning_rate': RATE * rate}
  changes |= {'model__width': width, 'model__layer__mixer__heads': width // 8}
  changes |= {f'model__layer__{key}': value for key, value in arm.layer.items()}
  values = {'std': 0.02, 'output_std': 0.0}  # the config's defaults
  if init:
    stds = {'embedding_std': 0.1 * init, 'output_std': init / (8 * width**0.5)}
    values = {'std': 0.1 * init * arm.keys, **stds}
  changes |= {f'model__init__{key}': value for key, value in values.items()}
  if 'mixer__qkv__kind' not in arm.layer:
    tokens = {f'model__layer__{part}__tokens': round(arm.tokens * width) for part in _PROJECTIONS}
    changes |= tokens
  if arm.groups > 1:
    for part, tokens in (('mixer__qkv', 2 * base), ('mixer__proj', 2 * base), ('ffn', 8 * base)):
      changes[f'model__layer__{part}__groups'] = f'{tokens // arm.groups}*{arm.groups}'
    return growth.config(scale, '4x2u', **changes)
  is_mlp = arm.layer.get('ffn__kind') == 'mlp'
  unit = f'model__layer__ffn__{"width" if is_mlp else "tokens"}'

  def made(units: int) -> Config:
    return growth.config(scale, '4x2u', **changes | {unit: units})

  wanted = token_flops(growth.config(scale, '4x2u'))
  one, two = token_flops(made(1)), token_flops(made(2))
  return made(1 + round((wanted - one) / (two - one)))


@dataclasses.dataclass(frozen=True)
class Maker:
  """Make the runs of an arm that are missing."""

  branches: Branches
  rows: list[Row]

  def run(self, scale: str, arm: str, rate: float, init: float, seed: int) -> None:
    """Add the row of a run."""
    steps = functools.partial(growth.SCALES[scale].steps)
    name = f'{scale}/{arm}/{rate:g}/{init:g}/{seed}'
    made = config(scale, arm, rate, init, seed)
    end, decay = steps(growth.MAIN), steps((1 - growth.DECAY) * growth.MAIN)
    ended, points = self.branches.train(name, made, ends=[end], decay_from=decay)
    points[end].path.unlink(missing_ok=True)  # no run goes on from it
    self.rows.append(Row(scale, arm, rate, init, seed, ended.loss, ended.step_seconds))

  def arm(self, scale: str, arm: str, seeds: Sequence[int]) -> None:
    """Try the settings of an arm at a scale, and give the best one more seeds."""
    is_core = list(ARMS).index(arm) < CORE
    tries = list(
      itertools.product(RATES, INITS) if is_core else itertools.product(RATES[:2], INITS[2:])
    )
    if scale in FRACTIONS:
      below = list(growth.SCALES)[list(growth.SCALES).index(scale) - 1]
      rate, init, _ = best(self.rows, below, arm)
      tries = [(rate * fraction, init) for fraction in FRACTIONS[scale]]
    for rate, init in tries:
      self.run(scale, arm, rate, init, seeds[0])
    rate, init, _ = best(self.rows, scale, arm)
    for seed in seeds[1:]:
      self.run(scale, arm, rate, init, seed)


def tries(rows: Sequence[Row], scale: str, arm: str) -> dict[tuple[float, float], dict[int, float]]:
  """Return the losses of an arm by rate and initial scale, and by seed."""
  losses: dict[tuple[float, float], dict[int, float]] = {}
  for row in rows:
    if (row.scale, row.arm) == (scale, arm):
      losses.setdefault((row.rate, row.init), {})[row.seed] = row.loss
  return losses


def best(rows: Sequence[Row], scale: str, arm: str) -> tuple[float, float, dict[int, float]]:
  """Return the rate and the initial scale that are best with the first seed, and their losses."""
  tried = tries(rows, scale, arm)
  if not tried:
    return 0.0, 0.0, {}
  rate, init = min(tried, key=lambda one: tried[one][min(tried[one])])
  return rate, init, tried[rate, init]


def gaps(rows: Sequence[Row], scale: str, arm: str, base: str = TOKENFORMER) -> list[float]:
  """Return for each seed by how many bits an arm is behind another one."""
  losses, others = (best(rows, scale, name)[2] for name in (arm, base))
  return [losses[seed] - others[seed] for seed in sorted(losses.keys() & others.keys())]


def report(rows: Sequence[Row]) -> None:
  """Print each arm's cost, best try and loss, how far it is behind, and what was predicted."""
  predicted = json.loads(PREDICTED.read_text())['behind the TokenFormer']
  for scale in dict.fromkeys(row.scale for row in rows):
    head = [scale, 'layers', 'all', 'MFLOPs a token', 'ms of CPU a step', 'rate', 'init']
    lines = [[*head, 'bits a byte', 'behind', 'predicted', 'init by default']]
    for arm in dict.fromkeys(row.arm for row in rows if row.scale == scale):
      rate, init, losses = best(rows, scale, arm)
      made = complete(config(scale, arm))
      layers, count = flops.matrix_parameters(made.model), models.define(made.model).count
      times = [row.step_seconds for row in rows if (row.scale, row.arm) == (scale, arm)]
      default = [one for (_, i), one in tries(rows, scale, arm).items() if i == 0]
      least = min((one[min(one)] for one in default), default=None)
      low, high = predicted.get(scale, {}).get(arm, ('', ''))
      cost = [f'{token_flops(made) / 1e6:.3f}', f'{1e3 * statistics.median(times):.1f}']
      line = [arm, f'{layers:,}', f'{count:,}', *cost, f'{RATE * rate:g}', f'{init:g}']
      line += [trials.spread(losses.values()), trials.spread(gaps(rows, scale, arm))]
      lines.append([*line, f'{low} … {high}', '–' if least is None else f'{least:.3f}'])
    trials.table(lines)


@styled()
def draw(rows: Sequence[Row], path: Path) -> None:
  """Draw how far each arm is behind the TokenFormer, and its best loss by initial scale."""
  import matplotlib.pyplot as plt  # noqa: PLC0415 (only for the picture)

  figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
  scales = [scale for scale in growth.SCALES if any(row.scale == scale for row in rows)]
  for number, scale in enumerate(scales):
    shown = [(arm, gaps(rows, scale, arm)) for arm in ARMS if arm != TOKENFORMER]
    for place, (_, each) in enumerate(shown):
      if each:
        spread = statistics.stdev(each) if len(each) > 1 else 0.0
        style = {'fmt': 'osD'[number], 'color': f'C{number}', 'capsize': 3}
        label = f'{scale}: {growth.SCALES[scale].parameters:,} parameters' if not place else None
        y = -place - 0.2 * (number - 1)
        left.errorbar([statistics.mean(each)], [y], xerr=[spread], label=label, **style)
  left.set_yticks([-n for n in range(len(ARMS) - 1)], list(ARMS)[1:], fontsize=8)
  left.axvline(0, color='0.8', zorder=0)
  left.set(xlabel='bits a byte behind the TokenFormer')
  left.legend(fontsize=7)
  for arm in list(ARMS)[:5]:
    tried = tries(rows, scales[0], arm)
    inits = sorted({init for _, init in tried})
    least = [min(one[min(one)] for (_, i), one in tried.items() if i == init) for init in inits]
    right.plot(range(len(inits)), least, 'o-', ms=4, label=arm)
  right.set_xticks(range(len(INITS)), ['default', *(f'×{init:g}' for init in INITS[1:])])
  right.set(xlabel='initial values', ylabel=f'{scales[0]}: bits a byte at the best rate')
  right.legend(fontsize=7)
  figure.savefig(path)


def main() -> None:
  """Make the runs, and print the tables."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', type=Path, help='make the runs that are missing in this folder')
  parser.add_argument('--csv', type=Path, help='of the runs: read it, or write it with --out')
  parser.add_argument('--scales', default='tiny')
  parser.add_argument('--arms', default=';'.join(ARMS), help='separated by ;')
  parser.add_argument('--seeds', default='0,1,2', help='the first is that of the tries')
  parser.add_argument('--picture', type=Path)
  args = parser.parse_args()
  rows = trials.read(args.csv, Row) if args.csv and args.csv.exists() else []
  if args.out:
    trials.keep_programs(args.out)
    maker, seeds = Maker(Branches(args.out), rows), [int(seed) for seed in args.seeds.split(',')]
    for scale, arm in itertools.product(args.scales.split(','), args.arms.split(';')):
      maker.arm(scale, arm, seeds)
    rows = list({dataclasses.replace(row, step_seconds=0, loss=0): row for row in rows}.values())
    if args.csv:
      trials.write(rows, args.csv)
  report(rows)
  if args.picture:
    draw(rows, args.picture)


if __name__ == '__main__':
  main()
