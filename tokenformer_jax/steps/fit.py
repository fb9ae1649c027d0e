"""Compile the training step with the fastest remat plan that fits the devices' memory."""

import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import hosts
from tokenformer_jax.parallel.messages import say
from tokenformer_jax.steps import remat_plans
from tokenformer_jax.steps.remat_plans import RematPlan
from tokenformer_jax.steps.step import Program, State, Step, make_train_step

# XLA refuses a program for its temporaries before it lays memory out, or for its total after that.
_TOO_LARGE = re.compile(
  r'([\d.]+)([KMGT])(?:\) exceeds available HBM \(| of )([\d.]+)([KMGT])(?:\)| hbm)'
)
_GIB = {'K': 2**-20, 'M': 2**-10, 'G': 1.0, 'T': 2**10}
# The share of a GPU's memory that a step may take; the rest is lost between blocks.
USABLE = 0.97
_BLOCK = 2**20  # bytes


class DoesNotFitError(Exception):
  """An error of the compiler: the program needs more memory than a device has.

  Attributes:
    needed: GiB of memory that the program needs, or None if the compiler does not say.
    capacity: GiB that the compiler may use, or None.
    reason: the first line of the compiler's message.
  """

  def __init__(self, message: str):
    sizes = _TOO_LARGE.search(message)
    self.needed = float(sizes[1]) * _GIB[sizes[2]] if sizes else None
    self.capacity = float(sizes[3]) * _GIB[sizes[4]] if sizes else None
    self.reason = message.splitlines()[0] if message else 'the compiler ran out of memory'
    super().__init__(self.reason)

  @classmethod
  def from_bytes(cls, needed: float, capacity: float) -> 'DoesNotFitError':
    """Return the error for a program that the compiler accepts and a device cannot hold."""
    error = cls('')
    error.needed, error.capacity = needed / 2**30, capacity / 2**30
    return error

  @property
  def size(self) -> str:
    """Return what is needed and what there is, as a part of a sentence."""
    if self.needed is None:
      return f'does not fit ({self.reason})'
    return f'needs {self.needed:.1f} of {self.capacity:.1f} GiB of a device'


def compile_lowered(lowered: jax.stages.Lowered, **options: Any) -> jax.stages.Compiled:
  """Compile a step."""
  try:
    return lowered.compile(**options)
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    raise DoesNotFitError(str(error)) from error


def compiled_bytes(compiled: jax.stages.Compiled) -> float:
  """Return the bytes on a device of a step's arguments, temporaries, new results and code."""
  memory = compiled.memory_analysis()
  if memory is None:
    return 0.0
  return (
    memory.argument_size_in_bytes
    + memory.temp_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.generated_code_size_in_bytes
  )


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
  """Return the bytes on a device of a step's temporaries; 0 if the compiler does not say."""
  return getattr(compiled.memory_analysis(), 'temp_size_in_bytes', 0)


def free_bytes(mesh: Mesh, arguments: Any) -> float:
  """Return the bytes that a step may take on a device, its own arguments included.

  It is the least of all devices; infinite if the devices do not say. All processes must call this
  function.
  """
  given, least = remat_plans.argument_bytes(arguments), math.inf
  for device in mesh.local_devices:
    memory = device.memory_stats() or {}
    if 'bytes_limit' in memory:
      others = max(0, memory.get('bytes_in_use', 0) - given)
      usable = USABLE if device.platform == 'gpu' else 1
      least = min(least, memory['bytes_limit'] * usable - others)
  if hosts.in_any(least == math.inf):
    return math.inf
  return -hosts.highest(-int(least / 2**20)) * 2.0**20


def can_allocate(mesh: Mesh, size: int) -> bool:
  """Return whether each local GPU can allocate `size` contiguous bytes; True on other devices.

  A GPU gets the temporaries of a program as one block each time that it runs, so it may lack them
  although as much is free in fragments. The function allocates such a block, and frees it.
  """
  blocks = -(-size // _BLOCK)
  try:
    allocated = [
      jnp.zeros((blocks, _BLOCK), jnp.uint8, device=device)
      for device in mesh.local_devices
      if device.platform == 'gpu'
    ]
    jax.block_until_ready(allocated)
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    return False
  return True


class FittedStep:
  """The training step, compiled for each shape of batches with a remat plan that fits the devices.

  A step is compiled once if the first plan fits, and once more for each plan that does not. All
  processes choose the same plan. No plan changes the results.
  """

  def __init__(
    self,
    program: Program,
    mesh: Mesh,
    *,
    free: Callable[[Mesh, Any], float] = free_bytes,
  ):
    """Prepare the step of a program whose config leaves the plan open; compile nothing."""
    self._program, self._mesh, self._free = program, mesh, free
    self._steps: dict[tuple[tuple[int, ...], ...], Step] = {}

  def __call__(self, state: State, batch: Any, *teacher: Any) -> tuple[State, dict[str, jax.Array]]:
    """Make a step."""
    shapes = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
    if shapes not in self._steps:
      self._steps[shapes] = self._compile((state, batch, *teacher))
    return self._steps[shapes](state, batch, *teacher)

  def _compile(self, arguments: tuple[Any, ...]) -> Step:
    capacity, failed = self._free(self._mesh, arguments), None
    train = self._program.config.train
    if train.check_devices:
      capacity -= remat_plans.argument_bytes(arguments[0])  # a copy of the state
    for plan in remat_plans.affordable(self._program, self._mesh, arguments, capacity):
      if failed is not None:
        say(f'{failed}; trying {plan.flags}')
      try:
        return self._compile_with(plan, arguments, capacity)
      except DoesNotFitError as error:
        failed = f'the step {error.size} with {plan.flags}'
    raise UserError(
      f'{failed}, and nothing else needs less; take a smaller config.data.batch_size, more '
      'config.optim.accumulation_steps, or more devices'
    )

  def _compile_with(self, plan: RematPlan, arguments: tuple[Any, ...], capacity: float) -> Step:
    """Compile the step with a remat plan."""
    step = make_train_step(remat_plans.with_plan(self._program, plan), self._mesh)
    begin, error, compiled, needed = time.monotonic(), None, None, 0.0
    try:
      compiled = compile_lowered(step.lower(*arguments))
      if (needed := compiled_bytes(compiled)) > capacity:
        error = DoesNotFitError.from_bytes(needed, capacity)
      elif not can_allocate(self._mesh, size := temporary_bytes(compiled)):
        error = DoesNotFitError(f'{size / 2**30:.1f} GiB are not free in one piece')
    except DoesNotFitError as refused:
      error = refused
    if hosts.in_any(error is not None) or compiled is None:
      raise error or DoesNotFitError('another process cannot hold it')
    of = f' of {capacity / 2**30:.1f}' if capacity < math.inf else ''
    say(
      f'the step runs with {plan.flags}: {needed / 2**30:.1f}{of} GiB of a device, compiled in '
      f'{time.monotonic() - begin:.0f} s'
    )
    return compiled


def make_fitted_step(program: Program, mesh: Mesh) -> Step:
  """Return the step of `make_train_step` for a run.

  If the config leaves open how layers run, accelerators choose by their memory, when the step is
  first called: see `FittedStep`. A CPU does not choose: see `Execution.from_config`.
  """
  train, platform = program.config.train, mesh.devices.flat[0].platform
  if platform == 'cpu' or 'auto' not in (train.remat, train.layers):
    return make_train_step(program, mesh)
  return FittedStep(program, mesh)
