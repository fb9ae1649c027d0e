"""Choose what the layers of a training step save for the backward pass, and in what loop they run.

A plan that saves more computes less again, and is faster as far as memory allows. `PLANS` has them
in the order of the planner's times. `affordable` estimates the memory of each from the values that
it saves, which JAX finds without compiling. The compiler has the last word: see `fit.FittedStep`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from tokenformer_jax.config import ModelConfig, TrainConfig, pattentions
from tokenformer_jax.parallel import rules, sharding
from tokenformer_jax.steps.step import Program

# Temporaries of a step over the values that its layers save. Without a loop, gaps are between them.
_GAPS = {'unrolled': 1.16}
# Working set of one layer, in units of its saved values.
_WORKING_SET = 1.2
# The share of the memory that a plan may fill if devices exchange data. In a step that fills more,
# the compiler for TPUs overlaps no collective with computation (docs/planned_speed.md).
_USABLE = 0.9


class RematPlan(NamedTuple):
  """A value of `train.remat`, which values are saved, and one of `train.layers`, how layers run."""

  remat: str
  layers: str

  @property
  def flags(self) -> str:
    """Return the plan as flags of `train.py`."""
    return f'--config.train.remat={self.remat} --config.train.layers={self.layers}'


# All plans, the fastest first, by benchmarks/remat_plans.py (docs/planned_speed.md). A loop copies
# saved values into stacked arrays and back. Layers that save only their inputs need a loop alone:
# it copies almost nothing.
PLANS = (
  RematPlan('everything', 'unrolled'),
  RematPlan('everything', 'scan'),
  RematPlan('score_inputs', 'unrolled'),
  RematPlan('score_inputs', 'scan'),
  RematPlan('dots', 'unrolled'),
  RematPlan('dots', 'scan'),
  RematPlan('attention', 'scan'),
  RematPlan('full', 'scan'),
  RematPlan('offload', 'scan'),
)
# The most layers of a model without a loop by choice, by the start of `device_kind`: the program
# compiles in minutes. The compiler for TPU7x takes up to a minute for each product.
_MOST_UNROLLED = {'': 64, 'TPU7x': 0}


def open_plans(train: TrainConfig, model: ModelConfig, kind: str) -> list[RematPlan]:
  """Return the plans that a config leaves open on a `device_kind`, the fastest first."""
  plans: dict[RematPlan, None] = {}
  most = sharding.lookup_kind(_MOST_UNROLLED, kind)
  for remat, layers in PLANS:
    if remat == 'score_inputs' and not pattentions(model):
      continue  # A layer without Pattentions has no scores, so it is `everything`.
    if train.remat in ('auto', remat) and (layers == 'scan' or model.depth <= most):
      plans[RematPlan(remat, layers if train.layers == 'auto' else train.layers)] = None
  return list(plans) or [RematPlan(train.remat, 'scan')]


def with_plan(program: Program, plan: RematPlan) -> Program:
  """Return the program with the plan; it makes the same states."""
  train = dataclasses.replace(program.config.train, remat=plan.remat, layers=plan.layers)
  return dataclasses.replace(
    program,
    config=dataclasses.replace(program.config, train=train),
    task=program.task.with_train(train),
  )


def affordable(
  program: Program, mesh: Mesh, arguments: tuple[Any, ...], capacity: float
) -> Iterator[RematPlan]:
  """Yield the plans to try, the fastest that should fit first; each needs less than those before.

  Leave memory for exchanges between devices. If no plan should fit, yield the smallest one.

  Args:
    program: the step, whose config leaves the plan open.
    mesh: the devices.
    arguments: those of the step, or their shapes with shardings.
    capacity: bytes of a device for the arguments and the temporaries.
  """
  kind = mesh.devices.flat[0].device_kind
  plans = open_plans(program.config.train, program.config.model, kind)
  if len(plans) == 1:
    yield plans[0]
    return
  model, given = program.config.model, argument_bytes(arguments)

  @functools.cache
  def saved(remat: str) -> float:
    return saved_bytes(with_plan(program, RematPlan(remat, 'scan')), mesh, arguments)

  def needed(plan: RematPlan) -> float:
    gaps = _GAPS.get(plan.layers, 1)
    return given + gaps * saved(plan.remat) + _WORKING_SET * saved(plans[0].remat) / model.depth

  usable, least = capacity * (_USABLE if mesh.size > 1 else 1), math.inf
  for plan in plans:
    if needed(plan) < min(least, usable):
      least = needed(plan)
      yield plan
  if least == math.inf:
    yield min(plans, key=needed)


def argument_bytes(arguments: Any) -> float:
  """Return the bytes of arrays, or of shapes with shardings, on a device."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(arguments)
  )


def saved_bytes(program: Program, mesh: Mesh, arguments: tuple[Any, ...]) -> float:
  """Return the bytes on a device that the forward pass of a step saves for the backward pass.

  They are those of one microbatch if the step accumulates gradients. The step's arguments do not
  count. Values of the model's width count whole if `tokens` splits what projections compute.
  """
  state, batch, *teacher = arguments
  steps = program.config.optim.accumulation_steps
  microbatch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((x.shape[0] // steps, *x.shape[1:]), x.dtype), batch
  )

  def saved(params: Any, batch: Any, key: jax.Array, *teacher: Any) -> list[jax.Array]:
    def loss(params: Any) -> jax.Array:
      return program.task.loss(params, batch, key, *teacher)[0]

    return jax.tree.leaves(jax.vjp(loss, params)[1])

  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state['params'], *teacher))
  key = jax.eval_shape(lambda: jax.random.key(0))
  with jax.set_mesh(mesh):
    traced = jax.make_jaxpr(saved)(like[0], microbatch, key, *like[1:]).jaxpr
  given = {id(value) for value in traced.invars}
  kept = [value.aval for value in traced.outvars if id(value) not in given]
  rows = rules.shard_count('batch', mesh) * rules.shard_count('slots', mesh)
  split = rules.shard_count('param_tokens', mesh)
  whole = (program.config.model.width,)
  return sum(
    value.size * value.dtype.itemsize / rows / (1 if value.shape[-1:] == whole else split)
    for value in kept
    if value.memory_space.name == 'Device'
  )
