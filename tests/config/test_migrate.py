"""JSON of earlier formats becomes today's; the changes here are invented, but for the real ones."""

import copy
import dataclasses

import pytest

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, DataConfig, GrowConfig, ModelConfig, migrate
from tokenformer_jax.config.migrate import Change
from tokenformer_jax.errors import UserError
from tokenformer_jax.runs import checkpoint_meta
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Seen

CONFIG = Config(model=ModelConfig(width=64), data=DataConfig(batch_size=8))
ANCESTOR = Ancestor('grow', '/runs/a', 4, ModelConfig(width=32), GrowConfig(), 4)


def stored(format_=migrate.FORMAT, **changes):
  """The `meta` of a checkpoint of step 5."""
  return {
    'format': format_,
    'step': 5,
    'updates': 5,
    'config': config_lib.to_json(CONFIG),
    'lineage': [config_lib.to_json(ANCESTOR)],
    'contents': 'model',
    'checksums': {'params/blocks/ffn/keys': 1, 'opt_state/0/mu/blocks/ffn/keys': 2, 'step': 3},
    'seen': {'samples': 40, 'digest': 'abc'},
    **changes,
  }


def test_what_format_1_left_out_is_filled_in():
  of_format_1 = {'config': {'data': {'batch_size': 8}}, 'lineage': []}
  old = stored(1, **of_format_1)
  del old['seen']
  meta = checkpoint_meta.from_json(old, {}, 'a run')
  assert meta.seen == Seen(samples=5 * 8), 'the run would see samples again, or miss some'
  assert checkpoint_meta.from_json(stored(1, **of_format_1), {}, 'a run').seen == Seen(40, 'abc')


def test_todays_json_is_left_as_it_is():
  assert migrate.meta(stored()) == stored()
  meta = checkpoint_meta.from_json(stored(), {}, 'a run')
  assert (meta.config, meta.lineage, meta.stored_paths) == (CONFIG, (ANCESTOR,), {})


def test_keys_and_values_of_a_config_get_their_new_names():
  change = Change(
    keys={'train.remat': 'train.keep', 'mesh': 'devices', 'a.x': 'b.y', 'b.y': 'a.x'},
    values={'train.keep': {'none': 'everything', 'full': 'none'}},
  )
  old = {
    'train': {'remat': 'none', 'remat_other': 'none'},
    'mesh': {'fsdp': 2},
    'mesh_other': {'fsdp': 3},
    'a': {'x': 1},
    'b': {'y': 2},
  }
  assert migrate.config(old, 1, {2: change}) == {
    'train': {'keep': 'everything', 'remat_other': 'none'},
    'devices': {'fsdp': 2},
    'mesh_other': {'fsdp': 3},
    'a': {'x': 2},
    'b': {'y': 1},
  }
  assert old['train'] == {'remat': 'none', 'remat_other': 'none'}, 'the argument was changed'


def test_a_key_can_move_into_a_group_and_get_values_of_another_type():
  change = Change(
    keys={'model.init_std': 'model.init.std', 'train.scan_layers': 'train.layers'},
    values={'train.layers': {True: 'scan', False: 'unrolled'}},
  )
  old = {'model': {'width': 8, 'init_std': 0.5}, 'train': {'scan_layers': False}}
  assert migrate.config(old, 1, {2: change}) == {
    'model': {'width': 8, 'init': {'std': 0.5}},
    'train': {'layers': 'unrolled'},
  }


def test_a_value_is_renamed_once_and_only_if_it_is_that_value():
  change = Change(values={'a': {1: 2, 2: 3}})
  values = [1, 2, True, 1.0, 'x', [1]]
  found = [migrate.config({'a': value}, 1, {2: change})['a'] for value in values]
  assert [*map(repr, found)] == ['2', '3', 'True', '1.0', "'x'", '[1]']


def test_only_the_changes_since_a_format_are_made_and_the_oldest_first():
  changes = {3: Change(keys={'b': 'c'}), 2: Change(keys={'a': 'b'}, arrays={'x': 'y'})}
  assert migrate.config({'a': 1}, 1, changes) == {'c': 1}
  assert migrate.config({'b': 1}, 2, changes) == {'c': 1}
  assert migrate.config({'b': 1}, 3, changes) == {'b': 1}
  assert migrate.array_path('x', 1, changes) == 'y'
  assert migrate.array_path('x', 2, changes) == 'x'


@pytest.mark.parametrize('values', [{}, {'train': 3}, {'train': {}}, {'train': {'a': {}}}])
def test_what_a_config_lacks_is_left_to_its_reader(values):
  change = Change(keys={'train.remat': 'train.keep'}, values={'train.keep': {'none': 'all'}})
  assert migrate.config(values, 1, {2: change}) == values


def test_a_checkpoint_and_its_lineage_get_the_new_names():
  old = stored()
  for model in (old['config']['model'], old['lineage'][0]['model']):
    model['depth'], model['last_norm'] = model.pop('pattern'), model.pop('final_norm')
  old['ran'] = old.pop('updates')
  change = Change(
    meta=lambda meta: {**meta, 'updates': meta['ran']},
    keys={'model.last_norm': 'model.final_norm'},
    config=lambda config: {**config, 'model': _with_pattern(config['model'])},
    arrays={'blocks/ffn': 'layers/mlp'},
  )
  changes = {**migrate.CHANGES, migrate.FORMAT + 1: change}
  meta = checkpoint_meta.from_json(old, {}, 'a run', changes)
  assert meta.config == CONFIG, 'the config is another one'
  assert meta.lineage == (ANCESTOR,), 'an ancestor is another one'
  assert meta.updates == 5
  assert meta.checksums == {
    'params/layers/mlp/keys': 1,
    'opt_state/0/mu/layers/mlp/keys': 2,
    'step': 3,
  }
  assert meta.stored_paths == {
    'params/layers/mlp/keys': 'params/blocks/ffn/keys',
    'opt_state/0/mu/layers/mlp/keys': 'opt_state/0/mu/blocks/ffn/keys',
  }


def _with_pattern(model):
  return {**{k: v for k, v in model.items() if k != 'depth'}, 'pattern': model['depth']}


def test_names_of_arrays_are_whole_parts_and_the_longest_counts():
  changes = {2: Change(arrays={'keys': 'in', 'ffn/keys': 'up', 'up': 'keys'})}
  paths = ['blocks/ffn/keys', 'keys', 'qkv/keys', 'monkeys/keys_2', 'up/ffn']
  found = [migrate.array_path(path, 1, changes) for path in paths]
  assert found == ['blocks/up', 'in', 'qkv/in', 'monkeys/keys_2', 'keys/ffn']


@pytest.mark.parametrize('format_', [0, -1, '1', True, None, 1.0])
def test_what_is_no_format_is_refused(format_):
  with pytest.raises(UserError, match=r'^the format .* in /runs/a is not a number from 1 on'):
    checkpoint_meta.from_json(stored(format_), {}, '/runs/a')


def test_a_later_format_is_refused():
  with pytest.raises(migrate.LaterFormatError, match=r'^/runs/a has the format .* a newer one$'):
    checkpoint_meta.from_json(stored(migrate.FORMAT + 1), {}, '/runs/a')


# Format 2, in which all layers were equal and their keys stood side by side

MODEL_2 = {
  'kind': 'lm',
  'projection': 'pattention',
  'layers': 3,
  'width': 32,
  'heads': 2,
  'vocab_size': 64,
  'param_tokens': {'qkv': 8, 'proj': 12, 'ffn': 20},
  'reference_tokens': {'qkv': 0, 'proj': 6, 'ffn': 10},
  'score': 'l2_norm_gelu',
  'gelu': 'tanh',
  'row_epsilon': 1e-5,
  'ffn_width': 48,
  'bias': False,
  'block_norm': 'bias',
  'final_norm': 'plain',
  'norm_epsilon': 1e-6,
  'positions': 'rotary',
  'rotary_fraction': 0.5,
  'rotary_base': 500.0,
  'window': 7,
  'max_length': 16,
  'tied_head': False,
  'scaled_logits': True,
  'patch': 16,
  'channels': 0,
  'classes': 0,
  'pool': 'mean',
  'init': {'std': 0.1, 'embedding_std': 0.5},
}
ROTARY, NO_POSITIONS = config_lib.RotaryConfig(0.5, 500.0), config_lib.NoPositionsConfig()
MATRIX = config_lib.DenseConfig(bias=True)
SCORE = config_lib.pattention.L2NormGELU(1e-5, 'tanh')


def _model_3(positions=ROTARY, score=SCORE, parts=None, **changes):
  """Return what `MODEL_2` is today, with other parts."""
  qkv, proj, ffn = parts or (
    config_lib.PattentionConfig(8, 0, score),
    config_lib.PattentionConfig(12, 6, score),
    config_lib.PattentionConfig(20, 10, score),
  )
  model = ModelConfig(
    pattern='layer*3',
    width=32,
    layer=config_lib.LayerConfig(
      config_lib.SoftmaxConfig(2, 7, positions, qkv, proj), ffn, norm='bias'
    ),
    norm_epsilon=1e-6,
    final_norm='plain',
    max_length=16,
    vocab_size=64,
    tied_head=False,
    scaled_logits=True,
    init=config_lib.InitConfig(0.1, 0.5),
  )
  return dataclasses.replace(model, **changes)


@pytest.mark.parametrize(
  ('changes', 'want'),
  [
    pytest.param({}, _model_3(), id='pattention'),
    pytest.param(
      {'projection': 'dense', 'bias': True},
      _model_3(parts=(MATRIX, MATRIX, config_lib.MLPConfig(48, True, 'gelu_tanh'))),
      id='dense',
    ),
    *(
      pytest.param(
        {'positions': embedding},
        _model_3(NO_POSITIONS, position_embedding=embedding),
        id=embedding,
      )
      for embedding in ('learned', 'sincos', 'none')
    ),
    *(
      pytest.param(
        {'score': kind}, _model_3(score=config_lib.pattention.SCORES[kind](1e-5)), id=kind
      )
      for kind in ('softmax', 'exp_l2_norm')
    ),
    pytest.param(
      {'score': 'gelu_l1_norm'},
      _model_3(score=config_lib.pattention.GELUL1Norm(1e-5, 'tanh')),
      id='gelu_l1_norm',
    ),
  ],
)
@pytest.mark.parametrize('of_format_1', [False, True])
def test_a_model_of_format_2_has_the_same_parts_today(changes, want, of_format_1):
  old = {**copy.deepcopy(MODEL_2), **changes}
  if of_format_1:
    init = old.pop('init')
    old |= {'init_std': init['std'], 'embedding_std': init['embedding_std']}
  before = copy.deepcopy(old)
  stored_model = migrate.config({'model': old}, 1 if of_format_1 else 2)
  model = config_lib.from_dict(Config, stored_model).model
  assert model == want and model.init == want.init, 'a stored model is read as another one'
  assert old == before, 'the argument was changed'
  left = _paths(config_lib.to_json(model)) - _paths(stored_model['model'])
  assert left <= SINCE_FORMAT_3, 'a key of format 2 is left to its default'


# Keys whose default is what every model of format 2 computes.
SINCE_FORMAT_3 = {
  'layer.ffn.gated',
  'layer.ffn.groups',
  'layer.mixer.proj.groups',
  'layer.mixer.qkv.groups',
  *(
    'init.output_std',
    'init.attention_kernels',
    'init.ffn_gain',
    'norm_epsilon_outside',
    'embedding_norm',
  ),
  *('layer.ffn.groups', 'layer.mixer.proj.groups', 'layer.mixer.qkv.groups'),
  *('layer.wiring.kind', 'layer.mixer.shaped', 'layer.mixer.length_scale.kind'),
  *('layer.mixer.value.kind', 'layer.mixer.value_skip', 'layer.mixer.proj_skip', 'layer.ffn_norm'),
  *('layer.mixer.positions.layout', 'layer.mixer.positions.clip'),
}


def _paths(groups, prefix=''):
  """Return the dotted paths of the values in nested dicts."""
  found = set()
  for name, value in groups.items():
    is_group = isinstance(value, dict) and value
    found |= _paths(value, f'{prefix}{name}.') if is_group else {f'{prefix}{name}'}
  return found


def test_a_key_that_a_file_of_format_2_lacks_has_the_default_of_that_format():
  old = {'model': {'layers': 7, 'param_tokens': {'ffn': 64}}}
  model = config_lib.from_dict(Config, migrate.config(old, 2)).model
  assert model.depth == 7 and config_lib.token_counts(model) == {'qkv': 128, 'proj': 128, 'ffn': 64}
  assert model.layer.mixer.positions == config_lib.RotaryConfig()


@pytest.mark.parametrize(
  'model', [3, {'layers': 'x'}, {'param_tokens': 3}, {'projection': []}, {'score': {}}]
)
def test_what_is_wrong_in_a_model_of_format_2_is_left_to_its_reader(model):
  with pytest.raises(UserError):
    resolved = config_lib.from_dict(Config, migrate.config({'model': model}, 2))
    assert resolved.model.repeats


# Format 3, in which `restart_schedule` was yes or no for every schedule


@pytest.mark.parametrize(
  ('name', 'was', 'now'),
  [
    ('cosine', True, ''),
    ('cosine', False, 'no'),
    ('constant', True, 'yes'),
    ('constant', False, 'no'),
    ('constant', None, 'yes'),
  ],
)
def test_an_old_schedule_restarts_as_it_did(name, was, now):
  old = {'schedule': name, 'final_fraction': 0.0}
  if was is not None:
    old['restart_schedule'] = was
  new = migrate.config({'optim': old}, 3)['optim']
  assert new['restart_schedule'] == now, 'the rate after a growth is another one'
  assert ('final_fraction' in new) == (name == 'cosine'), 'a key without a meaning is kept'
