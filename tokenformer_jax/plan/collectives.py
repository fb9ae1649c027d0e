"""Count the bytes that a collective moves and estimate its time on the network."""

import dataclasses
import functools
import math
import re

import numpy as np
from jax.sharding import Mesh

from tokenformer_jax.plan.chips import Chip
from tokenformer_jax.plan.hlo import Instruction

COLLECTIVES = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')

_IOTA = re.compile(r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')
_MESH = re.compile(
  r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? \{([^}:]*)\}'
)
_LISTS = re.compile(r'(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}')
_MEGASCALE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_DIE_TO_DIE = 6  # The link between the two devices of a TPU7x has 6 times ICI's rate (Google).


@dataclasses.dataclass(frozen=True)
class Cost:
  """The cost of one run of a collective."""

  axis: str  # of the mesh; several are joined by +
  moved: float  # bytes that a device receives
  seconds: float  # on the network
  network: str  # `ICI` or `DCN`; between GPUs `NVLink`


def parse_collective(opcode: str) -> str | None:
  """Return the collective in `COLLECTIVES` that an opcode runs or starts (`…-start`), or None."""
  opcode = opcode.removesuffix('-start')
  return opcode if opcode in COLLECTIVES else None


def parse_replica_groups(instruction: Instruction, devices: int) -> np.ndarray:
  """Return the groups of device numbers that exchange data, [groups, size]; pairs for a permute.

  Raises:
    ValueError: the groups have an unknown notation.
  """
  text = instruction.attributes
  if match := _MESH.search(text):
    axes, dims, order, along = match.groups()
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    ids = np.arange(math.prod(sizes.values()))
    if dims:
      ids = ids.reshape(_numbers(dims)).transpose(_numbers(order))
    inside = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", along)]
    ids = np.moveaxis(ids.reshape(list(sizes.values())), inside, range(-len(inside), 0))
    return ids.reshape(-1, math.prod(ids.shape[-len(inside) :]))
  if match := _IOTA.search(text):
    shape, sizes, order = match.groups()
    ids = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return (ids.transpose(_numbers(order)) if order else ids).reshape(_numbers(shape))
  if match := _LISTS.search(text):
    lists = re.findall(r'\{([\d,]+)\}', match.group(1))
    return np.array([_numbers(members) for members in lists]) if lists else np.arange(devices)[None]
  raise ValueError(f'the groups of {instruction.name} cannot be read from {text[:300]!r}')


def _numbers(text: str) -> list[int]:
  return [int(number) for number in text.split(',')]


def cost(collective: str, operand_bytes: int, members: np.ndarray, mesh: Mesh, chip: Chip) -> Cost:
  """Return the cost of one run of a collective over groups of devices within a slice.

  The time is a bound by bandwidth: every device sends its data on all links along the sides of the
  torus that its group spans, in both directions where the side is a ring. Latency is ignored.

  Every device contributes `operand_bytes`; `members` come from `parse_replica_groups`.
  """
  axis = _axis(members, mesh)
  if chip.platform == 'gpu':  # A switch joins all links of a host.
    moved = _received(collective, operand_bytes, members.shape[1])
    return Cost(axis, moved, moved / chip.link, 'NVLink')
  if collective == 'collective-permute':
    return _permute(axis, operand_bytes, members, mesh, chip)
  sides = _sides(chip, _coordinates(mesh)[members[0]], _torus(mesh))
  moved = _received(collective, operand_bytes, members.shape[1])
  if collective == 'all-to-all':  # Data crosses a quarter of a ring, or half of a line.
    length, bandwidth, ring = max(sides)
    seconds = operand_bytes * length / (4 if ring else 2) / bandwidth
  else:
    seconds = moved / sum(bandwidth for _, bandwidth, _ in sides)
  return Cost(axis, moved, seconds, 'ICI')


def between_slices(collective: str, sent: int, mesh: Mesh, chip: Chip) -> Cost:
  """Return the cost of a collective between slices, over DCN.

  Every device contributes `sent` bytes. Each slice of the mesh is its own replica.
  """
  slices, first = np.unique(_coordinates(mesh)[:, 0], return_index=True)
  moved = _received(collective, sent, len(slices))
  return Cost(_axis(first[None], mesh), moved, moved / chip.dcn, 'DCN')


def parse_transfer(instruction: Instruction) -> str | None:
  """Return the collective whose data a `send` carries between slices, or None.

  XLA splits a collective over several slices into a collective inside each slice and a `send` and
  a `recv` between slices, which the hosts carry out.
  """
  match = _MEGASCALE.search(instruction.attributes)
  if instruction.opcode != 'send' or not match:
    return None
  return match.group(1).lower().replace('_', '-')


def _received(collective: str, operand_bytes: float, size: int) -> float:
  """Return the bytes that a device receives in a group of this size, by the best algorithms."""
  factor = {
    'all-gather': size - 1,
    'reduce-scatter': (size - 1) / size,
    'all-reduce': 2 * (size - 1) / size,
    'all-to-all': (size - 1) / size,
    'collective-permute': 1,
  }
  return operand_bytes * factor[collective]


def _permute(axis: str, operand_bytes: int, pairs: np.ndarray, mesh: Mesh, chip: Chip) -> Cost:
  coordinates, torus = _coordinates(mesh), _torus(mesh)
  source, target = coordinates[pairs[:, 0]], coordinates[pairs[:, 1]]
  apart = np.abs(source - target)[:, 1:]
  rings = np.array([side % chip.wraps_at == 0 for side in torus])
  hops = np.where(rings, np.minimum(apart[:, :3], torus - apart[:, :3]), apart[:, :3]).sum(axis=1)
  # The furthest pair decides the time. Pairs that share a link are not modelled.
  return Cost(axis, operand_bytes, operand_bytes * max(1, hops.max()) / chip.link, 'ICI')


def _axis(members: np.ndarray, mesh: Mesh) -> str:
  """Return the axes of the mesh along which the members of a group differ, joined by +."""
  indices = np.stack(np.unravel_index(members, mesh.devices.shape), axis=-1)
  differ = np.any(indices != indices[:, :1], axis=(0, 1))
  return '+'.join(name for name, varies in zip(mesh.axis_names, differ, strict=True) if varies)


@functools.cache
def _coordinates(mesh: Mesh) -> np.ndarray:
  """Return slice, three coordinates and core of every device, in the mesh's order."""
  return np.array(
    [
      [getattr(one, 'slice_index', None) or 0, *[*one.coords, 0, 0, 0][:3], one.core_on_chip]
      for one in mesh.devices.flat
    ]
  )


@functools.cache
def _torus(mesh: Mesh) -> np.ndarray:
  """Return the lengths of the three sides of a slice."""
  return np.array([len(np.unique(_coordinates(mesh)[:, i])) for i in (1, 2, 3)])


def _sides(chip: Chip, coordinates: np.ndarray, torus: np.ndarray) -> list[tuple[int, float, bool]]:
  """Return length, bytes a second and whether it is a ring, of each side that devices span."""
  sides = []
  for i, whole in enumerate(torus):
    length = len(np.unique(coordinates[:, i + 1]))
    ring = bool(length == whole and whole % chip.wraps_at == 0)
    if length > 1:
      sides.append((length, chip.link * (2 if ring else 1), ring))
  if len(np.unique(coordinates[:, 4])) > 1 and not sides:
    sides.append((2, _DIE_TO_DIE * chip.link, False))
  return sides
