"""Many cases of one test: some run in CI, all of them by hand."""

from collections.abc import Container, Iterable

import pytest


def draw_seeds(in_ci: int, by_hand: int) -> list:
  """Return the seeds below `by_hand`; those from `in_ci` on are marked `full_size`."""
  more = range(in_ci, by_hand)
  return [*range(in_ci), *(pytest.param(seed, marks=pytest.mark.full_size) for seed in more)]


def take(cases: Iterable, in_ci: Container) -> list:
  """Return all cases; those that are not among `in_ci` are marked `full_size`."""
  return [
    case if case in in_ci else pytest.param(case, marks=pytest.mark.full_size) for case in cases
  ]


def take_third(cases: Iterable, first: int) -> list:
  """Return all cases; all but every third, counted from number `first`, are marked `full_size`.

  Tests of other properties take another third, so that each case is in CI with one of them.
  """
  return [
    case if i % 3 == first else pytest.param(case, marks=pytest.mark.full_size)
    for i, case in enumerate(cases)
  ]
