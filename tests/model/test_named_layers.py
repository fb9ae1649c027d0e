"""Models of several kinds of layers, named in `model.variants`, and layers of one part."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import large_params, logits_of, tiny_model, tiny_vit, two_kinds

from tokenformer_jax.config import ModelConfig, NoFeedForwardConfig
from tokenformer_jax.model import models
from tokenformer_jax.model.layer import LayerInputs
from tokenformer_jax.model.lm import Execution, define_lm

slow = pytest.mark.slow  # because of what is compiled

MODEL = two_kinds(tied_head=False)
IDS = np.random.default_rng(0).integers(0, 64, (8, 24), np.int32)
GROUPS = {'local_0': (1, 3), 'layer_1': (2, 4), 'local_2': (5,)}  # the depths of each stack


# Two kinds of layers


def test_every_array_knows_how_deep_its_layers_are():
  for name, stack in define_lm(MODEL).info['blocks'].items():
    for info in jax.tree.leaves(stack):
      assert info.depth == GROUPS[name], f'{name} would learn at the rate of another depth'


@slow
def test_residual_branches_start_by_the_number_of_all_layers():
  for name, stack in define_lm(two_kinds(width=64)).info['blocks'].items():
    draw = stack['attention']['proj']['values'].initializer
    got = np.std(draw(jax.random.key(0), (2, 64, 64), jnp.float32))
    np.testing.assert_allclose(
      got, 2 / (5 * 64**0.5), rtol=0.05, err_msg=f'{name} starts elsewhere'
    )


def _reach(model: ModelConfig) -> int:
  """Return how many of 24 tokens the last logit depends on."""
  params = jax.device_get(large_params(model))

  def last(x_BxTxD: jax.Array) -> jax.Array:
    module = define_lm(model, Execution()).bind(params)
    module.embed = lambda ids, context: x_BxTxD
    return module(IDS[:1])[0][0, -1, 0]

  derivative = jax.jit(jax.grad(last))(params['embedding'][IDS[:1]])
  return int(np.sum(np.abs(derivative).max(axis=(0, 2)) > 0))


@pytest.mark.parametrize(
  ('pattern', 'tokens'), [pytest.param('local*2', 15, marks=slow), ('local*2 layer', 24)]
)
def test_each_layer_has_its_own_window(pattern, tokens):
  model = two_kinds(pattern=pattern, tied_head=False)
  assert _reach(model) == tokens, f'{pattern} with a window of 8 sees other tokens'


@slow
def test_branches_of_images_are_left_out_of_the_layers_that_are_meant():
  """Leaving them out is the same as values of 0 in the stacks with this name."""
  lm = two_kinds(window=0, rotary=0)  # patches know neither a window nor rotary positions
  model = dataclasses.replace(tiny_vit(), pattern=lm.pattern, variants=lm.variants)
  images = np.random.default_rng(0).normal(size=(3, 8, 8, 1)).astype(np.float32)
  definition, params = models.define(model), large_params(model)
  run = jax.jit(lambda p, x, s: definition.bind(p)(x, inputs=LayerInputs(branch_scales_Bx2=s))[0])
  scales = np.ones((5, 3, 2), np.float32)
  scales[1::2, 1] = 0
  got, whole = (np.asarray(run(params, images, s)) for s in (scales, None))
  blocks = {
    stack: jax.tree.map(jnp.zeros_like, part) if stack.startswith('layer') else part
    for stack, part in params['blocks'].items()
  }
  without = np.asarray(run({**params, 'blocks': blocks}, images, None))
  np.testing.assert_allclose(got[1], without[1], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(got[[0, 2]], whole[[0, 2]], rtol=1e-5, atol=1e-5)
  assert np.abs(got[1] - whole[1]).max() > 1e-3, 'these layers add nothing'


# Layers that are a mixer alone


@slow
def test_a_layer_without_a_feed_forward_part_is_the_residual_and_its_mixer():
  """It is one whose feed-forward part adds nothing, without that part and its norm."""
  whole = tiny_model(norm='affine', tied_head=False)
  params = large_params(whole)
  blocks = dict(params['blocks'])
  blocks['ffn'] = jax.tree.map(jnp.zeros_like, blocks['ffn'])
  want = logits_of(whole)({**params, 'blocks': blocks}, IDS)
  layer = dataclasses.replace(whole.layer, ffn=NoFeedForwardConfig())
  alone = dataclasses.replace(whole, layer=layer)
  blocks = {name: part for name, part in blocks.items() if name not in ('ffn', 'ffn_norm')}
  own = {**params, 'blocks': blocks}
  abstract = define_lm(alone).abstract
  assert jax.tree.structure(own) == jax.tree.structure(abstract), 'it has parameters of no use'
  got = logits_of(alone)(own, IDS)
  np.testing.assert_allclose(got, want, atol=1e-5, err_msg='it computes something else')
