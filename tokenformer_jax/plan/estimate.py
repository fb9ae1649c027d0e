"""Plan a run: the memory and time of its training step on a topology, and its total cost."""

import dataclasses
import os
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from tokenformer_jax.config import Config, ModelConfig, to_json
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.model import flops
from tokenformer_jax.parallel import rules, sharding
from tokenformer_jax.parallel.messages import say
from tokenformer_jax.plan import (
  costs,
  gpu,
  hlo,
  kept_schedules,
  layout_dump,
  program,
  schedule,
  topology,
)
from tokenformer_jax.plan.costs import Costs
from tokenformer_jax.plan.program import Memory
from tokenformer_jax.plan.schedule import Bundles
from tokenformer_jax.plan.topology import Topology
from tokenformer_jax.resolve import lengths, sizes
from tokenformer_jax.steps import compiler, fit, remat_plans
from tokenformer_jax.steps.fit import DoesNotFitError
from tokenformer_jax.steps.step import Program


@dataclasses.dataclass(frozen=True)
class Plan:
  """The plan of a training step on a topology, and of the whole run."""

  config: Config  # every size is filled in
  topology: Topology
  mesh: dict[str, int]  # sizes of the mesh axes
  parameters: int  # the model's number of parameters
  memory: Memory  # of one device
  costs: Costs  # of one step on one device
  has_cycles: bool  # False before code generation: times are rough
  compile_seconds: float  # on this machine

  @property
  def model_flops(self) -> float:
    """Return the model FLOPs of a step over all devices, by formula (`flops.step_flops`)."""
    return flops.step_flops(self.config)

  @property
  def compute_seconds(self) -> float:
    """Return the time of computation in a step: of its operations, or the rough estimate."""
    return self.costs.compute_seconds if self.has_cycles else self.costs.rough_seconds

  @property
  def network_gigabytes(self) -> float:
    """Return the data that a device receives from all collectives of a step, in 10⁹ bytes."""
    return sum(row.gigabytes for row in self.costs.traffic)

  @property
  def network_seconds(self) -> float:
    """Return the time of all collectives of a step, one after the other."""
    return sum(row.seconds for row in self.costs.traffic)

  @property
  def step_seconds(self) -> tuple[float, float]:
    """Return the time of a step with all collectives behind computation, and with none."""
    compute, network = self.compute_seconds, self.network_seconds
    return max(compute, network), compute + network

  @property
  def mfu(self) -> tuple[float, float]:
    """Return model FLOPs over the FLOPs at the devices' peak, for both `step_seconds`."""
    peak = self.topology.chip.peak * self.topology.devices
    fast, slow = (self.model_flops / peak / seconds for seconds in self.step_seconds)
    return fast, slow

  @property
  def steps(self) -> int | None:
    """Return the steps of the run: see `count_steps`."""
    return count_steps(self.config)

  @property
  def hours(self) -> tuple[float, float] | None:
    """Return the hours of all steps for both `step_seconds`, or None if the steps are unknown.

    Evaluations, checkpoints and interruptions are not included.
    """
    return None if self.steps is None else self.hours_of(self.steps)

  def hours_of(self, steps: int) -> tuple[float, float]:
    """Return the hours of a number of steps for both `step_seconds`."""
    fast, slow = (steps * seconds / 3600 for seconds in self.step_seconds)
    return fast, slow

  @property
  def summary(self) -> str:
    """Return a sentence with the main figures of a program that is laid out."""
    memory, (fast, _), (mfu, _) = self.memory, self.step_seconds, self.mfu
    caveat = self.topology.chip.caveat and f'; but {self.topology.chip.caveat}'
    return (
      f'after {self.compile_seconds:.0f} s: it fits, in {memory.peak / 2**30:.2f} of '
      f'{memory.capacity / 2**30:.0f} GiB of HBM a device; a step moves '
      f'{self.network_gigabytes:.2f} GB and takes roughly {fast * 1e3:,.0f} ms, an MFU of '
      f'{mfu:.0%}{caveat}'
    )

  def to_json(self) -> dict[str, Any]:
    """Return every figure of the table, in bytes, seconds and FLOPs, and the config."""
    unit, units = self.config.data.unit, self.config.data.units_per_step
    chip = dataclasses.asdict(self.topology.chip)
    return {
      'topology': self.topology.name,
      'slices': self.topology.slices,
      'devices': self.topology.devices,
      'chips': self.topology.chips,
      'chip': chip | {'peak': self.topology.chip.peak},
      'mesh': self.mesh,
      'has_cycles': self.has_cycles,
      'compile_seconds': self.compile_seconds,
      'parameters': self.parameters,
      'memory': dataclasses.asdict(self.memory)
      | {'peak': self.memory.peak, 'left': self.memory.left},
      'model_flops': self.model_flops,
      **{k: v for k, v in vars(self.costs).items() if k not in ('operations', 'collectives')},
      'traffic': [dataclasses.asdict(row) for row in self.costs.traffic],
      'scheduled_seconds': self.costs.scheduled_seconds if self.has_cycles else None,
      'compute_seconds': self.compute_seconds,
      'network_seconds': self.network_seconds,
      'step_seconds': self.step_seconds,
      'mfu': self.mfu,
      f'{unit}_per_second': [units / seconds for seconds in self.step_seconds],
      'steps': self.steps,
      'hours': self.hours,
      'chip_hours': self.hours and [hours * self.topology.chips for hours in self.hours],
      'config': to_json(self.config),
    }


def count_steps(config: Config) -> int | None:
  """Return the steps of a run, or None if they are in epochs and need the data's size."""
  wanted = config.train.examples
  if config.train.epochs:
    examples = sizes.known_examples(config)
    if examples is None:
      return None
    wanted = config.train.epochs * examples
  return lengths.steps_to(config.data, wanted) if wanted else config.train.steps


def plan(
  config: Config, on: Topology, before: ModelConfig | None = None, *, quick: bool = False
) -> Plan:
  """Compile the training step for the topology and return its plan.

  The config comes from `config.resolve`. `before` is the model before the growth, or None. `quick`
  stops when the program is laid out.

  Raises:
    UserError: sizes do not divide by the mesh, or libtpu is missing.
    DoesNotFitError: the step needs more memory than a device has.
  """
  if quick and on.chip.platform == 'gpu':
    raise UserError(
      f'{arg.quick} leaves out the generation of code, which takes seconds for {on.name}; '
      'plan without it'
    )
  say(f'{"laying out" if quick else "compiling"} for {on.name}, which takes seconds to minutes')
  # In a process of its own, which libtpu ends when it fails, and in which it loads with the flags
  # of the dump.
  with tempfile.TemporaryDirectory(
    prefix='tokenformer-plan-', ignore_cleanup_errors=True
  ) as directory:
    return layout_dump.run_alone(_plan, config, on, before, quick, directory)


def _plan(
  config: Config, on: Topology, before: ModelConfig | None, quick: bool, directory: str
) -> Plan:
  """Compile the step in this process, with a dump of its schedule within a directory."""
  tempfile.tempdir = directory  # The parent removes it, also if it kills this process.
  dump = tempfile.mkdtemp()
  if not quick:
    os.environ['LIBTPU_INIT_ARGS'] = schedule.flags(dump)
  mesh = sharding.make_mesh(config.mesh, topology.devices(on))
  step = program.make_step(config, before, on.chip.platform)
  definition = step.task.definition
  sharding.check_devices(step.config, mesh)
  sharding.check_divides(mesh, definition.abstract, definition.axes)
  arguments = step.abstract_state(mesh), step.abstract_batch(mesh)
  refused = DoesNotFitError('')
  for remat in remat_plans.affordable(step, mesh, arguments, capacity(on)):
    say(
      f'the step {refused.size}; trying {remat.flags}'
      if refused.needed
      else f'trying {remat.flags}'
    )
    step = remat_plans.with_plan(step, remat)
    try:
      if on.chip.platform == 'gpu':
        return _compile_for_gpus(step, on, mesh)
      return _compile(step, on, mesh, quick, schedule.Reader(dump))
    except DoesNotFitError as error:
      refused = error
  raise refused


def _compile(step: Program, on: Topology, mesh: Mesh, quick: bool, reader: schedule.Reader) -> Plan:
  first = time.monotonic()
  laid_out: list[tuple[Plan, str, hlo.Program]] = []  # with the program, as text and parsed
  options = compiler.options(step.config.train.compiler_options, mesh)
  kept = kept_schedules.Schedules(on.chip.name, options)

  def plan_of(
    parsed: hlo.Program, memory: Memory, bundles: Mapping[str, Bundles], has_cycles: bool
  ) -> Plan:
    return Plan(
      config=step.config,
      topology=on,
      mesh=dict(mesh.shape),
      parameters=step.task.definition.count,
      memory=memory,
      costs=costs.read(parsed, mesh, on.chip, bundles, has_cycles=has_cycles),
      has_cycles=has_cycles,
      compile_seconds=time.monotonic() - first,
    )

  def tell(text: str, hbm: int, host: int) -> bool:
    memory = program.memory(step, mesh, on.chip.hbm, hbm, host=host)
    parsed = hlo.parse(text)
    plan = plan_of(parsed, memory, {}, has_cycles=False)
    known = None if quick else kept.restore(parsed)
    if known:
      figures = kept.memory(text)
      memory = program.memory(step, mesh, on.chip.hbm, **figures) if figures else memory
      plan = plan_of(known[0], memory, known[1], has_cycles=True)
    laid_out.append((plan, text, parsed))
    since = 'from earlier plans' if known else 'in minutes'
    say(plan.summary if quick else f'{plan.summary}; its schedule is known {since}')
    return not quick and not known

  compiled = program.compile_step(step, mesh, tell, reader.read)
  if compiled is None:
    return laid_out[0][0]
  reader.read(complete=True)
  analysis: Any = compiled.memory_analysis()
  figures = {
    'peak': analysis.peak_memory_in_bytes,
    'code': analysis.generated_code_size_in_bytes,
    'allocated': analysis.temp_size_in_bytes,
    'host': analysis.host_temp_size_in_bytes,
  }
  generated = hlo.parse(compiled.as_text() or '')
  if laid_out:
    _, text, parsed = laid_out[0]
    kept.keep(text, parsed, generated, reader.bundles, figures)
  memory = program.memory(step, mesh, on.chip.hbm, **figures)
  return plan_of(generated, memory, reader.bundles, has_cycles=True)


def _compile_for_gpus(step: Program, on: Topology, mesh: Mesh) -> Plan:
  """Compile the step in one phase; there is no schedule, and the capacity is checked here."""
  first, most = time.monotonic(), capacity(on)
  compiled = program.compile_for_gpus(step, mesh)
  figures: Any = compiled.memory_analysis()
  code = figures.generated_code_size_in_bytes
  needed = fit.compiled_bytes(compiled)
  if needed > most:
    raise DoesNotFitError.from_bytes(needed, most)
  host = figures.host_temp_size_in_bytes
  return Plan(
    config=step.config,
    topology=on,
    mesh=dict(mesh.shape),
    parameters=step.task.definition.count,
    memory=program.memory(step, mesh, most, needed - code, code=code, host=host),
    costs=costs.read(compiled.as_text() or '', mesh, on.chip, has_cycles=False),
    has_cycles=False,
    compile_seconds=time.monotonic() - first,
  )


def capacity(on: Topology) -> float:
  """Return the bytes of a device that a step may take: of a GPU, what JAX gives to programs."""
  return gpu.usable_share() * on.chip.hbm if on.chip.platform == 'gpu' else on.chip.hbm


def advice(config: Config, error: DoesNotFitError, on: Topology) -> UserError:
  """Return the error for a step that does not fit, with its size and possible remedies."""
  train, steps = config.train, 2 * config.optim.accumulation_steps
  mesh = sharding.abstract_mesh(config.mesh, on.devices)
  rows = config.data.batch_size // rules.shard_count('batch', mesh)
  less = 'offload' if train.remat == 'full' else 'full'
  remedies = {
    f'{arg.config}.train.remat={less}': train.remat not in ('auto', 'offload'),
    f'{arg.config}.train.layers=scan': train.layers not in ('auto', 'scan'),
    f'{arg.config}.optim.accumulation_steps={steps} (or a smaller batch: it is {rows} a device)': (
      rows % steps == 0
    ),
    'more of the mesh in config.mesh.fsdp or tokens, and less in replica': (
      rules.replicas(mesh) > on.slices
    ),
    'more devices': True,
  }
  helpful = [remedy for remedy, helps in remedies.items() if helps]
  size = (
    f'needs {error.needed:.2f} GiB of HBM a device and may use {error.capacity:.2f}'
    if error.needed
    else f'does not fit ({error.reason})'
  )
  return UserError(f'the step {size} on {on.name}; what may make it fit: {"; ".join(helpful)}')
