"""What a config may be, and the sentence for what it may not."""

import dataclasses

import pytest
from changing import refusal, resolved
from hypothesis import given
from hypothesis import strategies as st

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, InitConfig, MeshConfig
from tokenformer_jax.errors import UserError


def test_the_defaults_are_a_config():
  assert config_lib.to_json(resolved()) == config_lib.to_json(Config()), (
    'the defaults are not what the dataclasses say'
  )


def test_a_change_is_kept():
  counts = config_lib.token_counts(resolved(model__layer__ffn__tokens=96).model)
  assert counts == {'qkv': 128, 'proj': 128, 'ffn': 96}


@pytest.mark.parametrize('value', [1, 0])
def test_an_integer_passes_for_a_float(value):
  got = resolved(optim__weight_decay=value).optim.weight_decay
  assert (got, type(got)) == (value, float), '--config.optim.weight_decay=0 is refused'


NUMBERS = st.floats(1e-9, 1e9)


@given(
  layers=st.integers(1, 100),
  rate=NUMBERS,
  counts=st.tuples(*[st.integers(1, 10**6)] * 3),
  mesh=st.tuples(*[st.sampled_from([-1, 1, 2, 8])] * 3),
  tied=st.booleans(),
  text=st.text('abc/:*.', max_size=8),
)
def test_a_config_survives_being_stored(layers, rate, counts, mesh, tied, text):
  config = Config(
    model=dataclasses.replace(
      Config().model,
      pattern=f'layer*{layers}',
      tied_head=tied,
      layer=config_lib.LayerConfig(
        mixer=config_lib.SoftmaxConfig(
          qkv=config_lib.PattentionConfig(counts[0]), proj=config_lib.PattentionConfig(counts[1])
        ),
        ffn=config_lib.PattentionConfig(counts[2]),
      ),
      init=InitConfig(std=rate),
    ),
    optim=dataclasses.replace(Config().optim, learning_rate=rate),
    mesh=MeshConfig(*mesh),
    init_from=text,
  )
  values = config_lib.to_json(config)
  assert config_lib.to_json(config_lib.from_dict(Config, values)) == values, (
    'a checkpoint describes another run'
  )


def test_a_key_missing_in_a_stored_config_has_its_default():
  config = config_lib.from_dict(Config, {'model': {'width': 64}})
  assert config.model == dataclasses.replace(Config().model, width=64)


# Unknown keys


@pytest.mark.parametrize(
  ('path', 'sentence'),
  [
    ('optimizer', "config key 'optimizer' is unknown; did you mean 'optim'?"),
    ('model__layr', "config key 'model.layr' is unknown; did you mean 'model.layer'?"),
    (
      'model__layer__fnn',
      "config key 'model.layer.fnn' is unknown; did you mean 'model.layer.ffn'?",
    ),
    (
      'model__layer__ffn__tokns',
      "config key 'model.layer.ffn.tokns' is unknown; did you mean 'model.layer.ffn.tokens'?",
    ),
    (
      'model__heads',
      "config key 'model.heads' is unknown; did you mean 'model.layer.mixer.heads'?",
    ),
    (
      'mesh__xyz',
      "config key 'mesh.xyz' is unknown; known names: experts, fsdp, replica, sequence, tokens",
    ),
  ],
)
def test_an_unknown_key_is_told_the_nearest(path, sentence):
  assert refusal(**{path: 1}) == sentence, 'a mistyped key is not put right'


@pytest.mark.parametrize(
  ('path', 'kind'),
  [
    ('model.pattern', str),
    ('model.layer.mixer.qkv.tokens', int),
    ('model.layer.ffn.kind', str),
    ('model.variants.a.ffn.gated', bool),
    ('data.mixture.law.weight', float),
    ('train.trackers', tuple),
    ('dtype', str),
  ],
)
def test_every_key_has_a_type(path, kind):
  assert config_lib.type_of(path) is kind


@pytest.mark.parametrize(
  ('path', 'sentence'),
  [
    ('model.layr', "config key 'model.layr' is unknown; did you mean 'model.layer'?"),
    ('modell.width', "config key 'modell' is unknown; did you mean 'model'?"),
    (
      'model.layer.mixer.head',
      "config key 'model.layer.mixer.head' is unknown; did you mean 'model.layer.mixer.heads'?",
    ),
    (
      'model.layer.qkv.tokens',
      "config key 'model.layer.qkv' is unknown; did you mean 'model.layer.mixer.qkv.tokens' or "
      "'model.layer.mixer.qkv.beside.tokens'?",
    ),
    (
      'model.variants.local.mixer.windw',
      "config key 'model.variants.local.mixer.windw' is unknown; did you mean "
      "'model.variants.local.mixer.window'?",
    ),
    (
      'model.variants.local.window',
      "config key 'model.variants.local.window' is unknown; did you mean "
      "'model.variants.local.mixer.window'?",
    ),
    ('model.layers', "config key 'model.layers' is unknown; did you mean 'model.layer'?"),
    ('model.steps', "config key 'model.steps' is unknown; did you mean 'train.steps'?"),
    ('batch_size', "config key 'batch_size' is unknown; did you mean 'data.batch_size'?"),
    ('seed', "config key 'seed' is unknown; did you mean 'train.seed' or 'grow.seed'?"),
    ('dtype.x', "config key 'dtype.x' is unknown; config.dtype is a single value"),
  ],
)
def test_an_unknown_key_has_a_nearest_one(path, sentence):
  with pytest.raises(UserError) as error:
    config_lib.type_of(path)
  assert str(error.value) == sentence, 'a mistyped flag is not put right'


# Models


def test_models_that_are_drawn_otherwise_are_equal():
  a, b = (config_lib.LMConfig(init=InitConfig(std=std)) for std in (0.02, 0.5))
  assert a == b and hash(a) == hash(b), 'the same function is taken for another model'


# Wrong types


@pytest.mark.parametrize(
  ('path', 'value', 'sentence'),
  [
    ('model.width', 2.0, 'config.model.width is 2.0, of type float; it must be int'),
    ('model.width', True, 'config.model.width is True, of type bool; it must be int'),
    ('model.kind', 3, 'config.model.kind is 3; it must be one of lm, vit'),
    ('model.tied_head', 1, 'config.model.tied_head is 1, of type int; it must be bool'),
    (
      'optim.learning_rate',
      '1e-3',
      "config.optim.learning_rate is '1e-3', of type str; it must be float",
    ),
    ('optim.beta1', True, 'config.optim.beta1 is True, of type bool; it must be float'),
    ('train.seed', None, 'config.train.seed is None, of type NoneType; it must be int'),
    ('model.layer.ffn', 8, 'config.model.layer.ffn is 8; it is a section of keys'),
    ('model.variants', 8, 'config.model.variants is 8; it is a section of keys'),
    ('model.variants.local', 8, 'config.model.variants.local is 8; it is a section of keys'),
    (
      'model.layer.ffn.kind',
      ['mlp'],
      "config.model.layer.ffn.kind is ['mlp']; it must be one of pattention, mlp, experts, none",
    ),
  ],
)
def test_a_value_of_the_wrong_type_is_refused(path, value, sentence):
  # Not by way of a ConfigDict, which converts or refuses some values itself.
  for name in reversed(path.split('.')):
    value = {name: value}
  with pytest.raises(UserError) as error:
    config_lib.from_dict(Config, value)
  assert str(error.value) == sentence, 'the sentence does not say what is allowed'


# Values that do not fit together


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    (
      {'model__width': 30, 'model__layer__mixer__heads': 4},
      'config.model.width is 30, which is not a multiple of model.layer.mixer.heads=4',
    ),
    (
      {'data__batch_size': 6, 'optim__accumulation_steps': 4},
      'config.data.batch_size is 6, which is not a multiple of optim.accumulation_steps=4',
    ),
    (
      {'model__layer__mixer__qkv__bias': True},
      'config.model.layer.mixer.qkv.bias is True, which has a meaning for '
      'model.layer.mixer.qkv.kind=dense only, and this is pattention; leave it out',
    ),
    (
      {'model__layer__ffn__kind': 'mlp', 'model__layer__ffn__width': -1},
      'config.model.layer.ffn.width is -1; it must not be negative',
    ),
    (
      {'model__pattern': '12'},
      'config.model.pattern is \'12\', and 12 is not a layer; did you mean "layer*12"?',
    ),
    (
      {
        'model__position_embedding': 'learned',
        'model__max_length': 128,
        'data__sequence_length': 256,
      },
      'config.model.max_length is 128, less than data.sequence_length=256; learned positions must '
      'reach that far',
    ),
  ],
)
def test_values_that_do_not_fit_together_are_refused(changes, sentence):
  assert refusal(**changes) == sentence, 'the sentence does not name both values'


@pytest.mark.parametrize(
  'changes',
  [
    {'model__layer__mixer__qkv__kind': 'dense', 'model__layer__mixer__qkv__bias': True},
    {'model__layer__ffn__kind': 'mlp', 'model__layer__ffn__bias': True},
    {'model__layer__ffn__kind': 'none'},
    {'model__position_embedding': 'learned', 'model__max_length': 0},
    {'model__position_embedding': 'learned', 'model__max_length': 256},
    {'model__position_embedding': 'none', 'model__max_length': 1},
    {'model__layer__ffn__reference': 64},
  ],
)
def test_values_that_fit_together_pass(changes):
  assert isinstance(resolved(**changes), Config), 'a config that means something is refused'


@pytest.mark.parametrize('value', ['10', '10:', ':10', 'a:b', '0:3', '5:4', '-1:3'])
def test_profile_steps_that_cannot_be(value):
  assert refusal(train__profile_steps=value) == (
    f'config.train.profile_steps is {value!r}; it must be FIRST:LAST, two step numbers from 1 on '
    'of which the last is not below the first, for example 10:13'
  ), 'the sentence does not show the form'


@pytest.mark.parametrize(('value', 'steps'), [('', None), ('10:13', (10, 13)), ('3:3', (3, 3))])
def test_profile_steps(value, steps):
  got = config_lib.profile_range(resolved(train__profile_steps=value).train)
  assert got == steps, 'other steps are profiled'


@pytest.mark.parametrize(
  ('value', 'rate'), [('train', 1), ('freeze', 0), ('scale:0.1', 0.1), ('scale:2', 2)]
)
def test_the_rate_of_old_tokens(value, rate):
  got = config_lib.old_token_rate(resolved(optim__old_tokens=value).optim)
  assert got == rate, 'old tokens move at another rate'


@pytest.mark.parametrize(
  'value', ['half', 'scale', 'scale:x', 'scale:-1', 'scale:0', 'scale:inf', 'scale:nan', '0.1', '']
)
def test_rates_of_old_tokens_that_cannot_be(value):
  assert refusal(optim__old_tokens=value) == (
    f"config.optim.old_tokens is {value!r}; it must be 'train', 'freeze' or 'scale:X' with a "
    'factor X greater than 0, for example scale:0.1'
  ), 'the sentence does not show the form'


@pytest.mark.parametrize(
  ('key', 'value', 'needed', 'chosen'),
  [
    ('schedule.decay_share', 0.3, 'optim.schedule.kind=wsd', {'schedule': 'cosine'}),
    ('schedule.decay_shape', 'one_minus_sqrt', 'optim.schedule.kind=wsd', {'schedule': 'linear'}),
    (
      'schedule.final_fraction',
      0.0,
      'optim.schedule.kind=cosine or linear or wsd',
      {'schedule': 'constant'},
    ),
    ('momentum', 0.9, 'optim.kind=muon', {'kind': 'adamw'}),
    ('beta1', 0.8, 'optim.kind=adamw or muon or lion', {'kind': 'adafactor'}),
    ('beta2', 0.99, 'optim.kind=adamw or muon or lion', {'kind': 'adafactor'}),
    ('epsilon', 1e-6, 'optim.kind=adamw or muon', {'kind': 'lion'}),
    ('new_token_correction', True, 'optim.kind=adamw', {'kind': 'lion'}),
  ],
)
def test_a_key_without_a_meaning_for_what_was_chosen(key, value, needed, chosen):
  ((choice, name),) = chosen.items()
  changes = {f'optim.{choice}': name, f'optim.{key}': value}
  want = (
    f'config.optim.{key} is {value!r}, which has a meaning for {needed} only, and this is {name}; '
    'leave it out'
  )
  with pytest.raises(UserError) as error:
    config_lib.resolve(config_lib.from_dotted(changes))
  assert str(error.value) == want
