"""Choose how the layers of a training step run: which values they save, and in what loop.

A way that saves more computes less again, and is faster as far as memory allows. `WAYS` has them in
the order of the planner's times. `affordable` estimates the memory of each from the values that it
saves, which JAX finds without compiling. The compiler has the last word: see `fit.FittedStep`.
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
GAPS = {'unrolled': 1.16}
# Layers whose values and gradients are alive beside those.
_LAYERS_BESIDES = 1.2
# The part of the memory that a way may fill if devices exchange something. In a step that fills
# more, the compiler for TPUs lets no collective run beside computation (docs/planned_speed.md).
_ROOM = 0.9


class Way(NamedTuple):
  """How the layers of a step run: values of `train.remat` and of `train.layers`."""

  remat: str
  layers: str

  @property
  def flags(self) -> str:
    """Return the way as flags of `train.py`."""
    return f'--config.train.remat={self.remat} --config.train.layers={self.layers}'


# All ways, the fastest first, by `python benchmarks/ways.py` (docs/planned_speed.md). A loop copies
# what the layers save into stacked arrays and back; with several layers in its body as much.
# Layers that save only their inputs need no other loop: it copies almost nothing.
WAYS = (
  Way('everything', 'unrolled'),
  Way('everything', 'scan'),
  Way('score_inputs', 'unrolled'),
  Way('score_inputs', 'scan'),
  Way('dots', 'unrolled'),
  Way('dots', 'scan'),
  Way('attention', 'scan'),
  Way('full', 'scan'),
  Way('offload', 'scan'),
)
# The most layers of a model without a loop by choice, by the start of `device_kind`: the program
# compiles in minutes. The compiler for TPU7x takes up to a minute for each product.
_MOST_UNROLLED = {'': 64, 'TPU7x': 0}


def all_ways(model: ModelConfig) -> list[Way]:
  """Return the ways that a model's layers can run, the fastest first."""
  # A layer without Pattentions has no scores, so `score_inputs` is `everything`.
  return [way for way in WAYS if way.remat != 'score_inputs' or pattentions(model)]


def open_ways(train: TrainConfig, model: ModelConfig, kind: str) -> list[Way]:
  """Return the ways that a config leaves open on a `device_kind`, the fastest first."""
  found: dict[Way, None] = {}
  most = sharding.lookup_kind(_MOST_UNROLLED, kind)
  for remat, layers in all_ways(model):
    if train.remat in ('auto', remat) and (layers == 'scan' or model.depth <= most):
      found[Way(remat, layers if train.layers == 'auto' else train.layers)] = None
  return list(found) or [Way(train.remat, 'scan')]


def in_way(program: Program, way: Way) -> Program:
  """Return the program whose layers run in a way; it makes the same states."""
  train = dataclasses.replace(program.config.train, remat=way.remat, layers=way.layers)
  return dataclasses.replace(
    program,
    config=dataclasses.replace(program.config, train=train),
    task=program.task.with_train(train),
  )


def affordable(
  program: Program, mesh: Mesh, arguments: tuple[Any, ...], capacity: float
) -> Iterator[Way]:
  """Yield the ways to try, the fastest that should fit first, with room for what is exchanged.

  Every later one needs less memory than those before. If none should fit, yield the one that needs
  least.

  Args:
    program: the step, whose config leaves the way open.
    mesh: the devices.
    arguments: those of the step, or their shapes with shardings.
    capacity: bytes of a device for the arguments and the temporaries.
  """
  kind = mesh.devices.flat[0].device_kind
  ways = open_ways(program.config.train, program.config.model, kind)
  if len(ways) == 1:
    yield ways[0]
    return
  model, given = program.config.model, argument_bytes(arguments)

  @functools.cache
  def saved(remat: str) -> float:
    return saved_bytes(in_way(program, Way(remat, 'scan')), mesh, arguments)

  def needed(way: Way) -> float:
    gaps = GAPS.get(way.layers, 1)
    return given + gaps * saved(way.remat) + _LAYERS_BESIDES * saved(ways[0].remat) / model.depth

  room, least = capacity * (_ROOM if mesh.size > 1 else 1), math.inf
  for way in ways:
    if needed(way) < min(least, room):
      least = needed(way)
      yield way
  if least == math.inf:
    yield min(ways, key=needed)


def argument_bytes(arguments: Any) -> float:
  """Return the bytes of arrays, or of shapes with shardings, on a device."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(arguments)
  )


def saved_bytes(program: Program, mesh: Mesh, arguments: tuple[Any, ...]) -> float:
  """Return the bytes on a device that the forward pass of a step saves for the backward pass.

  They are those of one part of the batch if the step accumulates gradients. The step's arguments
  do not count. Values of the model's width count whole if `tokens` splits what projections compute.
  """
  state, batch, *teacher = arguments
  parts = program.config.optim.accumulation_steps
  part = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype), batch
  )

  def saved(params: Any, batch: Any, key: jax.Array, *teacher: Any) -> list[jax.Array]:
    def loss(params: Any) -> jax.Array:
      return program.task.loss(params, batch, key, *teacher)[0]

    return jax.tree.leaves(jax.vjp(loss, params)[1])

  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state['params'], *teacher))
  key = jax.eval_shape(lambda: jax.random.key(0))
  with jax.set_mesh(mesh):
    traced = jax.make_jaxpr(saved)(like[0], part, key, *like[1:]).jaxpr
  given = {id(value) for value in traced.invars}
  found = [value.aval for value in traced.outvars if id(value) not in given]
  rows = rules.parts('batch', mesh) * rules.parts('slots', mesh)
  split = rules.parts('param_tokens', mesh)
  whole = (program.config.model.width,)
  return sum(
    value.size * value.dtype.itemsize / rows / (1 if value.shape[-1:] == whole else split)
    for value in found
    if value.memory_space.name == 'Device'
  )
