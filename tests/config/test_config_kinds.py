"""Keys of one kind of model in the config of another, and values that do not fit their kind."""

import pytest
import tiny_run

from tokenformer_jax import config as config_lib
from tokenformer_jax.errors import UserError


def _text(**changes):
  dotted = {name.replace('__', '.'): value for name, value in changes.items()}
  return config_lib.resolve(config_lib.from_dotted(dotted))


@pytest.mark.parametrize(
  ('path', 'value', 'needed'),
  [
    ('model.vocab_size', 64, 'model.kind=lm'),
    ('model.scaled_logits', True, 'model.kind=lm'),
    ('data.tokenizer', 'bytes', 'data.kind=text'),
    ('data.sequence_length_by_step', '0:512', 'data.kind=text'),
    ('data.mixture', {'a': {'source': 'files:a'}}, 'data.kind=text'),
    ('optim.z_loss', 0.1, 'model.kind=lm'),
    ('train.sample_tokens', 1, 'model.kind=lm'),
    ('distill.teacher', 'runs/x', 'model.kind=lm'),
  ],
)
def test_keys_of_text_are_refused_for_images(path, value, needed):
  with pytest.raises(UserError, match=rf'{path} is .* {needed} only, and this is (vit|images)'):
    tiny_run.vit_config(**{path.replace('.', '__'): value})


@pytest.mark.parametrize(
  ('path', 'value'),
  [('model__patch', 8), ('model__drop_path', 0.1), ('data__flip', True), ('data__mixup', 0.8)],
)
def test_keys_of_images_are_refused_for_text(path, value):
  with pytest.raises(UserError, match=r'kind=(vit|images) only, and this is (lm|text); leave it'):
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
    ({'model__layer__mixer__window': 4}, 'mixer.window is 4, and a ViT attends to all patches'),
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
    ({'data__rand_augment': 11.0}, 'rand_augment is 11.0; it must be at most 10'),
    ({'model__pool': 'max'}, 'must be one of mean, token, attention'),
    ({'data__on_bad_image': 'warn'}, 'must be one of skip, fail'),
    ({'data__crop_area': 0.0}, 'crop_area is 0.0; it must be greater than 0'),
    ({'model__drop_path': 1.0}, 'drop_path is 1.0; it must be less than 1'),
  ],
)
def test_impossible_values_of_a_vit_are_refused(changes, sentence):
  with pytest.raises(UserError, match=sentence):
    tiny_run.vit_config(**changes)


def test_sincos_positions_are_refused_for_a_language_model():
  sentence = "is 'sincos'; it must be one of none, learned"
  with pytest.raises(UserError, match=sentence):
    _text(model__position_embedding='sincos')
