"""Count the FLOPs of the matrix products in a compiled program."""

import functools
import math
import re

from tokenformer_jax.plan.hlo import Computation, Instruction, arrays

_WINDOW = {'stride': 1, 'pad': 0, 'lhs_dilate': 1, 'rhs_dilate': 1}  # the defaults of its fields


@functools.cache
def _spatial_pairs(
  size: int, out: int, kernel: int, stride: int, low: int, dilation: int, kernel_dilation: int
) -> int:
  """Return how many pairs of an output position and a kernel position read an input entry."""
  pairs = 0
  for k in range(kernel):
    for o in range(out):
      index = o * stride + k * kernel_dilation - low
      pairs += 0 <= index <= (size - 1) * dilation and index % dilation == 0
  return pairs


def matmul_flops(computation: Computation, instruction: Instruction) -> float:
  """Return the FLOPs of a `dot` or a `convolution`, and 0 for any other instruction.

  XLA turns matrix products into convolutions on TPUs, and uses padding and dilation to make one
  convolution of a batch of matrices. Padding and dilation cost no FLOPs.
  """
  if instruction.opcode == 'dot':
    left = arrays(computation.instructions[instruction.operands[0]].shape)[0][1]
    contracted = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', instruction.attributes)
    summed = [left[int(i)] for i in contracted.group(1).split(',') if i] if contracted else []
    return 2.0 * math.prod(arrays(instruction.shape)[0][1]) * math.prod(summed)
  if instruction.opcode != 'convolution':
    return 0.0
  left, kernel, out = _named_sizes(computation, instruction)
  groups = re.search(r'batch_group_count=(\d+)', instruction.attributes)
  total = 2.0 * out['b'] * out['f'] * kernel['i'] / (int(groups.group(1)) if groups else 1)
  window = _window(instruction.attributes)
  for i, name in enumerate(sorted(name for name in out if name.isdigit())):
    stride, pad, dilation, kernel_dilation = (
      int(window[key][i].split('_')[0]) if key in window else default
      for key, default in _WINDOW.items()
    )
    total *= _spatial_pairs(
      left[name], out[name], kernel[name], stride, pad, dilation, kernel_dilation
    )
  return total


def filling(computation: Computation, instruction: Instruction, side: int) -> float:
  """Return the factor by which a convolution fills narrow matrices up to `side`; else 1.

  A matrix unit with this side takes whole squares of the kernel.
  """
  if instruction.opcode != 'convolution':
    return 1.0
  _, kernel, out = _named_sizes(computation, instruction)
  return math.prod(-(-size // side) * side / size for size in (kernel['i'], out['f']))


def _named_sizes(computation: Computation, instruction: Instruction) -> list[dict[str, int]]:
  """Return the sizes of the input, the kernel and the output of a convolution, by their labels."""
  (labels,) = re.findall(r'dim_labels=(\w+)_(\w+)->(\w+)', instruction.attributes)
  shapes = [arrays(computation.instructions[name].shape)[0][1] for name in instruction.operands]
  shapes.append(arrays(instruction.shape)[0][1])
  return [dict(zip(names, sizes, strict=True)) for names, sizes in zip(labels, shapes, strict=True)]


def _window(attributes: str) -> dict[str, list[str]]:
  """Return the fields of `window={size=3x4 stride=1x2}` as lists of texts."""
  match = re.search(r'window=\{([^}]*)\}', attributes)
  if not match:
    return {}
  return {key: value.split('x') for key, value in re.findall(r'(\w+)=(\S+)', match.group(1))}
