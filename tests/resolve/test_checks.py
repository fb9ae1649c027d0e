"""A run is checked before its data is read."""

import types

import jax
import numpy as np
import pytest
import tiny_run
from written_runs import save_run

from tokenformer_jax.config import Config, TrainConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.resolve import checks
from tokenformer_jax.storage import paths
from tokenformer_jax.tasks.text import TextTask
from tokenformer_jax.training.prepare import prepare

STEP = 10  # of the checkpoint of `other`
WSD = {'optim__schedule': 'wsd', 'train__steps': 40}


@pytest.fixture(scope='module')
def other(source, tmp_path_factory):
  """The directory of a run with a checkpoint."""
  root = tmp_path_factory.mktemp('other')
  save_run(tiny_run.config(source, root / 'cache', train__steps=STEP), root / 'other', STEP)
  return root / 'other'


def _begin(config, workdir):
  return prepare(config, paths.parse_path(workdir), jax.devices()[:2])


FROM = '{other}'
MISTAKES = {
  'a batch that devices cannot share': ({'data__batch_size': 7}, 'batch'),
  'heads that devices cannot share': (
    {'mesh__fsdp': 1, 'mesh__tokens': 2, 'model__layer__mixer__heads': 1},
    'heads',
  ),
  'tokens that devices cannot share': (
    {'mesh__fsdp': 1, 'mesh__tokens': 2, 'model__layer__ffn__tokens': 63},
    "'param_tokens' of parameter",
  ),
  'another number of devices': ({'mesh__fsdp': 3}, 'number of devices, 2'),
  'another model': ({'init_from': FROM, 'model__width': 64}, 'model.width is 32 in the source'),
  'fewer tokens': (
    {'init_from': FROM, 'model__layer__ffn__tokens': 32},
    'ffn has 64 parameter tokens in the source, and 32 are fewer',
  ),
  'another optimizer': ({'init_from': FROM, 'optim__kind': 'lion'}, 'config.optim.kind is lion'),
  'no step left': ({'init_from': FROM, 'train__steps': STEP}, 'raise it, or set config.grow.step'),
  'a decay in the past': (
    {'init_from': FROM, **WSD, 'train__decay_from': STEP - 2},
    'the decay would have begun in the past',
  ),
  'a decay in the past of a run in epochs': (
    {'init_from': FROM, **WSD, 'train__steps': 1000, 'train__epochs': 9.0}
    | {'train__decay_from': STEP - 2},
    'the decay would have begun in the past',
  ),
  'a decay within another one': (
    {'init_from': FROM, **WSD, 'train__decay_from': STEP + 2},
    'has begun to decay already (optim.schedule=cosine of 10 steps)',
  ),
  'an order at another step': ({'data__new_order_at': 4}, 'config.data.new_order_at is 4'),
  'keys of a growth without one': ({'grow__seed': 4}, 'config.grow.seed is 4'),
  'a tokenizer of another size': (
    {'init_from': FROM, 'data__tokenizer': 'bpe:300'},
    "config.data.tokenizer is 'bpe:300'",
  ),
  'old tokens of a new model': ({'optim__old_tokens': 'freeze'}, 'config.optim.old_tokens is'),
  'old tokens of a model that has not grown': (
    {'init_from': FROM, 'optim__old_tokens': 'freeze'},
    "old_tokens is 'freeze', but this model has no tokens newer",
  ),
  'one group to nest': ({'train__nested_rows': 2}, 'config.train.nested_rows is 2'),
  'a vocabulary without the ids': ({'model__vocab_size': 8}, 'config.model.vocab_size is 8'),
}


@pytest.mark.parametrize('name', MISTAKES)
def test_a_mistake_that_needs_no_data_is_reported_before_any_is_read(
  make, other, tmp_path, monkeypatch, name
):
  changes, sentence = MISTAKES[name]
  monkeypatch.setattr(TextTask, 'prepare', lambda self: pytest.fail('the text was read'))
  if 'init_from' in changes:
    changes = {**changes, 'init_from': changes['init_from'].format(other=other)}
  with pytest.raises(UserError) as error:
    _begin(make(**changes), tmp_path / 'run')
  assert sentence in str(error.value)
  assert not (tmp_path / 'cache').exists(), 'tokens were written'


def test_a_finished_run_is_not_given_other_data(make, other, monkeypatch):
  monkeypatch.setattr(TextTask, 'prepare', lambda self: pytest.fail('the text was read'))
  config = make(train__steps=STEP, data__deduplicate=True)
  with pytest.raises(UserError, match='so none would be made with what differs'):
    _begin(config, other)


def test_a_gpu_without_an_order_of_sums_is_refused():
  mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform='gpu')]))
  config = Config(train=TrainConfig(check_devices=10))
  with pytest.raises(UserError, match='compiler_options=auto; set that to deterministic'):
    checks.check_before_data(types.SimpleNamespace(config=config, mesh=mesh))
