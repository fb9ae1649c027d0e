"""Round lengths and batch requests of similar lengths, so that few programs compile."""

from collections.abc import Iterator, Sequence

from jax.sharding import Mesh

from tokenformer_jax.parallel.rules import shard_count

_SMALLEST = 64
_SMALLEST_GROWING = 256


def bucket(length: int) -> int:
  """Round a length up to 64, 96, 128, 192, 256, 384, and so on."""
  size = _SMALLEST
  while size < length:
    size *= 2
  return size * 3 // 4 if size > _SMALLEST and length <= size * 3 // 4 else size


def growing_bucket(length: int) -> int:
  """Round a length that grows from turn to turn up to 256, 1024, 4096, and so on."""
  size = _SMALLEST_GROWING
  while size < length:
    size *= 4
  return size


def batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
  """Yield the indices of requests in batches of `size` (the last may be smaller), longest first.

  The longest batch needs the most memory, so a lack of memory shows at once.
  """
  order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
  for first in range(0, len(order), size):
    yield order[first : first + size]


def rows(count: int, mesh: Mesh | None = None) -> int:
  """Round a number of rows up to a multiple that a mesh (default: the current one) can split."""
  multiple = shard_count('batch', mesh)
  return -(-count // multiple) * multiple
