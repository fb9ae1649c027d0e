r"""Measure what growth saves: chains that grow, against models from scratch at the final size.

  python experiments/growth.py --out=runs/growth              two scales; goes on where it stopped
  python experiments/growth.py --out=runs/growth --scales=small --parts=arms,scratch
  python experiments/growth_report.py runs/growth docs        tables and pictures of finished runs

A chain trains the small model at a constant rate, grows it, and ends with a decay of the rate to
zero. All arms spend the same FLOPs, the decay included: BUDGET times those of the small model's
stable run, of which the decay has the part DECAY. Each arm tries the rates of FACTORS (times the
rate of the small model) with seed 0, and runs the other seeds at its best one. Parts:

  rates     the rate of each small model (seed 0)
  arms      every way to grow, at three quarters of the stable run, to four times the tokens
  scratch   the large model from scratch, decayed at several budgets
  points    growth earlier and later, to other sizes, and in two stages
  handover  the first 50 steps after growth, evaluated every 10
  warmups   the same for a group at the rate that `grow` writes, by the new tokens' warm-up
  defaults  the same with all that `grow` does by default, for every kind and size of growth
  elastic   one model of three sizes, against models of these sizes and `grow shrink`
  forgetting  growth for another text, with old tokens trained, scaled or frozen

Every run calls `tokenformer_jax.train` with a config, and grows by `config.init_from`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import elastic
import forgetting
import trials

import tokenformer_jax
from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.grow import as_tokens, state
from tokenformer_jax.model import flops
from tokenformer_jax.runs import metrics
from tokenformer_jax.training import sizes

BUDGET, DECAY = 3, 0.2
POINT = 0.75  # of the stable run, where arms grow
MATRICES = 'qkv,proj'  # that become tokens: four times their parameters
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
FACTORS = (1, 1 / 2, 1 / 4)
GROWN_RATE, WARMUPS = 0.354, (50, 100, 200, 400)  # of `grow`, for four times the tokens
SCRATCH_BUDGETS = (0.5, 1, 2)  # in budgets of a chain
Changes = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Scale:
  """The sizes of the small model.

  Attributes:
    layers: the number of layers.
    width: of the TokenFormer, which has as many parameter tokens, and four times as many in its
      feed-forward part.
    dense_width: of the Transformer with as many parameters in its blocks.
    steps: of the stable run.
    dense_head: the width of a head of the Transformer.
    rates: those that the small model tries.
    factors: those that an arm tries.
  """

  layers: int
  width: int
  dense_width: int
  steps: int
  dense_head: int = 4
  rates: tuple[float, ...] = RATES[1:]
  factors: tuple[float, ...] = FACTORS


# From scratch, the grown size sees about 20 tokens a parameter of its layers with one budget. Each
# scale has four times the parameters of the one before it, and 16 times its FLOPs, so that the last
# tries only the rates that were best at the others.
SCALES = {
  'tiny': Scale(2, 16, 18, 1500, dense_head=6),
  'small': Scale(2, 32, 36, 6000),
  'large': Scale(2, 64, 72, 24000, rates=RATES[:3], factors=(1 / 2,)),
}


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of model: its changes to the TokenFormer's config.

  Attributes:
    changes: to the config.
    dense: whether it is a Transformer.
    rate: a factor on the rates that the small model tries.
  """

  changes: Changes = dataclasses.field(default_factory=dict)
  dense: bool = False
  rate: float = 1


KINDS = {
  'tokenformer': Kind(),
  'transformer': Kind(dense=True),
  'muon': Kind({'optim__name': 'muon'}),
  'adafactor': Kind({'optim__name': 'adafactor'}),
  'transformer, muon': Kind({'optim__name': 'muon'}, dense=True),
  'lion': Kind({'optim__name': 'lion'}, rate=0.1),
}


@dataclasses.dataclass(frozen=True)
class Size:
  """A size: factors of the small model's parameter tokens (or width²) and of its layers."""

  tokens: int = 1
  layers: int = 1
  groups: int = 0  # from scratch, in as many equal groups of tokens
  beside: str = ''  # a Transformer keeps its width: tokens beside 'all' matrices, or 'attention'
  as_tokens: bool = False  # the matrices of a Transformer's attention are tokens


@dataclasses.dataclass(frozen=True)
class Arm:
  """A way to spend a part of the budget: a kind of model, how it grows, and to which size."""

  kind: str = 'tokenformer'
  size: Size = Size(4)
  grow: Changes = dataclasses.field(default_factory=dict)
  stages: tuple[tuple[float, Size], ...] = ()  # (point, size); (): one growth at POINT
  part: float = 1


def _tokens(count: int) -> dict[str, Any]:
  return {'kind': 'pattention', 'tokens': count}


def _grown(method: str, **changes: Any) -> dict[str, Any]:
  return {'grow__method__kind': method, **changes}


# Copies need noise to part if each value is shared evenly; the exact growth of copies needs none.
ARMS = {
  'no growth': Arm(size=Size()),
  'group': Arm(grow=_grown('group')),
  'group, keys like trained': Arm(grow=_grown('group', grow__method__new_keys='trained')),
  'group, keys copied': Arm(
    grow=_grown('group', grow__method__new_keys='copies', grow__method__noise=0.5)
  ),
  'zero_keys': Arm(grow=_grown('zero_keys')),
  'duplicate': Arm(grow=_grown('duplicate')),
  'as released': Arm(grow=_grown('random', grow__moments='drop')),
  'scale only': Arm(size=Size(), grow={'scale_only': True}),
  'depth': Arm(size=Size(1, 4), grow={'grow__place': 'between'}),
  'depth, copies': Arm(size=Size(1, 4), grow={'grow__place': 'copies'}),
  'tokens and depth': Arm(size=Size(2, 2), grow=_grown('group', grow__place='between')),
  'tokens and depth, copies': Arm(size=Size(2, 2), grow=_grown('group', grow__place='copies')),
  'transformer, no growth': Arm('transformer', Size()),
  'net2net': Arm('transformer', grow=_grown('net2net', grow__method__noise=0.01)),
  'hypercloning': Arm('transformer', grow=_grown('hypercloning', grow__method__noise=0.01)),
  'transformer, depth, copies': Arm('transformer', Size(1, 4), {'grow__place': 'copies'}),
  'transformer, group': Arm('transformer', Size(4, beside='all'), _grown('group')),
  'transformer, group, attention': Arm('transformer', Size(4, beside='attention'), _grown('group')),
  'transformer, as tokens': Arm('transformer', Size(as_tokens=True)),
  'muon, no growth': Arm('muon', Size()),
  'muon, group': Arm('muon', grow=_grown('group')),
  'muon, tokens and depth, copies': Arm('muon', Size(2, 2), _grown('group', grow__place='copies')),
  'net2net, muon': Arm('transformer, muon', grow=_grown('net2net', grow__method__noise=0.01)),
  'adafactor, no growth': Arm('adafactor', Size()),
  'adafactor, group': Arm('adafactor', grow=_grown('group')),
  'lion, no growth': Arm('lion', Size()),
  'lion, group': Arm('lion', grow=_grown('group')),
}
_AT = {
  'group': (0.25, 0.5, 0.9),
  'tokens and depth, copies': (0.25, 0.5),
  'net2net': (0.25,),
  'muon, tokens and depth, copies': (0.25,),
}
POINTS = {
  **{
    f'{name} at {point:.0%}': dataclasses.replace(ARMS[name], stages=((point, ARMS[name].size),))
    for name, points in _AT.items()
    for point in points
  },
  'group ×2': Arm(size=Size(2), grow=_grown('group')),
  'group ×8': Arm(size=Size(8), grow=_grown('group')),
  'group ×2 ×2': Arm(grow=_grown('group'), stages=((0.5, Size(2)), (0.75, Size(4)))),
}
POINTS |= {
  f'{name}, half the budget': dataclasses.replace(ARMS[name], part=0.5)
  for name in (
    'no growth',
    'group',
    'depth, copies',
    'tokens and depth, copies',
    'net2net',
    'muon, no growth',
    'muon, group',
    'muon, tokens and depth, copies',
  )
}
SCRATCH = {
  'scratch': Arm(),
  'scratch, depth': Arm(size=Size(1, 4)),
  'scratch, tokens and depth': Arm(size=Size(2, 2)),
  'scratch, four groups': Arm(size=Size(4, 1, 4)),
  'scratch, transformer': Arm('transformer'),
  'scratch, transformer, depth': Arm('transformer', Size(1, 4)),
  'scratch, muon': Arm('muon'),
  'scratch, muon, tokens and depth': Arm('muon', Size(2, 2)),
}
DEFAULTS = {
  **{f'group ×{size}': Arm(size=Size(size), grow=_grown('group')) for size in (2, 4, 8)},
  **{name: ARMS[name] for name in ('depth', 'depth, copies', 'tokens and depth')},
  **{name: ARMS[name] for name in ('muon, group', 'adafactor, group', 'lion, group')},
}
HANDOVER = ('no growth', 'group', 'zero_keys', 'duplicate', 'as released', 'depth', 'net2net')


@dataclasses.dataclass(frozen=True)
class Plan:
  """The runs of one scale."""

  out: Path
  scale: Scale
  seeds: tuple[int, ...]

  def config(self, kind: str, size: Size, seed: int, steps: int, **changes: Any) -> Config:
    """Return a run's config; two underscores in the name of a change stand for a dot."""
    c, scale = config_lib.defaults(), self.scale
    layer, mixer = c.model.layer, c.model.layer.mixer
    c.model.pattern = f'layer*{scale.layers * size.layers}'
    c.model.width, mixer.heads = scale.width, scale.width // 8
    mixer.qkv.tokens = mixer.proj.tokens = scale.width * size.tokens
    layer.ffn.tokens = 4 * scale.width * size.tokens
    if size.groups:
      for projection in (mixer.qkv, mixer.proj, layer.ffn):
        projection.groups = f'{projection.tokens // size.groups}*{size.groups}'
    if KINDS[kind].dense:
      width = round(scale.dense_width * (1 if size.beside else size.tokens**0.5))
      c.model.width, mixer.heads, layer.norm = width, width // scale.dense_head, 'affine'
      mixer.qkv = mixer.proj = {'kind': 'dense'}
      layer.ffn = {'kind': 'mlp'}
      if size.beside:  # Tokens have 2 D entries each: D / 2 of them are a matrix of D × D.
        added = (size.tokens - 1) * width // 2
        mixer.qkv = mixer.proj = {'kind': 'dense', 'beside': _tokens(added)}
        if size.beside == 'all':
          layer.ffn = {'kind': 'mlp', 'beside': _tokens(8 * added)}
    # Values a quarter as large as by default suit short runs of every kind.
    depth = scale.layers * size.layers
    c.model.init.output_std = 0.5 / (depth * c.model.width**0.5)
    mixer.positions.fraction, c.model.init.std = 1.0, 0.1
    c.data.update(source='stdlib', tokenizer='bytes', sequence_length=64, batch_size=8)
    c.optim.update(schedule='wsd', warmup_steps=50, new_token_warmup=50)
    c.train.update(steps=steps, seed=seed, log_every=500, eval_every=0, eval_batches=64)
    c.train.update(checkpoint_every=10**9, keep_checkpoints=99, sample_tokens=0, loss_chunk=64)
    c.train.trackers = ()
    changes = {**KINDS[kind].changes, **changes}
    c.update_from_flattened_dict({k.replace('__', '.'): v for k, v in changes.items()})
    if c.optim.schedule == 'wsd':
      c.optim.final_fraction = 0.0
    config = config_lib.resolve(c)
    if size.as_tokens:
      model = as_tokens.wanted(sizes.fill_in(config).model, MATRICES)
      config = dataclasses.replace(config, model=model)
    return config

  def step_flops(self, kind: str, size: Size) -> float:
    """Return the model FLOPs of one step."""
    config = self.config(kind, size, 0, 1)
    data, model = config.data, sizes.fill_in(config).model
    return data.batch_size * data.sequence_length * flops.train_flops(model, data.sequence_length)

  def budget(self, kind: str) -> float:
    """Return the FLOPs that every arm of a kind spends."""
    return BUDGET * self.scale.steps * self.step_flops(kind, Size())

  def run(self, name: str, config: Config) -> Path:
    """Train, unless the run is done; return the work directory."""
    return trials.once(self.out, name, config)

  def rate(self, kind: str) -> float:
    """Return the rate of the small model with the least loss after a decay (seed 0)."""

    def loss(rate: float) -> float:
      config = self.config(kind, Size(), 0, self.scale.steps, optim__learning_rate=rate)
      return final_loss(self.run(f'rates/{kind}/{rate:g}', config))

    return min((rate * KINDS[kind].rate for rate in self.scale.rates), key=loss)

  def stable(self, kind: str, size: Size, seed: int, rate: float, steps: int, every: int) -> Path:
    """Return a run at a constant rate that keeps a checkpoint every so many steps."""
    config = self.config(
      kind,
      size,
      seed,
      steps,
      optim__schedule='constant',
      optim__learning_rate=rate,
      train__checkpoint_every=every,
    )
    name = f'stable/{kind}/{size.tokens}x{size.layers}x{size.groups}/{rate:g}/{seed}'
    return self.run(name, config)

  def base(self, kind: str, seed: int) -> Path:
    """Return the stable run of the small model."""
    steps = self.scale.steps
    return self.stable(kind, Size(), seed, self.rate(kind), steps, steps // 20)

  def arm(self, name: str, arm: Arm, factor: float, seed: int, last: Changes | None = None) -> Path:
    """Return the last run of an arm; `last` changes the config of its last stage."""
    kind, stages = arm.kind, arm.stages or ((POINT, arm.size),)
    source, size = self.base(kind, seed), Size()
    step = round(stages[0][0] * self.scale.steps)
    spent = step * self.step_flops(kind, size)
    budget, grow = arm.part * self.budget(kind), dict(arm.grow)
    if grow.pop('scale_only', False):
      grow |= self._references(4)
    origin = f'{source}@{step}'
    if arm.size.as_tokens:
      origin = str(self.tokens_of(origin, seed))
    for i, (_, size) in enumerate(stages):
      per_step, is_last = self.step_flops(kind, size), i == len(stages) - 1
      decay = round(DECAY * budget / per_step)
      if is_last:
        steps = step + round((budget - spent) / per_step)
      else:
        steps = step + round((stages[i + 1][0] - stages[i][0]) * self.scale.steps)
      config = self.config(
        kind,
        size,
        seed,
        steps,
        **{
          'init_from': origin,
          'optim__learning_rate': self.rate(kind) * factor,
          **({'train__decay_from': steps - decay} if is_last else {'optim__schedule': 'constant'}),
          **grow,
          **(last or {} if is_last else {}),
        },
      )
      source = self.run(f'arms/{name}/{factor:.3g}/{seed}/{i}', config)
      spent, step = spent + (steps - step) * per_step, steps
      origin = f'{source}@{step}'
    return source

  def tokens_of(self, origin: str, seed: int) -> Path:
    """Return a run whose matrices of attention are tokens that compute the same."""
    target = self.out / f'as_tokens/{seed}'
    if not target.exists():
      tokenformer_jax.load(origin).as_tokens(target, MATRICES)
    return target

  def first_steps(self, arm: Arm, factor: float, seed: int, **changes: Any) -> Config:
    """Return the config of the 50 steps after growth at a constant rate, evaluated every 10."""
    step = round(POINT * self.scale.steps)
    return self.config(
      arm.kind,
      arm.size,
      seed,
      step + 50,
      **{
        'init_from': f'{self.base(arm.kind, seed)}@{step}',
        'optim__schedule': 'constant',
        'optim__learning_rate': self.rate(arm.kind) * factor,
        'train__eval_every': 10,
        **arm.grow,
        **changes,
      },
    )

  def _references(self, factor: int) -> dict[str, int]:
    """Return τ² of a model with so many times as many tokens."""
    width = self.scale.width * factor
    in_mixer = {f'model__layer__mixer__{name}__reference': width for name in ('qkv', 'proj')}
    return in_mixer | {'model__layer__ffn__reference': 4 * width}

  def best(self, try_: Callable[[float, int], Path]) -> float:
    """Return the factor of the rate with the least loss at seed 0."""
    return min(self.scale.factors, key=lambda factor: final_loss(try_(factor, 0)))

  def scratch(self, name: str, arm: Arm, factor: float, seed: int, budget: float) -> Path:
    """Return the large model from scratch, decayed at a part of the budget."""
    kind, size = arm.kind, arm.size
    per_step, rate = self.step_flops(kind, size), self.rate(kind) * factor
    ends = [round(part * self.budget(kind) / per_step) for part in SCRATCH_BUDGETS]
    steps = round(budget * self.budget(kind) / per_step)
    begins = {end: round((1 - DECAY) * end) for end in ends}
    # Checkpoints are taken where a decay begins: all budgets are multiples of the smallest.
    stable = self.stable(kind, size, seed, rate, begins[max(ends)], begins[min(ends)])
    step = min(paths_of_steps(stable), key=lambda step: abs(step - begins[steps]))
    config = self.config(
      kind,
      size,
      seed,
      steps,
      init_from=f'{stable}@{step}',
      optim__learning_rate=rate,
      train__decay_from=step,
    )
    return self.run(f'scratch/{name}/{budget:g}/{factor:.3g}/{seed}', config)


def paths_of_steps(workdir: Path) -> list[int]:
  """Return the steps that a run has checkpoints of."""
  return [int(path.name) for path in (workdir / 'checkpoints').iterdir() if path.name.isdigit()]


def final_loss(workdir: Path) -> float:
  """Return the last bits per byte on held-out text."""
  lines = [line for line in metrics.read(workdir) if 'eval/bits_per_byte' in line]
  return lines[-1]['eval/bits_per_byte']


def arms(plan: Plan, chosen: Mapping[str, Arm]) -> None:
  """Run arms: every rate with seed 0, then the best one with the other seeds."""
  for name, arm in chosen.items():
    factor = plan.best(lambda f, seed, name=name, arm=arm: plan.arm(name, arm, f, seed))
    for seed in plan.seeds:
      plan.arm(name, arm, factor, seed)


def scratch(plan: Plan, chosen: Mapping[str, Arm]) -> None:
  """Run models from scratch; the rate is the best one at the chain's own budget."""
  for name, arm in chosen.items():
    factor = plan.best(lambda f, seed, name=name, arm=arm: plan.scratch(name, arm, f, seed, 1))
    for seed in plan.seeds:
      for budget in SCRATCH_BUDGETS:
        plan.scratch(name, arm, factor, seed, budget)


def warmups(plan: Plan) -> None:
  """Train the first steps after growth by a group, with several warm-ups of the new tokens."""
  for warmup in WARMUPS:
    for seed in plan.seeds:
      config = plan.first_steps(ARMS['group'], GROWN_RATE, seed, optim__new_token_warmup=warmup)
      plan.run(f'warmups/{GROWN_RATE}-{warmup}/{seed}', config)


def defaults(plan: Plan) -> None:
  """Train the first steps after growth as `grow` leaves a run: its rate, and its warm-up."""
  default = config_lib.Config().optim.new_token_warmup
  for name, arm in DEFAULTS.items():
    models = [sizes.fill_in(plan.config(arm.kind, size, 0, 1)).model for size in (Size(), arm.size)]
    factor = state.rate_factor(*models)
    for seed in plan.seeds:
      config = plan.first_steps(arm, factor, seed, optim__new_token_warmup=default)
      plan.run(f'defaults/{name}/{seed}', config)


def handover(plan: Plan, chosen: Mapping[str, Arm]) -> None:
  """Train the first steps after growth, with the rate of the arm."""
  for name, arm in chosen.items():
    factor = plan.best(lambda f, seed, name=name, arm=arm: plan.arm(name, arm, f, seed))
    for seed in plan.seeds:
      plan.run(f'handover/{name}/{seed}', plan.first_steps(arm, factor, seed))


def main() -> None:
  """Run the parts."""
  names = ('arms', 'scratch', 'points', 'handover', 'warmups', 'defaults', 'elastic', 'forgetting')
  parser = trials.parser(__doc__.splitlines()[0], names)
  parser.add_argument('--scales', default='tiny,small')
  parser.add_argument('--only', default='', help='names of arms, separated by ;')
  args, out, parts, seeds = trials.begin(parser, names)

  def chosen(all_: Mapping[str, Arm]) -> dict[str, Arm]:
    wanted = args.only.split(';') if args.only else list(all_)
    return {name: arm for name, arm in all_.items() if name in wanted}

  for scale in args.scales.split(','):
    plan = Plan(out / scale, SCALES[scale], seeds)
    run = {
      'arms': lambda plan=plan: arms(plan, chosen(ARMS)),
      'scratch': lambda plan=plan: scratch(plan, chosen(SCRATCH)),
      'points': lambda plan=plan: arms(plan, chosen(POINTS)),
      'handover': lambda plan=plan: handover(plan, chosen({name: ARMS[name] for name in HANDOVER})),
      'warmups': lambda plan=plan: warmups(plan),
      'defaults': lambda plan=plan: defaults(plan),
      'elastic': lambda plan=plan: elastic.run(plan, POINTS['group ×2 ×2']),
      'forgetting': lambda plan=plan: forgetting.run(plan, {1: Size(), 2: Size(2)}),
    }
    for part in parts:
      run[part]()


if __name__ == '__main__':
  main()
