"""Parameter tokens beside matrices: growth of a Transformer, and what can be done with it."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny_run
from growing import apply_steps, forward, grow_params, inexact, params_of
from outcomes import assert_close, assert_same, paths
from tiny import normal_params

import tokenformer_jax
from tokenformer_jax import config as config_lib
from tokenformer_jax.config import (
  GrowConfig,
  MeshConfig,
  ModelConfig,
  NoProjectionConfig,
  PattentionConfig,
  TokenGroup,
  growth,
  pattentions,
)
from tokenformer_jax.config.pattention import SCORES, GELUScore, LinearScore
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import plan
from tokenformer_jax.grow.steps import matrices
from tokenformer_jax.model import mlp
from tokenformer_jax.model.execution import DEFAULT
from tokenformer_jax.model.params import define
from tokenformer_jax.model.pattention import pattention
from tokenformer_jax.parallel import sharding

IDS = np.arange(24).reshape(4, 6) * 7 % 100
MLP = {'kind': 'mlp', 'width': 48}
FEED_FORWARDS = {
  'mlp': MLP,
  'gated': {**MLP, 'gated': True, 'bias': True},
  'experts': {'kind': 'experts', 'count': 4, 'expert': MLP, 'shared': MLP},
}


def transformer(ffn: str = 'mlp') -> ModelConfig:
  """A Transformer of two layers."""
  c = config_lib.defaults()
  layer = c.model.layer
  c.model.pattern, c.model.width, c.model.vocab_size, c.model.max_length = 'layer*2', 32, 100, 32
  layer.mixer.qkv, layer.mixer.proj = {'kind': 'dense'}, {'kind': 'dense', 'bias': True}
  layer.ffn, layer.norm = FEED_FORWARDS[ffn], 'affine'
  return config_lib.resolve(c).model


def logits(model: ModelConfig, params, dtype='float32') -> np.ndarray:
  return np.asarray(forward(model, dtype)(params, IDS))


def grown(model: ModelConfig, params, counts, **changes):
  """The grown model and its parameters."""
  config = growth(**changes)
  larger = grown_model(model, config_lib.named_counts(model, counts, 'counts', first=True), config)
  plan.check(model, larger, config)
  assert not inexact(model, larger, config)
  return larger, grow_params(params, model, larger, config)


@functools.cache
def grown_twice(ffn: str):
  """A Transformer and its parameters, and those with two groups, or one beside experts."""
  model = transformer(ffn)
  params = params_of(model)
  name = 'ffn.expert' if ffn == 'experts' else 'ffn'
  larger, new = grown(model, params, {'qkv': 16, 'proj': 8, name: 24})
  assert config_lib.token_counts(larger) == {'qkv': 16, 'proj': 8, name: 24}
  if ffn == 'experts':
    return (model, params), (larger, new)
  second = grown(larger, new, {'qkv': 24, 'ffn': 40}, new_score='linear', seed=1)
  assert pattentions(second[0])['qkv'].groups[1] == TokenGroup(8, 8, LinearScore())
  return (model, params), second


@pytest.mark.parametrize(
  ('ffn', 'dtype'),
  [
    ('mlp', 'float32'),
    ('experts', 'float32'),
    ('mlp', 'bfloat16'),
    pytest.param('gated', 'float32', marks=pytest.mark.slow),
    *(pytest.param(ffn, 'bfloat16', marks=pytest.mark.slow) for ffn in ('gated', 'experts')),
  ],
)
def test_growth_changes_no_logit(ffn, dtype):
  was, larger = grown_twice(ffn)
  assert_same(logits(*larger, dtype), logits(*was, dtype), 'a growth changes a logit')


def test_the_grown_model_on_several_devices():
  larger, new = grown_twice('mlp')[1]
  new = _with_values(new)
  with jax.set_mesh(sharding.make_mesh(MeshConfig(fsdp=4, tokens=2), jax.devices()[:8])):
    many = logits(larger, new)
  assert_close(many, logits(larger, new), 'tokens beside matrices depend on the mesh')


def _with_values(params):
  """The parameters with numbers in the place of zeros."""
  rng = np.random.default_rng(5)
  return jax.tree.map(lambda x: np.asarray(x) + np.float32(0.1 * rng.normal(size=x.shape)), params)


def test_each_group_has_its_own_score():
  rng = np.random.default_rng(0)
  arrays = [np.float32(rng.normal(size=s)) for s in ((2, 3, 8), (12, 8), (12, 8))]
  scores = [SCORES[kind]() for kind in ('softmax', 'gelu', 'linear')]
  groups = [TokenGroup(n, n, score) for n, score in zip((4, 5, 3), scores, strict=True)]

  def written(x, keys, values):
    first = pattention(x, keys[:4], values[:4], groups=groups[:1])
    second = jax.nn.gelu(x @ keys[4:9].T, approximate=False) @ values[4:9]
    return first + second + x @ keys[9:].T @ values[9:]  # LoRA of rank 3

  def found():
    return jax.jit(lambda *x: pattention(*x, groups=groups))(*arrays)

  want = jax.jit(written)(*arrays)
  np.testing.assert_allclose(found(), want, rtol=1e-5, atol=1e-5)
  with jax.set_mesh(sharding.make_mesh(MeshConfig(tokens=2), jax.devices()[:2])):
    np.testing.assert_allclose(found(), want, rtol=1e-5, atol=1e-5)


def test_malformed_groups_are_refused():
  c = config_lib.defaults()
  c.model.layer.ffn = {'kind': 'mlp', 'beside': {'kind': 'pattention', 'tokens': 32}}
  c.model.layer.ffn.beside.groups = '16 16::gellu'
  sentence = "has the score 'gellu'; did you mean 'gelu'"
  with pytest.raises(UserError, match=rf'model\.layer\.ffn\.beside\.groups=.*{sentence}'):
    config_lib.resolve(c)


def test_other_methods_need_tokens_that_are_there():
  model = transformer()
  larger = grown_model(model, {'qkv': 16}, GrowConfig())
  with pytest.raises(UserError, match='qkv has no parameter tokens in the source, and method=zero'):
    plan.check(model, larger, growth(method='zero_keys'))


def test_first_tokens_have_no_keys_to_follow():
  model, how = transformer(), growth(new_keys='trained')
  larger = grown_model(model, {'qkv': 16}, how)
  with pytest.raises(UserError, match='new_keys=trained is for new tokens of a proj'):
    plan.check(model, larger, how)
  second = grown_model(larger, {'qkv': 24, 'ffn': 8}, how)
  assert plan.check(larger, second, how), 'qkv has tokens whose keys it follows'


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  return tmp_path_factory.mktemp('beside')


@pytest.fixture(scope='module')
def base(root, one_device_in_module):
  """A trained Transformer."""
  source = tiny_run.write_corpus(root / 'texts')
  values = config_lib.defaults()
  kept = {k: v for k, v in tiny_run.CHANGES.items() if not k.endswith('.tokens')}
  values.update_from_flattened_dict({'data.source': source, **kept})
  values.data.cache_dir = str(root / 'cache')
  layer = values.model.layer
  layer.mixer.qkv, layer.mixer.proj = {'kind': 'dense'}, {'kind': 'dense', 'bias': True}
  layer.ffn = {'kind': 'mlp', 'width': 48, 'gated': True}
  return tokenformer_jax.train(config_lib.resolve(values), root / 'base')


def _adapter(root, base, name, seed, **optim):
  larger = base.grow(root / name, {'qkv': 16, 'ffn': 32}, seed=seed)
  return larger.train(24, optim={'old_tokens': 'freeze', 'new_token_warmup': 2, **optim})


@pytest.fixture(scope='module')
def one(root, base):
  return _adapter(root, base, 'one', 1)


@pytest.fixture(scope='module')
def two(root, base):
  return _adapter(root, base, 'two', 2, learning_rate=1e-2)


@pytest.mark.slow
def test_a_frozen_transformer_stays_bit_for_bit_and_comes_out_again(root, base, one):
  found, was = paths(one.parameters), paths(base.parameters)
  changed = {path for path in found if path not in was or (found[path] != was[path]).any()}
  assert changed and all('beside' in path for path in changed), 'a frozen matrix has changed'
  assert any(np.abs(found[path]).max() > 0 for path in changed if 'values' in path)
  again = one.remove(root / 'again')
  assert again.config.model == base.config.model
  assert_same(again.parameters, base.parameters, 'the base does not come out again')


@pytest.mark.slow
def test_adapters_of_one_transformer_merge(root, one, two):
  two.extract(root / 'tokens2')
  both = one.merge(root / 'tokens2', root / 'both')
  assert config_lib.token_counts(both.config.model) == {'qkv': 32, 'ffn': 64}
  first = both.slice(root / 'first', 1)
  assert_same(first.parameters, one.parameters, 'the first adapter is not first')


@pytest.mark.slow
def test_an_adapted_transformer_grows_in_depth(root, one):
  deeper = one.grow(root / 'deeper', layers=4)
  assert_same(deeper.logits(IDS), one.logits(IDS), 'copied layers change a logit')
  assert 'qkv (tokens:τ²)' in one.group_table()


@pytest.mark.slow
def test_matrices_become_tokens_that_compute_the_same(root, base, one):
  with pytest.raises(UserError, match='ffn cannot become parameter tokens: a gate multiplies two'):
    base.as_tokens(root / 'gate', 'ffn')
  with pytest.raises(UserError, match='proj cannot become parameter tokens: it has a bias'):
    base.as_tokens(root / 'bias', 'qkv,proj')
  with pytest.raises(UserError, match="matrices names 'kv'; known names: ffn, proj, qkv"):
    base.as_tokens(root / 'unknown', 'kv')
  tokens = one.as_tokens(root / 'as_tokens')
  assert pattentions(tokens.config.model)['qkv'].groups[1] == TokenGroup(16, 16)
  np.testing.assert_allclose(tokens.logits(IDS), one.logits(IDS), atol=1e-5)


def test_neurons_and_heads_become_tokens():
  model = dataclasses.replace(transformer(), pattern='layer*2')
  tanh = PattentionConfig(16, 16, SCORES['gelu']('tanh'))
  layer = dataclasses.replace(
    model.layer,
    mixer=dataclasses.replace(model.layer.mixer, proj=config_lib.DenseConfig()),
    ffn=dataclasses.replace(model.layer.ffn, beside=tanh),
  )
  model = dataclasses.replace(model, layer=layer)
  params = params_of(model)
  after = config_lib.with_references(matrices.wanted(model, None))
  assert config_lib.token_counts(after) == {'qkv': 64, 'proj': 64, 'ffn': 64}
  assert pattentions(after)['ffn'].groups[1].score == GELUScore('tanh')
  steps = (matrices.MatricesToTokens(model, after),)
  new = apply_steps({'params': params, 'opt_state': ()}, model, steps)['params']
  assert_close(logits(after, new), logits(model, params), 'tokens compute something else')


def test_tokens_beside_each_matrix_of_an_mlp_add_to_its_product():
  tokens = PattentionConfig(3, 3, LinearScore())
  model, x = transformer('gated'), np.float32(np.random.default_rng(0).normal(size=(2, 3, 32)))
  config = dataclasses.replace(model.layer.ffn, each=tokens)
  bare = dataclasses.replace(config, each=NoProjectionConfig())
  beside, alone = (
    define(lambda rngs: mlp.MLP(one, model, execution=DEFAULT, rngs=rngs))  # noqa: B023
    for one in (config, bare)
  )
  params, whole = normal_params(beside, 0.2), {}
  for name, own in jax.tree.map(np.asarray, params).items():
    added = own['beside']['keys'].T @ own['beside']['values']
    whole[name] = {'kernel': own['kernel'] + added, 'bias': own['bias']}
  got, want = (
    jax.jit(lambda params: definition.bind(params)(x))(params)  # noqa: B023
    for definition, params in ((beside, params), (alone, whole))
  )
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
