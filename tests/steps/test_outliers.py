"""Steps that are far above the last good ones are skipped, in the compiled step and on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenformer_jax.steps import outliers

WINDOW = 8


def run(values, *, deviations=6.0, may_skip=True, recent=None, window=WINDOW):
  """The statistics after values of the loss, with a constant norm, and which steps were made."""
  recent, made = recent or outliers.initial(window), []
  for value in values:
    figures = {'loss': jnp.float32(value), 'grad_norm': jnp.float32(1)}
    good, recent = accept(recent, figures, jnp.isfinite(value), jnp.asarray(may_skip), deviations)
    made.append(bool(good))
  return recent, made


@jax.jit
def accept(recent, figures, finite, may_skip, deviations):
  return outliers.accept_step(
    recent, figures, finite=finite, may_skip=may_skip, deviations=deviations
  )


NORMAL = [3.0, 3.1, 2.9, 3.05, 2.95, 3.0, 3.1, 2.9]


def test_the_norm_is_watched_as_well():
  before, _ = run(NORMAL)
  figures = {'loss': jnp.float32(3), 'grad_norm': jnp.float32(50)}
  good, _ = accept(before, figures, True, True, 6.0)
  assert not good


def test_a_value_that_is_not_finite_is_skipped_and_no_outlier():
  before, _ = run(NORMAL)
  after, made = run([np.nan, np.inf], recent=before)
  assert made == [False, False] and after['outliers'] == 0
  np.testing.assert_array_equal(after['loss'], before['loss'])


def test_an_outlier_that_must_be_made_begins_the_statistics_anew():
  before, _ = run(NORMAL)
  after, made = run([9.0], recent=before, may_skip=False)
  assert made == [True] and after['good'] == 1 and after['outliers'] == 0
  _, made = run([9.0, 9.5, 9.1, 9.3, 20.0], recent=after)
  assert made == [True, True, True, True, False], 'the old level still counts, or nothing does'


def test_equal_values_have_room_for_rounding():
  before, _ = run([3.0] * 8)
  assert run([np.nextafter(np.float32(3), np.float32(4))], recent=before)[1] == [True]
  assert run([3.1], recent=before)[1] == [False]


@settings(max_examples=50, deadline=None)
@given(
  values=st.lists(st.floats(1, 100, width=32), min_size=1, max_size=30),
  deviations=st.sampled_from([1.0, 2.0, 6.0]),
)
def test_the_limit_is_that_of_numpy_over_the_last_good_values(values, deviations):
  good, expected = [], []
  for value in values:
    last = np.array(good[-WINDOW:], np.float64)
    limit = np.inf
    if len(last) >= WINDOW // 2:
      deviation = max(last.std(ddof=1), np.finfo(np.float32).eps * last.mean())
      limit = last.mean() + deviations * deviation
    if abs(value - limit) < 1e-4 * abs(limit):
      return  # Rounding decides.
    expected.append(value <= limit)
    good += [value] if expected[-1] else []
  recent, made = run(values, deviations=deviations)
  assert made == expected
  kept = sorted(np.asarray(recent['loss'])[: len(good)])
  np.testing.assert_array_equal(kept, sorted(np.float32(good[-WINDOW:])))


@pytest.mark.parametrize('window', [4, 5])
def test_a_buffer_is_used_in_a_ring(window):
  recent, _ = run(range(11), deviations=1e9, window=window)
  assert sorted(np.asarray(recent['loss'])) == list(range(11 - window, 11))
