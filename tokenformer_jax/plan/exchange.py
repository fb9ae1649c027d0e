"""Compute what devices that split experts exchange in a step: the all-to-alls of tokens."""

import dataclasses
import math
from collections.abc import Iterator

from tokenformer_jax.config import ExpertsConfig, GroupedConfig, ModelConfig, pattern
from tokenformer_jax.model import dispatch

_ROW, _NUMBER = 2, 4  # bytes of a number in bfloat16, and of an expert's number


@dataclasses.dataclass(frozen=True)
class Exchange:
  """The all-to-alls of a step.

  Attributes:
    number: the number of all-to-alls.
    received: bytes that a device receives in all of them.
  """

  number: int
  received: float

  def __add__(self, other: 'Exchange') -> 'Exchange':
    return Exchange(self.number + other.number, self.received + other.received)


NONE = Exchange(0, 0.0)


def experts_of(model: ModelConfig) -> Iterator[tuple[ExpertsConfig, int]]:
  """Yield the experts of each kind of layer, and the number of such layers."""
  names = pattern.names(model.groups)
  for name, experts in model.experts.items():
    yield experts, names.count(name)


def places(experts: ExpertsConfig, rows: int, length: int, devices: int) -> int:
  """Return the places of a device's tokens in training, of which it keeps one part of `devices`.

  Args:
    experts: the experts.
    rows: the sequences of a device.
    length: the tokens of a sequence.
    devices: the number of devices that split the experts.
  """
  top_k, how = experts.router.top_k, experts.dispatch
  if isinstance(how, GroupedConfig):
    if devices == 1:
      return rows * length * top_k
    local = experts.count // devices
    return devices * dispatch.device_slots(how, rows * length * top_k, top_k, local, devices)
  shared = math.gcd(rows, how.rows)
  slots = dispatch.capacity(how, shared * length, top_k, experts.count, training=True)
  return experts.count * (rows // shared) * slots


def of_layer(
  experts: ExpertsConfig, width: int, rows: int, length: int, devices: int, *, again: bool = True
) -> Exchange:
  """Return the all-to-alls of a layer in a step.

  Rows of the width go to the experts and their results come back: two all-to-alls forward, two for
  the gradients, and two if the backward pass computes them again. Sorted rows need the number of
  each row's expert as well, which has no gradient.

  Args:
    experts: the experts.
    width: the width of the model.
    rows: the sequences of a device.
    length: the tokens of a sequence.
    devices: the number of devices that split the experts.
    again: whether the backward pass computes the exchange again.
  """
  if devices == 1:
    return NONE
  part = places(experts, rows, length, devices) * (devices - 1) / devices
  passes = 2 if again else 1
  found = Exchange(2 * passes + 2, (2 * passes + 2) * part * width * _ROW)
  if isinstance(experts.dispatch, GroupedConfig):
    found += Exchange(passes, passes * part * _NUMBER)
  return found


def of_step(model: ModelConfig, rows: int, length: int, devices: int) -> Exchange:
  """Return the all-to-alls of all layers in a step; for the arguments see `of_layer`."""
  total = NONE
  for experts, layers in experts_of(model):
    one = of_layer(experts, model.width, rows, length, devices)
    total += Exchange(layers * one.number, layers * one.received)
  return total


def divisors(model: ModelConfig, devices: int) -> list[int]:
  """Return the powers of two that divide a number of devices and the experts of every layer.

  The result is [1] for a model without experts.
  """
  counts = [experts.count for experts, _ in experts_of(model)]
  if not counts:
    return [1]
  most = math.gcd(devices, *counts)
  return [1 << power for power in range(most.bit_length()) if most % (1 << power) == 0]
