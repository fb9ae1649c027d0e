"""Model FLOPs by formula, and the chips' published peaks: the one place that MFU comes from."""

from collections.abc import Mapping
from typing import Any

import jax

from tokenformer_jax.config import Config, ModelConfig

# Dense bf16 peak of one device in TFLOP/s, by the start of `device_kind`; the longest match counts.
# A device is a chip, but for TPU v3 and TPU7x, whose chips are two devices.
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


def peak_flops(device: jax.Device) -> float | None:
  """The device's published bf16 peak in FLOP/s, or None if it is not in the table (a CPU, say)."""
  peak = of_kind(PEAK_TFLOPS, device)
  return peak * 1e12 if peak else None


def of_kind(table: Mapping[str, Any], device: jax.Device) -> Any:
  """What a table has for the kind of a device, by the longest key that it begins with, or None."""
  matches = [name for name in table if device.device_kind.startswith(name)]
  return table[max(matches, key=len)] if matches else None


def _projection(model: ModelConfig, kind: str) -> int:
  """Entries of the matrices of one projection: `qkv`, `proj` or `ffn`."""
  if model.projection == 'pattention':
    return 2 * model.width * getattr(model.param_tokens, kind)
  hidden = model.ffn_width or 4 * model.width
  return 2 * model.width * hidden if kind == 'ffn' else model.width**2


def matrix_parameters(model: ModelConfig) -> int:
  """Entries of the matrices that a token meets in the blocks (TokenFormer, Table 3)."""
  qkv, proj, ffn = (_projection(model, kind) for kind in ('qkv', 'proj', 'ffn'))
  return model.layers * (3 * qkv + proj + ffn)


def forward_flops(model: ModelConfig, length: int) -> float:
  """FLOPs of the forward pass for one token in a sequence of `length`, averaged over positions.

  Two for every entry of a matrix, the head's included; 4 · D · T for scores and weighted sums of
  token-token attention, halved because it is causal (TokenFormer, Table 3, where it is not halved),
  and less where a window W is shorter: W − W² / 2T positions are seen then, on average.
  Of a ViT for one image of `length` patches, where nothing is halved.
  """
  if model.kind == 'vit':
    return _image_flops(model, length)
  window = min(model.window or length, length)
  seen = window - window**2 / (2 * length) if length else 0
  attention = model.layers * 4 * model.width * seen
  return 2 * (matrix_parameters(model) + model.vocab_size * model.width) + attention


def _image_flops(model: ModelConfig, patches: int) -> float:
  length = patches + (model.pool == 'token')
  attention = model.layers * 4 * model.width * length**2
  embedding = 2 * patches * model.patch**2 * model.channels * model.width
  head = 2 * model.width * model.classes
  if model.pool == 'attention':  # Keys and values of all positions, the rest of one query.
    qkv, proj, ffn = (_projection(model, kind) for kind in ('qkv', 'proj', 'ffn'))
    head += 2 * (2 * length * qkv + qkv + proj + ffn) + 4 * model.width * length
  return 2 * length * matrix_parameters(model) + attention + embedding + head


def train_flops(model: ModelConfig, length: int) -> float:
  """FLOPs of a training step for what `forward_flops` counts.

  Backward is twice forward, recomputing not counted.
  """
  return 3 * forward_flops(model, length)


def unit(model: ModelConfig) -> str:
  """What the functions above count the FLOPs of."""
  return 'an image' if model.kind == 'vit' else 'a token'


def length(config: Config) -> int:
  """Tokens or patches of an example of a run, which the functions above ask for."""
  if config.model.kind == 'vit':
    return (config.data.image_size // config.model.patch) ** 2
  return config.data.sequence_length


def of_step(config: Config) -> float:
  """FLOPs of a training step over all devices."""
  units = 1 if config.model.kind == 'vit' else length(config)
  return config.data.batch_size * units * train_flops(config.model, length(config))
