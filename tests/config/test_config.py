"""What a config may be, and the sentence for what it may not."""

import dataclasses

import pytest
import tiny_run
from changing import refusal, resolved

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, InitConfig
from tokenformer_jax.errors import UserError


def test_the_defaults_are_a_config():
  assert config_lib.to_json(resolved()) == config_lib.to_json(Config()), (
    'the defaults are not what the dataclasses say'
  )


def test_a_key_missing_in_a_stored_config_has_its_default():
  config = config_lib.from_dict(Config, {'model': {'width': 64}})
  assert config.model == dataclasses.replace(Config().model, width=64)


# Unknown keys


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
    ('model.steps', "config key 'model.steps' is unknown; did you mean 'train.steps'?"),
    ('optimizer', "config key 'optimizer' is unknown; did you mean 'optim'?"),
    (
      'mesh.xyz',
      "config key 'mesh.xyz' is unknown; known names: experts, fsdp, replica, sequence, tokens",
    ),
    ('seed', "config key 'seed' is unknown; did you mean 'train.seed' or 'grow.seed'?"),
    ('dtype.x', "config key 'dtype.x' is unknown; config.dtype is a single value"),
  ],
)
def test_an_unknown_key_has_a_nearest_one(path, sentence):
  with pytest.raises(UserError) as error:
    config_lib.type_of(path)
  assert str(error.value) == sentence, 'a mistyped flag is not put right'


def test_an_unknown_key_of_a_file_has_the_same_sentence():
  sentence = "config key 'model.heads' is unknown; did you mean 'model.layer.mixer.heads'?"
  assert refusal(model__heads=1) == sentence


# Models


def test_models_that_are_drawn_otherwise_are_equal():
  a, b = (config_lib.LMConfig(init=InitConfig(std=std)) for std in (0.02, 0.5))
  assert a == b and hash(a) == hash(b), 'the same function is taken for another model'


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


MIXER, FFN = 'model__layer__mixer__', 'model__layer__ffn__'


@pytest.mark.parametrize(
  ('path', 'value', 'cause', 'others'),
  [
    ('model__patch', 8, 'model.kind=lm', {}),
    ('data__flip', True, 'data.kind=text', {}),
    ('optim__schedule__decay_share', 0.3, 'optim.schedule.kind=cosine', {}),
    ('optim__momentum', 0.9, 'optim.kind=adamw', {}),
    ('optim__skip_window', 64, 'optim.skip_deviations=0', {}),
    ('distill__weight', 0.5, 'distill.teacher=', {}),
    ('train__decay_from', 5, 'optim.schedule.kind=cosine', {}),
    ('train__steps', 5, 'train.epochs=2', {'train__epochs': 2}),
    ('train__steps', 5, 'train.examples=99', {'train__examples': 99}),
    ('optim__warmup_steps', 5, 'optim.warmup_epochs=2', {'optim__warmup_epochs': 2}),
    ('optim__skip_deviations', 6.0, 'train.max_skipped_steps=1', {'train__max_skipped_steps': 1}),
    (
      'optim__schedule__decay_share',
      0.3,
      'train.decay_from=500',
      {'optim__schedule__kind': 'wsd', 'train__decay_from': 500},
    ),
    ('model__norm_epsilon_outside', True, 'model.layer.norm=plain', {}),
    (f'{MIXER}positions__clip', 5, 'model.layer.mixer.kind=linear', {f'{MIXER}kind': 'linear'}),
    ('model__layer__ffn_norm', 'rms', 'model.layer.ffn.kind=none', {f'{FFN}kind': 'none'}),
    (
      'model__layer__ffn_norm',
      'rms',
      'model.layer.wiring.kind=parallel',
      {'model__layer__wiring__kind': 'parallel'},
    ),
    (f'{FFN}shared_gate', True, 'model.layer.ffn.shared.kind=none', {f'{FFN}kind': 'experts'}),
    (
      f'{FFN}balance__device_weight',
      0.1,
      'model.layer.ffn.balance.devices=1',
      {f'{FFN}kind': 'experts'},
    ),
  ],
)
def test_a_key_without_effect_is_refused(path, value, cause, others):
  want = f'config.{path.replace("__", ".")} is {value!r}, which has no effect with {cause}; leave'
  assert refusal(**others, **{path: value}).startswith(want)


@pytest.mark.parametrize('value', ['10', 'a:b', '0:3', '5:4'])
def test_profile_steps_that_cannot_be(value):
  assert refusal(train__profile_steps=value) == (
    f'config.train.profile_steps is {value!r}; it must be FIRST:LAST, two step numbers from 1 on '
    'of which the last is not below the first, for example 10:13'
  ), 'the sentence does not show the form'


@pytest.mark.parametrize(
  ('value', 'rate'), [('train', 1), ('freeze', 0), ('scale:0.1', 0.1), ('scale:2', 2)]
)
def test_the_rate_of_old_tokens(value, rate):
  got = config_lib.old_token_rate(resolved(optim__old_tokens=value).optim)
  assert got == rate, 'old tokens move at another rate'


@pytest.mark.parametrize('value', ['half', 'scale:x', 'scale:0', 'scale:nan'])
def test_rates_of_old_tokens_that_cannot_be(value):
  assert refusal(optim__old_tokens=value) == (
    f"config.optim.old_tokens is {value!r}; it must be 'train', 'freeze' or 'scale:X' with a "
    'factor X greater than 0, for example scale:0.1'
  ), 'the sentence does not show the form'


# Kinds


@pytest.mark.parametrize(
  ('path', 'value', 'kind'),
  [
    ('model.vocab_size', 64, 'model.kind=vit'),
    ('data.sequence_length_by_step', '0:512', 'data.kind=images'),
    ('data.mixture', {'a': {'source': 'files:a'}}, 'data.kind=images'),
    ('optim.z_loss', 0.1, 'model.kind=vit'),
    ('model.layer.mixer.window', 4, 'model.kind=vit'),
    ('distill.teacher', 'runs/x', 'model.kind=vit'),
  ],
)
def test_keys_of_text_are_refused_for_images(path, value, kind):
  with pytest.raises(UserError, match=f'{path} is .*, which has no effect with {kind}; leave it'):
    tiny_run.vit_config(**{path.replace('.', '__'): value})


@pytest.mark.parametrize('kinds', [{'model__kind': 'vit'}, {'data__kind': 'images'}])
def test_a_model_needs_data_of_its_kind(kinds):
  assert '; set config.data.kind=' in refusal(**kinds)


def test_a_kind_alone_stands_for_its_section():
  config = resolved(optim='muon', optim__schedule='wsd', optim__schedule__decay_share=0.3)
  assert config.optim.kind == 'muon'
  assert config.optim.schedule == config_lib.WSDSchedule(decay_share=0.3)


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    (
      {'model__layer__mixer__positions__kind': 'rotary'},
      r'positions\.kind is rotary, and the patches of a ViT are in no order; set it to none',
    ),
    ({'data__image_size': 30}, r'image_size is 30, which is not a multiple of model\.patch=4'),
    (
      {'model__width': 30, 'model__layer__mixer__heads': 3},
      'width is 30; it must be a multiple of 4',
    ),
    ({'model__channels': 2}, r'channels is 2; it must be 1 \(grey\), 3'),
    (
      {'model__position_embedding': 'learned', 'model__max_length': 5},
      'have 4 patches; set it to 0',
    ),
  ],
)
def test_impossible_values_of_a_vit_are_refused(changes, sentence):
  with pytest.raises(UserError, match=sentence):
    tiny_run.vit_config(**changes)


def test_sincos_positions_are_refused_for_a_language_model():
  said = refusal(model__position_embedding='sincos')
  assert said.endswith("is 'sincos'; it must be 'none' or 'learned'")
