"""Search meshes, batches and recomputation for the fastest combination that fits."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from tokenformer_jax.config import Config, differences
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import rules, sharding
from tokenformer_jax.parallel.messages import aligned, say
from tokenformer_jax.plan import topology
from tokenformer_jax.plan.estimate import Plan, plan
from tokenformer_jax.plan.table import Row, gib, ms, percent
from tokenformer_jax.plan.topology import Topology
from tokenformer_jax.steps import remat_plans
from tokenformer_jax.steps.fit import DoesNotFitError
from tokenformer_jax.steps.remat_plans import RematPlan

BATCHES = (1, 2, 0.5)  # multiples of the config's batch
_MOST_TOKENS = 8  # the most devices to split parameter tokens over


@dataclasses.dataclass(frozen=True)
class Tried:
  """A candidate config, with its plan or the reason why there is none."""

  number: int  # in the order of `candidates`; 0 is the config itself
  config: Config
  plan: Plan | None
  reason: str = ''


def candidates(
  config: Config, on: Topology, batches: Sequence[float] = BATCHES
) -> Iterator[Config]:
  """Yield the config, then variants with other meshes, batches and recomputation, nearest first.

  `batches` are multiples of the config's batch; the first is 1.
  """
  own_split = rules.parts('param_tokens', sharding.abstract_mesh(config.mesh, on.devices))
  meshes = {
    tokens: mesh
    for tokens in (1, 2, 4, _MOST_TOKENS)
    if all(heads % tokens == 0 for heads in config.model.heads)
    and (mesh := sharding.with_token_shards(config.mesh, on.devices, tokens)) is not None
  }
  own = _remat_plan(config)
  others = remat_plans.all_plans(config.model)
  if not on.has_compiler:  # By the formulas a loop takes no time.
    others = [one._replace(layers='auto') for one in others]
  # Put the config's own choice first and keep the order of the others.
  splits = sorted(meshes, key=lambda tokens: tokens != own_split)
  plans = dict.fromkeys([own, *others])
  options = list(itertools.product(batches, splits, plans))
  first = options[0]
  options.sort(key=lambda option: sum(a != b for a, b in zip(option, first, strict=True)))
  for factor, tokens, (remat, layers) in options:
    batch = int(config.data.batch_size * factor)
    if batch % config.optim.accumulation_steps == 0:
      yield dataclasses.replace(
        config,
        mesh=meshes[tokens],
        data=dataclasses.replace(config.data, batch_size=batch),
        train=dataclasses.replace(config.train, remat=remat, layers=layers),
      )


def search(
  config: Config,
  on: Topology,
  most: int,
  *,
  quick: bool = False,
  batches: Sequence[float] = BATCHES,
) -> list[Tried]:
  """Plan up to `most` candidates and return them with the fastest first.

  For `batches` see `candidates`. Print the progress on standard error. If a candidate with full
  recomputation does not fit, skip the candidates of the same mesh and batch that need as much.
  """
  if on.has_compiler:
    topology.devices(on)  # Fail here if the compiler is missing.
  tried, hopeless, planned = [], {}, set()
  for candidate in candidates(config, on, batches):
    if len(tried) == most:
      break
    size = (candidate.mesh, candidate.data.batch_size)
    if size in hopeless and not _needs_less(_remat_plan(candidate), hopeless[size]):
      continue
    if (*size, _remat_plan(candidate)) in planned:
      continue
    say(f'{len(tried) + 1} of at most {most}: {_name(candidate)}')
    tried.append(_try(len(tried), candidate, on, quick))
    if found := tried[-1].plan:
      planned.add((*size, _remat_plan(found.config)))
    if tried[-1].plan is None and candidate.train.remat in ('full', 'offload'):
      hopeless[size] = _remat_plan(candidate)
  if not any(candidate.plan for candidate in tried):
    reasons = '; '.join(f'{_name(candidate.config)}: {candidate.reason}' for candidate in tried)
    raise UserError(f'no candidate fits on {on.name} ({reasons})')
  return sorted(tried, key=_speed, reverse=True)


def _try(number: int, config: Config, on: Topology, quick: bool) -> Tried:
  try:
    return Tried(number, config, plan(config, on, quick=quick))
  except DoesNotFitError as error:
    needed = (
      f'needs {error.needed:.1f} of {error.capacity:.1f} GiB' if error.needed else 'too large'
    )
    return Tried(number, config, None, needed)
  except UserError as error:
    return Tried(number, config, None, str(error))


def _speed(candidate: Tried) -> float:
  """Return tokens or images a second, midway between the bounds; −1 if the step does not fit."""
  plan = candidate.plan
  return plan.units[1] * 2 / sum(plan.step_seconds) if plan else -1.0


def _remat_plan(config: Config) -> RematPlan:
  return RematPlan(config.train.remat, config.train.layers)


def _needs_less(tried: RematPlan, failed: RematPlan) -> bool:
  """Return whether a plan needs less memory than one that saves at most the inputs of layers."""
  loops = failed.layers == 'unrolled' and tried.layers != 'unrolled'
  return failed.remat == 'full' and (tried.remat == 'offload' or (tried.remat == 'full' and loops))


def _name(config: Config) -> str:
  mesh = ' '.join(f'{axis}={size}' for axis, size in dataclasses.asdict(config.mesh).items())
  remat, layers = _remat_plan(config)
  return f'batch_size={config.data.batch_size} {mesh} remat={remat} layers={layers}'


def advice(tried: Sequence[Tried]) -> str:
  """Return the flags of the fastest candidate, and its gain over the config itself.

  `tried` is from `search`.
  """
  own, best = min(tried, key=lambda candidate: candidate.number), tried[0]
  if best is own:
    return 'no candidate is faster than the config as it is'
  changed = differences(best.config, own.config)
  flags = ' '.join(f'--config.{path}={value}' for path, value, _ in changed)
  if own.plan is None:
    return f'the config as it is does not fit; the fastest that fits: {flags}'
  return f'{flags}: {_speed(best) / _speed(own):.2f} times as fast as the config as it is'


def render(tried: list[Tried]) -> str:
  """Return a table with a row for each candidate."""
  rows: list[Row] = [('', 'HBM GiB', 'ms a step', 'MFU', 'a second')]
  for candidate in tried:
    plan = candidate.plan
    name = _name(plan.config if plan else candidate.config)
    if plan is None:
      rows.append((name, 'does not fit', '', '', candidate.reason[:60]))
      continue
    (fast, slow), (high, low), (_, units) = plan.step_seconds, plan.mfu, plan.units
    rows.append(
      (
        name,
        gib(plan.memory.peak),
        f'{ms(fast)} … {ms(slow)}',
        f'{percent(low)} … {percent(high)}',
        f'{units / slow:,.0f} … {units / fast:,.0f}',
      )
    )
  return aligned(rows)
