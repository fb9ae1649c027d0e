"""Published memory, clock and links of each chip. The peak FLOP/s are in `model/flops.py`.

Source: cloud.google.com/tpu/docs, the page of each generation: HBM, ICI and DCN of a chip. The
pages of v5p, v6e and TPU7x give ICI for both directions together. The pages of v4 and v5e give 2400
and 1600 Gbit/s; these count here as one direction of all links, because v5p's page gives its 4800
Gbit/s that way.

Clocks are the peak divided by two FLOPs for every cell of the matrix units: v4 and v5p have 8 units
of 128 × 128, v5e has 4, and v6e has four times the cells of v5e. No source gives the units of
TPU7x: its clock assumes v6e's cells in each of its two devices and is uncertain. The DCN figure of
v4 is v5p's and is uncertain.

GPUs are those of servers (SXM), by NVIDIA's data sheets: bandwidth of the memory, NVLink in one
direction, cores and boost clock. The memory is what a driver reports.
"""

import dataclasses

from tokenformer_jax.model import flops

GIB = 2**30
_GB, _GBIT = 1e9, 1e9 / 8


@dataclasses.dataclass(frozen=True)
class Chip:
  """One JAX device: a whole chip, except on TPU7x, whose chips are two devices each."""

  name: str  # the name in `--topology`
  kind: str  # the key in `flops.PEAK_TFLOPS`
  hbm: float  # bytes of memory
  hbm_rate: float  # bytes a second
  link: float  # bytes a second of one ICI link in one direction
  dcn: float  # bytes a second to other slices in one direction
  clock: float  # cycles a second
  cores: int = 1
  platform: str = 'tpu'
  lanes: int = 4 * 8 * 128  # operations a cycle of a core's vector units
  matrix_side: int = 128
  devices: int = 1  # JAX devices of one chip as it is sold
  torus: int = 3  # sides of a slice; 1 for the GPUs of a host
  wraps_at: int = 4  # a side of a slice is a ring if its length is a multiple of this number
  # Whether the compiler's cycles are near its own schedule (docs/plan.md).
  cycles_hold: bool = True
  has_functions: bool = False  # erf and the like in hardware
  caveat: str = ''  # a sentence about figures of this chip that are uncertain, or ''

  @property
  def peak(self) -> float:
    """Return the dense bf16 FLOP/s of the device."""
    return flops.PEAK_TFLOPS[self.kind] * 1e12

  @property
  def vector_peak(self) -> float:
    """Return operations a second of the vector units."""
    return self.lanes * self.cores * self.clock


def _gpu(name: str, mib: float, rate: float, link: float, cores: int, caveat: str) -> Chip:
  return Chip(
    name,
    f'NVIDIA {name.upper()}',
    mib * 2**20,
    rate * _GB,
    link * _GB,
    dcn=0.0,
    clock=1.98e9,
    cores=cores,
    platform='gpu',
    lanes=128,
    torus=1,
    cycles_hold=False,
    caveat=caveat,
  )


_FITTED = 'times of a GPU follow rates that were fitted to two models on an H200 (docs/plan.md)'


_ALL = (
  Chip('v4', 'TPU v4', 32 * GIB, 1228 * _GB, 50 * _GB, 50 * _GBIT, 1.05e9, cores=2),
  Chip('v5e', 'TPU v5e', 16 * GIB, 800 * _GB, 50 * _GB, 25 * _GBIT, 1.5e9, torus=2, wraps_at=16),
  Chip('v5p', 'TPU v5', 95 * GIB, 2765 * _GB, 100 * _GB, 50 * _GBIT, 1.75e9, cores=2),
  Chip(
    'v6e',
    'TPU v6e',
    32 * GIB,
    1600 * _GB,
    100 * _GB,
    100 * _GBIT,
    1.75e9,
    matrix_side=256,
    torus=2,
    wraps_at=16,
    cycles_hold=False,
    has_functions=True,
  ),
  Chip(
    'tpu7x',
    'TPU7x',
    96 * GIB,
    3690 * _GB,
    100 * _GB,
    50 * _GBIT,
    2.2e9,
    matrix_side=256,
    devices=2,
    cycles_hold=False,
    has_functions=True,
    caveat='the clock of TPU7x is a guess, and so are times and MFU (docs/plan.md)',
  ),
  _gpu('h100', 81559, 3350, 450, 132, f'{_FITTED}, not on an H100'),
  _gpu('h200', 143771, 4800, 450, 132, _FITTED),
  _gpu('b200', 183359, 8000, 900, 148, f'{_FITTED}, and none on a B200: take them for a guess'),
)
CHIPS = {chip.name: chip for chip in _ALL}
