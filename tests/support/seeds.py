"""Many cases of one test: some run in CI, all of them by hand."""

from collections.abc import Container, Iterable

import pytest


def take(cases: Iterable, in_ci: Container) -> list:
  """Return all cases; those that are not among `in_ci` are marked `full_size`."""
  return [
    case if case in in_ci else pytest.param(case, marks=pytest.mark.full_size) for case in cases
  ]
