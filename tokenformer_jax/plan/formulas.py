"""Estimate memory of a training step by formula, and its FLOPs, for GPUs: no compiler is here."""

import math
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh

from tokenformer_jax.config import ExpertsConfig, GroupedConfig, MLPConfig, ModelConfig, pattern
from tokenformer_jax.model import dispatch, flops, models
from tokenformer_jax.model.mlp import hidden_width
from tokenformer_jax.model.params import ParamInfo, Role
from tokenformer_jax.parallel import rules
from tokenformer_jax.plan.chips import Chip
from tokenformer_jax.plan.costs import Costs
from tokenformer_jax.plan.program import Memory
from tokenformer_jax.steps import remat_plans
from tokenformer_jax.steps.step import Program

_ACTIVATION = 2  # bytes of bfloat16
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
_AGAIN = {'everything': (0.0, 0.0), 'score_inputs': (0.5, 0.0), 'dots': (0.5, 0.0)}
_WHOLE_PASS = (1.0, 1.0)


def memory_and_costs(
  step: Program, mesh: AbstractMesh, state: tuple[float, float, float], chip: Chip
) -> tuple[Memory, Costs]:
  """Return the memory and the costs of a step on one device.

  Temporaries are the activations that recomputation keeps of every layer, with gaps between them
  if no loop runs the layers, all activations of one layer, the logits of a chunk of the loss, a
  mask of documents, and gradients in float32. FLOPs are the model's plus the recomputed ones.
  Collectives are left out. `state` has bytes on a device: of parameters, of the rest of the state,
  and of a batch.
  """
  config = step.config
  model = config.model
  rows = config.data.batch_size / config.optim.accumulation_steps / rules.shard_count('batch', mesh)
  whole = flops.length(config)
  length = whole // rules.shard_count('slots', mesh)  # the positions of a row on a device
  remat, depth = config.train.remat, model.depth
  # Sums over all layers, for each position.
  inner = _outputs(model, 'hidden', Role.KERNEL) / rules.shard_count('hidden', mesh)
  scores = _outputs(model, 'param_tokens', Role.KEY) / rules.shard_count('param_tokens', mesh)
  widths, inners, all_scores = _KEPT[remat]
  inputs = depth * model.width
  layer = 12 * model.width + (2 * inner + 3 * scores) / depth
  kept = widths * inputs + inners * inner + all_scores * scores
  host = rows * length * inputs * _ACTIVATION if remat == 'offload' else 0.0
  at_experts, kept_at_experts = _expert_activations(model, mesh, int(rows), length)
  chunk = min(config.train.loss_chunk, length) if model.kind == 'lm' else 1
  outputs = model.vocab_size if model.kind == 'lm' else model.classes
  head = 2 * 4 * chunk * outputs / rules.shard_count('vocab', mesh)
  parameters, optimizer, batch = state
  kept *= remat_plans.GAPS.get(config.train.layers, 1)
  temporaries = rows * (length * (kept + layer) * _ACTIVATION + head) + parameters
  temporaries += _ACTIVATION * (at_experts + inners * kept_at_experts)
  if config.train.attention == 'cudnn' and config.data.documents != 'joined':
    temporaries += rows * whole**2 * _ACTIVATION
  memory = Memory(parameters, optimizer, batch, temporaries, chip.hbm, host=host)
  again = _AGAIN.get(remat, _WHOLE_PASS)[0 if scores else 1]
  executed = flops.step_flops(config) * (3 + again) / 3 / mesh.size
  return memory, Costs(0, 0.0, executed, executed / chip.peak, (), ())


def _outputs(model: ModelConfig, axis: str, role: Role) -> int:
  """Count the outputs for one position, along a logical axis, of the layers' matrices of a role."""
  at = -2 if role is Role.KEY else -1
  return sum(
    math.prod(shape[:-2]) * shape[at]
    for shape, info in _layer_arrays(model)
    if info.role is role and info.axes[at] == axis
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
  names = pattern.names(model.repeats)
  for name, experts in model.experts.items():
    slots = count_slots(experts, rows, length, rules.shard_count('experts', mesh))
    inner = slots * _inner_width(experts, model) / rules.shard_count('expert_hidden', mesh)
    # Rows there and back, on both sides of an exchange; gate, product and gradient inside.
    most = max(most, 4 * slots * model.width + 3 * inner)
    kept += names.count(name) * inner
  return most, kept


def count_slots(experts: ExpertsConfig, rows: int, length: int, devices: int) -> int:
  """Return the slots that a device fills with tokens in training, for the experts of all devices.

  A device has `rows` sequences of `length` tokens, and `devices` devices split the experts.
  """
  top_k, how = experts.router.top_k, experts.dispatch
  if isinstance(how, GroupedConfig):
    if devices == 1:
      return rows * length * top_k
    local = experts.count // devices
    return devices * dispatch.device_slots(how, rows * length * top_k, top_k, local, devices)
  slots = dispatch.capacity(how, length, top_k, experts.count, training=True)
  return experts.count * rows * slots


def _inner_width(experts: ExpertsConfig, model: ModelConfig) -> int:
  """Return the numbers inside an expert for one token; a gate has as many as what it gates."""
  expert = experts.expert
  if isinstance(expert, MLPConfig):
    return (1 + expert.gated) * hidden_width(expert, model)
  return expert.tokens
