"""Model FLOPs by formula and published peaks of chips: the one source of every MFU figure."""

from typing import Any

from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.config.groups import choose, first, most_groups
from tokenformer_jax.model import models, trunk
from tokenformer_jax.model.params import matrix_entries
from tokenformer_jax.parallel import sharding

# Dense bf16 peak of one device in TFLOP/s, by the start of `device_kind`; the longest match counts.
# A device is a chip, except for TPU v3 and TPU7x, whose chips are two devices.
PEAK_TFLOPS = {
  'TPU v3': 61.5,
  'TPU v4': 275,
  'TPU v5 lite': 197,
  'TPU v5e': 197,
  'TPU v5': 459,
  'TPU v6 lite': 918,
  'TPU v6e': 918,
  'TPU7x': 1153.5,
  'Tesla V100': 125,
  'Tesla T4': 65,
  'NVIDIA L4': 121,
  'NVIDIA L40': 181,
  'NVIDIA L40S': 362,
  'NVIDIA A100': 312,
  'NVIDIA H100': 989,
  'NVIDIA H100 NVL': 835,
  'NVIDIA H100 PCIe': 756,
  'NVIDIA H200': 989,
  'NVIDIA B200': 2250,
}


def peak_flops(device: Any) -> float | None:
  """Return a JAX device's published bf16 peak in FLOP/s, or None if the table lacks it (a CPU)."""
  peak = sharding.lookup_kind(PEAK_TFLOPS, device.device_kind)
  return peak * 1e12 if peak else None


def matrix_parameters(model: ModelConfig) -> int:
  """Count the entries of the layers' matrices that one token uses (TokenFormer, Table 3)."""
  return matrix_entries(_module(model), lambda info: info.in_layers)


def forward_flops(model: ModelConfig, length: int) -> float:
  """Count the mean FLOPs of the forward pass for one token in a sequence of `length`.

  A token costs two FLOPs for each matrix entry that it uses, including the head, plus the mixers'
  length-dependent FLOPs. For a ViT the count is for one image of `length` patches.
  """
  module = _module(model)
  if model.kind != 'vit':
    return 2 * matrix_entries(module) + trunk.length_flops(module.blocks, module.repeats, length)
  slots = length + (model.pool == 'token')
  before = matrix_entries(module, lambda info: info.depth == 0)
  within = matrix_entries(module, lambda info: info.in_layers)
  after = matrix_entries(module, lambda info: info.depth is None)
  layers = 2 * within + trunk.length_flops(module.blocks, module.repeats, slots)
  return 2 * (length * before + after) + slots * layers


def _module(model: ModelConfig) -> Any:
  """Return the model with shapes instead of parameters."""
  definition = models.define(model)
  return definition.bind(definition.abstract)


def train_flops(model: ModelConfig, length: int) -> float:
  """Count the FLOPs of a training step for one token, or for one image of a ViT.

  The backward pass counts as twice the forward pass; recomputation does not count.
  """
  return 3 * forward_flops(model, length)


def unit(model: ModelConfig) -> str:
  """Return the unit of a model's FLOPs: 'an image' or 'a token'."""
  return 'an image' if model.kind == 'vit' else 'a token'


def length(config: Config) -> int:
  """Return the `length` for the functions above: tokens or patches in an example of a run."""
  if config.model.kind == 'vit':
    return (config.data.image_size // config.model.patch) ** 2
  return config.data.sequence_length


def step_flops(config: Config) -> float:
  """Count the model FLOPs of a training step over all devices."""
  return config.data.batch_size * config.data.sequences * sequence_flops(config)


def sequence_flops(config: Config) -> float:
  """Count the model FLOPs of training on one sequence or image."""
  units = 1 if config.model.kind == 'vit' else length(config)
  return units * unit_flops(config)


def unit_flops(config: Config) -> float:
  """Count the model FLOPs of training on one token or image of a run: see `train_flops`.

  With `train.nested_rows` it is a mean over rows, some of which train smaller models.
  """
  model, whole, every = config.model, length(config), config.train.nested_rows
  smaller = [choose(model, first(n)) for n in range(1, most_groups(model))] if every else []
  part = sum(train_flops(one, whole) for one in smaller) / max(1, every)
  return part + (1 - len(smaller) / max(1, every)) * train_flops(model, whole)
