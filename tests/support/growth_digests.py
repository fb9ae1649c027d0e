"""Print digests of every array of states that grew, for each kind of step and three optimizers.

  python tests/support/growth_digests.py --out=before.json             all cases
  python tests/support/growth_digests.py --against=before.json         compare with the kept ones
  python tests/support/growth_digests.py --against=before.json layers  those with this in their name

A change of `grow/` that should alter no draw and no moment keeps every digest.
"""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import replace

from digests import compare  # before JAX: it chooses the devices

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
from growing import DENSE, DOUBLE, IDS, STEP, UPDATES, apply_steps, by_name, optimizer, params_of
from outcomes import paths
from routed import by_bias, sparse, upcycled, with_experts
from tiny import tiny_model, two_kinds

from tokenformer_jax import tasks
from tokenformer_jax.config import (
  Config,
  GrowConfig,
  ModelConfig,
  OptimConfig,
  growth,
  with_references,
)
from tokenformer_jax.config import groups as choices
from tokenformer_jax.config.optim import AdafactorConfig, AdamWConfig, MuonConfig
from tokenformer_jax.grow import merging, plan, subsets
from tokenformer_jax.grow.apply import Steps
from tokenformer_jax.grow.steps import experts, matrices
from tokenformer_jax.grow.steps.remove import ScaleGroups, TakeGroups
from tokenformer_jax.grow.steps.tokens import grown_model
from tokenformer_jax.model.params import lookup
from tokenformer_jax.runs.checkpoint_meta import Ancestor
from tokenformer_jax.steps import statistics
from tokenformer_jax.steps.step import State

OPTIMIZERS = {'adamw': AdamWConfig(), 'muon': MuonConfig(), 'adafactor': AdafactorConfig()}
BASE, TRANSFORMER, WIDE = tiny_model(), tiny_model(**DENSE), {'width': 64, 'heads': 8}
LARGER = by_name(32, 48, 64)
GROUP, ZERO_KEYS, DUPLICATE = growth('group'), growth('zero_keys'), growth('duplicate')
MORE, TWO = (grown_model(BASE, LARGER, how) for how in (ZERO_KEYS, GROUP))
THREE = grown_model(TWO, by_name(40, 48, 80), GROUP)
BESIDE = grown_model(TRANSFORMER, {'qkv': 16, 'proj': 8, 'ffn': 24}, GROUP)
Made = Callable[[OptimConfig], State]


def state(model: ModelConfig, optim: OptimConfig, seed: int = 0) -> State:
  """Return a state in which no statistic is zero, with an average of the parameters."""
  rng = np.random.default_rng(seed + 1)

  def drawn(name: str, tree: dict) -> dict:
    def draw(array: jax.Array) -> jax.Array:
      values = jnp.asarray(rng.normal(size=array.shape), jnp.float32)
      return jnp.square(values) + 0.1 if statistics.ORDERS[name] == 2 else values

    return jax.tree.map(draw, tree)

  params = params_of(model, seed)
  opt_state = optimizer(model, optim).init(params)
  counters = {'step': STEP, 'skipped': STEP - UPDATES, 'skipped_in_a_row': 0}
  return {
    'params': params,
    'ema': params_of(model, seed + 7),
    'opt_state': statistics.map_state(drawn, lambda _, count: jnp.int32(UPDATES), opt_state),
    **{name: jnp.int32(count) for name, count in counters.items()},
  }


def grown(source: ModelConfig, *growths: tuple[ModelConfig, GrowConfig]) -> Made:
  """Return a chain of growths, each to a model."""

  def make(optim: OptimConfig) -> State:
    model, made = source, state(source, optim)
    for target, how in growths:
      made, model = apply_steps(made, model, plan.check(model, target, how), how), target
    return made

  return make


def more(source: ModelConfig, *growths: tuple[dict[str, int], GrowConfig]) -> Made:
  """Return a chain of growths, each to numbers of parameter tokens."""
  models = [source]
  for counts, how in growths:
    models.append(grown_model(models[-1], counts, how))
  return grown(source, *zip(models[1:], (how for _, how in growths), strict=True))


def stepped(
  model: ModelConfig, steps: Steps | Callable[[dict], Steps], how: GrowConfig | None = None
) -> Made:
  """Return what steps make of a model; a function makes them from its parameters."""

  def make(optim: OptimConfig) -> State:
    old = state(model, optim)
    return apply_steps(
      old, model, steps(old['params']) if callable(steps) else steps, how or GrowConfig()
    )

  return make


def removed(model: ModelConfig, base: ModelConfig, how: GrowConfig) -> Made:
  """Return what the removal of a growth makes."""
  last = Ancestor('grow', '/base', STEP, base, how, UPDATES)
  return stepped(model, plan.plan_removal(last, model), how)


def chosen(model: ModelConfig, choice: choices.Choice) -> Made:
  """Return a choice of groups."""
  return stepped(model, (TakeGroups(model, choices.choose(model, choice), choice),))


def merged(ours: ModelConfig, theirs: ModelConfig, base: ModelConfig, after: ModelConfig) -> Made:
  """Return our model with the tokens of theirs that are behind those of `base`."""
  added = subsets.extract(params_of(theirs, 5), theirs, base)
  return stepped(ours, merging.merge(ours, after, added))


def without_experts(model: ModelConfig) -> Made:
  """Return a model without its experts 1 and 3."""
  after = experts.without(model, [1, 3], 'the case')
  kept = functools.partial(lookup, experts.all_but(model, [1, 3]))
  return stepped(model, (experts.TakeExperts(model, after, data=kept),))


def shrunken() -> Made:
  """Return the most important tokens of a model."""
  after = grown_model(THREE, by_name(24, 40, 40), GrowConfig())
  task = tasks.make(Config(model=THREE))
  return stepped(THREE, lambda params: subsets.shrink(params, task, after, IDS))


def as_tokens(model: ModelConfig) -> Made:
  """Return the matrices of a model as tokens."""
  after = with_references(matrices.wanted(model, None))
  return stepped(model, (matrices.MatricesToTokens(model, after),))


def deeper(model: ModelConfig, pattern: str = 'layer*4') -> ModelConfig:
  """Return a model with another pattern."""
  return replace(model, pattern=pattern)


def cases() -> dict[str, Made]:
  """Return the cases by name."""
  copies, behind, whole = (growth(place=p) for p in ('copies', 'behind', 'whole_copies'))
  all_, twice = deeper(with_experts(MORE, 4, 16)), DOUBLE | {'proj': 160}
  noisy, like_trained = growth('duplicate', noise=0.1), growth(new_keys='trained', new_score='gelu')
  random = growth('random', new_keys='copies', noise=0.2, new_values='zero')
  anew = growth(moments='drop', step='restart', seed=3)
  wide = tiny_model(**DENSE, **WIDE)
  first, second = {'qkv': 16, 'ffn': 24}, {'qkv': 24, 'proj': 8}
  return {
    'zero_keys': more(BASE, (LARGER, ZERO_KEYS), (by_name(40, 48, 96), ZERO_KEYS)),
    'duplicate': more(BASE, (DOUBLE, DUPLICATE), (twice, noisy)),
    'group': more(BASE, (LARGER, GROUP), (by_name(40, 48, 96), like_trained)),
    'random': more(BASE, (LARGER, random)),
    'dropped': more(BASE, (LARGER, anew)),
    'first tokens': more(TRANSFORMER, (first, GROUP), (second, GROUP)),
    'hypercloning': grown(TRANSFORMER, (wide, growth('hypercloning', noise=0.1))),
    'net2net': grown(TRANSFORMER, (wide, growth('net2net'))),
    'net2net_fill': grown(TRANSFORMER, (wide, growth('net2net_fill'))),
    'experts beside': grown(BASE, (sparse(), GROUP), (with_experts(sparse(), 6), GROUP)),
    'experts of copies': grown(tiny_model(dense=True), (upcycled(), GROUP)),
    'experts by a bias': grown(by_bias(sparse()), (with_experts(by_bias(sparse()), 6), GROUP)),
    'layers behind': grown(BASE, (deeper(BASE), behind)),
    'layers as copies': grown(BASE, (deeper(MORE), growth('zero_keys', place='copies'))),
    'layers as whole copies': grown(BASE, (deeper(BASE, 'layer*3'), whole)),
    'layers of two kinds': grown(two_kinds(), (deeper(two_kinds(), '(local layer)*3'), copies)),
    'everything': grown(BASE, (all_, growth('zero_keys', place='copies'))),
    'everything removed': removed(all_, BASE, growth('zero_keys', place='copies')),
    'copies of experts removed': removed(upcycled(), tiny_model(dense=True), GROUP),
    'first tokens removed': removed(BESIDE, TRANSFORMER, GROUP),
    'a group taken out': chosen(THREE, choices.without([2])),
    'first group of a matrix taken out': chosen(BESIDE, choices.without([1])),
    'scaled': stepped(THREE, (ScaleGroups(THREE, THREE, [2], 0.5),)),
    'merged': merged(TWO, THREE, TWO, THREE),
    'merged beside matrices': merged(TRANSFORMER, BESIDE, TRANSFORMER, BESIDE),
    'shrunken': shrunken(),
    'experts taken out': without_experts(sparse()),
    'matrices': as_tokens(tiny_model(dense=True)),
  }


def measure(make: Made, optim: OptimConfig) -> dict[str, str]:
  """Return a digest of each array, by its path."""
  arrays = {path: (a.tobytes(), str((a.shape, a.dtype))) for path, a in paths(make(optim)).items()}
  return {
    path: hashlib.sha256(content + kind.encode()).hexdigest()[:16]
    for path, (content, kind) in arrays.items()
  }


if __name__ == '__main__':
  compare(
    {
      f'{name}, {optim}': functools.partial(measure, make, config)
      for name, make in cases().items()
      for optim, config in OPTIMIZERS.items()
    }
  )
