r"""Measure what one growth saves: grown models against both sizes from scratch.

  python experiments/growth.py --out=runs/growth --scales=tiny          make missing runs; tables
  python experiments/growth.py --csv=experiments/growth_runs.csv        tables of the runs in docs
  python experiments/growth.py --csv=experiments/growth_runs.csv --picture=docs/growth_saves.png

Byte language models on the text of the Python standard library, 512 tokens a step. A length is in
tokens for each parameter of the large model's layers. Every size trains at a constant rate and
leaves that run for a decay to zero over the last fifth of a length. A grown model continues from
the constant run of the small one. Sizes and arms try RATES with every seed.

η is the part of the gap between the small and the large model that a grown one has closed, all
three at their best rate on the same tokens. A saving compares FLOPs with those of the large model
from scratch at equal loss, between the lengths of its frontier. Intervals hold 95 % of bootstrap
samples of the seeds, in which all models of a seed stay together.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import trials
from branches import Point
from branches import Runs as Branches

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.model import flops
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.runs.pictures import styled

MAIN = 20  # tokens a parameter, at which arms are compared
DECAY, TOKENS = 0.2, 512  # the decay as a share of the length; the tokens of a step
RATES, SEEDS = (1.0, 0.5, 0.25), (0, 1, 2)  # rates are factors of that of the scale
POINTS = (0.25, 0.5, 0.75)  # shares of the tokens before growth
# Layers × groups of as many tokens as the width. With `u` all tokens are one group; with `^` the
# layers are tied; with `h` the head is not the embedding; with `t` it is a Transformer whose
# matrices have so many times as many parameters.
SMALL, LARGE = '2x1', '4x2'


@dataclasses.dataclass(frozen=True)
class Scale:
  """A scale: its width, the parameters of the large model's layers, its rate, and its lengths."""

  width: int
  dense_width: int  # of the Transformer with as many parameters
  dense_heads: int
  parameters: int
  rate: float
  lengths: tuple[int, ...]
  chunk: int  # lengths are rounded to so many steps

  def steps(self, length: float) -> int:
    """Return the steps of a length."""
    return round(length * self.parameters / TOKENS / self.chunk) * self.chunk


SCALES = {
  'tiny': Scale(16, 18, 3, 2**15, 4e-3, (10, 20, 40), 32),
  'small': Scale(32, 36, 9, 2**17, 4e-3, (10, 20, 40), 128),
  'large': Scale(64, 72, 18, 2**19, 2e-3, (10, 20, 40), 256),
}


@dataclasses.dataclass(frozen=True)
class Arm:
  """A way to grow: the shapes on the way, changes of `grow`, and the parts of the point.

  A shape begins at its part of the point, the last one at the point; (): at equal parts.
  """

  shapes: tuple[str, ...] = (SMALL, LARGE)
  grow: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  parts: tuple[float, ...] = ()

  @property
  def small(self) -> str:
    """The small model that η and the controls compare with."""
    return 't2x1' if self.shapes[-1].startswith('t') else SMALL

  @property
  def large(self) -> str:
    """The large model from scratch, whose head is the embedding."""
    return self.shapes[-1].rstrip('h')


AGAIN = 'default, by the driver of the recipes'
RECIPES = {  # of others, and the default beside them
  AGAIN: Arm(),
  'one layer': Arm(('1x2', LARGE), {'place': 'whole_copies'}),
  'default, then the head untied': Arm((SMALL, LARGE, f'{LARGE}h'), parts=(0.75, 1.0)),
  'default, its head untied throughout': Arm((f'{SMALL}h', f'{LARGE}h')),
  'default, its layers behind in their order': Arm(grow={'place': 'stacked_copies'}),
  'tied layers': Arm(('4x2^', LARGE)),
  'gradual stacking': Arm(('1x2', '2x2', '3x2', LARGE), {'place': 'whole_copies'}),
  'tokens alone': Arm(('4x1', LARGE)),
  'tokens alone, moments dropped': Arm(('4x1', LARGE), {'moments': 'drop'}),
}
ARMS = {
  'default': Arm(),
  **RECIPES,
  'from one layer of half the tokens (r = 8)': Arm(('1x1', LARGE)),
  'two growths': Arm((SMALL, '2x2', LARGE)),
  'keys copied': Arm(grow={'method__new_keys': 'copies'}),
  'layers drawn': Arm(grow={'place': 'between'}),
  'zero_keys': Arm((SMALL, '2x4u'), {'method__kind': 'zero_keys'}),
  'duplicate': Arm((SMALL, '2x4u'), {'method__kind': 'duplicate'}),
  'as released': Arm((SMALL, '2x4u'), {'method__kind': 'random', 'moments': 'drop'}),
  'copied layers alone': Arm((SMALL, '8x1')),
  'Transformer, copied layers': Arm(('t2x1', 't8x1')),
  'Transformer, net2net': Arm(('t2x1', 't2x4'), {'method__kind': 'net2net', 'method__noise': 0.01}),
}


@dataclasses.dataclass(frozen=True)
class Row:
  """A run that has ended; `arm` is the shape of a run from scratch, whose point is 0."""

  scale: str
  arm: str
  length: float
  point: float
  rate: float
  seed: int
  loss: float  # in bits a byte on held-out text
  step_seconds: float = 0.0  # of the processor, for a step of the last part; 0: not measured


Losses = Mapping[int, float]  # by seed


def config(scale_name: str, shape: str, **changes: Any) -> Config:
  """Return the config of a shape; two underscores in the name of a change stand for a dot."""
  scale, c = SCALES[scale_name], config_lib.defaults()
  layer, mixer = c.model.layer, c.model.layer.mixer
  layers, groups = map(int, shape.strip('tu^h').split('x'))
  c.model.pattern = f'layer{"^" if "^" in shape else "*"}{layers}'
  c.model.tied_head = not shape.endswith('h')
  if shape.startswith('t'):
    c.model.width, mixer.heads = round(scale.dense_width * groups**0.5), scale.dense_heads
    mixer.heads = round(scale.dense_heads * groups**0.5)
    mixer.qkv = mixer.proj = {'kind': 'dense'}
    layer.norm, layer.ffn = 'affine', {'kind': 'mlp'}
  else:
    c.model.width, mixer.heads = scale.width, scale.width // 8
    for projection, width in ((mixer.qkv, 1), (mixer.proj, 1), (layer.ffn, 4)):
      projection.tokens = width * scale.width * groups
      if groups > 1 and not shape.endswith('u'):
        projection.groups = f'{width * scale.width}*{groups}'
  # Values a quarter as large as by default suit short runs.
  c.model.init.std, c.model.init.output_std = 0.1, 0.5 / (layers * c.model.width**0.5)
  mixer.positions.fraction = 1.0
  c.data.update(source='stdlib', tokenizer='bytes', sequence_length=64, batch_size=8)
  c.optim.update(warmup_steps=50, new_token_warmup=100)
  c.train.update(eval_batches=64, loss_chunk=64, trackers=())
  dotted = {name.replace('__', '.'): value for name, value in changes.items()}
  return config_lib.resolve(c, config_lib.from_dotted(dotted))


@dataclasses.dataclass(frozen=True)
class Maker:
  """Make the runs of a scale that are missing."""

  branches: Branches
  name: str
  rates: tuple[float, ...] = RATES
  seeds: tuple[int, ...] = SEEDS

  @property
  def scale(self) -> Any:
    """The scale: at least its rate, and the steps of a length."""
    return SCALES[self.name]

  def config(self, shape: str, **changes: Any) -> Config:
    """Return the config of a shape."""
    return config(self.name, shape, **changes)

  def begin(self, length: float) -> int:
    """Return the step at which the decay of a length begins."""
    return self.scale.steps((1 - DECAY) * length)

  def constant(
    self,
    name: str,
    shape: str,
    rate: float,
    seed: int,
    ends: Sequence[int],
    start: Point | None = None,
    **changes: Any,
  ) -> dict[int, Point]:
    """Return the points of a run at a constant rate after some steps."""
    changes |= {'optim__learning_rate': self.scale.rate * rate, 'train__seed': seed}
    made = self.config(shape, **changes)
    return self.branches.train(f'{self.name}/{name}', made, start, ends=ends)[1]

  def decayed(
    self, name: str, shape: str, rate: float, start: Point, length: float, **changes: Any
  ) -> Row:
    """Return a run that goes on from a point and decays to zero at the end of a length."""
    seed, end = start.config.train.seed, self.scale.steps(length)
    changes |= {'optim__learning_rate': self.scale.rate * rate, 'train__seed': seed}
    made, decay = self.config(shape, **changes), max(start.step, self.begin(length))
    name = f'{self.name}/{name}/{rate:g}/{seed}'
    ended, _ = self.branches.train(name, made, start, ends=[end], decay_from=decay)
    return Row(self.name, '', length, 0.0, rate, seed, ended.loss, ended.step_seconds)

  def scratch(self, shape: str, lengths: Sequence[float]) -> Iterator[Row]:
    """Yield a size from scratch at all lengths."""
    begins = {length: self.begin(length) for length in lengths}
    for rate, seed in itertools.product(self.rates, self.seeds):
      name = f'scratch/constant {shape}/{rate:g}/{seed}'
      trunk = self.constant(name, shape, rate, seed, list(begins.values()))
      for length, begin in begins.items():
        row = self.decayed(f'scratch/{shape} {length}', shape, rate, trunk[begin], length)
        yield dataclasses.replace(row, arm=shape)

  def grown(self, name: str, points: Sequence[float]) -> Iterator[Row]:
    """Yield the grown runs of an arm; the small model has the rate of the scale."""
    arm, steps = ARMS[name], self.scale.steps
    grow = {f'grow__{key}': value for key, value in arm.grow.items()}
    first, *between, last = arm.shapes
    for seed in self.seeds:
      at = {point: [steps(share * MAIN) for share in shares(point, arm)[1:]] for point in points}
      firsts = [ends[0] for ends in at.values()]
      trunk = self.constant(f'{name}/constant/{seed}', first, 1.0, seed, firsts)
      for (point, ends), rate in itertools.product(at.items(), self.rates):
        start = trunk[ends[0]]
        for shape, end in zip(between, ends[1:], strict=True):
          path = f'{name}/{point:g}/constant {shape}/{rate:g}/{seed}'
          start = self.constant(path, shape, rate, seed, [end], start, **grow)[end]
        row = self.decayed(f'{name}/{point:g}', last, rate, start, MAIN, **grow)
        yield dataclasses.replace(row, arm=name, point=point)


def shares(point: float, arm: Arm) -> list[float]:
  """Return the shares of the tokens at which the shapes of an arm begin."""
  growths = len(arm.shapes) - 1
  parts = arm.parts or [number / growths for number in range(1, growths + 1)]
  return [0.0, *(point * part for part in parts)]


@dataclasses.dataclass(frozen=True)
class Runs:
  """The runs of one scale."""

  scale: str
  rows: Sequence[Row]

  def by_rate(self, arm: str, length: float, point: float = 0.0) -> dict[float, dict[int, float]]:
    """Return the losses of an arm by rate and seed."""
    losses: dict[float, dict[int, float]] = {}
    for row in self.rows:
      if (row.arm, row.length, row.point) == (arm, length, point):
        losses.setdefault(row.rate, {})[row.seed] = row.loss
    return losses

  def best(self, arm: str, length: float, point: float = 0.0) -> tuple[float, Losses]:
    """Return the best rate by the mean over seeds, and the losses at it; {} if there are none."""
    by_rate = self.by_rate(arm, length, point)
    most = max(map(len, by_rate.values()), default=0)
    whole = {rate: losses for rate, losses in by_rate.items() if len(losses) == most}
    if not whole:
      return 0.0, {}
    rate = min(whole, key=lambda rate: statistics.mean(whole[rate].values()))
    return rate, whole[rate]

  def lengths(self, arm: str) -> list[float]:
    """Return the lengths of an arm."""
    return sorted({row.length for row in self.rows if row.arm == arm})

  def points(self, arm: str) -> list[float]:
    """Return the points of growth of an arm."""
    return sorted({row.point for row in self.rows if (row.arm, row.length) == (arm, MAIN)})

  def flops(self, shape: str) -> float:
    """Return the FLOPs of a token."""
    return _token_flops(self.scale, shape)

  def cost(self, arm: str, point: float) -> float:
    """Return what a grown run costs, in FLOPs of a token of its last model times the length."""
    shapes, steps = ARMS[arm].shapes, SCALES[self.scale].steps
    at = [steps(share * MAIN) / steps(MAIN) for share in shares(point, ARMS[arm])] + [1.0]
    spent = [(at[n + 1] - at[n]) * self.flops(shape) for n, shape in enumerate(shapes)]
    return MAIN * sum(spent) / self.flops(shapes[-1])

  def frontier(self, seeds: Sequence[int], shape: str = LARGE) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of a size from scratch and its mean losses at them."""
    known = [(length, self.best(shape, length)[1]) for length in self.lengths(shape)]
    means = [np.mean([losses[seed] for seed in seeds]) for _, losses in known]
    return np.array([length for length, _ in known]), np.array(means)


@functools.cache
def _token_flops(scale: str, shape: str) -> float:
  made = complete(config(scale, shape))
  return flops.train_flops(made.model, made.data.sequence_length)


def equal_length(lengths: np.ndarray, losses: np.ndarray, loss: float) -> float:
  """Return the length at which a size reaches a loss, by lines in the log of the length.

  Beyond the ends, the last line goes on.
  """
  logs = np.log(lengths)
  at = int(np.clip(np.searchsorted(-losses, -loss), 1, len(losses) - 1))
  slope = (logs[at] - logs[at - 1]) / (losses[at] - losses[at - 1])
  return float(np.exp(logs[at] + slope * (loss - losses[at])))


def loss_at(lengths: np.ndarray, losses: np.ndarray, length: float) -> float:
  """Return the loss at a length, by lines in the log of the length; the first and last go on."""
  at = int(np.clip(np.searchsorted(lengths, length), 1, len(lengths) - 1))
  share = np.log(length / lengths[at - 1]) / np.log(lengths[at] / lengths[at - 1])
  return float(losses[at - 1] + share * (losses[at] - losses[at - 1]))


def with_interval(figures: Callable[[Sequence[int]], Sequence[float]], seeds: Sequence[int]) -> Any:
  """Return figures of some seeds, and the intervals of each from bootstrap samples."""
  drawn = np.array([figures(chosen) for chosen in itertools.product(seeds, repeat=len(seeds))])
  return list(zip(figures(seeds), np.quantile(drawn, (0.025, 0.975), axis=0).T, strict=True))


def grown(runs: Runs, arm: str, point: float) -> Any:
  """Return η and the saving of an arm, each with its interval; None if runs are missing."""
  losses, (small, large) = runs.best(arm, MAIN, point)[1], (ARMS[arm].small, ARMS[arm].large)
  apart = [runs.best(shape, MAIN)[1] for shape in (small, large)]
  seeds = sorted(losses.keys() & apart[0].keys() & apart[1].keys())
  if not seeds or len(runs.lengths(large)) < 2:
    return None

  def figures(chosen: Sequence[int]) -> tuple[float, float]:
    low, high, mean = (np.mean([one[seed] for seed in chosen]) for one in (*apart, losses))
    needed = equal_length(*runs.frontier(chosen, large), mean)
    return (low - mean) / (low - high), 1 - runs.cost(arm, point) / needed

  return with_interval(figures, seeds)


def ahead_of_small(runs: Runs, arm: str, point: float) -> list[float]:
  """Return how many bits an arm is ahead of the small model with as many FLOPs, for each seed.

  The small model lies between the lengths of its frontier from scratch, or at most half as far
  again behind the last one; [] if it does not.
  """
  losses, small = runs.best(arm, MAIN, point)[1], ARMS[arm].small
  seeds = sorted(losses.keys() & runs.best(small, MAIN)[1].keys())
  equal = runs.cost(arm, point) * runs.flops(ARMS[arm].large) / runs.flops(small)
  if not seeds or len(runs.lengths(small)) < 2 or equal > 1.5 * runs.lengths(small)[-1]:
    return []
  return [loss_at(*runs.frontier([seed], small), equal) - losses[seed] for seed in seeds]


def saving(value: float, interval: Sequence[float]) -> str:
  """Return a saving with its interval."""
  percent, low, high = (f'{100 * share:.0f} %' for share in (value, *interval))
  return f'{percent} ({low} … {high})'


def report(all_runs: Sequence[Runs]) -> None:
  """Print both sizes from scratch, and what each arm closes and saves."""
  rows = [['from scratch, bits a byte', 'tokens a parameter', 'small', 'large', 'best rates']]
  for runs in all_runs:
    for length in runs.lengths(LARGE):
      both = [runs.best(shape, length) for shape in (SMALL, LARGE)]
      losses = [trials.spread(one.values()) for _, one in both]
      rates = ', '.join(f'×{rate:g}' for rate, _ in both)
      rows.append([runs.scale, f'{length:g}', *losses, rates])
  trials.table(rows)
  rows = [['', 'grown at', 'rate', 'bits a byte', 'η', 'saves', 'ahead of the small model']]
  rows[0].append('less than the default')
  for runs, arm in itertools.product(all_runs, [arm for arm in ARMS if arm not in RECIPES]):
    for point in runs.points(arm):
      rate, losses = runs.best(arm, MAIN, point)
      default = runs.best('default', MAIN, point)[1]
      shown = ['', '']
      if figures := grown(runs, arm, point):
        (closed, (low, high)), saved = figures
        shown = [f'{closed:.2f} ({low:.2f} … {high:.2f})', saving(*saved)]
      line = [f'{runs.scale}, {arm}', f'{point:.3g}', f'×{rate:g}', trials.spread(losses.values())]
      ahead = ahead_of_small(runs, arm, point)
      less = [default[seed] - losses[seed] for seed in losses.keys() & default.keys()]
      shown += [trials.spread(ahead), trials.spread(less) if arm != 'default' else '']
      rows.append([*line, *shown])
  trials.table(rows)


def report_recipes(runs: Runs) -> None:
  """Print what recipes reach and save, and the differences from the default, paired by seed."""
  rows = [['', 'grown at', 'FLOPs', 'rates of the first seed', 'bits a byte']]
  rows[0] += ['more than the default', 'saves', 'more than the default, in %']
  default: tuple[Losses, Losses] | None = None
  if not any(map(runs.points, RECIPES)):
    return
  frontier = runs.frontier(sorted(runs.best(LARGE, MAIN)[1]))
  for arm in RECIPES:
    for point in runs.points(arm):
      losses, cost = runs.best(arm, MAIN, point)[1], runs.cost(arm, point)
      saved = {seed: 100 * (1 - cost / equal_length(*frontier, x)) for seed, x in losses.items()}
      default = default or (losses, saved)
      by_rate = runs.by_rate(arm, MAIN, point)
      tried = (f'×{rate:g} {by_rate[rate][min(losses)]:.3f}' for rate in sorted(by_rate))
      rows.append([f'{runs.scale}, {arm}', f'{point:.3g}', f'{cost / MAIN:.2f}', ', '.join(tried)])
      for mine, other, digits in ((losses, default[0], 3), (saved, default[1], 0)):
        paired = [mine[seed] - other[seed] for seed in sorted(mine.keys() & other.keys())]
        rows[-1] += [trials.spread(mine.values(), digits), trials.spread(paired, digits)]
  trials.table(rows)


@styled()
def draw(all_runs: Sequence[Runs], path: Path) -> None:
  """Draw the saving and the lead over the small model by the share of the tokens before growth."""
  import matplotlib.pyplot as plt  # noqa: PLC0415 (only for the picture)

  figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
  for number, runs in enumerate(all_runs):
    shift = 0.008 * (number - (len(all_runs) - 1) / 2)
    label = f'{runs.scale}: {SCALES[runs.scale].parameters:,} parameters in its layers'
    style = {'fmt': 'osD'[number % 3], 'color': f'C{number}', 'capsize': 3, 'label': label}
    for point in runs.points('default'):
      if figures := grown(runs, 'default', point):
        value, (low, high) = figures[1]
        error = [[100 * (value - low)], [100 * (high - value)]]
        left.errorbar([point + shift], [100 * value], yerr=error, **style)
      if ahead := ahead_of_small(runs, 'default', point):
        mean, deviation = statistics.mean(ahead), statistics.stdev(ahead)
        right.errorbar([point + shift], [mean], yerr=[deviation], **style)
  left.set(ylabel='saved FLOPs at equal loss, %')
  right.set(ylabel='bits a byte less than the small\nmodel with as many FLOPs')
  for axis in (left, right):
    axis.axhline(0, color='0.8', zorder=0)
    axis.set(xlabel='share of the tokens before growth', xlim=(0, 0.8))
  marks, labels = left.get_legend_handles_labels()
  known = dict(zip(labels, marks, strict=True))
  figure.legend(known.values(), known.keys(), loc='outside lower center', ncols=3)
  figure.savefig(path)


def runs_by_scale(rows: Sequence[Row]) -> list[Runs]:
  """Return the runs of each scale."""
  names = dict.fromkeys(row.scale for row in rows)
  return [Runs(name, [row for row in rows if row.scale == name]) for name in names]


def flags(description: str) -> argparse.ArgumentParser:
  """Return the flags that this experiment and families.py have."""
  parser = argparse.ArgumentParser(description=description)
  parser.add_argument('--out', type=Path, help='make the runs that are missing in this folder')
  parser.add_argument('--csv', type=Path, help='of the runs: read it, or write it with --out')
  parser.add_argument('--scales', default='tiny')
  parser.add_argument('--rates', default=','.join(map(str, RATES)))
  parser.add_argument('--seeds', default=','.join(map(str, SEEDS)))
  return parser


def makers(args: argparse.Namespace) -> Iterator[Maker]:
  """Yield the maker of each scale that the flags name."""
  trials.keep_programs(args.out)
  rates, seeds = tuple(map(float, args.rates.split(','))), tuple(map(int, args.seeds.split(',')))
  for name in args.scales.split(','):
    yield Maker(Branches(args.out, rows=8), name, rates, seeds)


def main() -> None:
  """Make the runs, and print the tables."""
  parser = flags(__doc__.splitlines()[0])
  parser.add_argument('--arms', default='default', help='separated by ;')
  parser.add_argument('--points', default=','.join(map(str, POINTS)))
  parser.add_argument('--picture', type=Path)
  args = parser.parse_args()
  rows = trials.read(args.csv, Row) if args.csv and args.csv.exists() else []
  stored = {(row.scale, row.arm) for row in rows}
  if args.out:
    arms, points = args.arms.split(';'), list(map(float, args.points.split(',')))
    for maker in makers(args):
      for arm in arms:
        for shape in dict.fromkeys((ARMS[arm].small, ARMS[arm].large)):
          if (maker.name, shape) not in stored:
            rows += maker.scratch(shape, maker.scale.lengths)
        rows += maker.grown(arm, points)
    rows = trials.latest(rows)
    if args.csv:
      trials.write(rows, args.csv)
  report(runs_by_scale(rows))
  for runs in runs_by_scale(rows):
    report_recipes(runs)
  if args.picture:
    draw(runs_by_scale(rows), args.picture)


if __name__ == '__main__':
  main()
