"""Families of the hub grow without a change of their logits."""

import dataclasses

import hub_folders
import jax
import numpy as np
import pytest
from growing import (
  IDS,
  assert_shared,
  difference,
  forward,
  grow_params,
  inexact,
  logits,
  loss_and_gradient,
  mesh_of,
  moments_and_gradient,
)
from outcomes import assert_close, assert_same, paths

from tokenformer_jax.config import GrowConfig, MLPConfig, growth, matrices
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.convert import families
from tokenformer_jax.decoding import sampling
from tokenformer_jax.decoding.decode import Decoder, Request
from tokenformer_jax.grow import plan
from tokenformer_jax.grow.steps import experts, layers, widen
from tokenformer_jax.model.execution import DEFAULT

pytestmark = pytest.mark.slow
PLAIN, NEURONS = GrowConfig(), growth(method='neurons')


def _families(*names):
  return pytest.mark.parametrize('kind', names)


def beside_all(model):
  """The model with tokens beside each of its matrices, the MLPs of experts included."""
  counts = {'qkv': 16, 'proj': 8}
  counts = {name: counts.get(name.rpartition('.')[2], 24) for name in matrices(model)}
  return grown_model(model, counts, PLAIN)


def grown(source, target, params, config=PLAIN):
  """The parameters of the larger model; the growth must be exact."""
  plan.check(source, target, config)
  assert not inexact(source, target, config), 'an exact growth is said not to be'
  return grow_params(params, source, target, config)


def filled(params):
  """The parameters with numbers in the place of zeros."""
  rng = np.random.default_rng(5)
  return jax.tree.map(lambda x: np.asarray(x) + np.float32(0.1 * rng.normal(size=x.shape)), params)


@_families('gpt_neox', 'qwen2_moe', 'qwen3')
def test_tokens_beside_all_matrices_change_no_logit(kind):
  source, params = hub_folders.model(kind), hub_folders.params(kind)
  target = beside_all(source)
  assert not matrices(target), 'a matrix has no tokens beside it'
  new, before = grown(source, target, params), logits(source, params)
  assert np.std(before) > 0.1, 'the model computes almost nothing'
  assert_same(logits(target, new), before, 'a logit changes')


@_families('gpt_neox', 'mixtral', 'olmo2', 'qwen2')
def test_layers_and_experts_change_no_logit(kind):
  source, params = hub_folders.model(kind), hub_folders.params(kind)
  sizes = (None, 'layer*2 local*2') if kind == 'qwen2' else (4, None)
  target = layers.wanted(source, *sizes)
  ffn = source.layer.ffn
  if isinstance(ffn, MLPConfig) and not ffn.bias:
    names = experts.named_counts(source, 3, 'the test')
    target = experts.wanted(target, experts.Wanted(names))
    assert target.experts, 'no part became experts'
  new = grown(source, target, params)
  np.testing.assert_allclose(logits(target, new), logits(source, params), atol=1e-6)


@_families('gpt2', 'llama', 'qwen2_moe')
def test_new_neurons_change_nothing_and_learn(kind):
  source, params = hub_folders.model(kind), hub_folders.params(kind)
  parts = {'ffn_width': 96} if len({*widen.sizes(source).hidden}) == 1 else {}
  target = widen.resized(source, **parts) if parts else _with_wider_experts(source)
  new = grown(source, target, params, NEURONS)
  same = assert_close if source.experts else assert_same  # sums over experts have another order
  same(logits(target, new), logits(source, params), 'a logit changes')
  assert families.match(target)[0].kind == kind, 'the family is lost'
  rows = {
    path: (before.shape, array.shape)
    for (path, before), array in zip(paths(params).items(), paths(new).values(), strict=True)
    if before.shape != array.shape
  }
  assert len(rows) >= 3, 'no neuron is new'
  gradient = loss_and_gradient(target)(new)[1]
  learned = jax.tree.map(lambda x, g: np.asarray(x) - np.float32(0.1) * g, new, gradient)
  gradients = paths(gradient)
  later = paths(loss_and_gradient(target)(learned)[1])
  for path, (small, large) in rows.items():
    axis = next(i for i, sizes in enumerate(zip(small, large, strict=True)) if len({*sizes}) > 1)
    fresh = [np.moveaxis(g[path], axis, 0)[small[axis] :] for g in (gradients, later)]
    units = [np.abs(g).reshape(len(g), -1).max(1) for g in fresh]
    first = 'down' in path
    assert (units[0] > 0).all() == first, f'{path}: no output of a new neuron has a gradient'
    assert (units[1] > 0).all(), f'{path}: a new neuron never learns'
    assert len({*units[1].tolist()}) == len(units[1]), f'{path}: new neurons are equal'


def _with_wider_experts(model):
  expert = dataclasses.replace(model.layer.ffn.expert, width=20)
  ffn = dataclasses.replace(model.layer.ffn, expert=expert)
  return dataclasses.replace(model, layer=dataclasses.replace(model.layer, ffn=ffn))


@_families('gpt_neox', 'qwen2_moe')
def test_the_grown_model_on_several_devices_and_token_by_token(kind):
  target = beside_all(hub_folders.model(kind))
  params = filled(grown(hub_folders.model(kind), target, hub_folders.params(kind)))
  alone = logits(target, params)
  with jax.set_mesh(mesh_of(fsdp=4, tokens=2)):
    assert_close(logits(target, params), alone, 'the logits depend on the mesh')
  # The model's own greedy continuation of two prompts, by the cache; logits read 12 tokens.
  requests = [Request(IDS[0, :length].tolist(), 12 - length, sampling.GREEDY) for length in (3, 6)]
  decoder = Decoder(target, dataclasses.replace(DEFAULT, dtype='float32'))
  for request, written in zip(requests, decoder(decoder.prepare(params), requests), strict=True):
    ids = np.append(request.prompt, written)[None].repeat(2, axis=0)
    likeliest = np.argmax(forward(target)(params, ids)[0], axis=-1)
    start = len(request.prompt) - 1
    assert written.tolist() == likeliest[start:-1].tolist(), 'the cache changes the text'


@_families('gemma', 'gpt2', 'olmo2', 'qwen2_moe', 'qwen3')
def test_a_wider_model_computes_the_same(kind):
  source, params = hub_folders.model(kind), hub_folders.params(kind)
  several = len({*widen.sizes(source).hidden}) > 1
  more = {} if several else {'ffn_width': 70}
  target, config = widen.resized(source, 32, **more), growth(method='net2net')
  plan.check(source, target, config)
  assert not inexact(source, target, config)
  wide = grow_params(params, source, target, config)
  assert difference(logits(target, wide), logits(source, params)) < 1e-5, 'a logit changes'


def test_moments_are_those_of_the_wider_models_gradient():
  source, params = hub_folders.model('qwen2_moe'), hub_folders.params('qwen2_moe')
  target, config = widen.resized(source, 32), growth(method='net2net')
  _, small = loss_and_gradient(source)(params)
  _, wide = loss_and_gradient(target)(grow_params(params, source, target, config))
  (step,) = plan.plan_growth(source, target, config)
  for path, (first, second, want) in moments_and_gradient(step, small, wide).items():
    if np.max(np.abs(want)) > 1e-6:
      assert_shared(first, second, want, path)
