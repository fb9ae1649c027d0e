"""A run on conversations learns their answers only, each token of them as much as any other."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest
import short_chats
import tiny_run
from mixtures import KINDS
from outcomes import assert_close
from tiny import normal_params

from tokenformer_jax import tasks
from tokenformer_jax.config import (
  BiasBalanceConfig,
  CapacityConfig,
  DenseConfig,
  LossBalanceConfig,
  MeshConfig,
  RouterConfig,
)
from tokenformer_jax.data import marks
from tokenformer_jax.parallel import sharding
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.tasks.task import reported


@pytest.fixture(scope='module')
def chats(tmp_path_factory):
  """Return a function that makes the config of a run on short conversations."""
  root = tmp_path_factory.mktemp('chats')
  written = short_chats.write(root)
  source, rows = written['source'], written['rows']
  text_source = tiny_run.write_corpus(root / 'texts')

  def config(*, mixture: bool = False):
    changes = {'data__chat_template': written['chat_template'], 'model__pattern': 'layer'}
    if not mixture:
      return tiny_run.config(source, root / 'cache', data__rows=rows, **changes)
    sources = {
      'chat': {'source': source, 'rows': rows, 'weight': 0.5},
      'text': {'source': text_source, 'weight': 0.5},
    }
    return tiny_run.config('stdlib', root / 'cache', data__mixture=sources, **changes)

  return config


def _open(config) -> tuple[tasks.Task, np.ndarray, dict]:
  task = tasks.make(complete(config))
  task.prepare()
  with contextlib.closing(task.train_batches(range(config.data.batch_size), 0, 1)) as batches:
    batch = next(batches)
  return task, batch, normal_params(task.definition, 0.2)


def test_the_loss_is_the_mean_over_the_tokens_of_answers(chats):
  task, batch, params = _open(chats())
  counts = batch[:, 1:] >= 0
  assert 0.2 < counts.mean() < 0.9, 'the batch does not have both'
  gradient = jax.jit(step_lib._gradient(task.loss, 1, task.counts))
  _, figures = gradient(params, batch, jax.random.key(0))
  ids = marks.plain(batch)
  sums, (logits, _) = jax.jit(lambda p: (task.sums(p, batch).task, task.logits(p, ids)))(params)
  nats = np.logaddexp.reduce(logits, axis=-1)
  nats -= np.take_along_axis(np.asarray(logits), ids[:, 1:, None], axis=-1)[..., 0]
  expected = (nats * counts).sum() / counts.sum()
  assert_close(figures['loss'], expected, 'training counts other tokens')
  assert_close(sums.nats / sums.tokens, expected, 'evaluation counts other tokens')
  assert sums.tokens == counts.sum()
  nothing = marks.flip(ids)
  slope, figures = jax.device_get(gradient(params, nothing, jax.random.key(0)))
  assert figures['loss'] == 0
  assert not any(leaf.any() for leaf in jax.tree.leaves(slope)), 'a batch without answers teaches'


Z_LOSS = RouterConfig(z_loss=0.1)
ROUTED = {
  'switch': dataclasses.replace(
    KINDS['switch'],
    router=Z_LOSS,
    balance=LossBalanceConfig(1.0),
    dispatch=CapacityConfig(1.0, 1.0, least=1),
  ),
  'bias': dataclasses.replace(KINDS['sparse'], router=Z_LOSS, balance=BiasBalanceConfig()),
}


def _routed(chats, kind: str) -> tuple[tasks.Task, np.ndarray, dict]:
  """Return a task, parameters and a batch with all kinds of rows in its first half."""
  config = chats()
  dense = {'qkv': DenseConfig(), 'proj': DenseConfig()}  # compiles faster
  mixer = dataclasses.replace(config.model.layer.mixer, **dense)
  layer = dataclasses.replace(config.model.layer, mixer=mixer, ffn=ROUTED[kind])
  model = dataclasses.replace(config.model, layer=layer)
  task, batch, params = _open(dataclasses.replace(config, model=model))
  batch = batch.copy()
  batch[:4] = marks.flip(marks.plain(batch[:4]))  # rows without answers,
  batch[3, 9:] = batch[4] = -1  # a short one, and one without tokens
  return task, batch, params


def test_routers_have_the_losses_and_loads_of_the_whole_batch(chats):
  task, batch, params = _routed(chats, 'switch')
  task = tasks.make(task.config, None, task.config.model)
  teacher = jax.tree.map(lambda p: p[..., ::-1], params)

  @jax.jit
  def run(parts):
    counts = task.counts(batch)
    key = jax.random.key(0)
    found = jax.lax.map(lambda rows: task.loss(params, rows, key, teacher, counts=counts), parts)
    objective, figures = jax.tree.map(lambda x: x.sum(axis=0), found)
    return objective, reported(figures)

  whole, parts = (jax.device_get(run(batch.reshape(n, -1, batch.shape[1]))) for n in (1, 4))
  assert whole[1]['aux_loss'] > 0.1 and whole[1]['distill_loss'] > 0.1
  assert_close(parts, whole, 'the loss or a figure depends on the parts')


@pytest.mark.slow
def test_routers_have_the_gradient_of_the_whole_batch_on_a_mesh(chats):
  task, batch, params = _routed(chats, 'bias')

  def run(parts: int, batch):
    gradient = jax.jit(step_lib._gradient(task.loss, parts, task.counts))
    gradients, figures = jax.device_get(gradient(params, batch, jax.random.key(0)))
    return gradients, reported(figures)

  whole = run(1, batch)
  devices = sharding.make_mesh(MeshConfig(fsdp=2, experts=2), jax.devices()[:4])
  with jax.set_mesh(devices):
    parts = run(2, jax.device_put(batch, sharding.batch_sharding(devices)))
  assert_close(parts, whole, 'the gradient or a figure depends on the parts')


def test_a_mixture_has_conversations_beside_text(chats):
  task, batch, params = _open(chats(mixture=True))
  has_marks = (batch < 0).any(axis=1)
  assert has_marks.sum() == len(batch) // 2, 'text has marks, or conversations have none'
  sums = {name: [*found] for name, found in task.validation_parts(range(len(batch))).items()}
  sum_batch = jax.jit(task.sums)
  figures = task.parts_figures({n: sum_batch(params, one[0]) for n, one in sums.items()})
  assert all(np.isfinite(value) for value in figures.values())
  assert task.vocabulary()['chat']['source'].startswith('{% for m in messages %}')


def test_text_alone_compiles_the_program_that_it_had(chats):
  task, batch, _ = _open(chats())
  plain = tasks.make(
    dataclasses.replace(
      task.config, data=dataclasses.replace(task.config.data, rows='text', chat_template='')
    )
  )
  inputs, targets = plain.inputs_and_targets(batch)
  np.testing.assert_array_equal(inputs, batch[:, :-1])
  np.testing.assert_array_equal(targets, batch[:, 1:])
  assert plain.counts(marks.plain(batch)).targets == batch[:, 1:].size
