"""Plan growth chains: every stage, and the whole against the largest model from scratch."""

import dataclasses
import itertools
from typing import Any

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, ModelConfig, counts_as_text, token_counts
from tokenformer_jax.config.projections import counts_from_text, grown_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import payoff
from tokenformer_jax.grow.plan import plan_growth
from tokenformer_jax.grow.steps import experts
from tokenformer_jax.grow.steps import layers as layers_lib
from tokenformer_jax.model import flops
from tokenformer_jax.parallel.messages import aligned, say
from tokenformer_jax.plan.estimate import count_steps, plan
from tokenformer_jax.plan.stages import Leg, StagedPlan, with_steps
from tokenformer_jax.plan.table import percent
from tokenformer_jax.plan.topology import Topology


@dataclasses.dataclass(frozen=True)
class Chain:
  """The plans of a chain's sizes, and of its last model from scratch on as many tokens."""

  sizes: StagedPlan
  scratch: Leg

  def to_json(self) -> dict[str, Any]:
    """Return the figures of each size, and of the last one from scratch."""
    return {'stages': self.sizes.to_json()['stages'], 'scratch': self.scratch.plan.to_json()}


def stage(config: Config, text: str) -> Config:
  """Return the config grown as `--grow=qkv=N,proj=N,ffn=N[,experts=N][,layers=N][,steps=N]` says.

  `pattern=PATTERN` replaces `layers=N` for a model of different layers; `expert_tokens=N` and
  `top_k=K` need `experts=N`, as in the command grow. `config.grow` decides the groups of tokens and
  the reference counts. `steps` counts this stage alone and defaults to the steps before it.
  """
  where, pattern, entries = f'--grow={text}', None, []
  for entry in text.split(','):
    if entry.startswith('pattern='):
      pattern = entry.removeprefix('pattern=')
    else:
      entries.append(entry)
  numbers = counts_from_text(','.join(entries), where) if entries else {}
  steps, layers = numbers.pop('steps', count_steps(config)), numbers.pop('layers', None)
  more = {name: numbers.pop(name, None) for name in ('experts', 'expert_tokens', 'top_k')}
  before = config_lib.with_references(config.model)
  old = token_counts(before)
  new = config_lib.named_counts(before, numbers, where, first=True) if numbers else old
  grown = routed = grown_model(before, new, config.grow)
  if more['experts'] is not None:
    counts = experts.named_counts(grown, more['experts'], where)
    routed = experts.wanted(grown, experts.Wanted(counts, more['expert_tokens'], more['top_k']))
  elif set(more.values()) != {None}:
    raise UserError(f'{where} has expert_tokens or top_k, which go with experts=N')
  after = layers_lib.wanted(routed, layers, pattern)
  if after == before or any(new[name] < count for name, count in old.items()):
    raise UserError(
      f'{where} must make no count smaller and one larger than {_sizes(config.model)} of the '
      'stage before it, or add experts or layers'
    )
  for step in plan_growth(grown, after, dataclasses.replace(config.grow, place='between')):
    step.check()
  return dataclasses.replace(
    config,
    model=after,
    train=dataclasses.replace(config.train, steps=steps, epochs=0.0, examples=0),
  )


def _sizes(model: ModelConfig) -> str:
  """Return the sizes that stages may change, in the form of `--grow`."""
  counts = [layer_experts.count for layer_experts in model.experts.values()]
  most_experts = {'experts': max(counts)} if counts else {}
  return counts_as_text(token_counts(model) | most_experts | {'layers': model.depth})


def plan_chain(config: Config, grow: list[str], on: Topology, *, quick: bool = False) -> Chain:
  """Plan the config and every stage that grows from it.

  Raises:
    UserError: the text of a stage is wrong, a size does not divide by the mesh, or
      `config.train.epochs` is set.
    DoesNotFitError: a stage does not fit.
  """
  configs = [config]
  for text in grow:
    configs.append(stage(configs[-1], text))
  legs: list[Leg] = []
  for i, stage_config in enumerate(configs, start=1):
    name = f'{i}: {_sizes(stage_config.model)}'
    say(f'stage {name}')
    steps, before = count_steps(stage_config), legs[-1].plan.config.model if legs else None
    if steps is None or config.train.epochs:
      raise UserError('--grow compares tokens, and config.train.epochs is set; set train.steps')
    legs.append(Leg(name, plan(stage_config, on, before, quick=quick), steps))
  # A step from scratch costs as much as one of the last stage: factors on tokens cost nothing.
  steps = sum(leg.steps for leg in legs)
  scratch = Leg('the last one from scratch', with_steps(legs[-1].plan, steps), steps)
  return Chain(StagedPlan(tuple(legs)), scratch)


def render(chain: Chain) -> str:
  """Return a table with a row for each stage and the whole, and whether the chain pays."""
  rows = [*chain.sizes.rows('the chain'), chain.scratch.row()]
  hours = zip(chain.sizes.chip_hours, chain.scratch.chip_hours, strict=True)
  low, high = sorted(chained / alone for chained, alone in hours)
  return (
    f'{aligned(rows)}\n\nthe chain costs {percent(low)} to {percent(high)} of the chip-hours of '
    f'the largest model trained from scratch on as many tokens\n\n{_will_it_pay(chain)}'
  )


def _will_it_pay(chain: Chain) -> str:
  sizes: list[payoff.Leg] = []
  for leg in chain.sizes.legs:
    model, units = leg.plan.config.model, leg.plan.config.data.units_per_step
    parameters = flops.matrix_parameters(model)
    sizes.append(payoff.Leg(leg.plan.model_flops / units, leg.steps * units, parameters))
  unmeasured: list[str] = []
  for before, after in itertools.pairwise(leg.plan.config for leg in chain.sizes.legs):
    unmeasured += payoff.unmeasured(plan_growth(before.model, after.model, before.grow))
  if chain.scratch.plan.config.model.kind != 'lm':
    unmeasured.append(payoff.IMAGES)
  return payoff.render(payoff.expect(sizes, unmeasured))
