"""Runs that skip a poisoned batch, and what becomes of their statistics."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from outcomes import assert_same, losses
from tiny_run import begun, broken, trainer

from tokenformer_jax.parallel import sharding
from tokenformer_jax.training import loop

GUARD = {'optim__skip_deviations': 4.0, 'optim__skip_window': 8}
BAD = 15
FOREIGN = 7  # a byte that the corpus does not have


def poison(batch):
  return jax.tree.map(lambda ids: jnp.full_like(ids, FOREIGN), batch)


def poisoned(make_batches, steps):
  """Return `Trainer.batches` with other batches at some steps."""

  def batches(first, say):
    with contextlib.closing(make_batches(first, say)) as given:
      for step, (stage, work, batch) in enumerate(given, start=first + 1):
        yield stage, work, poison(batch) if step in steps else batch

  return batches


def train(config, workdir, steps=(BAD,)):
  """Train with poisoned batches at some steps; return the last state."""
  run, state, first = loop.begin(config, workdir)
  run.batches = poisoned(run.batches, steps)
  with jax.set_mesh(run.mesh), contextlib.closing(run.checkpoints):
    return run.train(state, first)


def test_a_poisoned_batch_is_skipped_as_if_it_had_not_been_there(make, tmp_path, one_device, capfd):
  run = trainer(make(train__log_every=1, train__steps=17, **GUARD), tmp_path / 'run')
  with jax.set_mesh(run.mesh), contextlib.closing(run.checkpoints):
    # The run by hand, in which the bad step only counts.
    by_hand, _ = run.first_state()
    for step, (_, _, batch) in enumerate(run.batches(0, print), start=1):
      if step == BAD:
        more = {name: np.asarray(by_hand[name]) + np.int32(1) for name in ('step', 'skipped')}
        outliers = np.asarray(by_hand['recent']['outliers']) + np.int32(1)
        by_hand = {**by_hand, **more, 'recent': {**by_hand['recent'], 'outliers': outliers}}
      else:
        by_hand, figures = run.train_step(by_hand, batch)
        jax.block_until_ready(figures)
    run.batches = poisoned(run.batches, [BAD])
    ended = run.train(*run.first_state())
  assert_same(ended, by_hand, 'a run with a skipped batch')
  counts = losses(tmp_path / 'run', 'train/outlier_steps')
  assert counts == {step: step >= BAD for step in range(1, 18)}, 'other steps are skipped'
  assert counts == losses(tmp_path / 'run', 'train/skipped_steps')
  said = [line for line in capfd.readouterr().err.splitlines() if 'skipped' in line]
  assert len(said) == 17 - BAD + 1 and 'skipped 1' in said[0], 'the log does not show it'


@pytest.mark.slow
def test_a_run_that_is_resumed_skips_the_same_steps(make, tmp_path, one_device):
  config = make(train__keep_checkpoints=9, **GUARD)
  whole = train(config, tmp_path / 'run', (12, BAD))
  resumed = train(config, broken(tmp_path / 'run', tmp_path / 'again', 10), (12, BAD))
  assert int(resumed['recent']['outliers']) == 2
  assert_same(resumed, whole, 'after a resume between good steps')


@pytest.mark.slow
def test_the_guard_can_be_turned_on_and_off_between_starts(make, tmp_path, one_device):
  plain = loop.train(make(), tmp_path / 'plain')
  guarded = loop.train(make(**GUARD), tmp_path / 'guarded')

  def first_state(workdir, **changes):
    return begun(make(train__steps=30, **changes), workdir)[1]

  assert_same(first_state(tmp_path / 'guarded'), plain, 'a run whose guard is turned off')
  kept = first_state(tmp_path / 'guarded', **GUARD)
  assert_same(kept, guarded, 'a run that goes on')
  source = {'init_from': str(tmp_path / 'guarded'), 'model__layer__ffn__tokens': 96}
  for empty, size in (
    (first_state(tmp_path / 'guarded', **{**GUARD, 'optim__skip_window': 6}), 6),
    (first_state(tmp_path / 'plain', **GUARD), 8),
    (first_state(tmp_path / 'grown', **GUARD, **source), 8),
  ):
    recent = empty['recent']
    assert (int(recent['good']), recent['loss'].size) == (0, size), 'the statistics are not empty'


@pytest.mark.slow
def test_a_run_is_the_same_on_a_mesh_and_after_a_move_to_another(make, tmp_path, monkeypatch):
  config = make(train__log_every=1, train__keep_checkpoints=9, **GUARD)
  sizes = dataclasses.replace(config.mesh, fsdp=2, tokens=4)
  train(dataclasses.replace(config, mesh=sizes), tmp_path / 'many')
  monkeypatch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
  train(config, tmp_path / 'one')
  train(config, broken(tmp_path / 'many', tmp_path / 'moved', 10))
  one = losses(tmp_path / 'one')
  assert list(one) == list(range(1, 21))
  for name in ('many', 'moved'):
    got = losses(tmp_path / name)
    np.testing.assert_allclose(list(got.values()), list(one.values()), rtol=1e-4, err_msg=name)
    skipped = losses(tmp_path / name, 'train/outlier_steps')
    assert skipped == losses(tmp_path / 'one', 'train/outlier_steps') and skipped[20] == 1
