"""Plan growth chains: every stage, and the whole against the largest model from scratch."""

import dataclasses

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, ModelConfig, counts_as_text, token_counts
from tokenformer_jax.errors import UserError, nearest
from tokenformer_jax.grow.plan import plan_growth
from tokenformer_jax.grow.steps import experts
from tokenformer_jax.grow.steps import layers as layers_lib
from tokenformer_jax.grow.steps.tokens import grown_model
from tokenformer_jax.parallel.messages import aligned, say
from tokenformer_jax.plan import table
from tokenformer_jax.plan.estimate import Plan, count_steps, plan
from tokenformer_jax.plan.table import Row, percent
from tokenformer_jax.plan.topology import Topology


@dataclasses.dataclass(frozen=True)
class Chain:
  """The plans of a chain's stages, and of its last model from scratch on as many tokens."""

  stages: tuple[Plan, ...]
  scratch: Plan


_OTHERS = ('experts', 'expert_tokens', 'top_k', 'layers', 'pattern', 'steps')


def stage(config: Config, text: str) -> Config:
  """Return the config grown as `--grow=qkv=N,proj=N,ffn=N[,experts=N][,layers=N][,steps=N]` says.

  `pattern=PATTERN` replaces `layers=N` for a model of different layers; `expert_tokens=N` and
  `top_k=K` need `experts=N`, as in the command grow. `config.grow` decides the groups of tokens and
  the reference counts. `steps` counts this stage alone and defaults to the steps before it.
  """
  numbers, pattern = _parsed(config.model, text)
  steps, layers = numbers.pop('steps', count_steps(config)), numbers.pop('layers', None)
  more = {name: numbers.pop(name, None) for name in ('experts', 'expert_tokens', 'top_k')}
  before = config_lib.with_references(config.model)
  old = token_counts(before)
  new = config_lib.named_counts(before, numbers, f'--grow={text}', first=True) if numbers else old
  grown = routed = grown_model(before, new, config.grow)
  if more['experts'] is not None:
    counts = experts.named_counts(grown, more['experts'], f'--grow={text}')
    routed = experts.wanted(grown, experts.Wanted(counts, more['expert_tokens'], more['top_k']))
  elif set(more.values()) != {None}:
    raise UserError(f'--grow={text} has expert_tokens or top_k, which go with experts=N')
  after = layers_lib.wanted(routed, layers, pattern)
  if after == before or any(new[name] < count for name, count in old.items()):
    raise UserError(
      f'--grow={text} must make no count smaller and one larger than {_sizes(config.model)} of the '
      'stage before it, or add experts or layers'
    )
  for step in plan_growth(grown, after, dataclasses.replace(config.grow, place='between')):
    step.check()
  return dataclasses.replace(
    config,
    model=after,
    train=dataclasses.replace(config.train, steps=steps, epochs=0.0, examples=0),
  )


def _parsed(model: ModelConfig, text: str) -> tuple[dict[str, int], str | None]:
  """Return the numbers of a stage by name, and its pattern or None."""
  numbers: dict[str, int] = {}
  pattern = None
  names = config_lib.count_names(model, first=True)
  known = (*names, *_OTHERS)
  for part in text.split(','):
    name, _, number = part.partition('=')
    if name not in known:
      if not names:
        raise UserError(
          f'--grow={text} adds parameter tokens, and a Transformer has none; it takes layers=N and '
          'experts=N'
        )
      raise UserError(f'--grow={text} names {name!r}{nearest(name, known)}')
    if name == 'pattern':
      pattern = number
      continue
    if not number.isdecimal() or int(number) == 0:
      raise UserError(f'--grow={text} has {part!r}; it must be {name}=N, with N greater than 0')
    numbers[name] = int(number)
  return numbers, pattern


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
  if config.train.epochs:
    raise UserError('--grow compares tokens, and config.train.epochs is set; set train.steps')
  configs = [config]
  for text in grow:
    configs.append(stage(configs[-1], text))
  plans: list[Plan] = []
  for i, stage_config in enumerate(configs):
    say(f'stage {i + 1} of {len(configs)}: {_sizes(stage_config.model)}')
    before = plans[-1].config.model if plans else None
    plans.append(plan(stage_config, on, before, quick=quick))
  last = plans[-1]
  # A step from scratch costs as much as one of the last stage: factors on tokens cost nothing.
  train = dataclasses.replace(
    last.config.train, steps=sum(planned.known_run[0] for planned in plans)
  )
  alone = dataclasses.replace(last, config=dataclasses.replace(last.config, train=train))
  return Chain(tuple(plans), alone)


def render(chain: Chain) -> str:
  """Return a table with a row for each stage, the total, and the largest model alone."""
  rows: list[Row] = [
    ('', 'parameters', 'HBM GiB', 'ms a step', 'MFU', 'steps', 'FLOPs', 'chip-hours')
  ]
  for i, planned in enumerate(chain.stages):
    rows.append(_row(f'{i + 1}: {_sizes(planned.config.model)}', planned))
  flops = sum(planned.known_run[0] * planned.model_flops for planned in chain.stages)
  hours = [sum(bounds) for bounds in zip(*map(_chip_hours, chain.stages), strict=True)]
  steps = f'{chain.scratch.steps:,}'
  rows.append(('the chain', '', '', '', '', steps, f'{flops:.3g}', table.chip_hours(hours)))
  rows.append(_row('the last one from scratch', chain.scratch))
  whole = _chip_hours(chain.scratch)
  saved = [1 - part / all_of_it for part, all_of_it in zip(hours, whole, strict=True)]
  return (
    f'{aligned(rows)}\n\nthe chain costs {percent(1 - max(saved))} to {percent(1 - min(saved))} of '
    'the chip-hours of the largest model trained from scratch on as many tokens'
  )


def _row(name: str, planned: Plan) -> Row:
  return (name, f'{planned.parameters:,}', *table.figures(planned))


def _chip_hours(planned: Plan) -> list[float]:
  return [hours * planned.topology.chips for hours in planned.known_run[1]]
