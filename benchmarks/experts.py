r"""Compare grouped products of experts with dense products on TPUs, by the compiler's schedule.

  python benchmarks/experts.py                     experts of DeepSeekMoE 16b on v5p and v6e
  python benchmarks/experts.py --on=v6e --rows=32768

`model/grouped_tpu.py` multiplies sorted rows by the matrices of their experts. At an even load the
same rows are [experts, rows of an expert, width], and a dense product of a batch of matrices does
the same work. The table has the cycles of both, and those that the matrix units need at their peak.

The compiler's estimate of cycles omits kernels and is wrong on v6e (docs/plan.md). So the script
counts cycles in the schedule, the bundles of instructions of a kernel or a fusion:

  steps × (the longer of the bundles of a step and the work of the matrix units)

or, if that takes longer, the bytes of all blocks at the bandwidth of HBM. Parts of a kernel without
products and of more than 200 bundles run once for each expert and block of its result. The last
columns add the compiler's estimate for all other operations, such as the search for the rows of
each expert. Compiling takes about 10 seconds for each of 24 programs; it needs
`pip install -e ".[tpu]"`, but no TPU.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import cells
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tokenformer_jax.model import grouped_tpu
from tokenformer_jax.plan import costs, topology
from tokenformer_jax.plan.chips import Chip

SLICES = {'v5p': 'v5p:2x2x1', 'v6e': 'v6e:2x2'}
WHAT = ('product', 'gradient of rows', 'gradient of matrices')
HEAD = ('chip', 'matrix', 'result', 'at the peak', 'dense', 'grouped', 'and the rest', 'ratio')
_BUNDLE = re.compile(r'\s*(?:0x[0-9a-f]+|0)\s+(\S*)\s*:')
_MATMUL = re.compile(r'vmatmul\.(?:mubr\.)?(bf16|f32)')
_LONG = 200  # bundles


@dataclasses.dataclass(frozen=True)
class Shape:
  """A product of P rows, sorted by E experts, with matrices [E, I, O]."""

  rows: int
  count: int
  inputs: int
  outputs: int

  @property
  def flops(self) -> float:
    return 2.0 * self.rows * self.inputs * self.outputs


@dataclasses.dataclass
class Region:
  """Bundles between two branches, and the multiplications in them."""

  bundles: int = 0
  macs: float = 0.0


def programs(shape: Shape) -> dict[str, Callable[..., jax.Array]]:
  """Return the functions to compile, of rows, matrices, sizes and the gradient of the result."""

  def grouped(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    tile = grouped_tpu.row_tile(shape.rows, shape.count)
    return grouped_tpu.product(rows, matrices, sizes, tile)

  def dense(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    del sizes
    batch = rows.reshape(shape.count, -1, shape.inputs)
    return jnp.einsum('ESI,EIO->ESO', batch, matrices).reshape(shape.rows, shape.outputs)

  def gradient(product: Callable[..., jax.Array], number: int) -> Callable[..., jax.Array]:
    def run(rows: jax.Array, matrices: jax.Array, sizes: jax.Array, out: jax.Array) -> jax.Array:
      return jax.vjp(lambda *x: product(*x, sizes), rows, matrices)[1](out)[number]

    return run

  made = {}
  for name, product in (('grouped', grouped), ('dense', dense)):
    made[f'{name}: {WHAT[0]}'] = lambda r, m, s, _, product=product: product(r, m, s)
    made[f'{name}: {WHAT[1]}'] = gradient(product, 0)
    made[f'{name}: {WHAT[2]}'] = gradient(product, 1)
  return made


def compile_one(name: str, program: str, shape: Shape, directory: str) -> dict[str, float]:
  """Compile a program in this process and return its cycles by the schedule, and all others.

  The compiler writes to the directory.
  """
  os.environ['LIBTPU_INIT_ARGS'] = (
    f'--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true '
    '--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*'
  )
  on = topology.parse(name)
  mesh = Mesh(np.array(topology.devices(on)[:1]), ('one',), axis_types=(AxisType.Auto,))

  def array(*sizes: int, dtype: jnp.dtype = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

  arguments = (
    array(shape.rows, shape.inputs),
    array(shape.count, shape.inputs, shape.outputs),
    array(shape.count, dtype=jnp.int32),
    array(shape.rows, shape.outputs),
  )
  with jax.set_mesh(mesh):
    tiles = step_tiles(program, shape)
    lowered = jax.jit(programs(shape)[program]).lower(*arguments)
  with topology.quiet():
    text = lowered.compile().as_text()
  dumped = (path.read_text() for path in Path(directory).glob('*final_bundles.txt'))
  (bundles,) = (one for one in dumped if 'vmatmul' in one)  # that of the matrix units
  regions = read_regions(bundles, on.chip)
  others = costs.read(text, mesh, on.chip).cycles
  if program.startswith('dense'):
    return {'cycles': dense_cycles(text, regions, on.chip), 'others': 0.0}
  return {'cycles': grouped_cycles(program, shape, tiles, regions, on.chip), 'others': others}


def step_tiles(program: str, shape: Shape) -> tuple[int, int, int]:
  """Return rows, inputs and outputs of a step of a kernel."""
  tile, sizes = grouped_tpu.row_tile(shape.rows, shape.count), (shape.inputs, shape.outputs)
  if program.endswith(WHAT[2]):
    return grouped_tpu.gradient_tiles(tile, *sizes, 2)
  return grouped_tpu.product_tiles(tile, *(sizes if program.endswith(WHAT[0]) else sizes[::-1]), 2)


def read_regions(text: str, chip: Chip) -> list[Region]:
  """Return the regions of a schedule; a multiplication of a matrix unit has 8 or 16 rows."""
  regions = [Region()]
  for line in text.splitlines():
    if not (match := _BUNDLE.match(line)):
      continue
    if match.group(1):  # a target of a branch
      regions.append(Region())
    regions[-1].bundles += 1
    for kind in _MATMUL.findall(line):
      regions[-1].macs += (16 if kind == 'bf16' else 8) * chip.matrix_side**2
    if 'sbr.rel' in line:
      regions.append(Region())
  return regions


def step_cycles(regions: list[Region], chip: Chip) -> float:
  """Return the cycles of one step; bundles with products wait for their matrix units."""
  rate = chip.peak / 2 / chip.clock / chip.cores
  return sum(
    max(part.bundles, part.macs / rate) for part in regions if part.macs or part.bundles <= _LONG
  )


def dense_cycles(text: str, regions: list[Region], chip: Chip) -> float:
  """Return the cycles of a dense product; the cores share its iterations."""
  bounds = [
    math.prod(int(size) for size in re.findall(r'\d+', bounds_text))
    for bounds_text in re.findall(r'"iteration_bounds":\[([^\]]*)\]', text)
  ]
  return max(bounds) * step_cycles(regions, chip) / chip.cores


def grouped_cycles(
  program: str, shape: Shape, tiles: tuple[int, int, int], regions: list[Region], chip: Chip
) -> float:
  """Return the cycles of a kernel at an even load; the cores share the blocks of outputs."""
  inputs, outputs = shape.inputs, shape.outputs
  if program.endswith(WHAT[1]):
    inputs, outputs = outputs, inputs
  rows, part, out = tiles
  parts, outs = math.ceil(inputs / part), math.ceil(outputs / out)
  steps = math.ceil(shape.rows / rows) * parts * outs
  cycles = steps * step_cycles(regions, chip)
  moved = 2 * shape.rows * (inputs * outs + outputs) + 2 * shape.count * inputs * outputs
  if program.endswith(WHAT[2]):
    long = sum(part.bundles for part in regions if not part.macs and part.bundles > _LONG)
    cycles += shape.count * parts * outs * long
    moved += 2 * shape.rows * outputs * (parts - 1)
  return max(cycles / chip.cores, moved / chip.hbm_rate * chip.clock)


def compare(chip: str, shape: Shape) -> list[cells.Row]:
  """Return the rows of the table for a matrix on a chip."""
  on, cycles = SLICES[chip], {}
  for program in programs(shape):
    print(f'compiling for {on}, {program}', file=sys.stderr, flush=True)
    one = json.dumps([on, program, *dataclasses.astuple(shape)])
    done = subprocess.run(
      [sys.executable, __file__, f'--one={one}'],
      capture_output=True, text=True, check=False, cwd=cells.ROOT,
    )  # fmt: skip
    if done.returncode:
      sys.exit(f'{program} on {on}: {(done.stderr.strip().splitlines() or ["no message"])[-1]}')
    cycles[program] = json.loads(done.stdout)
  peak = shape.flops / topology.parse(on).chip.peak * topology.parse(on).chip.clock
  lines, totals = [], np.zeros(4)
  for what in WHAT:
    dense, grouped = cycles[f'dense: {what}'], cycles[f'grouped: {what}']
    numbers = np.array([peak, dense['cycles'], grouped['cycles'], grouped['others']])
    totals += numbers
    lines.append((what, numbers))
  lines.append(('**all**', totals))
  matrix = f'{shape.inputs:,} × {shape.outputs:,}'
  return [
    (
      chip,
      matrix,
      what,
      *(f'{number / 1e6:.3f}' for number in numbers),
      f'{(numbers[2] + numbers[3]) / numbers[1]:.2f}',
    )
    for what, numbers in lines
  ]


def main() -> None:
  """Compile the programs and print the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--on', default='v5p,v6e', help=f'chips, of {", ".join(SLICES)}')
  parser.add_argument('--rows', type=int, default=196_608, help='rows of all experts')
  parser.add_argument('--experts', type=int, default=8, help='experts on a device')
  parser.add_argument('--width', type=int, default=2048, help='of the model')
  parser.add_argument('--hidden', type=int, default=1408, help='width inside an expert')
  parser.add_argument('--one', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.one:
    name, program, *sizes = json.loads(args.one)
    jax.config.update('jax_platforms', 'cpu')
    with tempfile.TemporaryDirectory() as directory:
      print(json.dumps(compile_one(name, program, Shape(*sizes), directory)))
    return
  if args.rows % args.experts:
    sys.exit(f'--rows={args.rows} is not a multiple of --experts={args.experts}')
  lines = []
  for chip in args.on.split(','):
    if chip not in SLICES:
      sys.exit(f'--on={chip} is not one of {", ".join(SLICES)}')
    for sizes in ((args.width, args.hidden), (args.hidden, args.width)):
      lines += compare(chip, Shape(args.rows, args.experts, *sizes))
  print(f'{args.rows:,} rows of {args.experts} experts, bfloat16; millions of cycles\n')
  print(cells.table(HEAD, lines))


if __name__ == '__main__':
  main()
