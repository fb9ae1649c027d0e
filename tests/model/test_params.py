"""The metadata of every array of parameters."""

import jax
import pytest
from tiny import tiny_model, tiny_vit

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.model.models import define
from tokenformer_jax.model.params import Definition, Role

LEARNED = {'rotary': 0, 'position_embedding': 'learned'}
DENSE = {'dense': True, 'bias': True, 'norm': 'affine', **LEARNED}


def _infos(definition: Definition) -> dict:
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): info
    for path, info in jax.tree_util.tree_leaves_with_path(definition.info)
  }


@pytest.mark.parametrize('model', [tiny_model(), tiny_model(**DENSE)], ids=['pattention', 'dense'])
def test_arrays_have_the_role_of_their_name(model):
  of_names = {
    'keys': Role.KEY,
    'values': Role.VALUE,
    'kernel': Role.KERNEL,
    'bias': Role.BIAS,
    'scale': Role.GAIN,
    'embedding': Role.TIED_EMBEDDING,
    'positions': Role.POSITION,
  }
  for path, info in _infos(define(model)).items():
    assert info.role is of_names[path.rpartition('/')[2]], f'{path} is {info.role}'


def test_an_untied_head_is_one_and_the_embedding_is_looked_up_only():
  infos = _infos(define(tiny_model(tied_head=False)))
  assert (infos['embedding'].role, infos['head'].role) == (Role.EMBEDDING, Role.HEAD)


@pytest.mark.parametrize(
  'model',
  [
    tiny_model(tied_head=False, **LEARNED),
    tiny_vit(pool='token', **LEARNED),
  ],
  ids=['lm', 'class token'],
)
def test_depth_says_what_stands_before_and_after_the_layers(model: ModelConfig):
  before = {'embedding', 'positions', 'patch_embedding', 'class_token'}
  for path, info in _infos(define(model)).items():
    name = path.partition('/')[0]
    layers = tuple(range(1, model.depth + 1))
    want = layers if name == 'blocks' else 0 if name in before else None
    assert info.depth == want, f'{path} would learn at the rate of another depth'
