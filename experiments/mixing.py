r"""Measure how fast a grown model forgets that it was small, by recipe, point and length.

  python experiments/mixing.py --data=DATA.npz --pack         the text of all runs, once
  python experiments/mixing.py --data=DATA.npz --out=runs/mixing --scales=tiny --parts=default
  python experiments/mixing_report.py runs/mixing             tables

All runs of a shape are members of one program (members.py), so on a GPU hundreds of them take
minutes. `--parts`, in the order in which they are made:

  frontier  small and large from scratch: rates, seeds and lengths
  undecayed the same without decay of weights, at two rates
  default   growth as `grow` does it, by the point of growth
  shorter   the same at the least of the lengths
  longer    the small model alone for twice the length, which costs about as much as growth
  early     the same at 2.5, 5 and 10 % of the run
  recipes   other rates, moments, decays, keys, values, layers, batches and trunks; a teacher
  controls  growth by copied layers alone, as released, and of a Transformer, and these from scratch
  muon      the default and both sizes from scratch with Muon
  family    four sizes from scratch, and from one trunk that grows from each to the next
  late      the family again, whose trunk grows at a quarter, half and three quarters
  spread    the family again, whose trunk grows at 10, 65 and 78 %
  deep      the large model with twice the layers, from scratch
  tokens    sizes from scratch that differ in parameter tokens alone (family_ways.py)

Every run has 512 tokens a step. The length D is in tokens for each parameter of the large model's
layers. A trunk trains at a constant rate; runs that end decay to zero over the last fifth of D, or
from the growth on if it comes later. An arm tries the same RATES with every seed. The command
writes `OUT/runs.jsonl`, one line for each run that ends, and goes on where it stopped.
"""

import argparse
import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from member_runs import Rate, Run, Text
from members import Program, Work, record_to
from recipes import (
  AS_GROW,
  BY_TOKENS,
  CONTROL_SHAPES,
  CONTROLS,
  DECAY,
  DEEP,
  EARLY,
  FAMILIES,
  FAMILY,
  LARGE,
  RATES,
  RECIPES,
  SAMPLES,
  SCALES,
  SEEDS,
  SMALL,
  TAUGHT,
  TRUNK_RATES,
  Recipe,
  Scale,
  Trunk,
  config,
)


@dataclasses.dataclass(frozen=True)
class Plan:
  """The runs of a scale, by parts."""

  name: str
  seeds: tuple[int, ...]
  optimizer: str = 'adamw'
  lengths: tuple[int, ...] = ()  # in the place of those of the scale
  main: int = 0  # in the place of that of the scale
  rates: tuple[float, ...] = TRUNK_RATES  # of both sizes from scratch
  grown_rates: tuple[float, ...] = RATES
  points: tuple[float, ...] = ()  # of growth, in the place of those of a recipe

  @property
  def scale(self) -> Scale:
    """The scale."""
    scale = SCALES[self.name]
    lengths, main = self.lengths or scale.lengths, self.main or scale.main
    return dataclasses.replace(scale, lengths=lengths, main=main)

  def shape(self, shape: str, batch: str = '') -> str:
    """Return the name of a program."""
    return ' '.join(filter(None, (self.name, shape, self.optimizer, batch)))

  def trunk(self, trunk: Trunk, seed: int, lengths: tuple[int, ...], points: Any) -> Run:
    """Return the stable run of a small or large model, with the steps at which others begin.

    `points` are (point of growth, length); lengths without a point end in a decay.
    """
    keep = {self.begin(length) for length in lengths}
    for point, length in points:
      at = self.scale.steps(point * length)
      keep.add(self.scale.steps(0.8 * point * length) if trunk.annealed else at)
    keep.discard(0)
    last = max(keep)
    rate = Rate(self.scale.rate * trunk.rate)
    shape = self.shape(trunk.shape)
    name = f'{shape}/trunk/{trunk.rate:g}/{trunk.decay:g}/{seed}'
    return Run(name, shape, seed, 0, last, rate, trunk.decay, keep=tuple(sorted(keep)))

  def begin(self, length: float) -> int:
    """Return the step at which the decay of a length begins."""
    return self.scale.steps((1 - DECAY) * length)

  def scratch(
    self, shape: str, lengths: tuple[int, ...], rates: Sequence[float], decay: float = 0.1
  ) -> Iterator[Run]:
    """Yield a size from scratch at all lengths."""
    for factor in rates:
      for seed in self.seeds:
        yield from self._from_scratch(shape, lengths, Trunk(shape, factor, decay), seed)

  def _from_scratch(
    self, shape: str, lengths: tuple[int, ...], how: Trunk, seed: int
  ) -> Iterator[Run]:
    trunk = self.trunk(how, seed, lengths, ())
    yield trunk
    for length in lengths:
      begin, end = self.begin(length), self.scale.steps(length)
      rate = dataclasses.replace(trunk.rate, decay_from=begin, end=end)
      way = 'scratch' if how.decay else 'scratch without decay'
      name = f'{self.shape(shape)}/{way}/{length}/{how.rate:g}/{seed}'
      source = (trunk.name, begin)
      yield Run(name, self.shape(shape), seed, begin, end, rate, how.decay, begin=source)

  def arm(
    self, name: str, recipe: Recipe, lengths: tuple[int, ...], points: tuple[float, ...] = ()
  ) -> Iterator[Run]:
    """Yield the grown runs of an arm, each after the trunk that it needs."""
    points = points or self.points or recipe.points
    for seed in self.seeds:
      growths = len(recipe.between) + 1
      pairs = [(point / growths, length) for length in lengths for point in points]
      trunk = self.trunk(recipe.trunk, seed, (), pairs)
      yield trunk
      for length in lengths:
        for point in points:
          yield from self._grown(name, recipe, trunk, length, point)

  def _grown(
    self, name: str, recipe: Recipe, trunk: Run, length: int, point: float
  ) -> Iterator[Run]:
    scale, seed = self.scale, trunk.seed
    at, end = scale.steps(point * length), scale.steps(length)
    source, peak = (trunk.name, at), scale.rate
    path = f'{self.name} {self.optimizer}/{name}/{length}/{point:g}'
    if recipe.trunk.annealed:
      begin = scale.steps(0.8 * point * length)
      rate = dataclasses.replace(trunk.rate, decay_from=begin, end=at)
      run = Run(
        f'{path}/annealed/{seed}', trunk.shape, seed, begin, at, rate, begin=(trunk.name, begin)
      )
      yield dataclasses.replace(run, keep=(at,))
      source = (run.name, at)
    times = {'': 1, 'b4': 2, 'b16': 0.5}[recipe.batch]
    first, last = round(at * times), round(end * times)
    fall = first if recipe.falls else max(first, round(self.begin(length) * times))
    for factor in self.grown_rates:
      rate = Rate(peak * factor, recipe.warmup, first, fall, last, recipe.new)
      rate = dataclasses.replace(rate, new_warmup=recipe.new_warmup, layers=recipe.layers)
      begins, how, growths = source, recipe.grow, len(recipe.between) + 1
      for number, name in enumerate(recipe.between, 1):
        begin, until = (scale.steps(n * point * length / growths) for n in (number, number + 1))
        if number == 1:
          begins = (trunk.name, begin)
        shape = self.shape(name)
        between = dataclasses.replace(rate, start=begin, decay_from=0)
        one = Run(f'{path}/{factor:g} between {name}/{seed}', shape, seed, begin, until, between)
        yield dataclasses.replace(one, begin=begins, grow=how, keep=(until,))
        begins = (one.name, until)
      shape = self.shape(recipe.shape, TAUGHT if recipe.teacher else recipe.batch)
      run = Run(f'{path}/{factor:g}/{seed}', shape, seed, first, last, rate, recipe.decay, begins)
      yield dataclasses.replace(run, grow=how, edit=recipe.edit)

  def family(self, length: int, way: str) -> Iterator[Run]:
    """Yield a trunk that grows to each size of a family, and the decays of all but the smallest.

    The smallest size decays as it does from scratch. After n growths the rate has the factor
    x^(n/3), with each x of `grown_rates`.
    """
    scale, begin, end = self.scale, self.begin(length), self.scale.steps(length)
    parts = FAMILIES[way]
    at = [scale.steps(part * length) for part in parts]
    for seed in self.seeds:
      trunk = self.trunk(Trunk(FAMILY[0]), seed, (), [(parts[1], length)])
      yield trunk
      for factor in self.grown_rates:
        source = (trunk.name, at[1])
        for n in range(1, len(FAMILY)):
          shape, path = self.shape(FAMILY[n]), f'{self.name} {self.optimizer}/{way} {FAMILY[n]}'
          path = f'{path}/{length}/{parts[n]:.3g}/{factor:g}'
          rate = Rate(scale.rate * factor ** (n / (len(FAMILY) - 1)), 0, at[n], new_warmup=100)
          keep = tuple(sorted({*at[n + 1 : n + 2], begin}))
          stable = Run(f'{path} between/{seed}', shape, seed, at[n], begin, rate, keep=keep)
          yield dataclasses.replace(stable, begin=source, grow=AS_GROW)
          rate = dataclasses.replace(rate, decay_from=begin, end=end)
          yield Run(f'{path}/{seed}', shape, seed, begin, end, rate, begin=(stable.name, begin))
          source = (stable.name, at[n + 1]) if n + 1 < len(FAMILY) else source


def _frontier(plan: Plan) -> Iterator[Run]:
  lengths = plan.scale.lengths
  yield from plan.scratch(LARGE, lengths, plan.rates)
  yield from plan.scratch(SMALL, tuple(x for x in lengths if x <= plan.scale.main), plan.rates)


def _undecayed(plan: Plan) -> Iterator[Run]:
  lengths = plan.scale.lengths
  for shape, most in ((LARGE, max(lengths)), (SMALL, plan.scale.main)):
    some = tuple(length for length in lengths if length <= most)
    yield from plan.scratch(shape, some, TRUNK_RATES[1:3], decay=0.0)


def _recipes(plan: Plan) -> Iterator[Run]:
  for name in plan.scale.recipes or RECIPES:
    if name not in ('default', *CONTROLS):
      yield from plan.arm(name, RECIPES[name], (plan.scale.main,))


def _controls(plan: Plan) -> Iterator[Run]:
  for shape in CONTROL_SHAPES:
    yield from plan.scratch(shape, plan.scale.lengths, plan.rates)
  for name in CONTROLS:
    yield from plan.arm(name, RECIPES[name], (plan.scale.main,))


def _muon(plan: Plan) -> Iterator[Run]:
  plan = dataclasses.replace(plan, optimizer='muon')
  yield from _frontier(plan)
  yield from plan.arm('default', RECIPES['default'], (plan.scale.main,))


def _family(plan: Plan, way: str = 'family') -> Iterator[Run]:
  for shape in FAMILY:
    yield from plan.scratch(shape, plan.scale.lengths, plan.rates)
  yield from plan.family(plan.scale.main, way)


def _tokens(plan: Plan) -> Iterator[Run]:
  for shape in BY_TOKENS:
    yield from plan.scratch(shape, plan.scale.lengths, plan.rates)


PARTS: Mapping[str, Callable[[Plan], Iterator[Run]]] = {
  'frontier': _frontier,
  'undecayed': _undecayed,
  'default': lambda plan: plan.arm('default', RECIPES['default'], (plan.scale.main,)),
  'shorter': lambda plan: plan.arm('default', RECIPES['default'], plan.scale.lengths[:1]),
  'longer': lambda plan: plan.scratch(SMALL, (2 * plan.scale.main,), plan.rates),
  'early': lambda plan: plan.arm('default', RECIPES['default'], (plan.scale.main,), EARLY),
  'recipes': _recipes,
  'controls': _controls,
  'muon': _muon,
  'family': _family,
  'late': lambda plan: _family(plan, 'late family'),
  'spread': lambda plan: _family(plan, 'early and late family'),
  'deep': lambda plan: plan.scratch(DEEP, plan.scale.lengths, plan.rates),
  'tokens': _tokens,
}


def runs_of(
  parts: Sequence[str],
  scales: Sequence[str],
  seeds: tuple[int, ...],
  arms: Sequence[str] = (),
  **plan: Any,
) -> list[Run]:
  """Return all runs of some parts, each once; `arms` limits those that grow, if it names any.

  A trunk goes on for the longest of all that begin with it; `plan` has fields of `Plan`.
  """
  found: dict[str, Run] = {}
  for scale in scales:
    for part in parts:
      for run in PARTS[part](Plan(scale, seeds, **plan)):
        kind = run.name.split('/')[1]
        if arms and kind not in ('trunk', 'scratch', 'scratch without decay', *arms):
          continue
        known = found.get(run.name, run)
        keep = tuple(sorted({*known.keep, *run.keep}))
        found[run.name] = dataclasses.replace(known, last=max(known.last, run.last), keep=keep)
  begun = {run.begin[0] for run in found.values() if run.begin}
  return [run for run in found.values() if '/trunk/' not in run.name or run.name in begun]


def unfinished(runs: Sequence[Run], done: Collection[str]) -> list[Run]:
  """Return the runs that have not ended, and others as far as these begin with them."""
  found, steps = [], {}
  for run in reversed(runs):  # Each is behind the one that it begins with.
    keep = steps.get(run.name, set())
    if run.name in done:
      if not keep:
        continue
      run = dataclasses.replace(run, last=max(keep), keep=tuple(sorted(keep)))
    if run.begin:
      source, step = run.begin
      steps.setdefault(source, set()).add(step)
    found.append(run)
  return found[::-1]


def pack(path: Path) -> None:
  """Write the text of all runs, and the order of its samples."""
  Text.of(config('tiny 2x1 adamw'), SEEDS, SAMPLES).write(path)


def main() -> None:
  """Make the runs."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--data', type=Path, required=True)
  parser.add_argument('--pack', action='store_true')
  parser.add_argument('--out', type=Path)
  parser.add_argument('--parts', default='frontier,undecayed,default,recipes')
  parser.add_argument('--scales', default='tiny')
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('--lengths', default='', help="from scratch, in the place of the scale's")
  parser.add_argument('--main', type=int, default=0, help="of arms, in the place of the scale's")
  parser.add_argument('--rates', default='', help='from scratch, in the place of all')
  parser.add_argument('--points', default='', help="of growth, in the place of a recipe's")
  parser.add_argument('--grown_rates', default='', help='of arms, in the place of all')
  parser.add_argument('--arms', default='', help='names of recipes, separated by ;')
  parser.add_argument('--slots', type=float, default=1.0, help='a factor on the most members')
  parser.add_argument('--unroll', type=int, default=1, help='steps of the loop made as one')
  parser.add_argument('--minutes', type=float, default=1e9, help='stop after so long')
  parser.add_argument('--dtype', default='float32', help='of activations')
  parser.add_argument('--precision', default='highest', help='of products in float32')
  parser.add_argument('--dry_run', action='store_true', help='count the steps by shape')
  args = parser.parse_args()
  if args.pack:
    pack(args.data)
    return
  until = time.time() + 60 * args.minutes
  jax.config.update('jax_default_matmul_precision', args.precision)
  seeds = tuple(map(int, args.seeds.split(',')))
  arms = args.arms.split(';') if args.arms else ()
  plan = {'main': args.main}
  if args.lengths:
    plan['lengths'] = tuple(map(int, args.lengths.split(',')))
  for name in ('rates', 'grown_rates', 'points'):
    if values := getattr(args, name):
      plan[name] = tuple(map(float, values.split(',')))
  lines, done = args.out / 'runs.jsonl', set()
  if lines.exists():
    done = {json.loads(line)['name'] for line in lines.read_text().splitlines()}
  runs = unfinished(
    runs_of(args.parts.split(','), args.scales.split(','), seeds, arms, **plan), done
  )
  steps = Counter()
  for run in runs:
    steps[run.shape] += run.last - run.first
  if args.dry_run:
    print(f'{len(runs)} runs; members × steps: {dict(steps)}')
    return
  args.out.mkdir(parents=True, exist_ok=True)
  text = Text.read(args.data)
  programs = {}
  for shape, count in steps.items():
    longest = max(run.last for run in runs if run.shape == shape)
    scale = SCALES[shape.split()[0]]
    slots = min(round(args.slots * scale.slots), max(2, math.ceil(count / longest)))
    made, teacher = config(shape, args.dtype), None
    if shape.endswith(TAUGHT):
      teacher = config(shape.removesuffix(TAUGHT).replace(LARGE, SMALL), args.dtype)
    programs[shape] = Program(made, text, max(1, slots), scale.chunk, args.unroll, teacher)
  Work(programs, record_to(lines), done, until).make(runs)


if __name__ == '__main__':
  main()
