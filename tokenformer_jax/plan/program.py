"""Compile the training step of a config for devices that this machine does not have."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tokenformer_jax import tasks
from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.model import kernels
from tokenformer_jax.plan import gpu, layout_dump
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.resolve.sizes import DATA_SIZES
from tokenformer_jax.steps import fit
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.steps.last_growth import frozen_base, growth_from
from tokenformer_jax.steps.remat_plans import argument_bytes
from tokenformer_jax.steps.step import Program


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of a device's HBM in a training step."""

  parameters: float
  # The rest of the state: the moments, and the parameters' average if there is one.
  optimizer: float
  batch: float
  temporaries: float  # the peak of activations, gradients and buffers
  capacity: float  # as published; the compiler may use a little less
  code: float = 0.0  # known after code generation
  allocated: float = 0.0  # temporaries as the compiler lays them out, gaps included, if known
  host: float = 0.0  # activations that the step keeps in the host's memory

  @property
  def peak(self) -> float:
    return self.parameters + self.optimizer + self.batch + self.temporaries + self.code

  @property
  def left(self) -> float:
    return self.capacity - self.peak


def make_step(config: Config, before: ModelConfig | None = None, platform: str = 'tpu') -> Program:
  """Return the step of a resolved config on TPUs or GPUs, with `dtype=auto` as bfloat16.

  `before` is the model before the growth, or None. If the config has every size, no data is read.
  """
  config = _complete(config)
  # Resolve the automatic values here: elsewhere they depend on this machine's devices.
  if config.dtype == 'auto':
    config = dataclasses.replace(config, dtype='bfloat16')
  attention = kernels.kernel(config.train.attention, jnp.dtype(config.dtype), platform)
  config = dataclasses.replace(config, train=dataclasses.replace(config.train, attention=attention))
  growth = None if before is None else growth_from(before, config.model)
  return step_lib.make_program(
    tasks.make(config, before=frozen_base(growth, config)), config, growth
  )


def _complete(config: Config) -> Config:
  """Complete a config, and read data only for a size that needs it."""
  try:
    return complete(config, read=False)
  except UserError as error:
    size = DATA_SIZES[config.model.kind]
    raise UserError(
      f'config.model.{size} is 0, which takes the size from the data, and the data cannot be read: '
      f'{error}; give {arg.config}.model.{size}=N, with which a plan needs no data'
    ) from error


def compile_step(
  step: Program,
  mesh: Mesh,
  tell: Callable[[str, int, int], bool],
  meanwhile: Callable[[], None] = lambda: None,
) -> jax.stages.Compiled | None:
  """Compile the training step for the mesh's devices; see `layout_dump.run` for the functions.

  Raises:
    DoesNotFitError: the step needs more memory than the devices have.
  """
  lowered = _lower(step, mesh)
  return layout_dump.run(
    lambda options: fit.compile_lowered(lowered, compiler_options=options), tell, meanwhile
  )


def compile_for_gpus(step: Program, mesh: Mesh) -> jax.stages.Compiled:
  """Compile the training step for the mesh's GPUs, whose compiler refuses nothing."""
  return fit.compile_lowered(_lower(step, mesh), compiler_options=gpu.OPTIONS)


def _lower(step: Program, mesh: Mesh) -> jax.stages.Lowered:
  function = step_lib.make_train_step(step, mesh)
  arguments = step.abstract_state(mesh), step.abstract_batch(mesh)
  with jax.set_mesh(mesh):  # Only lower inside: the mesh's devices cannot run anything.
    return function.lower(*arguments)


def memory(step: Program, mesh: Mesh, capacity: float, peak: float, **others: float) -> Memory:
  """Return the memory of a device whose arguments and temporaries take `peak` bytes."""
  state, arrays = step.abstract_state(mesh), step.abstract_batch(mesh)
  parameters, whole, batch = map(argument_bytes, (state['params'], state, arrays))
  temporaries = peak - whole - batch
  return Memory(parameters, whole - parameters, batch, temporaries, capacity, **others)
