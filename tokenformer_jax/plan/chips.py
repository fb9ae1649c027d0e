"""What is published of chips, besides the peaks in `flops.py`: memory, clock and links.

Sources, by the name in `Chip.source`:

  Google   cloud.google.com/tpu/docs, the page of each generation: HBM, ICI and DCN of a chip. The
           pages of v5p, v6e and TPU7x give ICI for both directions together; those of v4 and v5e
           give 2400 and 1600 Gbit/s, taken as one direction of all links, as v5p's 4800 is there.
  NVIDIA   data sheets of A100 80GB SXM, H100 SXM and H200 SXM: memory, NVLink (half of what they
           give for both directions); network cards a GPU as in DGX A100 (200 Gbit/s), DGX H100 and
           DGX H200 (400 Gbit/s).

Clocks are the peak over two FLOPs for every cell of the matrix units: 8 of 128 × 128 in v4 and v5p,
4 in v5e, in v6e four times as many cells as that. For TPU7x nothing was found: its clock supposes
v6e's cells in each of its two devices, and is not sure. Nor is the DCN of v4, which is v5p's here.
"""

import dataclasses

from tokenformer_jax import flops

GIB = 2**30
_GB, _GBIT = 1e9, 1e9 / 8


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device as JAX counts them: a chip, but for TPU7x, whose chips are two devices.

  Attributes:
    name: as in `--topology`.
    kind: its key in `flops.PEAK_TFLOPS`.
    hbm: bytes.
    hbm_rate: bytes a second.
    link: bytes a second of one link of ICI in one direction; of a GPU all NVLinks together.
    dcn: bytes a second to other slices, or hosts, of GPUs, in one direction.
    clock: cycles a second, or None for a GPU, for which nothing is compiled.
    cores: of a device.
    matrix_side: of a matrix unit.
    devices: that make up what is sold as a chip.
    torus: how many sides a slice has; of GPUs, which are given by their number, 1.
    wraps_at: the sides of a slice whose last chip is linked to the first: multiples of this.
    source: see above.
    caveat: what is known against the compiler's cycles for it, a sentence, or nothing.
  """

  name: str
  kind: str
  hbm: float
  hbm_rate: float
  link: float
  dcn: float
  clock: float | None
  cores: int = 1
  matrix_side: int = 128
  devices: int = 1
  torus: int = 3
  wraps_at: int = 4
  source: str = 'Google'
  caveat: str = ''

  @property
  def peak(self) -> float:
    """Dense bf16 FLOP/s of the device."""
    return flops.PEAK_TFLOPS[self.kind] * 1e12

  @property
  def vector_peak(self) -> float:
    """Operations a second of the vector units: four on each of 8 × 128 lanes of a core."""
    return 4 * 8 * 128 * self.cores * self.clock


# Cycles of a product 32768 × 1536 × 6144 over what the matrix unit needs at its peak, without and
# with an exact GELU in the same fusion: 1.02 and 1.02 on v5p. docs/plan.md has the schedule's.
_CAVEAT_V6E = (
  "times and MFU by the compiler's cycles are not to be trusted on v6e: it counts 1.3 times the "
  'bound of the matrix unit for a product, 1.9 times with an exact GELU, where its own schedule '
  'takes 1.03 to 1.06 times; the step is probably faster (docs/plan.md)'
)
_CAVEAT_TPU7X = (
  "times and MFU by the compiler's cycles are doubtful on TPU7x: it counts 1.08 times the bound of "
  'the matrix unit for a product, 1.32 times with an exact GELU, and the clock is a guess '
  '(docs/plan.md)'
)

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
    caveat=_CAVEAT_V6E,
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
    caveat=_CAVEAT_TPU7X,
  ),
  Chip(
    'gpu-a100',
    'NVIDIA A100',
    80e9,
    2039 * _GB,
    300 * _GB,
    200 * _GBIT,
    None,
    torus=1,
    source='NVIDIA',
  ),
  Chip(
    'gpu-h100',
    'NVIDIA H100',
    80e9,
    3350 * _GB,
    450 * _GB,
    400 * _GBIT,
    None,
    torus=1,
    source='NVIDIA',
  ),
  Chip(
    'gpu-h200',
    'NVIDIA H200',
    141e9,
    4800 * _GB,
    450 * _GB,
    400 * _GBIT,
    None,
    torus=1,
    source='NVIDIA',
  ),
)
CHIPS = {chip.name: chip for chip in _ALL}
