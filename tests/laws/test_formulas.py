"""The laws have the limits and optima that their papers give."""

import numpy as np
import pytest
from synthetic import PUBLISHED

from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import formulas


def test_the_closed_form_is_the_numeric_minimum():
  for budget in (1e19, 1e22, 5.76e23):
    n, d = formulas.optimum(PUBLISHED, budget)
    around = n * np.geomspace(0.5, 2, 20_001)
    losses = formulas.loss(PUBLISHED, around, budget / (6 * around))
    assert n == pytest.approx(around[np.argmin(losses)], rel=1e-3)
    assert formulas.flops(n, d) == pytest.approx(budget)


def test_published_parameters_give_the_published_exponents():
  """0.452 and 0.548 are those of the rounded parameters; the paper prints 0.46 and 0.54."""
  assert round(float(formulas.size_exponent(PUBLISHED)), 3) == 0.452
  unrounded = formulas.size_exponent({**PUBLISHED, 'alpha': 0.3392, 'beta': 0.2849})
  assert round(float(unrounded), 2) == 0.46, "approach 3 of the paper's table 2"


def test_published_parameters_give_the_published_optima():
  """With Gopher's 5.76e23 FLOPs: table A3 of the paper has 40.2 billion parameters."""
  n, d = formulas.optimum(PUBLISHED, 5.76e23)
  assert n == pytest.approx(32.2e9, rel=0.01), 'by the rounded parameters'
  assert d == pytest.approx(2.98e12, rel=0.01)


@pytest.mark.parametrize(
  ('zeros', 'message'),
  [
    ({'alpha': 0.0}, 'the fitted alpha is 0, so by this law larger sizes do not'),
    ({'beta': 0.0}, 'the fitted beta is 0, so by this law longer runs do not'),
    ({'alpha': 0.0, 'beta': 0.0}, 'the fitted alpha and beta are 0, so by this law larger sizes'),
  ],
)
def test_a_law_that_does_not_fall_has_no_best_size(zeros, message):
  law = {**PUBLISHED, **zeros}
  n, d = formulas.optimum(law, 1e21)
  assert not (0 < n < np.inf and 0 < d < np.inf), 'a best size of a flat law'
  formulas.size_exponent(law)
  formulas.tokens_for_loss(law, 1e9, np.array([2.0, 500.0]))
  with pytest.raises(UserError, match=f'--budget=1 has no answer: {message}'):
    formulas.check_falls(law, '--budget=1')
  formulas.check_falls(PUBLISHED, '--budget=1')


def test_tokens_for_a_loss_invert_the_law():
  d = np.array([1e8, 1e10, 1e12])
  loss = formulas.loss(PUBLISHED, 1e9, d)
  assert formulas.tokens_for_loss(PUBLISHED, 1e9, loss) == pytest.approx(d)
  limit = PUBLISHED['E'] + PUBLISHED['A'] * 1e9**-0.34
  assert np.isinf(formulas.tokens_for_loss(PUBLISHED, 1e9, np.array(limit * 0.999))), (
    'never reached'
  )
