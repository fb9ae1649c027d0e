"""Lengths rounded up to few, and requests of like lengths batched, so that few programs compile."""

from collections.abc import Iterator, Sequence

from jax.sharding import Mesh

from tokenformer_jax.sharding import parts

_SMALLEST = 64


def bucket(length: int) -> int:
  """The least of 64, 96, 128, 192, 256, 384 … that is not less: at most half as much again."""
  size = _SMALLEST
  while size < length:
    size *= 2
  return size * 3 // 4 if size > _SMALLEST and length <= size * 3 // 4 else size


def batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
  """Indices in batches of `size` (the last may be smaller), the longest first.

  What takes the most memory comes first, so that what does not fit fails at once.
  """
  order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
  for first in range(0, len(order), size):
    yield order[first : first + size]


def rows(count: int, mesh: Mesh | None = None) -> int:
  """Round up to a number of rows that a mesh, or the one that is set, can split."""
  multiple = parts('batch', mesh)
  return -(-count // multiple) * multiple
