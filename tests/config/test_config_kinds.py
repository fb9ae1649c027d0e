"""Keys of one kind of model in the config of another, and values that do not fit their kind."""

import pytest
import tiny_run

from tokenformer_jax import config as config_lib
from tokenformer_jax.errors import UserError


def _text(**changes):
  dotted = {name.replace('__', '.'): value for name, value in changes.items()}
  return config_lib.resolve(config_lib.from_dotted(dotted))


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


@pytest.mark.parametrize(
  ('path', 'value', 'chosen'),
  [
    ('model__patch', 8, 'model.kind=lm'),
    ('data__flip', True, 'data.kind=text'),
    ('optim__schedule__decay_share', 0.3, 'optim.schedule.kind=cosine'),
    ('optim__momentum', 0.9, 'optim.kind=adamw'),
  ],
)
def test_keys_of_another_kind_are_refused(path, value, chosen):
  with pytest.raises(UserError, match=f'which has no effect with {chosen}; leave it out'):
    _text(**{path: value})


@pytest.mark.parametrize('kinds', [{'model__kind': 'vit'}, {'data__kind': 'images'}])
def test_a_model_needs_data_of_its_kind(kinds):
  with pytest.raises(UserError, match=r'config\.data\.kind is .*; set config\.data\.kind='):
    _text(**kinds)


def test_a_kind_alone_stands_for_its_section():
  config = _text(optim='muon', optim__schedule='wsd', optim__schedule__decay_share=0.3)
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
  sentence = "is 'sincos'; it must be 'none' or 'learned'"
  with pytest.raises(UserError, match=sentence):
    _text(model__position_embedding='sincos')
