"""A batch is a pure function of the config and the step, on any number of hosts."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numbered
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import order
from tokenformer_jax.data.mixture import one_source
from tokenformer_jax.data.order import TrainBatches, sample_index, validation_batches, window_count
from tokenformer_jax.data.store import Store, prepare
from tokenformer_jax.errors import UserError

BATCH, LENGTH, SEED = 8, 16, 3


@pytest.fixture(scope='module')
def config(tmp_path_factory) -> DataConfig:
  folder = tmp_path_factory.mktemp('order')
  source = numbered.write(folder / 'corpus.jsonl', 100)
  return numbered.config(folder, BATCH, LENGTH, source=source)


@pytest.fixture(scope='module')
def store(config) -> Store:
  return prepare(config)


def _train(
  store: Store, config: DataConfig, first: int, count: int, rows=range(BATCH)
) -> np.ndarray:
  return np.stack([*one_source(store, config, SEED).train_batches(rows, first, first + count)])


def _of_array(tokens: np.ndarray, size: int, **options) -> TrainBatches:
  options = {'sequence_length': LENGTH, 'seed': SEED, **options}
  return TrainBatches(
    sources=[numbered.Tokens(tokens)], rows=range(size), batch_size=size, **options
  )


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**40), epoch=st.integers(0, 10**9), n=st.integers(1, 100))
def test_an_epoch_visits_each_sample_once(seed, epoch, n):
  visited = [sample_index(seed, epoch * n + i, n) for i in range(n)]
  assert sorted(visited) == list(range(n)), 'samples are repeated or left out within an epoch'


@settings(max_examples=30, deadline=None)
@given(
  parts=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=6),
  first=st.integers(0, 10**6),
)
def test_any_batch_sizes_after_each_other_visit_each_position_once(parts, first):
  """Parts of a run, each of a batch size and some steps, each begun where the last one ended."""
  step, position, visited = first, order.Position(first, 0), []
  for batch_size, steps in parts:
    for _ in range(steps):
      visited += [position.batch_start(step, batch_size) + row for row in range(batch_size)]
      step += 1
    # A checkpoint holds the samples seen, and the next part begins there.
    position = order.Position(step, position.batch_start(step, batch_size))
  assert visited == list(range(len(visited))), 'a resumed run repeats or skips samples'


@settings(max_examples=10, deadline=None)
@given(step=st.integers(0, 1000), sample=st.integers(0, 10**6), size=st.integers(1, 9))
def test_a_run_that_begins_anywhere_reads_the_samples_from_there_on(step, sample, size):
  tokens, begin = np.arange(1000), order.Position(step, sample)
  batches = _of_array(tokens, size, position=begin)
  rows = np.concatenate([batches[step + i] for i in range(3)])
  n = 999 // LENGTH
  starts = [LENGTH * sample_index(SEED, sample + i, n) for i in range(3 * size)]
  np.testing.assert_array_equal(
    rows[:, 0], starts, 'the samples are not those after the last one seen'
  )


def test_the_order_is_what_it_always_was():
  # Of grain 0.2.18, on x86-64.
  order = [sample_index(0, i, 10) for i in range(20)]
  expected = [9, 6, 0, 4, 5, 2, 7, 1, 8, 3, 6, 2, 5, 3, 4, 8, 9, 7, 0, 1]
  assert order == expected, 'resumed runs see other data: the shuffle of Grain or its seed changed'
  other = [sample_index(1, i, 10) for i in range(10)]
  assert other == [2, 3, 1, 4, 5, 6, 7, 8, 9, 0], 'a seed has the order of another epoch or seed'


def test_a_row_holds_inputs_and_targets():
  tokens = np.arange(100, dtype=np.uint16)
  rows = _of_array(tokens, 6)[0]
  assert (rows.shape, rows.dtype) == ((6, 17), np.int32), 'the model expects int32 [rows, T + 1]'
  starts = np.sort(rows[:, 0])
  np.testing.assert_array_equal(starts, np.arange(0, 96, 16), 'windows overlap or leave gaps')
  np.testing.assert_array_equal(np.diff(rows, axis=1), 1, 'a window is not contiguous')


def test_hosts_share_the_global_batch(store, config):
  hosts, share = 2, BATCH // 2
  parts = [
    _train(store, config, 5, 4, range(host * share, (host + 1) * share)) for host in range(hosts)
  ]
  expected = _train(store, config, 5, 4)
  np.testing.assert_array_equal(
    np.concatenate(parts, axis=1), expected, f'{hosts} hosts train on other data than one'
  )


def test_seeking_reads_nothing_before_the_step(store, config, monkeypatch):
  steps, read = [], TrainBatches.__getitem__
  monkeypatch.setattr(
    TrainBatches, '__getitem__', lambda self, step: steps.append(step) or read(self, step)
  )
  batches = one_source(store, config, SEED).train_batches(range(BATCH), 1_000_000)
  next(batches)
  batches.close()
  assert min(steps) == 1_000_000, 'resuming reads the batches of earlier steps'
  assert len(steps) <= config.prefetch + 1, 'more is read ahead than config.data.prefetch'


@pytest.mark.slow
def test_worker_processes_give_the_same_batches(store, config):
  parallel = dataclasses.replace(config, workers=2)
  np.testing.assert_array_equal(
    _train(store, parallel, 1_000_000, 20),
    _train(store, config, 1_000_000, 20),
    'the batches depend on config.data.workers',
  )


@pytest.mark.slow
def test_unfinished_batches_do_not_keep_the_process_alive(store, config):
  del store  # is built, so that the process prints nothing
  script = f"""
from tokenformer_jax.config import Sources, TextConfig
from tokenformer_jax.data.mixture import open_sources
batches = open_sources({config!r}, 0).train_batches(range(8), 0)
print(next(batches).shape)
"""
  result = subprocess.run(
    [sys.executable, '-c', script],
    env=os.environ | {'PYTHONPATH': str(Path(__file__).parents[2])},
    check=False,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert result.stdout == f'({BATCH}, {LENGTH + 1})\n', 'no batch was read'
  assert (result.returncode, result.stderr) == (0, ''), 'leaving the loop early is not clean'


@pytest.mark.parametrize('batch_size', [7, 1000])
def test_validation_visits_every_window_once(store, config, batch_size):
  config = dataclasses.replace(config, batch_size=batch_size)
  rows = np.concatenate(list(validation_batches(store, config, range(batch_size))))
  n = window_count(store.validation, LENGTH)
  assert (rows[n:] == order.NO_TOKEN).all(), 'rows beyond the end count in the evaluation'
  expected = [store.validation[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(n)]
  np.testing.assert_array_equal(rows[:n], expected, 'the evaluation is not of the whole split')


def test_validation_rows_are_shared_by_hosts(store, config):
  whole = list(validation_batches(store, config, range(BATCH)))
  parts = [list(validation_batches(store, config, range(i, BATCH, 2))) for i in range(2)]
  for even, odd, batch in zip(*parts, whole, strict=True):
    np.testing.assert_array_equal(even, batch[::2], 'host 0 evaluates other windows')
    np.testing.assert_array_equal(odd, batch[1::2], 'host 1 evaluates other windows')


def test_fewer_validation_batches_are_spread_over_the_split(store, config):
  config = dataclasses.replace(config, batch_size=4)
  whole = list(validation_batches(store, config, range(4)))
  chosen = list(validation_batches(store, config, range(4), batches=3))
  expected = [whole[i * len(whole) // 3] for i in range(3)]
  np.testing.assert_array_equal(chosen, expected, 'the batches are not spread evenly')


@pytest.mark.parametrize('split', ['training', 'validation'])
def test_a_split_shorter_than_a_sequence_is_an_error(store, config, split):
  config = dataclasses.replace(config, sequence_length=10**4)
  long, short = (numbered.Tokens(np.zeros(n)) for n in (10**5, 9))
  splits = {'train': short, 'validation': long} if split == 'training' else {'validation': short}
  store = dataclasses.replace(store, **{'train': long, **splits})
  with pytest.raises(UserError, match=f'the {split} split has .* tokens?, too few'):
    order.check_store(store, config)
