"""Runs on a mixture: they resume exactly, keep the order of their data, and tell of each source."""

import dataclasses
import math

import pytest
import tiny_run
from outcomes import assert_same
from tiny_run import broken, prepared, train_on_one_device
from written_runs import save_run

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import SourceConfig, Sources
from tokenformer_jax.data import order
from tokenformer_jax.errors import UserError
from tokenformer_jax.runs import metrics
from tokenformer_jax.training import loop

pytestmark = pytest.mark.slow  # because almost every test trains a run
WEIGHTS = {'new': {'weight': 0.75}, 'old': {'weight': 0.25}}
SEVEN = {'train__checkpoint_every': 7, 'train__keep_checkpoints': 9}
VARYING = {'new': {'weight_by_step': '0:0.25 9:1'}, 'old': {'weight_by_step': '0:0.75 9:0'}}


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
  """The folder of two corpora."""
  return tiny_run.write_two_corpora(tmp_path_factory.mktemp('mixture'))


def mixed(texts, weights=WEIGHTS, **changes) -> config_lib.Config:
  """The config of a tiny run on both corpora."""
  config = tiny_run.config('stdlib', texts / 'cache', **changes)
  sources = {
    name: SourceConfig(source=f'files:{texts}/{name}/*.txt', **own) for name, own in weights.items()
  }
  return dataclasses.replace(
    config, data=dataclasses.replace(config.data, mixture=Sources(sources))
  )


@pytest.fixture(scope='module')
def run(texts, tmp_path_factory):
  """The work directory of a whole run, and its last state."""
  workdir = tmp_path_factory.mktemp('run') / 'run'
  return workdir, train_on_one_device(mixed(texts, train__ema=0.9), workdir)


def test_a_run_writes_the_figures_of_each_source(run):
  lines = metrics.read(run[0])
  last = [line for line in lines if 'eval/loss' in line][-1]
  losses = {name: last[f'eval/{name}/loss'] for name in WEIGHTS}
  mean = 0.75 * losses['new'] + 0.25 * losses['old']
  assert last['eval/loss'] == pytest.approx(mean), 'eval/loss is not the mean by the weights'
  assert last['eval/perplexity'] == pytest.approx(math.exp(mean))
  assert last['eval/ema_loss'] == pytest.approx(
    0.75 * last['eval/new/ema_loss'] + 0.25 * last['eval/old/ema_loss']
  )
  assert abs(losses['new'] - losses['old']) > 0.01, 'both have the figures of one'
  epochs = [line for line in lines if 'train/loss' in line][-1]
  assert epochs['data/new/epochs'] > 0 and epochs['data/old/epochs'] > 0


@pytest.fixture(scope='module')
def varying(texts, tmp_path_factory):
  """The same of a run whose weights change between checkpoints."""
  workdir = tmp_path_factory.mktemp('varying') / 'run'
  return workdir, train_on_one_device(mixed(texts, VARYING, **SEVEN), workdir)


def test_a_resumed_mixture_ends_bit_for_bit_where_an_unbroken_one_does(
  texts, tmp_path, one_device, varying
):
  workdir, whole = varying
  again = broken(workdir, tmp_path / 'again', 7)
  assert_same(loop.train(mixed(texts, VARYING, **SEVEN), again), whole, 'resumed')
  last = [metrics.read(path)[-2] for path in (workdir, again)]
  assert last[0]['data/new/epochs'] == last[1]['data/new/epochs'], 'epochs are counted anew'


def test_other_weights_are_refused_unless_they_are_asked_for(texts, run, one_device):
  change = {'new': {'weight': 0.5}, 'old': {'weight': 0.5}}
  with pytest.raises(UserError) as error:
    prepared(mixed(texts, change, train__steps=30, train__ema=0.9), run[0])
  assert 'config.data.mixture.new.weight is 0.5 and was 0.75' in str(error.value)
  assert 'config.data.new_order_at=20' in str(error.value)
  asked = mixed(texts, change, train__steps=30, train__ema=0.9, data__new_order_at=20)
  assert prepared(asked, run[0]).position == order.Position(20, 0)


def test_another_size_of_batches_is_another_order_if_weights_change_over_steps(
  texts, varying, one_device
):
  with pytest.raises(UserError, match=r'config\.data\.batch_size is 16 and was 8'):
    prepared(mixed(texts, VARYING, data__batch_size=16, train__steps=30), varying[0])


def test_a_run_on_one_source_goes_on_with_a_mixture_as_other_data(texts, tmp_path, one_device):
  source = f'files:{texts}/old/*.txt'
  save_run(tiny_run.config(source, texts / 'cache'), tmp_path / 'run', 5)
  config = mixed(texts)
  found = prepared(config, tmp_path / 'run')
  assert found.position == order.Position(5, 0), 'the mixture does not begin with its first sample'
  assert found.task.vocabulary() == found.origin.meta.tokenizer


def test_a_source_of_weight_zero_is_evaluated_and_not_trained_on(texts, tmp_path, one_device):
  only = {'new': {'weight': 1.0}, 'old': {'weight': 0.0}}
  loop.train(mixed(texts, only, train__checkpoint_every=20), tmp_path / 'run')
  lines = metrics.read(tmp_path / 'run')
  last = lines[-1]
  assert last['eval/loss'] == pytest.approx(last['eval/new/loss'])
  assert last['eval/old/loss'] > 0
  assert lines[0]['data/old/epochs'] == 0
