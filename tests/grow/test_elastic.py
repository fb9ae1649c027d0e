"""Elastic models: some rows of each batch train the first groups of parameter tokens alone."""

import dataclasses
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from grow_commands import read as read_state
from growing import IDS, by_name, params_of
from outcomes import assert_close, assert_same, losses
from tiny import tiny_model

from tokenformer_jax import tasks
from tokenformer_jax.config import Config, growth
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import flops
from tokenformer_jax.model.layer import Counts
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.steps import elastic
from tokenformer_jax.training import loop
from tokenformer_jax.training.prepare import prepare

SLOW = pytest.mark.slow  # because of what is compiled
SMALL = tiny_model()
GROUP = growth(method='group')
MIDDLE = grown_model(SMALL, by_name(32, 48, 64), GROUP)
LARGE = grown_model(MIDDLE, by_name(48, 48, 100), GROUP)
GROUPS = {'model__layer__ffn__groups': '32 32', 'train__nested_rows': 4}


def test_each_row_trains_its_own_number_of_groups_with_the_counts_of_the_batch():
  def task_of(model):
    def loss(params, batch, key, counts):
      seen.append((params['blocks']['ffn']['values'].shape[1], batch.tolist(), int(counts.targets)))
      return jnp.sum(batch) / counts.targets, {'loss': jnp.sum(batch)}

    def counts(batch):
      return Counts(jnp.size(batch), jnp.size(batch), jnp.size(batch))

    own = types.SimpleNamespace(config=Config(model=model), definition=define_lm(model))
    own.with_model, own.loss, own.counts = task_of, loss, counts
    return own

  seen = []
  nested = elastic.with_nested_rows(task_of(LARGE), 4)
  total, figures = nested(params_of(LARGE), jnp.arange(8), jax.random.key(0))
  assert seen == [(100, [4, 5, 6, 7], 8), (48, [0, 1], 8), (64, [2, 3], 8)]
  assert (float(total), int(figures['loss'])) == (28 / 8, 28)


def test_nested_rows_cost_what_their_sizes_cost():
  config = Config(model=LARGE)
  nested = dataclasses.replace(config, train=dataclasses.replace(config.train, nested_rows=8))
  whole = flops.length(config)
  small, middle, large = (flops.train_flops(m, whole) for m in (SMALL, MIDDLE, LARGE))
  assert flops.unit_flops(nested) == pytest.approx((small + middle + 6 * large) / 8)
  assert flops.unit_flops(config) == large


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    ({'train__nested_rows': 4}, 'nested_rows is 4, and no projection of this model has'),
    ({**GROUPS, 'train__nested_rows': 1}, 'so that no row would train it whole; take at least 2'),
    ({**GROUPS, 'train__nested_rows': 3}, 'nested_rows is 3, which does not divide a batch of 8'),
    ({**GROUPS, 'optim__accumulation_steps': 4}, 'in optim.accumulation_steps=4 parts'),
  ],
)
def test_rows_that_cannot_be_nested_are_refused(tmp_path, changes, sentence):
  text = tiny_run.write_corpus(tmp_path / 'text')
  with pytest.raises(UserError, match=sentence):
    config = tiny_run.config(text, tmp_path / 'cache', **changes)
    prepare(config, tmp_path / 'run', jax.devices()[:1])


@SLOW
def test_the_loss_of_nested_rows_is_that_of_each_size_on_its_rows():
  task = tasks.make(Config(model=LARGE))
  params, key, ids = params_of(LARGE), jax.random.key(0), np.tile(IDS, (4, 1))
  counts = task.counts(ids)

  @jax.jit
  def both(params):
    nested = elastic.with_nested_rows(task, 4)(params, ids, key)[0]
    alone = task.loss(params, ids[4:], key, counts=counts)[0]
    for model, rows in ((SMALL, [0, 1]), (MIDDLE, [2, 3])):
      first = jax.tree.map(
        lambda array, like: array[tuple(map(slice, like.shape))], params, define_lm(model).abstract
      )
      alone += task.with_model(model).loss(first, ids[np.array(rows)], key, counts=counts)[0]
    return nested, alone

  assert_close(*both(params), 'the loss')


@SLOW
def test_a_nested_run_resumes_bit_for_bit_and_is_the_same_in_parts_and_on_devices(tmp_path):
  text = tiny_run.write_corpus(tmp_path / 'text')
  short = {**GROUPS, 'train__steps': 6, 'train__checkpoint_every': 3, 'train__log_every': 1}
  short |= {'data__batch_size': 32}  # 4 rows on each of 8 devices

  def run(name, **changes):
    config = tiny_run.config(text, tmp_path / 'cache', **{**short, **changes})
    loop.train(config, tmp_path / name)

  run('whole')
  shutil.copytree(tmp_path / 'whole', tmp_path / 'resumed')
  shutil.rmtree(tmp_path / 'resumed/checkpoints/6')
  run('resumed')
  assert_same(*(read_state(tmp_path / name) for name in ('resumed', 'whole')), 'resumed')
  run('parts', optim__accumulation_steps=2)
  run('sharded', mesh__fsdp=2, mesh__tokens=4)
  for other in ('parts', 'sharded'):
    for step, value in losses(tmp_path / 'whole').items():
      assert losses(tmp_path / other)[step] == pytest.approx(value, rel=1e-4), other
