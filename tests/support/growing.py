"""Tiny models whose every parameter matters, what they compute, and how they grow."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from outcomes import paths
from tiny import COUNTS, make_optimizer, normal_params

from tokenformer_jax import tasks
from tokenformer_jax.config import (
  AdamWConfig,
  Config,
  GrowConfig,
  MeshConfig,
  ModelConfig,
  OptimConfig,
  TrainConfig,
)
from tokenformer_jax.grow import apply, merging, plan
from tokenformer_jax.grow.steps.step import Step
from tokenformer_jax.model.lm import Execution, define_lm
from tokenformer_jax.model.params import ParamInfo, Params, lookup
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs.checkpoint_meta import Ancestor
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.steps.entries import LastGrowth
from tokenformer_jax.steps.step import State

IDS = np.random.default_rng(0).integers(0, 64, (2, 13), np.int32)
DENSE = {'dense': True, 'bias': True, 'norm': 'affine'}
SMALL = COUNTS
DOUBLE = {name: 2 * count for name, count in SMALL.items()}
# The counters of state_of: two steps were skipped.
STEP, UPDATES = 20, 18
PLAIN, KEEP = AdamWConfig(), GrowConfig()


def by_name(qkv: int, proj: int, ffn: int) -> dict[str, int]:
  """Return numbers of parameter tokens by projection."""
  return {'qkv': qkv, 'proj': proj, 'ffn': ffn}


def params_of(model: ModelConfig, seed: int = 0) -> Params:
  """Normal parameters of standard deviation 0.2, so that scores, weights and norms differ."""
  return normal_params(define_lm(model), 0.2, seed)


def optimizer(model: ModelConfig, config: OptimConfig = PLAIN, growth=None):
  """The optimizer of a run of 1000 steps."""
  return make_optimizer(config, 1000, define_lm(model).info, growth)


def state_of(model: ModelConfig, seed: int = 0) -> State:
  """A state as after some training: no moment is zero and no counter fresh."""
  params = params_of(model, seed)
  moments = params_of(model, seed + 1)
  squares = jax.tree.map(lambda moment: jnp.asarray(np.square(moment)), moments)
  count = jnp.asarray(np.int32(UPDATES))
  parts = {
    optax.ScaleByAdamState: optax.ScaleByAdamState(count, moments, squares),
    optax.ScaleByScheduleState: optax.ScaleByScheduleState(count),
  }
  opt_state = jax.tree.map(
    lambda part: parts[type(part)],
    jax.eval_shape(optimizer(model).init, params),
    is_leaf=lambda part: type(part) in parts,
  )
  return {'params': params, 'opt_state': opt_state, **counters()}


def counters() -> dict[str, jax.Array]:
  """The counters of a state."""
  values = {'step': STEP, 'skipped': STEP - UPDATES, 'skipped_in_a_row': 0}
  return {name: jnp.asarray(np.int32(value)) for name, value in values.items()}


def adam(state: State) -> optax.ScaleByAdamState:
  """Adam's part of the optimizer's state."""
  is_adam = lambda part: isinstance(part, optax.ScaleByAdamState)  # noqa: E731
  (part,) = filter(is_adam, jax.tree.leaves(state['opt_state'], is_leaf=is_adam))
  return part


def schedule_count(state: State) -> int:
  """The count that the learning rate goes by."""
  is_it = lambda part: isinstance(part, optax.ScaleByScheduleState)  # noqa: E731
  (part,) = filter(is_it, jax.tree.leaves(state['opt_state'], is_leaf=is_it))
  return int(part.count)


def trained(
  state: State, model: ModelConfig, steps: int, growth: LastGrowth | None = None, **optim: Any
) -> State:
  """The state after training on random batches on one device; `optim` is of AdamW."""
  config = Config(
    model=model, optim=AdamWConfig(warmup_steps=0, **optim), train=TrainConfig(steps=1000)
  )
  mesh, rng = mesh_of(), np.random.default_rng(0)
  with jax.set_mesh(mesh):
    program = step_lib.make_program(tasks.make(config), config, growth)
    step = step_lib.make_train_step(program, mesh)
    for _ in range(steps):
      state, _ = step(state, jnp.asarray(rng.integers(0, 64, (4, 17), np.int32)))
  assert int(state['skipped']) == STEP - UPDATES, 'a step was not finite'
  return state


@functools.cache
def forward(model: ModelConfig, dtype: str = 'float32') -> Callable[[Params, Any], jax.Array]:
  """The compiled model, from parameters and ids [B, T] to logits."""
  definition = define_lm(model, Execution(jnp.dtype(dtype), attention='xla'))
  return jax.jit(lambda params, ids: definition.bind(params)(ids)[0])


def logits(model: ModelConfig, params: Params, dtype: str = 'float32') -> np.ndarray:
  """What the model computes of `IDS`."""
  return np.asarray(forward(model, dtype)(params, IDS[:, :-1]))


@functools.cache
def loss_and_gradient(model: ModelConfig) -> Callable[[Params], tuple[jax.Array, Params]]:
  """The compiled mean cross-entropy on `IDS`, and its gradient."""
  definition = define_lm(model, Execution(attention='xla'))

  def loss(params: Params) -> jax.Array:
    scores, _ = definition.bind(params)(IDS[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, IDS[:, 1:]))

  return jax.jit(jax.value_and_grad(loss))


def difference(got: np.ndarray, want: np.ndarray) -> float:
  """The largest difference of two logits, as a part of max(1, the largest logit)."""
  assert np.all(np.isfinite(got)), 'the logits are not finite'
  return float(np.max(np.abs(got - want)) / max(1.0, np.max(np.abs(want))))


def grow_params(
  params: Params, source: ModelConfig, target: ModelConfig, config: GrowConfig
) -> Params:
  """Parameters alone, grown by one compiled function."""
  return grow({'params': params, 'opt_state': ()}, source, target, config)['params']


def grow(state: State, source: ModelConfig, target: ModelConfig, config: GrowConfig) -> State:
  """A whole state, grown by one compiled function."""
  return apply_steps(state, source, plan.plan_growth(source, target, config), config)


def apply_steps(
  state: State, model: ModelConfig, steps: apply.Steps, config: GrowConfig = KEEP
) -> State:
  """A whole state after some steps, by one compiled function."""
  data = tuple(step.data for step in steps)  # which equal steps may differ in
  return _program(model, steps, config, data)(state)


@functools.cache
def _program(
  model: ModelConfig, steps: apply.Steps, config: GrowConfig, data: tuple[Any, ...]
) -> Callable[[State], State]:
  del data
  return jax.jit(lambda state: apply.grow_state(state, model, steps, config))


def remove(
  state: State, model: ModelConfig, before: ModelConfig, config: GrowConfig = KEEP
) -> State:
  """A state without what the growth `config` added to `before`."""
  last = Ancestor('grow', '/base', STEP, before, config, UPDATES)
  return apply_steps(state, model, plan.plan_removal(last, model), config)


def merge(state: State, added: Params, model: ModelConfig, after: ModelConfig) -> State:
  """A state with appended tokens."""
  return apply_steps(state, model, merging.merge(model, after, added))


def group_masks(info: Params, numbers: Collection[int]) -> dict[str, np.ndarray]:
  """By path: which parameter tokens of an array are in one of the numbered groups."""

  def mask(one: ParamInfo) -> np.ndarray:
    chosen = [number in numbers for number in range(1, len(one.groups) + 1)]
    shape = [-1 if axis == one.token_axis else 1 for axis in range(len(one.axes))]
    return np.repeat(chosen, one.groups).reshape(shape) if one.groups else np.array(False)

  return paths(jax.tree.map(mask, info))


def inexact(source: ModelConfig, target: ModelConfig, config: GrowConfig) -> str:
  """Why a growth changes what the model computes, or ''."""
  return plan.inexact(plan.plan_growth(source, target, config))


def moments_and_gradient(
  step: Step, small: Params, large: Params
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """By path: what a growth makes of the moments of a first gradient, and the grown model's own."""
  first, second = (
    paths(
      jax.tree.map_with_path(
        lambda path, _: step.moment(path, lambda path: lookup(small, path) ** order, order),  # noqa: B023
        large,
      )
    )
    for order in (1, 2)
  )
  return {path: (first[path], second[path], own) for path, own in paths(large).items()}


def assert_shared(first: np.ndarray, second: np.ndarray, gradient: np.ndarray, path: str) -> None:
  """Copies share a gradient at random: the moments have its mean and, roughly, its square's."""
  projection = np.vdot(first, gradient) / np.vdot(first, first)
  assert abs(projection - 1) < 0.01, f'the copies of {path} have {projection} times the gradient'
  ratio = np.mean(gradient**2) / np.mean(second)
  assert 0.4 < ratio < 2.5, f'the mean square of {path} is {ratio} times the second moment'


def mesh_of(fsdp: int = 1, tokens: int = 1) -> Mesh:
  """A mesh over the first devices."""
  return sharding.make_mesh(MeshConfig(fsdp=fsdp, tokens=tokens), jax.devices()[: fsdp * tokens])
