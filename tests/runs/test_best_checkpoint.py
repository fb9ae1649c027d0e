"""The checkpoint with the lowest loss is kept, and only a sound loss counts."""

import contextlib
import json
import math

import pytest
from saved_states import meta, save, state

from tokenformer_jax.runs import checkpoint


@pytest.mark.parametrize('loss', [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_never_the_best(tmp_path, loss):
  save(tmp_path, [loss, 2.0, loss, 3.0, loss, 4.0], keep=1)
  assert checkpoint.Checkpoints(tmp_path).steps() == [2, 6], 'the best one, or the last, is gone'


def test_the_best_checkpoint_stays_when_a_run_goes_on(tmp_path):
  save(tmp_path, [1.0, 2.0], keep=1)
  with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=1)) as checkpoints:
    checkpoints.save(meta(3), state(3), 3.0, wait=True)
  assert checkpoint.Checkpoints(tmp_path).steps() == [1, 3], 'which one was the best is forgotten'


@pytest.mark.parametrize('change', ['loss', 'digest', 'los_', 'no digest'])
def test_a_loss_that_changed_on_the_disk_is_never_the_best(tmp_path, change):
  """Here 5.0 becomes 0.5, or loses the name or the digest that shows it to be sound."""
  save(tmp_path, [1.0, 5.0, 2.0])
  path = tmp_path / 'checkpoints/2/metrics/metrics'
  figures = json.loads(path.read_text())
  figures['loss'] = 0.5
  figures = {change: figures.pop('loss'), **figures} if change == 'los_' else figures
  if change == 'digest':
    figures = {'loss': 0.5, 'diges_': figures['digest']}
  if change == 'no digest':
    figures = {'loss': 0.5}
  path.write_text(json.dumps(figures))
  with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=1)) as checkpoints:
    checkpoints.save(meta(4), state(4), 3.0, wait=True)
  assert checkpoint.Checkpoints(tmp_path).steps() == [1, 4]


def test_losses_that_cannot_be_read_do_not_keep_a_run_from_going_on(tmp_path):
  save(tmp_path, [1.0, 2.0])
  (tmp_path / 'checkpoints/1/metrics/metrics').write_text('{"loss": ')
  with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=2)) as checkpoints:
    assert checkpoints.steps() == [1, 2]
