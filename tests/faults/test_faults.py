"""Whatever fails in between, a run ends as an unbroken one does, and no intact checkpoint is lost.

Each case is drawn from its seed: where a run stands, what fails, how often and how long. Real
processes that are killed, or that meet in one work directory, are in test_processes.py.
"""

from collections.abc import Iterator

import pytest
import shim
import xla_flags
from seeds import take
from worker import AGAIN, FINISHED, STEPS, Ended, Worker

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def worker(tmp_path_factory) -> Iterator[Worker]:
  root = tmp_path_factory.mktemp('faults')
  worker = Worker(root, shim.build(root), {'XLA_FLAGS': xla_flags.join_flags(devices=1)})
  yield worker
  worker.close()


@pytest.fixture(scope='module')
def unbroken(worker) -> Ended:
  ended = worker.run('reference')
  assert ended.attempts == [FINISHED] and max(ended.checksums) == STEPS, ended
  return ended


def check_as_unbroken(ended: Ended, unbroken: Ended) -> None:
  """Check that a run left what the unbroken one did, and threw nothing away."""
  assert ended.attempts[-1] == FINISHED, f'the run does not come to its end: {ended}'
  assert not ended.damaged, f'an intact checkpoint was put aside: {ended.damaged}\n{ended.said}'
  for step, checksums in ended.checksums.items():
    assert checksums == unbroken.checksums[step], f'the state of step {step} is another one'
  assert max(ended.checksums) == STEPS, f'the last step is not saved: {sorted(ended.checksums)}'
  assert ended.figures == unbroken.figures, 'figures are lost, doubled, or others'
  assert 'Traceback' not in ended.said, f'a traceback is for programmers:\n{ended.said}'


def check_no_mistake(ended: Ended) -> None:
  """Check that what passes by itself was not told as a mistake of the user."""
  assert set(ended.attempts) <= {FINISHED, AGAIN}, (
    f'a failure that passes is a mistake: {ended.attempts}'
  )


@pytest.mark.parametrize('seed', take(range(115), range(5)))
def test_a_run_ends_as_unbroken_where_calls_fail_for_a_while(worker, unbroken, seed):
  check_as_unbroken(ended := worker.run('failing_calls', seed=seed), unbroken)
  check_no_mistake(ended)


@pytest.mark.parametrize('seed', take(range(15), range(1)))
def test_a_run_ends_as_unbroken_where_a_bucket_fails_calls(worker, unbroken, seed):
  check_as_unbroken(ended := worker.run('failing_bucket', seed=seed), unbroken)
  check_no_mistake(ended)


@pytest.mark.parametrize('seed', take(range(20), range(3)))
def test_a_run_on_a_disk_that_fills_ends_as_unbroken_or_says_so(worker, unbroken, seed):
  ended = worker.run('full_disk', seed=seed)
  check_as_unbroken(ended, unbroken)
  first = ended.attempts[0]
  assert first in (FINISHED, AGAIN) or 'disk' in first or 'space' in first, (
    f'the sentence does not say that the disk is full: {first}'
  )


@pytest.mark.parametrize('seed', take(range(10), range(2)))
def test_a_run_ends_as_unbroken_where_clocks_jump(worker, unbroken, seed):
  check_as_unbroken(ended := worker.run('jumping_clock', seed=seed), unbroken)
  check_no_mistake(ended)
