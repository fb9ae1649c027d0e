"""The checkpoint with the lowest loss is kept, and only a sound loss counts."""

import contextlib
import json
import math

from written_runs import meta, save, state

from tokenformer_jax.runs import checkpoint


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path):
  save(tmp_path, [math.nan, 2.0, math.inf, 3.0], keep=1)
  assert checkpoint.Checkpoints(tmp_path).steps() == [2, 4], 'the best one, or the last, is gone'


def test_the_best_checkpoint_stays_when_a_run_goes_on(tmp_path):
  save(tmp_path, [1.0, 2.0], keep=1)
  with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=1)) as checkpoints:
    checkpoints.save(meta(3), state(3), 3.0, wait=True)
  assert checkpoint.Checkpoints(tmp_path).steps() == [1, 3], 'which one was the best is forgotten'


def test_a_loss_that_changed_on_the_disk_is_never_the_best(tmp_path):
  """Here 5.0 becomes 0.5, or loses the name or the digest that shows it to be sound."""
  save(tmp_path, [1.0, 5.0, 5.0, 5.0, 5.0])
  paths = [tmp_path / f'checkpoints/{step}/metrics/metrics' for step in (2, 3, 4, 5)]
  digest = json.loads(paths[0].read_text())['digest']
  for path, figures in zip(
    paths,
    (
      {'loss': 0.5, 'digest': digest},
      {'los_': 0.5, 'digest': digest},
      {'loss': 0.5, 'diges_': digest},
      {'loss': 0.5},
    ),
    strict=True,
  ):
    path.write_text(json.dumps(figures))
  with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=1)) as checkpoints:
    checkpoints.save(meta(6), state(6), 3.0, wait=True)
  assert checkpoint.Checkpoints(tmp_path).steps() == [1, 6]


def test_losses_that_cannot_be_read_do_not_keep_a_run_from_going_on(tmp_path):
  save(tmp_path, [1.0, 2.0])
  (tmp_path / 'checkpoints/1/metrics/metrics').write_text('{"loss": ')
  with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=2)) as checkpoints:
    assert checkpoints.steps() == [1, 2]
