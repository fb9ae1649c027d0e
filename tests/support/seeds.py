"""Seeds of drawn cases: the first run in CI, all of them by hand."""

import pytest


def draw_seeds(in_ci: int, by_hand: int) -> list:
  """Return the seeds below `by_hand`; those from `in_ci` on are marked `full_size`."""
  more = range(in_ci, by_hand)
  return [*range(in_ci), *(pytest.param(seed, marks=pytest.mark.full_size) for seed in more)]
