"""Training, evaluation and a teacher read the documents of a row as `data.documents` says."""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from outcomes import assert_close
from tiny import normal_params
from tiny_trained import LENGTH, trained

from tokenformer_jax import tasks
from tokenformer_jax.data import marks
from tokenformer_jax.decoding import evaluation, perplexity
from tokenformer_jax.decoding.score import Row
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.loss import loss_sums
from tokenformer_jax.resolve.facts import complete

END = 0xFF


@pytest.fixture(scope='module')
def packed(tmp_path_factory):
  """Return a function that makes the config of a run on documents of a few tokens."""
  root = tmp_path_factory.mktemp('packed')
  rng = np.random.default_rng(0)
  lines = (
    json.dumps({'text': ''.join(rng.choice(list('abcdefgh '), size))})
    for size in rng.integers(1, 20, 400)
  )
  (root / 'texts.jsonl').write_text('\n'.join(lines))
  source = f'files:{root}/texts.jsonl'
  return lambda **changes: tiny_run.config(source, root / 'cache', **changes)


def _task(config, teacher=None) -> tasks.Task:
  task = tasks.make(complete(config), None, teacher)
  task.prepare()
  return task


def _batch(task: tasks.Task) -> np.ndarray:
  rows = range(task.config.data.batch_size)
  with contextlib.closing(task.train_batches(rows, 0, 1)) as batches:
    return marks.ids_alone(next(batches))


def _alone(batch: np.ndarray) -> np.ndarray:
  """Return the inputs and targets of each document in a row of its own, [N, 2, T]."""
  rows = []
  for inputs, targets in zip(batch[:, :-1], batch[:, 1:], strict=True):
    starts = sorted({0, *np.flatnonzero(inputs == END)})
    for start, stop in zip(starts, [*starts[1:], len(inputs)], strict=True):
      row = np.full((2, len(inputs)), -1, np.int32)
      row[0, : stop - start], row[1, : stop - start] = inputs[start:stop], targets[start:stop]
      rows.append(row)
  return np.stack(rows)


def _loss_alone(task: tasks.Task, params, rows_Nx2xT: np.ndarray) -> jax.Array:
  """Return the mean loss of documents that are in no row with others."""
  model = task.definition.bind(params)
  ids, targets = rows_Nx2xT[:, 0], rows_Nx2xT[:, 1]
  hidden, _, _ = model.hidden(jnp.maximum(ids, 0), Context.from_ids(ids))
  sums = loss_sums(hidden, model.output_embedding, targets, chunk=64)
  return sums.nats / sums.tokens


@pytest.mark.slow
def test_the_loss_is_that_of_documents_alone_and_every_target_counts(packed):
  task = _task(packed(data__documents='separate'))
  batch, params = _batch(task), normal_params(task.definition, 0.2)
  rows = _alone(batch)
  assert len(rows) > 2 * len(batch), 'rows hold no documents'

  loss = jax.jit(jax.value_and_grad(lambda params: task.loss(params, batch, jax.random.key(0))[0]))
  want = jax.jit(jax.value_and_grad(lambda params: _loss_alone(task, params, rows)))
  assert_close(loss(params), want(params), 'training')
  sums = jax.jit(task.sums)(params, batch)
  assert sums.counts.targets == batch[:, 1:].size, 'a target does not count'
  found = task.eval_figures(jax.device_get(sums))['loss']
  np.testing.assert_allclose(found, want(params)[0], rtol=1e-5, err_msg='evaluation')
  joined = _task(packed())
  other = jax.jit(joined.sums)(params, batch)
  assert abs(joined.eval_figures(jax.device_get(other))['loss'] - found) > 1e-3, 'documents is idle'


def test_a_text_is_scored_as_its_documents_were_trained():
  model = trained(1, layers=1, dense=True, ffn_width=48)
  data = dataclasses.replace(model.config.data, documents='separate')
  meta = dataclasses.replace(model.meta, config=dataclasses.replace(model.config, data=data))
  scorer = evaluation.make_scorer(dataclasses.replace(model, meta=meta), LENGTH)
  documents = ['naïve', 'Now is better.', 'ugly']
  found = perplexity.measure(scorer, model.tokenizer, documents)
  rows = [Row([END], [*text.encode(), END]) for text in documents]
  alone = evaluation.make_scorer(model, LENGTH)(rows)
  assert found.tokens == sum(len(row.continuation) for row in rows) <= LENGTH
  nats = -sum(score.log_prob for score in alone)
  assert found.loss * found.tokens == pytest.approx(nats, rel=1e-5)
