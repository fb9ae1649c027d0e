"""What every array says of itself, and what is counted by it."""

import jax
import pytest
from flax import nnx
from tiny import tiny_model, tiny_vit

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.model.models import define
from tokenformer_jax.model.params import Definition, Role, matrix_entries, param, stack
from tokenformer_jax.model.params import define as take_apart

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


class _Experts(nnx.Module):
  """Eight experts, of which a router chooses two."""

  def __init__(self, rngs: nnx.Rngs):
    zeros, axes = nnx.initializers.zeros, ('width', 'hidden')
    self.router = param(rngs, zeros, (4, 8), axes, role=Role.ROUTER)
    self.bias = param(rngs, zeros, (8,), ('hidden',), role=Role.BIAS)
    self.experts = param(rngs, zeros, (8, 4, 16), ('norm', *axes), role=Role.KERNEL, active=2 / 8)


class _Groups(nnx.Module):
  """Two groups of layers, one above the other."""

  def __init__(self, rngs: nnx.Rngs):
    self.lower = stack(_Experts, 3, rngs=rngs)
    self.upper = stack(_Experts, 2, rngs=rngs, depths=(4, 5))


def test_only_the_active_share_of_a_matrix_counts():
  module = nnx.eval_shape(lambda: _Experts(nnx.Rngs(0)))
  assert matrix_entries(module) == 4 * 8 + 2 * 4 * 16, 'FLOPs of what no token uses, or of a bias'


def test_stacked_layers_keep_the_rest_and_know_what_is_below():
  definition = take_apart(_Groups)
  infos = _infos(definition)
  for group, depths in (('lower', (1, 2, 3)), ('upper', (4, 5))):
    experts = infos[f'{group}/experts']
    assert (experts.role, experts.active, experts.depth) == (Role.KERNEL, 2 / 8, depths)
    assert experts.axes == ('layers', 'norm', 'width', 'hidden')
  module = definition.bind(definition.abstract)
  assert matrix_entries(module) == 5 * (4 * 8 + 2 * 4 * 16)
  assert matrix_entries(module, lambda info: 1 in (info.depth or ())) == 3 * (4 * 8 + 2 * 4 * 16)
