"""Look for devices that compute wrong: some steps are computed twice, and compared to the bit.

Both computations are calls of one compiled program with the same inputs, so a healthy device
returns the same bits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tokenformer_jax.errors import FaultyDeviceError, counted
from tokenformer_jax.parallel import hosts, sharding
from tokenformer_jax.steps.step import State, Step

_LISTED = 8  # devices that a message names
_ELSEWHERE = (
  'start the run again on other hosts: it continues from the last checkpoint (docs/reliability.md)'
)


class Repeated:
  """Steps that are computed twice."""

  def __init__(self, step: Step, mesh: Mesh):
    """Prepare to compute `step` twice. It donates its first argument, the state."""
    self._step, self._mesh = step, mesh
    self._copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
    self._count: Callable[[Any, Any], jax.Array] | None = None
    self.passed: int | None = None  # the last step whose check passed

  def __call__(
    self, number: int, state: State, *arguments: Any
  ) -> tuple[State, dict[str, jax.Array]]:
    """Make the step of a number twice, compare, and return its results.

    While it runs, each device holds its part of the state twice.
    """
    # Wait in between: on CPUs, programs that run at once can deadlock in their exchanges.
    again = jax.block_until_ready(self._step(jax.block_until_ready(self._copy(state)), *arguments))
    results = jax.block_until_ready(self._step(state, *arguments))
    if self._count is None:
      self._count = _differences(self._mesh, results)
    counts = np.asarray(self._count(again, results))
    if counts.any():
      raise FaultyDeviceError(*_report(number, self.passed, self._mesh, counts))
    self.passed = number
    return results


def _differences(mesh: Mesh, like: Any) -> Callable[[Any, Any], jax.Array]:
  """Return the function that counts, for each device, the numbers that differ in its two results.

  Nothing is exchanged before the counts are known, so a device finds its own differences. The
  counts [devices] are in the order of `mesh.devices.flat`.
  """
  specs = jax.tree.map(lambda array: array.sharding.spec, like)

  def on_device(one: Any, other: Any) -> jax.Array:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    counts = [jnp.sum(_bits(a) != _bits(b), dtype=jnp.uint32) for a, b in pairs]
    return jnp.sum(jnp.stack(counts), keepdims=True)

  compare = jax.shard_map(
    on_device,
    mesh=mesh,
    in_specs=(specs, specs),
    out_specs=PartitionSpec(mesh.axis_names),
    check_vma=False,  # Copies of one array may differ between devices.
  )
  return jax.jit(compare, out_shardings=sharding.replicated(mesh))


def _bits(array: jax.Array) -> jax.Array:
  """Return the bits of an array as integers; a NaN equals itself only so."""
  if not jnp.issubdtype(array.dtype, jnp.floating):
    return array
  return jax.lax.bitcast_convert_type(array, jnp.dtype(f'uint{array.dtype.itemsize * 8}'))


def _report(
  number: int, passed: int | None, mesh: Mesh, counts: np.ndarray
) -> tuple[str, tuple[str, ...]]:
  """Return a sentence about the devices whose results differ, and the names of their hosts."""
  names = hosts.names()
  faulty = [(d, n) for d, n in zip(mesh.devices.flat, counts, strict=True) if n]
  listed = [
    f'device {device.id} ({device.device_kind}) of process {device.process_index} on '
    f'{names[device.process_index]} in {counted(int(count), "number")}'
    for device, count in faulty[:_LISTED]
  ]
  more = f' and {counted(len(faulty) - _LISTED, "more device")}' if len(faulty) > _LISTED else ''
  before = 'no earlier check of this start' if passed is None else f'the check of step {passed}'
  if 1 < len(faulty) == mesh.size:
    more += ' (an exchange spreads what one device computes wrong)'
  sentence = (
    f'step {number} was computed twice, and the results differ on {len(faulty)} of '
    f'{counted(mesh.size, "device")}: {", ".join(listed)}{more}; {before} passed; {_ELSEWHERE}'
  )
  return sentence, tuple(dict.fromkeys(names[device.process_index] for device, _ in faulty))
