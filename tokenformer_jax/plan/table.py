"""Render a plan as the text that the plan command prints."""

from collections.abc import Iterable

from tokenformer_jax.parallel.messages import aligned
from tokenformer_jax.plan.estimate import Plan
from tokenformer_jax.plan.operations import Operation
from tokenformer_jax.plan.topology import Topology

Row = tuple[str, ...]


def render(plan: Plan) -> str:
  """Return the whole table of a plan."""
  on, costs = plan.topology, plan.costs
  mesh = ' × '.join(f'{size} {axis}' for axis, size in plan.mesh.items())
  slices = f'{on.slices} × ' if on.slices > 1 else ''
  how = f'compiled in {plan.compile_seconds:.0f} s'
  if not plan.has_cycles and on.chip.platform == 'tpu':
    how = f'laid out in {plan.compile_seconds:.0f} s: no code is generated; times are rough'
  sections = [
    f'{slices}{on.name}: {_size(on)}, {mesh}; {how}',
    f'{plan.parameters:,} parameters; the layers run with train.remat={plan.config.train.remat}, '
    f'train.layers={plan.config.train.layers}',
    aligned(_memory(plan)),
    aligned(_compute(plan)),
    _collectives(plan),
    aligned(_run(plan)),
    *(f'note: {note}' for note in (*costs.notes, on.chip.caveat) if note),
  ]
  if on.chip.platform == 'gpu':
    share = percent(plan.memory.capacity / on.chip.hbm)
    sections.append(
      f'note: the capacity is the {share} of {gib(on.chip.hbm)} GiB that JAX gives a step; '
      'XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 gives more'
    )
  distill = plan.config.distill
  if distill.teacher and distill.weight:
    sections.append(
      f'note: the teacher {distill.teacher} is left out: its parameters take memory, and its '
      'forward pass time, besides what the table says; its FLOPs never count as those of the model'
    )
  documents = plan.config.data.documents
  if documents != 'joined':
    sections.append(
      f'note: with data.documents={documents}, model FLOPs, MFU and times are those of joined '
      'documents, because kernels compute the scores between documents and mask them'
    )
  memory = plan.memory
  if memory.left < memory.allocated - memory.temporaries:
    sections.append(
      f'note: temporaries take {gib(memory.allocated)} GiB with the gaps between them, and no '
      'memory is left on the device; the compiler accepts this program, but it may not fit'
    )
  if memory.host:
    sections.append(
      f"note: {gib(memory.host)} GiB of activations are kept in the memory of each device's host; "
      'the times do not include the transfers there and back'
    )
  return '\n\n'.join(sections)


def _size(on: Topology) -> str:
  """Return the numbers of chips and of JAX devices, which are the same for GPUs, in words."""
  if on.chip.platform == 'gpu':
    return _counted(on.devices, 'GPU')
  return f'{_counted(on.chips, "chip")}, {_counted(on.devices, "device")}'


def _counted(count: int, noun: str) -> str:
  return f'{count} {noun}' if count == 1 else f'{count} {noun}s'


def chip_hours(bounds: Iterable[float]) -> str:
  """Return the least and the most chip-hours as text."""
  return ' … '.join(f'{hours:,.0f}' for hours in bounds)


def _memory(plan: Plan) -> list[Row]:
  memory = plan.memory
  sizes = {
    'parameters': memory.parameters,
    'moments': memory.optimizer,
    'batch': memory.batch,
    'activations, gradients, buffers': memory.temporaries,
    'program': memory.code,
    'peak': memory.peak,
    'capacity': memory.capacity,
    'left': memory.left,
  }
  rows = [(name, gib(size), percent(size / memory.capacity)) for name, size in sizes.items()]
  return [('HBM of a device', 'GiB', ''), *rows]


def _compute(plan: Plan) -> list[Row]:
  chip, costs, devices = plan.topology.chip, plan.costs, plan.topology.devices
  model = plan.model_flops / devices
  rows = [
    ('of a step, on a device', 'TFLOP', 'ms', ''),
    ('model FLOPs, at the peak', f'{model / 1e12:,.1f}', ms(model / chip.peak), ''),
    (
      'compiled matrix products, at the peak',
      f'{costs.flops / 1e12:,.1f}',
      ms(costs.flops / chip.peak),
      f'{costs.flops / model:.2f} × model',
    ),
  ]
  if chip.platform == 'gpu':
    rows += _by_kernel(plan)
  elif plan.has_cycles:
    rows += _by_compiler(plan)
  else:
    rough = ms(costs.rough_seconds - costs.kernel_seconds)
    rows.append(('products and single elements, at the peaks', '', rough, ''))
  if costs.kernel_seconds:
    how = 'their schedule or their own estimate' if plan.has_cycles else 'formula'
    rows.append((f'kernels, by {how}', '', ms(costs.kernel_seconds), ''))
  return rows


_KERNELS = {  # the rows of a GPU by the kind of a kernel; '' is every other
  'product': 'products, by their shapes',
  'attention': 'attention, by its published rates',
  '': 'other kernels, by their bytes',
}


def _by_kernel(plan: Plan) -> list[Row]:
  """Return the time of a GPU's kernels of each kind, with their number and their bytes."""
  rows = []
  for kind, name in _KERNELS.items():
    ones = [one for one in plan.costs.operations if _kernel_row(one) == kind]
    seconds = sum(one.times * one.seconds for one in ones)
    moved = sum(one.times * one.memory for one in ones) * plan.topology.chip.hbm_rate
    count = sum(one.times for one in ones)
    rows.append((name, '', ms(seconds), f'{count:,} kernels, {moved / 1e9:,.1f} GB'))
  return rows


def _kernel_row(kernel: Operation) -> str:
  return kernel.opcode if kernel.opcode in _KERNELS else ''


def _by_compiler(plan: Plan) -> list[Row]:
  """Return the time of all operations but kernels, by cycles and by the schedule."""
  chip, costs = plan.topology.chip, plan.costs
  cycles = ms(costs.cycles / chip.clock)
  note = f'{costs.cycles / 1e9:,.3f} G cycles at {chip.clock / 1e9:.2f} GHz'
  if costs.scheduled_seconds is None:
    return [("all operations, by the compiler's cycles", '', cycles, note)]
  scheduled = ms(costs.scheduled_seconds - costs.kernel_seconds)
  if chip.cycles_hold:
    return [
      ("all operations, by the compiler's cycles", '', cycles, note),
      ('the same by its schedule, as a check', '', scheduled, ''),
    ]
  return [
    ("all operations, by the compiler's schedule", '', scheduled, ''),
    ('the same by its cycles, which are wrong here', '', cycles, note),
  ]


def _collectives(plan: Plan) -> str:
  rows = [('collectives of a step', 'number', 'over', 'GB in', 'ms')]
  for row in plan.costs.traffic:
    moved, time = f'{row.gigabytes:,.3f}', ms(row.seconds)
    rows.append((f'{row.axis}: {row.kind}', f'{row.count:,}', row.network, moved, time))
  rows.append(('all', '', '', f'{plan.network_gigabytes:,.3f}', ms(plan.network_seconds)))
  return aligned(rows) if plan.costs.traffic else 'no collectives'


def _run(plan: Plan) -> list[Row]:
  (fast, slow), (high, low) = plan.step_seconds, plan.mfu
  unit, units = plan.config.data.unit, plan.config.data.units_per_step
  rows: list[Row] = [
    ('', 'all overlapped', 'nothing overlapped'),
    ('ms a step', ms(fast), ms(slow)),
    ('MFU', percent(high), percent(low)),
    (f'{unit} a second', f'{units / fast:,.0f}', f'{units / slow:,.0f}'),
  ]
  if plan.steps is None or plan.hours is None:
    rows.append(('the run', 'its length is in epochs', 'of data that is not read here'))
  else:
    hours = [f'{value:,.1f}' for value in plan.hours]
    chip_hours = [f'{value * plan.topology.chips:,.0f}' for value in plan.hours]
    run = f'{plan.steps:,} steps, {plan.steps * units:,} {unit}'
    rows += [(f'hours of {run}', *hours), ('chip-hours', *chip_hours)]
  return rows


def gib(size: float) -> str:
  """Format bytes in GiB."""
  return f'{size / 2**30:,.2f}'


def ms(seconds: float) -> str:
  """Format seconds in milliseconds."""
  return f'{seconds * 1e3:,.2f}'


def percent(fraction: float) -> str:
  """Format a fraction in percent."""
  return f'{fraction:.1%}'
