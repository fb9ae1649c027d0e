"""Bound memory and costs of a training step by formula, for GPUs: they have no compiler here."""

import itertools
import math
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh

from tokenformer_jax.config import (
  GatedUnitConfig,
  ModelConfig,
  SoftmaxConfig,
  width_of_heads,
)
from tokenformer_jax.model import flops, models, sequence
from tokenformer_jax.model.params import ParamInfo, Role
from tokenformer_jax.parallel import rules
from tokenformer_jax.plan import exchange
from tokenformer_jax.plan.chips import Chip
from tokenformer_jax.plan.costs import Costs, Traffic
from tokenformer_jax.plan.program import Memory
from tokenformer_jax.steps import remat_plans
from tokenformer_jax.steps.step import Program

_ACTIVATION = 2  # bytes of bfloat16
_NODE = 8  # GPUs that NVLink connects
# Numbers that `train.remat` keeps on the device for a layer and a position, as multiples of the
# model's width, the inner width of a dense feed-forward layer, and the number of scores.
_KEPT = {
  'everything': (8, 2, 1),
  'score_inputs': (8, 2, 0),
  'dots': (5, 1, 0),
  'attention': (1, 0, 0),  # the kernel for GPUs has no names for what it returns
  'full': (1, 0, 0),
  'offload': (0, 0, 0),
}
# Forward passes that it recomputes: for Pattention, whose scores are half a pass, and for others.
_AGAIN = {
  'everything': (0.0, 0.0),
  'score_inputs': (0.5, 0.0),
  'dots': (0.5, 0.0),
  'attention': (1.0, 1.0),
  'full': (1.0, 1.0),
  'offload': (1.0, 1.0),
}
# The values of `train.remat` that keep the heads of attention as kernels get them.
_KEEP_HEADS = ('everything', 'score_inputs')


def memory_and_costs(
  step: Program, mesh: AbstractMesh, state: tuple[float, float, float], chip: Chip
) -> tuple[Memory, Costs]:
  """Return the memory and the costs of a step on one device.

  Temporaries are the activations that recomputation keeps of every layer, with gaps between them
  if no loop runs the layers, all activations of one layer, the logits of a chunk of the loss, a
  mask of documents, and gradients in float32. FLOPs are the model's plus the recomputed ones.
  Collectives are the gathers of the weights in the forward and the backward pass, and the reduction
  of gradients. If parameter tokens are split, the outputs of every projection and the gradients of
  its inputs are summed as well. If experts are split, devices exchange tokens.
  `state` has bytes on a device: of parameters, of the rest of the state, and of a batch.
  """
  config = step.config
  model, parts = config.model, config.optim.accumulation_steps
  rows = config.data.batch_size / parts / rules.parts('batch', mesh)
  whole = flops.length(config)
  length = whole // rules.parts('slots', mesh)  # the positions of a row on a device
  remat, depth = config.train.remat, model.depth
  # Sums over all layers, for each position.
  inner = _outputs(model, 'hidden', Role.KERNEL) / rules.parts('hidden', mesh)
  scores = _outputs(model, 'param_tokens', Role.KEY) / rules.parts('param_tokens', mesh)
  widths, inners, all_scores = _KEPT[remat]
  inputs = depth * model.width
  layer = 12 * model.width + (2 * inner + 3 * scores) / depth
  kept = widths * inputs + inners * inner + all_scores * scores
  host = rows * length * inputs * _ACTIVATION if remat == 'offload' else 0.0
  at_experts, kept_at_experts = _expert_activations(model, mesh, int(rows), length)
  chunk = min(config.train.loss_chunk, length) if model.kind == 'lm' else 1
  outputs = model.vocab_size if model.kind == 'lm' else model.classes
  head = 2 * 4 * chunk * outputs / rules.parts('vocab', mesh)
  parameters, optimizer, batch = state
  kept *= remat_plans.GAPS.get(config.train.layers, 1)
  temporaries = rows * (length * (kept + layer) * _ACTIVATION + head) + parameters
  temporaries += _ACTIVATION * (at_experts + inners * kept_at_experts)
  if config.train.attention == 'cudnn' and config.data.documents != 'joined':
    temporaries += rows * whole**2 * _ACTIVATION
  memory = Memory(parameters, optimizer, batch, temporaries, 0.0, chip.hbm, host=host)
  again = _AGAIN[remat][0 if scores else 1]
  passes = 2 if remat in _KEEP_HEADS else 3
  executed = flops.step_flops(config) * (3 + again) / 3 / mesh.size
  output = rows * length * model.width * _ACTIVATION
  moved = exchange.step_exchange(model, int(rows), length, rules.parts('experts', mesh))
  sizes = _parameter_bytes(model, mesh, parameters)
  traffic = tuple(
    [
      *_weights_traffic(mesh, sizes, parts, chip),
      *_tokens_traffic(mesh, output, _summed_projections(model), moved, parts, chip),
      *_rows_traffic(model, mesh, rows * length, length, parts * passes, chip),
    ]
  )
  return memory, Costs(0, 0.0, executed, executed / chip.peak, traffic, ())


def _outputs(model: ModelConfig, axis: str, role: Role) -> int:
  """Count the outputs for one position, along a logical axis, of the layers' matrices of a role."""
  at = -2 if role is Role.KEY else -1
  return sum(
    math.prod(shape[:-2]) * shape[at]
    for shape, info in _layer_arrays(model)
    if info.role is role and info.axes[at] == axis
  )


def _summed_projections(model: ModelConfig) -> int:
  """Count the projections in all layers whose input is split over `tokens`: sums cross devices."""
  split = rules.mesh_axes('param_tokens')
  return sum(
    # The results of all experts are summed at once.
    math.prod(size for size, axis in zip(shape[:-2], info.axes, strict=False) if axis != 'experts')
    for shape, info in _layer_arrays(model)
    if info.role in (Role.VALUE, Role.KERNEL) and rules.mesh_axes(info.axes[-2]) == split
  )


def _layer_arrays(model: ModelConfig) -> Iterator[tuple[tuple[int, ...], ParamInfo]]:
  """Yield the shape and the metadata of each array in the layers."""
  definition = models.define(model)
  arrays, infos = jax.tree.leaves(definition.abstract), jax.tree.leaves(definition.info)
  for array, info in zip(arrays, infos, strict=True):
    if info.in_layers:
      yield array.shape, info


def _expert_activations(
  model: ModelConfig, mesh: AbstractMesh, rows: int, length: int
) -> tuple[float, float]:
  """Return the activations at experts on a device: all of one layer, and the inner ones of all."""
  most, kept = 0.0, 0.0
  for experts, layers in exchange.count_layers(model):
    slots = exchange.count_slots(experts, rows, length, rules.parts('experts', mesh))
    inner = slots * exchange.inner_width(experts, model) / rules.parts('expert_hidden', mesh)
    # Rows there and back, on both sides of an exchange; gate, product and gradient inside.
    most = max(most, 4 * slots * model.width + 3 * inner)
    kept += layers * inner
  return most, kept


def _parameter_bytes(model: ModelConfig, mesh: AbstractMesh, parameters: float) -> dict[str, float]:
  """Return the bytes on a device of arrays whose width the rules split, by the axis."""
  split = sum(
    4
    * math.prod(size / rules.parts(axis, mesh) for size, axis in zip(shape, info.axes, strict=True))
    for shape, info in _layer_arrays(model)
    if 'expert_width' in info.axes
  )
  return {'width': parameters - split, 'expert_width': split}


def _row(
  axes: tuple[str, ...], collective: str, devices: int, count: int, moved: float, chip: Chip
) -> Traffic:
  """Return `count` collectives among `devices` devices, over NVLink if one node has them all."""
  inside = devices <= _NODE
  bandwidth, network = (chip.link, 'NVLink') if inside else (chip.dcn, 'network')
  return Traffic('+'.join(axes), collective, network, count, moved / 1e9, moved / bandwidth)


def _weights_traffic(
  mesh: AbstractMesh, sizes: dict[str, float], parts: int, chip: Chip
) -> Iterator[Traffic]:
  """Yield the gathers of weights, and the sums of their gradients.

  `sizes` are bytes in float32 on a device, by the axis along which they are gathered. Accumulation
  splits the batch into `parts`.
  """
  replicas = rules.replicas(mesh)
  for axis, part in sizes.items():
    if part and (size := rules.parts(axis, mesh)) > 1:
      along = rules.mesh_axes(axis)
      along = tuple(name for name in along if mesh.shape[name] > 1)
      gathered = part / 2 * (size - 1) * 2 * parts  # in bfloat16, forward and backward
      in_replica = mesh.size // replicas
      yield _row(along, 'all-gather', in_replica, 2 * parts, gathered, chip)
      scattered = part * (size - 1) * parts
      yield _row(along, 'reduce-scatter', in_replica, parts, scattered, chip)
  if replicas > 1:
    moved = 2 * sum(sizes.values()) * (replicas - 1) / replicas
    yield _row(rules.replica_axes(), 'all-reduce', mesh.size, 1, moved, chip)


def _rows_traffic(
  model: ModelConfig, mesh: AbstractMesh, slots: float, own: int, times: int, chip: Chip
) -> Iterator[Traffic]:
  """Yield the exchanges of slots for heads, and of the slots before a device's own for windows.

  A device has `slots` slots in all, `own` of each row, and passes over its layers `times`: forward,
  backward, and to compute again. Sums of linear attention are left out: they are small.
  """
  if (size := rules.parts('slots', mesh)) == 1:
    return
  exchanged = halos = 0.0
  number = [0, 0]
  for name in itertools.chain.from_iterable(r.layers * r.count for r in model.repeats):
    mixer = model.layers[name].mixer
    if isinstance(mixer, GatedUnitConfig):
      exchanged += 2 * (mixer.width or 2 * model.width)
      number[0] += 2
    if not isinstance(mixer, SoftmaxConfig):
      continue
    one, tokens = width_of_heads(mixer, model.width), rules.parts('heads', mesh)
    # Heads are filled up to the same number for each device that splits slots.
    width = -(-(mixer.heads // tokens) // size) * size * tokens * one
    keys = mixer.key_heads * one
    if halo := 0 if mixer.shaped else sequence.halo_of(own, mixer.window):
      halos += 2 * keys * halo / own
      number[1] += 2
    else:
      exchanged += 2 * (width + keys)
      number[0] += 4
  each = times * slots * _ACTIVATION / rules.parts('heads', mesh)
  along, inside = rules.mesh_axes('slots'), size * rules.parts('heads', mesh)  # neighbours
  if number[0]:
    moved = each * exchanged * (size - 1) / size
    yield _row(along, 'all-to-all', inside, times * number[0], moved, chip)
  if number[1]:
    yield _row(along, 'collective-permute', inside, times * number[1], each * halos, chip)


def _tokens_traffic(
  mesh: AbstractMesh,
  output: float,
  projections: int,
  moved: exchange.Exchange,
  parts: int,
  chip: Chip,
) -> Iterator[Traffic]:
  """Yield the collectives of activations.

  On a device, the output of a projection has `output` bytes. `projections` of them sum it over
  parts of their matrices. Accumulation splits the batch into `parts`, each of which exchanges
  `moved` between experts.
  """
  in_replica = mesh.size // rules.replicas(mesh)
  if (size := rules.parts('param_tokens', mesh)) > 1:
    count = 2 * projections * parts  # in the forward and in the backward pass
    summed = 2 * (size - 1) / size * output * count
    along = rules.mesh_axes('param_tokens')
    yield _row(along, 'all-reduce', in_replica, count, summed, chip)
  if moved.number:
    along, number = rules.mesh_axes('experts'), parts * moved.number
    yield _row(along, 'all-to-all', in_replica, number, parts * moved.received, chip)
