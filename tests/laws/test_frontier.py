"""The envelope and the parabolas find the optima of the law that made the points."""

import numpy as np
import pytest
import synthetic

from tokenformer_jax.laws import formulas, frontier
from tokenformer_jax.laws.formulas import Compute

EXPONENT, _ = formulas.exponents(synthetic.PUBLISHED)


def test_the_envelope_has_the_exponent_of_the_law():
  found = frontier.envelope(synthetic.on_grid(25, 20), Compute(), draws=5)
  assert found.a == pytest.approx(EXPONENT, abs=0.05)
  assert found.a + found.b == pytest.approx(1)


def test_parabolas_between_lengths_have_the_exponent_of_the_law():
  found = frontier.isoflop(synthetic.on_grid(12, 20), Compute(), draws=5)
  assert len(found.parabolas) == frontier.PARABOLAS
  assert found.a == pytest.approx(EXPONENT, abs=0.06)


def test_runs_of_equal_flops_need_no_interpolation():
  budgets = np.geomspace(1e19, 1e21, 5)
  n = np.concatenate([formulas.optimum(synthetic.PUBLISHED, c)[0] * SPREAD for c in budgets])
  c = np.repeat(budgets, len(SPREAD))
  d = c / (6 * n)
  points = synthetic.points(n, d, formulas.loss(synthetic.PUBLISHED, n, d))
  found = frontier.isoflop(points, Compute(), draws=5)
  assert [one.flops for one in found.parabolas] == pytest.approx(budgets)
  assert found.a == pytest.approx(EXPONENT, abs=0.01), 'each budget has the same shape'


SPREAD = np.geomspace(0.25, 4, 7)


def test_too_few_sizes_have_no_exponent():
  found = frontier.isoflop(synthetic.on_grid(3, 5), Compute(), draws=5)
  assert not found.parabolas and np.isnan(found.a)
  one = frontier.envelope(synthetic.on_grid(1, 5), Compute(), draws=5)
  assert np.isnan(one.a) and one.a_interval == (-np.inf, np.inf)
