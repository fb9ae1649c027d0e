r"""Replicate, at small scale, a growth that others measured over two decades of compute.

  python experiments/replication.py --csv=experiments/replication_runs.csv     tables of stored runs
  python experiments/replication.py --out=runs/replication --sizes=0.13M       the runs of a size

Chen et al. 2026 (arXiv 2609.19107) have a prelude, a core and a coda of as many layers each, and go
on with the core twice, and then four times, each with its own parameters: c1 c2 → c1 c2 c1 c2 by
whole copies. Alone this was worth 1.09 times the compute at 1e18 FLOPs, and 1.16 times at 1e20.

Here a prelude, two cores and a coda of one Pattention layer each (START) grow to four cores (END)
at a share of the tokens, on the text of the Python standard library with its tests, byte by byte.
All sizes have heads of 32 and see MAIN tokens for each parameter of the layers of END.

The rate is constant, and decays to zero over the last fifth of a length. Runs of a size and a seed
share trunks: each length of a size leaves that of its rate, and every growth that of START at the
best rate of END. The rates of END are tried with the first seed; so are those after each growth.
The figure is the multiplier: the compute with which END from scratch, at any size and length,
reaches a loss, between the logs of its computes, over that of the grown run; beside it stands the
same of START alone, from its own lengths, with which the paper compares. Predictions were in a
commit before the runs (621a9a1c, whose command wrote the file of PREDICTED): exp(−κ share^γ) over
the share of the FLOPs that a growth spends, where κ is the gap between START and END in the logs of
compute.
"""

import argparse
import contextlib
import csv
import dataclasses
import fcntl
import functools
import hashlib
import itertools
import json
import math
import statistics
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import trials
from branches import CHUNK, Point
from branches import Runs as Branches
from growth import Losses, Maker, Row, Runs, equal_length, loss_at

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.model import flops
from tokenformer_jax.resolve.facts import complete

START, END = 'pre core*2 coda', 'pre core*4 coda'
MAIN, LENGTHS = 16, (8, 12, 16, 20)  # tokens for each parameter of the layers of END
SHARES = (0.46, 0.7)  # of the tokens before growth; the second one at the two smallest sizes alone
TOKENS = 512  # of a step
PREDICTED = Path(__file__).with_name('replication_predicted.json')


@dataclasses.dataclass(frozen=True)
class Size:
  """A size: its width, the tokens of a projection, its learning rate, and what is tried with it.

  A feed-forward part has four times as many tokens. `rates` are factors of the rate.
  """

  width: int
  tokens: int
  rate: float
  rates: tuple[float, ...] = (1.0, 2.0, 0.5)
  seeds: int = 5
  shares: tuple[float, ...] = SHARES[:1]

  @property
  def parameters(self) -> int:
    """The parameters of the layers of END, without norms and biases."""
    return 6 * 16 * self.width * self.tokens

  def steps(self, length: float) -> int:
    """Return the steps of a length."""
    return round(length * self.parameters / TOKENS / CHUNK) * CHUNK


SIZES = {
  '0.13M': Size(32, 43, 2e-3, shares=SHARES),
  '0.26M': Size(64, 43, 1.4e-3, (1.0, 2.0, 0.5, 0.25), shares=SHARES),
  '0.5M': Size(64, 85, 1e-3, (1.0, 2.0, 0.5, 0.25)),
  '1M': Size(96, 114, 7e-4, (0.5, 0.25), 3),
  '2M': Size(128, 171, 5e-4, (0.5,), 1),
}


def config(name: str, shape: str, source: str = 'stdlib', **changes: Any) -> Config:
  """Return the config of a shape; two underscores in the name of a change stand for a dot."""
  size, c = SIZES[name], config_lib.defaults()
  layer, mixer = c.model.layer, c.model.layer.mixer
  c.model.pattern, c.model.variants = shape, {'pre': {}, 'core': {}, 'coda': {}}
  c.model.width, mixer.heads = size.width, size.width // 32
  mixer.qkv.tokens = mixer.proj.tokens = size.tokens
  layer.ffn.tokens = 4 * size.tokens
  # Values a quarter as large as by default suit short runs.
  c.model.init.std, c.model.init.output_std = 0.1, 0.1 / size.width**0.5
  mixer.positions.fraction = 1.0
  c.data.update(source=source, tokenizer='bytes', sequence_length=64, batch_size=TOKENS // 64)
  c.data.validation_fraction = 0.01
  c.optim.update(warmup_steps=50, new_token_warmup=100)
  c.train.update(loss_chunk=64, trackers=())
  dotted = {key.replace('__', '.'): value for key, value in changes.items()}
  return config_lib.resolve(c, config_lib.from_dotted(dotted))


@functools.cache
def token_flops(name: str, shape: str) -> float:
  """Return the FLOPs of a token in training."""
  made = complete(config(name, shape))
  return flops.train_flops(made.model, made.data.sequence_length)


Curve = tuple[np.ndarray, np.ndarray]  # FLOPs and losses
ARMS = {
  'whole copies, c1 c2 c1 c2': 'whole_stacked_copies',
  'exact copies, c1 c2 c1 c2': 'stacked_copies',
  'exact copies, c1 c1 c2 c2': 'copies',
  'whole copies, c1 c1 c2 c2': 'whole_copies',
}
WHOLE = next(iter(ARMS))


class Replicas(Maker):
  """Makes the runs of a size."""

  source = ''  # of the text; set before the first run

  @property
  def scale(self) -> Size:
    return SIZES[self.name]

  def config(self, shape: str, **changes: Any) -> Config:
    return config(self.name, shape, self.source, **changes)

  def trunk(self, shape: str, rate: float, seed: int, ends: Sequence[float]) -> Point:
    """Return the state of a run at a constant rate after the last of some lengths."""
    point: Any = None
    for end in map(self.scale.steps, ends):
      name = f'{shape}/{rate:g}/{seed}/{end}'
      point = self.constant(name, shape, rate, seed, [end], point)[end]
    return point

  def leave(self, arm: str, length: float, share: float, rate: float, start: Point) -> Row:
    """Return a run that goes on from a point as an arm, and decays."""
    shape, grow = (END, {'grow__place': ARMS[arm]}) if arm in ARMS else (arm, {})
    row = self.decayed(f'{arm} {length:g} {share:g}', shape, rate, start, length, **grow)
    return dataclasses.replace(row, arm=arm, point=share)

  def apart(self, shape: str, rate: float, seed: int, lengths: Sequence[float]) -> Iterator[Row]:
    """Yield a shape from scratch at some lengths."""
    # Trunks of one rate and seed have the same parts.
    ends = [0.8 * length for length in LENGTHS]
    if shape == START:
      ends = sorted({*(share * MAIN for share in self.scale.shares), *ends[2:]})
    for length in lengths:
      needed = [end for end in ends if end <= 0.8 * length + 1e-9]
      yield self.leave(shape, length, 0, rate, self.trunk(shape, rate, seed, needed))

  def grow(self, arm: str, share: float, rate: float, trunk_rate: float, seed: int) -> Row:
    """Return a grown run."""
    ends = [one * MAIN for one in self.scale.shares if one <= share]
    return self.leave(arm, MAIN, share, rate, self.trunk(START, trunk_rate, seed, ends))

  def make(self) -> None:
    """Make all runs, so that every stop leaves whole comparisons."""
    first = self.seeds[0]
    tried = [*(next(self.apart(END, x, first, [MAIN])) for x in self.scale.rates)]
    best = min(tried, key=lambda row: row.loss).rate
    share, *others = self.scale.shares
    for seed in self.seeds:
      list(self.apart(END, best, seed, LENGTHS[1:3]))
      for arm in ARMS:  # the transferred recipe
        self.grow(arm, share, best, best, seed)
    own = {}
    for arm in ARMS:
      made = [self.grow(arm, share, rate, best, first) for rate in self.scale.rates]
      own[arm] = min(made, key=lambda row: row.loss).rate
    for seed, (arm, rate) in itertools.product(self.seeds, own.items()):
      self.grow(arm, share, rate, best, seed)
    for seed in self.seeds:
      list(self.apart(START, best, seed, LENGTHS[2:]))
      list(self.apart(END, best, seed, LENGTHS))
    for other, seed, (arm, rate) in itertools.product(others, self.seeds, own.items()):
      self.grow(arm, other, rate, best, seed)


def write_text(out: Path) -> str:
  """Write the standard library with its tests as text files; return the source of a config."""
  folder, root = out / 'corpus', Path(sysconfig.get_path('stdlib'))
  hashed, count = hashlib.sha256(), 0
  for path in sorted(root.rglob('*.py')):
    if {'site-packages', 'dist-packages', '__pycache__'} & {*path.parts}:
      continue
    with contextlib.suppress(UnicodeDecodeError, SyntaxError), tokenize.open(path) as file:
      text = file.read().encode()
      name = '_'.join(path.relative_to(root).parts) + '.txt'
      hashed.update(name.encode() + text)
      count += len(text)
      target = folder / name
      if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text)
  print(f'the standard library with its tests: {count:,} bytes, sha256 {hashed.hexdigest()[:16]}')
  return f'files:{folder}'


def collect(out: Path) -> list[Row]:
  """Return the rows of all runs in a folder that have ended."""
  rows = []
  for done in sorted(out.glob('*/* * */*/*/done.json')):
    size, arm, rate, seed = done.relative_to(out).parts[:4]
    arm, length, share = arm.rsplit(' ', 2)
    ended = json.loads(done.read_text())
    figures = ended['loss'], ended['step_seconds']
    rows.append(Row(size, arm, float(length), float(share), float(rate), int(seed), *figures))
  return rows


@dataclasses.dataclass(frozen=True)
class Table:
  """The runs of all sizes."""

  rows: Sequence[Row]

  def of(self, size: str) -> Runs:
    """Return the runs of a size."""
    return Runs(size, [row for row in self.rows if row.scale == size])

  def best(self, size: str, arm: str, length: float, share: float = 0.0) -> tuple[float, Losses]:
    """Return the best of the rates with the most seeds, and the losses at it; {} without runs."""
    return self.of(size).best(arm, length, share)

  def sizes(self) -> list[str]:
    """Return the sizes that have runs from scratch, the smallest first."""
    return [size for size in SIZES if self.best(size, END, MAIN)[1]]

  def scratch(self, size: str, shape: str, seed: int) -> tuple[list[float], list[float]]:
    """Return the FLOPs and losses of a shape from scratch at all lengths that a seed has."""
    known = [(length, self.best(size, shape, length)[1]) for length in LENGTHS]
    pairs = [(compute(size, shape, at), losses[seed]) for at, losses in known if seed in losses]
    return [cost for cost, _ in pairs], [loss for _, loss in pairs]

  def envelope(self, size: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return FLOPs and losses of END: those of a seed, and the means of the other sizes.

    A run that is no better than a cheaper one is left out.
    """
    points = list(zip(*self.scratch(size, END, seed), strict=True))
    for other in set(self.sizes()) - {size}:
      for length in LENGTHS:
        if losses := self.best(other, END, length)[1]:
          points.append((compute(other, END, length), statistics.mean(losses.values())))
    lowest, kept = math.inf, []
    for cost, loss in sorted(points):
      if loss < lowest:
        kept.append((cost, loss))
        lowest = loss
    return np.array([cost for cost, _ in kept]), np.array([loss for _, loss in kept])

  def multipliers(self, size: str, arm: str, share: float, losses: Losses) -> list[float]:
    """Return the multiplier of each seed."""
    spent = compute(size, arm, MAIN, share)
    both = losses.keys() & self.best(size, END, MAIN)[1].keys()
    return [equal_length(*self.envelope(size, seed), losses[seed]) / spent for seed in sorted(both)]

  def step_seconds(self, size: str, arms: Sequence[str]) -> float:
    """Return the median seconds of the processor for a step of some arms; 0 if unknown."""
    times = [row.step_seconds for row in self.rows if row.scale == size and row.arm in arms]
    return statistics.median(times) if times else 0.0

  def curve(self, arm: str, length: float, share: float) -> Curve:
    """Return the FLOPs and mean losses of an arm at all sizes."""
    known = [(size, self.best(size, arm, length, share)[1].values()) for size in self.sizes()]
    known = [(compute(size, arm, length, share), statistics.mean(x)) for size, x in known if x]
    return tuple(map(np.array, zip(*known, strict=True)))

  def kappa(self, size: str) -> str:
    """Return κ as measured: the gap between START and END at MAIN over the slope of END there."""
    start = self.best(size, START, MAIN)[1]
    made = []
    for seed in start.keys() & self.best(size, END, MAIN)[1].keys():
      costs, losses = map(np.array, self.scratch(size, END, seed))
      if len(costs) < len(LENGTHS):
        continue
      at = loss_at(costs, losses, compute(size, END, MAIN))
      slope = (losses[-1] - losses[-3]) / np.log(costs[-1] / costs[-3])  # on both sides
      made.append((start[seed] - at) / -slope)
    return trials.spread(made, 2)


def compute(size: str, arm: str, length: float, share: float = 0.0) -> float:
  """Return the FLOPs of a run."""
  costs = token_flops(size, START), token_flops(size, END)
  share = 1.0 if arm == START else share
  return length * SIZES[size].parameters * (share * costs[0] + (1 - share) * costs[1])


def write_curves(out: Path, path: Path) -> None:
  """Write the training losses of the runs in a folder as CSV, in bits a byte, after others."""
  stored = list(csv.reader(path.read_text().splitlines())) if path.exists() else []
  with path.open('w', newline='') as file:
    writer = csv.writer(file, lineterminator='\n')
    writer.writerow(['run', 'step', 'loss'])
    writer.writerows(row for row in stored[1:] if not (out / row[0] / 'done.json').exists())
    for done in sorted(out.glob('*/*/**/done.json')):
      curve = json.loads(done.read_text())['curve']
      name = str(done.parent.relative_to(out))
      writer.writerows([name, step, f'{loss:.4f}'] for step, loss in curve.items())


def report(table: Table) -> None:
  """Print sizes from scratch, growths, fits, what was predicted, and what is missing."""
  head = ['from scratch, bits a byte', 'FLOPs at 16', 'rates at 16 of one seed']
  rows = [[*head, *(f'{x} tokens' for x in LENGTHS), *(f'START, {x}' for x in LENGTHS[2:])]]
  for size in table.sizes():
    shown = _of_one_seed(table.of(size).by_rate(END, MAIN))
    apart = [table.best(size, END, length)[1] for length in LENGTHS]
    apart += [table.best(size, START, length)[1] for length in LENGTHS[2:]]
    spreads = [trials.spread(losses.values()) for losses in apart]
    rows.append([size, f'{compute(size, END, MAIN):.2e}', shown, *spreads])
  trials.table(rows)
  rows = [['size, growth', 'at', 'rates of one seed', 'rate', 'bits a byte', 'multiplier', 'saves']]
  rows[0] += ['saves seconds', 'gap closed', 'multiplier over START', 'bits less than whole copies']
  for size in table.sizes():
    for share, arm in itertools.product(SIZES[size].shares, ARMS):
      by_rate = table.of(size).by_rate(arm, MAIN, share)
      most = max(map(len, by_rate.values()), default=0)
      for rate, losses in by_rate.items():
        if len(losses) == most:
          figures = _figures(table, size, arm, share, rate, losses)
          rows.append([f'{size}, {arm}', f'{share:g}', _of_one_seed(by_rate), *figures])
  trials.table(rows)
  _report_fits(table)
  _report_predictions(table)
  for line in missing(table):
    print(f'missing: {line}')


def _of_one_seed(by_rate: dict[float, dict[int, float]]) -> str:
  """Return the loss of the first seed at each rate."""
  return ', '.join(f'×{rate:g} {losses[0]:.3f}' for rate, losses in sorted(by_rate.items()))


def _figures(
  table: Table, size: str, arm: str, share: float, rate: float, losses: Losses
) -> list[str]:
  plain_rate, plain = table.best(size, END, MAIN)
  start, whole = table.best(size, START, MAIN)[1], table.best(size, WHOLE, MAIN, share)[1]
  made = table.multipliers(size, arm, share, losses)
  line = [f'×{rate:g}{" (transferred)" if rate == plain_rate else ""}']
  line += [trials.spread(losses.values()), trials.spread(made), _percent(1 - 1 / x for x in made)]
  seconds = [table.step_seconds(size, arms) for arms in ((START,), (END, *ARMS))]
  spent, plain_cost = compute(size, arm, MAIN, share), compute(size, END, MAIN)
  longer = (share * seconds[0] / seconds[1] + 1 - share) * plain_cost / spent
  line.append(_percent(1 - longer / x for x in made) if seconds[0] else '–')
  seeds = sorted(losses.keys() & start.keys() & plain.keys())
  closed = [(start[seed] - losses[seed]) / (start[seed] - plain[seed]) for seed in seeds]
  curves = [tuple(map(np.array, table.scratch(size, START, seed))) for seed in seeds]
  over = [
    equal_length(*curve, losses[seed]) / spent
    for seed, curve in zip(seeds, curves, strict=True)
    if len(curve[0]) > 1
  ]
  less = [whole[seed] - losses[seed] for seed in losses.keys() & whole.keys()] if whole else []
  return [*line, trials.spread(closed, 2), trials.spread(over), trials.spread(less, 4)]


def _percent(values: Iterable[float]) -> str:
  return f'{trials.spread([100 * x for x in values], 0)} %'


def deviations(table: Table, *, pooled: bool = False) -> dict[str, float]:
  """Return the deviation of the log of a multiplier between seeds, of all growths of a size.

  A size with fewer than three seeds has that of the size before it. `pooled`: one for all sizes.
  """
  made, known, all_logs = {}, math.nan, []
  for size in table.sizes():
    share = SIZES[size].shares[0]
    each = [
      table.multipliers(size, arm, share, table.best(size, arm, MAIN, share)[1]) for arm in ARMS
    ]
    if logs := [np.log(values) for values in each if len(values) > 2]:
      known = _deviation(logs)
      all_logs += logs
    made[size] = known
  return dict.fromkeys(made, _deviation(all_logs)) if pooled else made


def _deviation(samples: Sequence[np.ndarray]) -> float:
  """Return the deviation within samples, of which each has a mean of its own."""
  squares = sum(float(one.var()) * len(one) for one in samples)
  return (squares / sum(len(one) - 1 for one in samples)) ** 0.5


def levels(
  table: Table, arm: str, by_size: Mapping[str, float]
) -> list[tuple[float, float, float]]:
  """Return log10 of the FLOPs, the log of the multiplier and its error, for each size.

  `by_size` has the deviations of the logs between seeds.
  """
  made = []
  for size, deviation in by_size.items():
    share = SIZES[size].shares[0]
    if values := table.multipliers(size, arm, share, table.best(size, arm, MAIN, share)[1]):
      error = deviation / len(values) ** 0.5
      cost = math.log10(compute(size, arm, MAIN, share))
      made.append((cost, float(np.log(values).mean()), error))
  return made


def line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float, float]:
  """Return the weighted mean of some levels, its error, their slope, and its error."""
  x, y, error = np.array(points).T
  weights = 1 / np.square(error)
  center = float(np.average(x, weights=weights))
  mean, spread = float(np.average(y, weights=weights)), float((weights * (x - center) ** 2).sum())
  if not spread:
    return mean, float(error[0]), math.nan, math.nan
  slope = float((weights * (x - center) * y).sum() / spread)
  return mean, float(weights.sum() ** -0.5), slope, spread**-0.5


def power(curve: Curve, e: float) -> np.ndarray:
  """Return the line of log(L − E) over log C of a curve, its slope first."""
  return np.polyfit(np.log(curve[0]), np.log(curve[1] - e), 1)


def best_e(curves: Sequence[Curve]) -> float:
  """Return the E with which L = E + A C^−γ fits curves best, each with its own A and γ."""

  def error(e: float) -> float:
    fits = (e + np.exp(np.polyval(power(one, e), np.log(one[0]))) - one[1] for one in curves)
    return sum(float(np.square(fit).sum()) for fit in fits)

  return min(np.linspace(0, min(one[1].min() for one in curves) - 0.01, 500), key=error)


def by_fit(plain: Curve, grown: Curve, *, shared: bool) -> str:
  """Return the multipliers at the computes of the second curve by fits with one E or two."""
  if len(grown[0]) < (2 if shared else 3):
    return '–'
  both = [best_e([plain, grown])] * 2 if shared else [best_e([plain]), best_e([grown])]
  (slope, start), own, logs = power(plain, both[0]), power(grown, both[1]), np.log(grown[0])
  loss = both[1] + np.exp(np.polyval(own, logs))
  needed = (np.log(loss - both[0]) - start) / slope
  return ', '.join(f'{x:.3f}' for x in np.exp(needed - logs))


def _report_fits(table: Table) -> None:
  """Print the multipliers over the sizes, and those of fits with one E and with an E for each."""
  head = ['multiplier', 'slope of its log a decade', 'with one deviation for all sizes', 'slope']
  rows = [['growth', *head, 'one E', 'an E for each']]
  spreads = deviations(table), deviations(table, pooled=True)
  for arm in ARMS:
    own, pooled = (levels(table, arm, by_size) for by_size in spreads)
    if own:
      shown = [*_shown(own), *_shown(pooled)]
      curves = table.curve(END, MAIN, 0.0), table.curve(arm, MAIN, SHARES[0])
      rows.append([arm, *shown, *(by_fit(*curves, shared=shared) for shared in (True, False))])
  trials.table(rows)


def _shown(points: Sequence[tuple[float, float, float]]) -> list[str]:
  mean, error, slope, slope_error = line(points)
  level = f'{math.exp(mean):.3f} ± {math.exp(mean) * error:.3f}'
  return [level, f'{slope:.3f} ± {slope_error:.3f}' if len(points) > 1 else '–']


def _report_predictions(table: Table) -> None:
  """Print what was predicted of each growth by whole copies, and what came."""
  rows = [['predicted', 'FLOPs', 'κ = 1.3', 'κ = 1.09 ln r', 'published line', 'measured', 'κ']]
  for one in json.loads(PREDICTED.read_text())['multiplier_of_compute']:
    size, share = one['size'], one['share']
    losses = table.best(size, WHOLE, MAIN, share)[1]
    kappas = ('kappa_1.3', 'kappa_1.09_ln_r', 'published_line_continued')
    shown = [f'{one[key]:.2f}' for key in kappas]
    made = table.multipliers(size, WHOLE, share, losses)
    name = f'{size} at {share:g}'
    rows.append([name, f'{one["flops"]:.2e}', *shown, trials.spread(made), table.kappa(size)])
  trials.table(rows)


def missing(table: Table) -> Iterator[str]:
  """Yield what each size lacks, with the seeds that it has."""
  for name, size in SIZES.items():
    wanted = [(END, length, 0.0) for length in LENGTHS]
    wanted += [(START, length, 0.0) for length in LENGTHS[2:]]
    wanted += [(arm, MAIN, share) for arm in ARMS for share in size.shares]
    counts = {one: len(table.best(name, *one)[1]) for one in wanted}
    lacks = [
      f'{arm} {f"at {share:g}" if share else f"of {length} tokens"} ({count} of {size.seeds} seeds)'
      for (arm, length, share), count in counts.items()
      if count < size.seeds
    ]
    if lacks:
      yield f'{name}: {"; ".join(lacks) if any(counts.values()) else "all"}'


def main() -> None:
  """Make the runs, and print what they say."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', type=Path, help='make the runs that are missing in this folder')
  parser.add_argument('--csv', type=Path, help='of the runs: read it, and add those of --out')
  parser.add_argument('--sizes', default=','.join(SIZES), help="by commas; '' makes no run")
  args = parser.parse_args()
  rows = trials.read(args.csv, Row) if args.csv and args.csv.exists() else []
  if args.out:
    trials.keep_programs(args.out)
    Replicas.source = write_text(args.out)
    for name in filter(None, args.sizes.split(',')):
      with (args.out / f'{name}.lock').open('w') as lock:
        try:
          fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # Another process makes this size.
          continue
        Replicas(Branches(args.out), name, seeds=tuple(range(SIZES[name].seeds))).make()
    rows = trials.latest([*rows, *collect(args.out)])
    if args.csv:
      trials.write(rows, args.csv)
      write_curves(args.out, args.csv.with_name(f'{args.csv.stem}_curves.csv'))
  report(Table(rows))


if __name__ == '__main__':
  main()
