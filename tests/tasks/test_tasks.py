"""What every task says of itself, against what it does."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import pytest
import tiny_run

from tokenformer_jax import tasks
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.layer import Aux, Counts
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.resolve.sizes import DATA_SIZES
from tokenformer_jax.tasks.task import with_aux


@pytest.fixture(params=['text', 'images'])
def task(request, tmp_path):
  if request.param == 'images':
    config = tiny_run.vit_config(data__prefetch=1)
  else:
    source = tiny_run.write_corpus(tmp_path / 'text')
    config = tiny_run.config(source, tmp_path / 'cache')
  made = tasks.make(complete(config))
  made.prepare()
  return made


def test_a_plan_has_the_batches_that_a_run_reads(task):
  rows = range(task.config.data.batch_size)
  with contextlib.closing(task.train_batches(rows, 0, 1)) as batches:
    batch = next(batches)
  shapes = jax.tree.map(lambda x: (x.shape, x.dtype), batch)
  planned = jax.tree.map(lambda x: (x.shape, x.dtype), task.abstract_batch())
  assert shapes == planned, 'a plan compiles the step for other batches'


def _with_model(task, **sizes):
  model = dataclasses.replace(task.config.model, **sizes)
  return dataclasses.replace(task.config, model=model)


def test_sizes_that_need_no_data_are_those_of_the_data(task):
  config = complete(_with_model(task, max_length=0), read=False)
  assert config.model == task.config.model, 'a plan is for another model'


def test_the_size_that_only_the_data_has_is_read(task):
  model = task.config.model
  config = _with_model(task, **{DATA_SIZES[model.kind]: 0})
  assert complete(config, read=False).model.kind == model.kind
  gone = {'lm': {'tokenizer': '/none.json'}, 'vit': {'source': 'folder:/none'}}[model.kind]
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, **gone))
  with pytest.raises(UserError, match='/none'):
    complete(config, read=False)


def test_the_loss_of_layers_is_minimised_and_not_reported_as_the_loss():
  aux = Aux({'tokens': jnp.float32(6)}, {'size': jnp.float32(9)})
  objective, figures = with_aux(jnp.float32(5), jnp.float32(4), aux, Counts(2, 3, 1))
  assert (objective, figures['loss'], figures['aux_loss']) == (5 + 6 / 3, 4, 2)
  assert figures['layers'] == {'size': 3}
