"""The learning rate of each schedule at the updates where its shape can be told from others."""

import numpy as np
import pytest

from tokenformer_jax.config import AdamWConfig, OptimConfig
from tokenformer_jax.steps.entries import LastGrowth
from tokenformer_jax.steps.schedules import learning_rate, schedule

PEAK, WARMUP, STEPS = 6e-4, 10, 110
GROWTH = LastGrowth(updates=60, old={})


def _config(name: str, restart: str = '', **keys) -> OptimConfig:
  schedule = {'kind': name, **keys}
  return AdamWConfig(
    learning_rate=PEAK, warmup_steps=WARMUP, schedule=schedule, restart_schedule=restart
  )


def _rate(update: int, **changes) -> float:
  config = AdamWConfig(learning_rate=PEAK, warmup_steps=WARMUP, **changes)
  return float(learning_rate(config, STEPS)(update))


@pytest.mark.parametrize(
  ('update', 'rate', 'meaning'),
  [
    (0, PEAK / WARMUP, 'the first update is not 1/W of the peak'),
    (4, PEAK / 2, 'the warm-up is not linear'),
    (WARMUP - 1, PEAK, 'the last update of the warm-up has not the peak'),
    (WARMUP, PEAK, 'the decay does not start at the peak'),
    (60, 0.55 * PEAK, 'the middle of a cosine is not the mean of peak and floor'),
    (35, (0.1 + 0.9 * (1 + np.cos(np.pi / 4)) / 2) * PEAK, 'the decay is not a cosine'),
    (STEPS, 0.1 * PEAK, 'the decay does not end at the floor'),
    (STEPS + 50, 0.1 * PEAK, 'the rate leaves the floor after the end'),
  ],
)
def test_cosine_falls_from_the_peak_to_its_floor(update, rate, meaning):
  np.testing.assert_allclose(_rate(update), rate, rtol=1e-5, err_msg=meaning)


@pytest.mark.parametrize(('update', 'rate'), [(0, PEAK / WARMUP), (WARMUP, PEAK), (STEPS, PEAK)])
def test_constant_keeps_the_peak_after_the_warmup(update, rate):
  got = _rate(update, schedule='constant')
  np.testing.assert_allclose(got, rate, rtol=1e-5, err_msg='not constant after the warm-up')


@pytest.mark.parametrize('warmup', [0, 1])
def test_without_a_warmup_the_first_update_has_the_peak(warmup):
  config = AdamWConfig(learning_rate=PEAK, warmup_steps=warmup)
  got = float(learning_rate(config, STEPS)(0))
  np.testing.assert_allclose(got, PEAK, rtol=1e-5, err_msg='something is warmed up')


@pytest.mark.parametrize(
  ('update', 'part'), [(0, 0.1), (9, 1), (10, 1), (60, 0.55), (85, 0.325), (110, 0.1), (200, 0.1)]
)
def test_linear_falls_to_its_floor_after_the_warmup(update, part):
  got = learning_rate(_config('linear'), STEPS)(update)
  np.testing.assert_allclose(got, part * PEAK, rtol=1e-5, err_msg='not a line to the floor')


@pytest.mark.parametrize(
  ('shape', 'update', 'part'),
  [
    *[(shape, update, 0.1) for shape in ('linear', 'one_minus_sqrt') for update in (0, 110, 200)],
    *[(shape, update, 1) for shape in ('linear', 'one_minus_sqrt') for update in (9, 50, 88)],
    ('linear', 99, 0.55),
    ('one_minus_sqrt', 99, 0.1 + 0.9 * (1 - np.sqrt(0.5))),
    ('one_minus_sqrt', 93.5, 0.55),
  ],
)
def test_wsd_is_stable_and_decays_over_the_last_fifth(shape, update, part):
  got = learning_rate(_config('wsd', decay_shape=shape), STEPS)(update)
  np.testing.assert_allclose(got, part * PEAK, rtol=1e-5, err_msg=f'{shape} at {update}')


@pytest.mark.parametrize(
  ('decay_from', 'share', 'begin'), [(0, 0.5, 55), (0, 1.0, WARMUP), (40, 0.2, 40), (10, 0.2, 10)]
)
def test_wsd_begins_its_decay_at_decay_from_or_by_its_share(decay_from, share, begin):
  rate = learning_rate(_config('wsd', decay_share=share), STEPS, 0, decay_from)
  middle = (begin + STEPS) / 2
  got = [float(rate(update)) / PEAK for update in (begin, middle, STEPS)]
  np.testing.assert_allclose(got, [1, 0.55, 0.1], rtol=1e-5, err_msg=f'not from {begin} on')


@pytest.mark.parametrize(
  ('name', 'restart', 'start'),
  [
    ('cosine', '', 60),
    ('wsd', '', 0),
    ('constant', '', 0),
    ('wsd', 'yes', 60),
    ('constant', 'yes', 60),
    ('linear', 'no', 0),
  ],
)
def test_a_growth_in_a_stable_phase_needs_no_warmup(name, restart, start):
  config = _config(name, restart)
  got, want = schedule(config, STEPS, GROWTH), learning_rate(config, STEPS, start)
  for update in (60, 65, 80, 109):
    assert float(got(update)) == float(want(update)), f'the rate of update {update}'
  plain = learning_rate(config, STEPS)
  assert float(schedule(config, STEPS)(60)) == float(plain(60)), 'it restarts without a growth'
