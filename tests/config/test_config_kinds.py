"""Keys of one kind of model in the config of another, and values that do not fit their kind."""

import pytest
import tiny_run

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import scope
from tokenformer_jax.config.section import leaves
from tokenformer_jax.errors import UserError


def _text(**changes):
  values = config_lib.defaults()
  values.update_from_flattened_dict({k.replace('__', '.'): v for k, v in changes.items()})
  return config_lib.resolve(values)


_OTHER = {
  bool: lambda value: not value,
  str: lambda value: f'{value}x',
  float: lambda value: value / 2 + 0.01,
}


OF_TEXT = {
  leaf.path: leaf for leaf in leaves(config_lib.Config()) if scope.kind_of_model(leaf.path) == 'lm'
}


@pytest.mark.parametrize('path', OF_TEXT)
def test_keys_of_text_are_refused_for_images(path):
  default, choices = OF_TEXT[path].default, OF_TEXT[path].key.choices
  others = [choice for choice in choices if choice != default]
  other = others[0] if others else _OTHER.get(type(default), lambda value: value + 1)(default)
  with pytest.raises(UserError, match=rf'{path} is .* model\.kind=lm only, and this is vit'):
    tiny_run.vit_config(**{path.replace('.', '__'): other})


@pytest.mark.parametrize(
  ('path', 'value'), [('model__patch', 8), ('data__flip', True), ('optim__mixup', 0.8)]
)
def test_keys_of_images_are_refused_for_text(path, value):
  with pytest.raises(UserError, match=r'model\.kind=vit only, and this is lm; leave it out'):
    _text(**{path: value})


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    (
      {'model__layer__mixer__positions__kind': 'rotary'},
      r'positions\.kind is rotary, and the patches of a ViT are in no order; set it to none',
    ),
    ({'model__tied_head': True}, 'tied_head is True, and the head of a ViT'),
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
    ({'data__rand_augment': 11.0}, 'rand_augment is 11.0; it must lie between 0 and 10'),
    ({'model__pool': 'max'}, 'must be one of mean, token, attention'),
    ({'data__on_bad_image': 'warn'}, 'must be one of skip, fail'),
    ({'data__crop_area': 0.0}, 'crop_area is 0.0; it must be greater than 0'),
    ({'optim__drop_path': 1.0}, r'drop_path is 1.0; it must lie between 0 and 1 \(excluded\)'),
  ],
)
def test_impossible_values_of_a_vit_are_refused(changes, sentence):
  with pytest.raises(UserError, match=sentence):
    tiny_run.vit_config(**changes)


def test_sincos_positions_are_refused_for_a_language_model():
  sentence = r"is 'sincos'; for model\.kind=lm it must be one of none, learned"
  with pytest.raises(UserError, match=sentence):
    _text(model__position_embedding='sincos')
