"""Order the samples of a mixture: the source and the sample of a position follow from it at once.

The order is made of blocks of `BLOCK` samples. Each source has a whole number of samples in a
block, its weight, spread evenly: sample j of n is due after (j + ½) / n of the block, and sources
that are due between the same two positions come in the order of their names. The samples that a
source gives are those of its own endless order, one after the other. Where weights change, new
blocks begin. All numbers are integers, so position 10¹² is exact.
"""

import bisect
import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from tokenformer_jax.config.mixture import BLOCK, Shares


class _Stage(NamedTuple):
  """Positions with the same weights: the first one, and the samples of each source before it."""

  first: int
  before: tuple[int, ...]
  counts: tuple[int, ...]  # of each source in a block

  def taken(self, position: int) -> list[int]:
    """Return the number of samples of each source before a position."""
    blocks, rest = divmod(position - self.first, BLOCK)
    sources, _ = _block(self.counts)
    in_block = np.bincount(sources[:rest], minlength=len(self.counts)).tolist()
    counts = zip(self.before, self.counts, in_block, strict=True)
    return [before + blocks * count + more for before, count, more in counts]


@dataclasses.dataclass(frozen=True)
class MixtureOrder:
  """The endless order of the samples of a mixture.

  Attributes:
    shares: the weights over steps.
    batch_size: the samples of a step.
    first_step: the step where the order begins.
  """

  shares: Shares
  batch_size: int
  first_step: int = 0

  def locate(self, position: int) -> tuple[int, int]:
    """Return the number of the source of a position, and the position in that source's order."""
    stage = self._stage(position)
    blocks, rest = divmod(position - stage.first, BLOCK)
    sources, numbers = _block(stage.counts)
    source = int(sources[rest])
    sample = stage.before[source] + blocks * stage.counts[source] + int(numbers[rest])
    return source, sample

  def taken(self, position: int) -> list[int]:
    """Return the number of samples of each source before a position."""
    return self._stage(position).taken(position)

  def _stage(self, position: int) -> _Stage:
    return self._stages[bisect.bisect_right(self._stages, position, key=lambda s: s.first) - 1]

  @functools.cached_property
  def _stages(self) -> list[_Stage]:
    stages = [_Stage(0, (0,) * len(self.shares.names), self.shares.counts[0])]
    for step, counts in zip(self.shares.steps[1:], self.shares.counts[1:], strict=True):
      first = max(0, (step - self.first_step) * self.batch_size)
      stages.append(_Stage(first, tuple(stages[-1].taken(first)), counts))
    return stages


ONE_SOURCE = MixtureOrder(Shares(('',), (0,), ((BLOCK,),)), batch_size=1)


@functools.lru_cache
def _block(counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
  """Return the source of each sample of a block, and the number of the sample in that source."""
  sources = np.repeat(np.arange(len(counts)), counts)
  numbers = np.concatenate([np.arange(count) for count in counts])
  sizes = np.repeat(counts, counts)
  due = -(-(2 * numbers + 1) * BLOCK // (2 * sizes))  # rounded up
  order = np.lexsort((sources, due))
  return sources[order], numbers[order]
