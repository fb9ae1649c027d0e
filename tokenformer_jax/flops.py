"""Model FLOPs by formula, and the chips' published peaks: the one place that MFU comes from."""

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
  matches = [name for name in PEAK_TFLOPS if device.device_kind.startswith(name)]
  return PEAK_TFLOPS[max(matches, key=len)] * 1e12 if matches else None


def matrix_parameters(model: ModelConfig) -> int:
  """Entries of the matrices that a token meets in the blocks (TokenFormer, Table 3)."""
  if model.projection == 'pattention':
    counts = model.param_tokens
    per_layer = 2 * model.width * (3 * counts.qkv + counts.proj + counts.ffn)
  else:
    hidden = model.ffn_width or 4 * model.width
    per_layer = model.width * (4 * model.width + 2 * hidden)
  return model.layers * per_layer


def forward_flops(model: ModelConfig, length: int) -> float:
  """FLOPs of the forward pass for one token in a sequence of `length`, averaged over positions.

  Two for every entry of a matrix, the head's included; 4 · D · T for scores and weighted sums of
  token-token attention, halved because it is causal (TokenFormer, Table 3, where it is not halved).
  """
  attention = model.layers * 4 * model.width * length / 2
  return 2 * (matrix_parameters(model) + model.vocab_size * model.width) + attention


def train_flops(model: ModelConfig, length: int) -> float:
  """FLOPs of a training step for one token: backward is twice forward, recomputing not counted."""
  return 3 * forward_flops(model, length)


def unit(model: ModelConfig) -> str:
  """What the functions above count the FLOPs of."""
  del model
  return 'a token'


def length(config: Config) -> int:
  """Positions of an example of a run, which the functions above ask for."""
  return config.data.sequence_length


def of_step(config: Config) -> float:
  """FLOPs of a training step over all devices."""
  return config.data.batch_size * length(config) * train_flops(config.model, length(config))
