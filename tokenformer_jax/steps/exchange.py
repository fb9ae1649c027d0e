"""Compute what devices exchange in a step if they split experts, and choose how many split them."""

import dataclasses
import math
from collections.abc import Iterator

from jax.sharding import AbstractMesh

from tokenformer_jax.config import (
  Config,
  ExpertsConfig,
  GroupedConfig,
  MeshConfig,
  MLPConfig,
  ModelConfig,
  pattern,
)
from tokenformer_jax.model import dispatch, flops
from tokenformer_jax.model.layers import hidden_width
from tokenformer_jax.parallel.rules import parts
from tokenformer_jax.parallel.sharding import abstract_mesh, resplit

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


def divisors(model: ModelConfig, devices: int) -> list[int]:
  """Return the powers of two that divide `devices` and all experts; [1] without experts."""
  counts = [experts.count for experts, _ in count_layers(model)]
  if not counts:
    return [1]
  most = math.gcd(devices, *counts)
  return [1 << power for power in range(most.bit_length()) if most % (1 << power) == 0]


def choose_mesh(config: Config, devices: int) -> MeshConfig:
  """Return the mesh config of a run, where `experts=0` is the number that moves the fewest bytes.

  With more parts, tokens travel to the experts; with fewer, the parameters of more experts are
  gathered on every device.
  """
  if config.mesh.experts:
    return config.mesh
  whole = abstract_mesh(config.mesh, devices)
  tokens = parts('param_tokens', whole)
  splits = [
    resplit(config.mesh, devices, count, tokens)
    for count in divisors(config.model, parts('expert_width', whole))
  ]
  return min(
    (split for split in splits if split),
    key=lambda split: _received(config, abstract_mesh(split, devices)),
  )


def _received(config: Config, mesh: AbstractMesh) -> float:
  """Return the bytes that a device receives in a step: tokens for experts, and their parameters.

  Experts are gathered for the forward and the backward pass, and their gradients scattered.
  """
  of_batch = config.data.batch_size // config.optim.accumulation_steps
  rows, split = max(1, of_batch // parts('batch', mesh)), parts('experts', mesh)
  tokens = step_exchange(config.model, rows, flops.length(config), split).received
  of_experts = sum(
    layers * experts.count * _columns(experts, config.model) * config.model.width
    for experts, layers in count_layers(config.model)
  )
  held, gathered = _ROW * of_experts / split, parts('expert_width', mesh)
  return tokens + 3 * held / parts('expert_hidden', mesh) * (gathered - 1) / gathered


def _columns(experts: ExpertsConfig, model: ModelConfig) -> int:
  """Return the columns of all matrices of an expert together: those into it, and one out of it."""
  inner, expert = inner_width(experts, model), experts.expert
  return inner + (hidden_width(expert, model) if isinstance(expert, MLPConfig) else inner)


def inner_width(experts: ExpertsConfig, model: ModelConfig) -> int:
  """Return the numbers inside an expert for one token; a gate has as many as what it gates."""
  expert = experts.expert
  if isinstance(expert, MLPConfig):
    return (1 + expert.gated) * hidden_width(expert, model)
  return expert.tokens
