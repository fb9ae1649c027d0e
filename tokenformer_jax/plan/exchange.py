"""Count the bytes that devices exchange in a step if they split experts."""

import dataclasses
import math
from collections.abc import Iterator

from tokenformer_jax.config import (
  ExpertsConfig,
  GroupedConfig,
  MLPConfig,
  ModelConfig,
  pattern,
)
from tokenformer_jax.model import dispatch
from tokenformer_jax.model.mlp import hidden_width

_ROW, _NUMBER = 2, 4  # bytes of a number in bfloat16, and of an expert's number


@dataclasses.dataclass(frozen=True)
class Exchange:
  """The all-to-alls of a step."""

  number: int
  received: float  # bytes that a device receives in all of them

  def __add__(self, other: 'Exchange') -> 'Exchange':
    return Exchange(self.number + other.number, self.received + other.received)


NONE = Exchange(0, 0.0)


def count_layers(model: ModelConfig) -> Iterator[tuple[ExpertsConfig, int]]:
  """Yield the experts of each named layer of the pattern, and the number of layers with them."""
  names = pattern.names(model.repeats)
  for name, experts in model.experts.items():
    yield experts, names.count(name)


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
  shared = math.gcd(rows, how.rows)
  slots = dispatch.capacity(how, shared * length, top_k, experts.count, training=True)
  return experts.count * (rows // shared) * slots


def layer_exchange(
  experts: ExpertsConfig, width: int, rows: int, length: int, devices: int, *, again: bool = True
) -> Exchange:
  """Return the all-to-alls of a layer in a step; for rows, length and devices see `count_slots`.

  Rows of the width go to the experts and their results come back: two all-to-alls forward, two for
  the gradients, and two if the backward pass computes them `again`. Sorted rows need the number of
  each row's expert as well, which has no gradient.
  """
  if devices == 1:
    return NONE
  part = count_slots(experts, rows, length, devices) * (devices - 1) / devices
  passes = 2 if again else 1
  found = Exchange(2 * passes + 2, (2 * passes + 2) * part * width * _ROW)
  if isinstance(experts.dispatch, GroupedConfig):
    found += Exchange(passes, passes * part * _NUMBER)
  return found


def step_exchange(model: ModelConfig, rows: int, length: int, devices: int) -> Exchange:
  """Return the all-to-alls of all layers in a step."""
  total = NONE
  for experts, layers in count_layers(model):
    layer = layer_exchange(experts, model.width, rows, length, devices)
    total += Exchange(layers * layer.number, layers * layer.received)
  return total


def inner_width(experts: ExpertsConfig, model: ModelConfig) -> int:
  """Return the numbers inside an expert for one token; a gate has as many as what it gates."""
  expert = experts.expert
  if isinstance(expert, MLPConfig):
    return (1 + expert.gated) * hidden_width(expert, model)
  return expert.tokens
