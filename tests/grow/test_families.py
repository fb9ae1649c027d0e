"""Every family of the hub grows without a change of its logits, trains on, and resumes."""

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
from outcomes import assert_close, assert_same, losses, paths
from seeds import take

import tokenformer_jax
from tokenformer_jax import config as config_lib
from tokenformer_jax.config import GrowConfig, MLPConfig, growth, matrices
from tokenformer_jax.convert.to_run import to_jax
from tokenformer_jax.decoding import sampling
from tokenformer_jax.decoding.decode import Decoder, Request
from tokenformer_jax.grow import plan
from tokenformer_jax.grow.steps import experts, layers, widen
from tokenformer_jax.grow.steps.tokens import grown_model
from tokenformer_jax.model.execution import DEFAULT

pytestmark = pytest.mark.slow
PLAIN = GrowConfig()


def _families(in_ci):
  """Of the families that compile what others compile as well, some are for the longer suite."""
  return pytest.mark.parametrize('kind', take(hub_folders.KEYS, in_ci))


EACH = _families(in_ci=hub_folders.KEYS.keys() - {'mistral', 'qwen2', 'qwen3_moe'})
FEW = _families(in_ci={'gemma', 'gpt_neox', 'qwen2_moe'})
TRAINED = _families(in_ci={'qwen2_moe'})


def beside_all(model):
  """The model with tokens beside each of its matrices, the MLPs of experts included."""
  counts = {'qkv': 16, 'proj': 8}
  counts = {name: counts.get(name.rpartition('.')[2], 24) for name in matrices(model)}
  return grown_model(model, counts, PLAIN)


def grown(source, target, params):
  """The parameters of the larger model; the growth must be exact."""
  plan.check(source, target, PLAIN)
  assert not inexact(source, target, PLAIN), 'an exact growth is said not to be'
  return grow_params(params, source, target, PLAIN)


def filled(params):
  """The parameters with numbers in the place of zeros."""
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(5), len(leaves))
  more = [x + 0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
  return jax.tree.unflatten(tree, more)


@EACH
def test_tokens_beside_all_matrices_change_no_logit(kind):
  source, params = hub_folders.model(kind), hub_folders.params(kind)
  target = beside_all(source)
  assert not matrices(target), 'a matrix has no tokens beside it'
  new, before = grown(source, target, params), logits(source, params)
  assert np.std(before) > 0.1, 'the model computes almost nothing'
  assert_same(logits(target, new), before, 'a logit changes')
  before = logits(source, params, 'bfloat16')
  rounding = 2**-8 * np.abs(before).max()
  np.testing.assert_allclose(logits(target, new, 'bfloat16'), before, rtol=0, atol=rounding)


@EACH
def test_layers_and_experts_change_no_logit(kind):
  source, params = hub_folders.model(kind), hub_folders.params(kind)
  deeper = (None, 'layer*2 local*2') if source.variants else (4, None)
  target = layers.wanted(source, *deeper)
  ffn = source.layer.ffn
  if isinstance(ffn, MLPConfig) and not ffn.bias:
    names = experts.named_counts(source, 3, 'the test')
    target = experts.wanted(target, experts.Wanted(names))
    assert target.experts, 'no part became experts'
  new = grown(source, target, params)
  np.testing.assert_allclose(logits(target, new), logits(source, params), atol=1e-6)


@FEW
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


@EACH
@pytest.mark.parametrize(
  'method', ['net2net', pytest.param('hypercloning', marks=pytest.mark.full_size)]
)
def test_a_wider_model_computes_the_same(kind, method):
  source, params = hub_folders.model(kind), hub_folders.params(kind)
  several = len({*widen.sizes(source).hidden}) > 1
  more = {} if several or method == 'hypercloning' else {'ffn_width': 70}
  target, config = widen.resized(source, 32, **more), growth(method=method)
  plan.check(source, target, config)
  assert not inexact(source, target, config)
  wide = grow_params(params, source, target, config)
  assert difference(logits(target, wide), logits(source, params)) < 1e-5, 'a logit changes'


@pytest.mark.parametrize('kind', ['gemma', 'qwen2_moe'])
def test_moments_are_those_of_the_wider_models_gradient(kind):
  source, params = hub_folders.model(kind), hub_folders.params(kind)
  target, config = widen.resized(source, 32), growth(method='net2net')
  _, small = loss_and_gradient(source)(params)
  _, wide = loss_and_gradient(target)(grow_params(params, source, target, config))
  (step,) = plan.plan_growth(source, target, config)
  for path, (first, second, want) in moments_and_gradient(step, small, wide).items():
    if np.max(np.abs(want)) > 1e-6:
      assert_shared(first, second, want, path)


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  """A source of text in the letters of the tokenizer."""
  folder = tmp_path_factory.mktemp('text')
  rng = np.random.default_rng(0)
  for number in range(30):
    (folder / f'{number}.txt').write_text(''.join(map(chr, rng.integers(33, 90, 300))))
  return f'files:{folder}/*.txt'


@TRAINED
def test_a_grown_run_resumes_bit_for_bit(kind, text, tmp_path):
  to_jax(hub_folders.write(tmp_path / 'folder', kind), tmp_path / 'brought')
  run = tokenformer_jax.load(tmp_path / 'brought')
  larger = dataclasses.replace(run.config, model=beside_all(run.config.model))
  how = {
    'model': config_lib.to_config_dict(larger).model,
    'mesh': {'fsdp': 4, 'tokens': 2},
    'data': {'source': text, 'cache_dir': str(tmp_path / 'cache'), 'batch_size': 8},
    'train': {'log_every': 1, 'eval_every': 0, 'checkpoint_every': 2, 'sample_tokens': 0},
  }
  whole = run.train(4, workdir=tmp_path / 'whole', **how)
  half = run.train(2, workdir=tmp_path / 'parts', **how)
  assert_same(half.train(4).parameters, whole.parameters, 'the resumed run differs')
  old, new = paths(run.parameters), paths(whole.parameters)
  assert np.isfinite(losses(whole.directory)[4])
  assert all((new[path] != array).any() for path, array in old.items())
