"""A training step by formula, where no compiler is at hand: GPUs. Bounds, and no more than that."""

from collections.abc import Mapping

from tokenformer_jax import flops
from tokenformer_jax.plan.chips import Chip
from tokenformer_jax.plan.costs import Costs, Traffic
from tokenformer_jax.plan.program import Memory, Step

_ACTIVATION = 2  # bytes of bfloat16
_PROJECTIONS = 5  # of a layer: query, key, value, output, feed-forward
_NODE = 8  # GPUs that NVLink connects
# What `train.remat` keeps of a layer on the device, for each position: times the model's width, the
# inner width of a dense feed-forward layer, and the number of scores.
_KEPT = {
  'everything': (12, 2, 1),
  'score_inputs': (12, 2, 0),
  'dots': (5, 1, 0),
  'full': (1, 0, 0),
  'offload': (0, 0, 0),
}
# Forward passes that it computes again: of Pattention, whose scores are half of one, and of others.
_AGAIN = {
  'everything': (0.0, 0.0),
  'score_inputs': (0.5, 0.0),
  'dots': (0.5, 0.0),
  'full': (1.0, 1.0),
  'offload': (1.0, 1.0),
}


def of_step(
  step: Step, mesh: Mapping[str, int], state: tuple[float, float, float], chip: Chip
) -> tuple[Memory, Costs]:
  """Memory and costs of a device.

  Activations are those that recomputation keeps of every layer, all of one layer, the logits of a
  chunk of the loss, and gradients in float32. FLOPs are the model's, with what is recomputed.
  Collectives are the gathers of the weights, in the forward and the backward pass, the reduction of
  gradients, and over `tokens` the sum of the output of every projection, and of its input's
  gradient.

  Args:
    step: to be computed.
    mesh: sizes of its axes.
    state: bytes of parameters, of the rest of the state, and of a batch, on a device.
    chip: the device.
  """
  config = step.config
  model, parts = config.model, config.optim.accumulation_steps
  rows = config.data.batch_size / parts / (mesh['replica'] * mesh['fsdp'])
  length = flops.length(config)
  remat, has_scores = config.train.remat, model.projection == 'pattention'
  inner = 0 if has_scores else (model.ffn_width or 4 * model.width) / mesh['tokens']
  counts = model.param_tokens
  scores = (3 * counts.qkv + counts.proj + counts.ffn) / mesh['tokens'] if has_scores else 0
  widths, inners, all_scores = _KEPT[remat]
  layer = 12 * model.width + 2 * inner + scores
  kept = model.layers * (widths * model.width + inners * inner + all_scores * scores)
  inputs = model.layers * model.width
  host = rows * length * inputs * _ACTIVATION if remat == 'offload' else 0.0
  chunk = min(config.train.loss_chunk, length) if model.kind == 'lm' else 1
  head = 2 * 4 * chunk * (model.vocab_size or model.classes) / mesh['tokens']
  parameters, optimizer, batch = state
  temporaries = rows * (length * (kept + layer) * _ACTIVATION + head) + parameters
  memory = Memory(parameters, optimizer, batch, temporaries, 0.0, chip.hbm, host=host)
  devices = mesh['replica'] * mesh['fsdp'] * mesh['tokens']
  again = _AGAIN[remat][0 if has_scores else 1]
  executed = flops.of_step(config) * (3 + again) / 3 / devices
  activations = rows * length * model.width * _ACTIVATION * model.layers * parts
  traffic = tuple(_traffic(mesh, parameters, activations, model.layers, parts, chip))
  return memory, Costs(0, 0.0, executed, executed / chip.peak, traffic, ())


def _traffic(
  mesh: Mapping[str, int],
  parameters: float,
  activations: float,
  layers: int,
  parts: int,
  chip: Chip,
) -> list[Traffic]:
  """The collectives of a step.

  Args:
    mesh: sizes of its axes.
    parameters: bytes in float32 on a device.
    activations: bytes of the outputs of one projection in each layer, on a device.
    layers: of the model.
    parts: that the batch is computed in.
    chip: the device.
  """
  rows, inside = [], mesh['tokens'] * mesh['fsdp'] <= _NODE
  bandwidth, network = (chip.link, 'NVLink') if inside else (chip.dcn, 'network')
  if (size := mesh['fsdp']) > 1:
    gathered = parameters / 2 * (size - 1) * 2 * parts  # in bfloat16, forward and backward
    reduced = parameters * (size - 1) * parts
    rows.append(
      Traffic('fsdp', 'all-gather', network, 2 * parts, gathered / 1e9, gathered / bandwidth)
    )
    rows.append(
      Traffic('fsdp', 'reduce-scatter', network, parts, reduced / 1e9, reduced / bandwidth)
    )
  if (size := mesh['tokens']) > 1:
    moved = 2 * (size - 1) / size * activations * 2 * _PROJECTIONS
    rows.append(
      Traffic(
        'tokens',
        'all-reduce',
        network,
        2 * _PROJECTIONS * layers * parts,
        moved / 1e9,
        moved / bandwidth,
      )
    )
  if (size := mesh['replica']) > 1:
    moved = 2 * parameters * (size - 1) / size
    whole = mesh['replica'] * mesh['fsdp'] * mesh['tokens'] <= _NODE
    bandwidth, network = (chip.link, 'NVLink') if whole else (chip.dcn, 'network')
    rows.append(Traffic('replica', 'all-reduce', network, 1, moved / 1e9, moved / bandwidth))
  return rows
