"""Wall time is counted once, by kind, and a wait for data only as far as devices were idle."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tokenformer_jax.runs import metrics, wall_time


@pytest.fixture
def clock(monkeypatch):
  """A clock that stands until the test moves it by `clock.sleep`."""

  class Clock:
    now = 0.0

    def sleep(self, seconds):
      self.now += seconds

    def monotonic(self):
      return self.now

    def time(self):
      return 1e9 + self.now

  found = Clock()
  monkeypatch.setattr(wall_time, 'time', found)
  # Without the compilations of this process, which have other times.
  monkeypatch.setattr(wall_time, '_compiling', functools.cache(wall_time._Compiling))
  return found


def slow(clock, seconds, count):
  for i in range(count):
    clock.sleep(seconds)
    yield i


def test_a_lap_has_every_second_once(clock):
  wall = wall_time.WallTime()
  clock.sleep(7)
  assert wall.lap('starting') == {'time': 1e9 + 7, 'starting': 7.0}
  clock.sleep(2)
  with wall.spent_on('evaluation'):
    clock.sleep(3)
  with wall.spent_on('saving'):
    clock.sleep(0.5)
  assert wall.lap() == {'time': 1e9 + 12.5, 'training': 2.0, 'evaluation': 3.0, 'saving': 0.5}
  assert wall.lap() == {'time': 1e9 + 12.5}


@pytest.mark.parametrize(
  ('wait', 'dispatch', 'fetch', 'lost'),
  [
    (1, 0, 9, 0),  # Devices compute 12 s for 4 steps; reading ahead of them costs nothing.
    (4, 0, 1, 4 * 4 + 1 - 4),  # Each step computes 1 s; the devices wait for the rest.
    (4, 2, 0, 4 * 4),  # The call of a step returns when it is done, so all waiting is lost.
    (0, 3, 3, 0),
  ],
)
def test_waiting_for_data_counts_as_far_as_devices_had_nothing_to_do(
  clock, wait, dispatch, fetch, lost
):
  wall, steps = wall_time.WallTime(), 4
  for _ in wall.reading(slow(clock, wait, steps)):
    clock.sleep(dispatch)
  clock.sleep(fetch)
  lap = wall.lap(device_seconds=fetch * steps)
  assert lap.get('data', 0) == lost
  assert lap.get('data', 0) + lap.get('training', 0) == steps * (wait + dispatch) + fetch


def test_compilation_is_not_counted_as_evaluation_nor_twice(clock):
  wall, compiling = wall_time.WallTime(), wall_time._compiling()
  with wall.spent_on('evaluation'):
    clock.sleep(1)  # traces a function
    compiling.add('/jax/core/compile/jaxpr_trace_duration', 1.0)
    clock.sleep(1)  # The function around it ends.
    compiling.add('/jax/core/compile/jaxpr_trace_duration', 2.0)
    clock.sleep(4)
    compiling.add('/jax/core/compile/backend_compile_duration', 4.0)
    clock.sleep(3)
    compiling.add('/jax/checkpoint/write', 3.0)
  assert wall.lap() == {'time': 1e9 + 9, 'compiling': 6.0, 'evaluation': 3.0}


def test_jax_reports_its_compilations():
  wall = wall_time.WallTime()
  jax.jit(lambda x: jnp.sin(x) * 3.25).lower(jnp.ones(7)).compile()
  lap = wall.lap()
  assert lap['compiling'] > 0, 'JAX has other names for its events of compilation'
  assert lap['compiling'] > lap['training']


def test_a_resumed_run_keeps_lost_time_and_drops_lost_samples(tmp_path):
  for first, last in ((0, 3), (1, 2)):
    figures = metrics.Metrics(tmp_path, first_step=first, steps=9)
    for step in range(first, last):
      figures.times(step, {'time': 1.0, 'training': 0.5})
      figures.text(step, 'sample', f'text {first} {step}')
    figures.close()
  times = metrics.read_lines(tmp_path / 'times.jsonl')
  assert [line['step'] for line in times] == [0, 1, 2, 1]
  samples = metrics.read_lines(tmp_path / 'samples.jsonl')
  assert [(one['step'], one['text']) for one in samples] == [
    (0, 'text 0 0'),
    (1, 'text 0 1'),
    (1, 'text 1 1'),
  ]
  assert metrics.read_lines(tmp_path / 'none.jsonl') == []
