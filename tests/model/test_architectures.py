"""Check every architecture: however its layers run, on any mesh, grown or not."""

import functools

import architectures
import jax
import numpy as np
import pytest
from outcomes import assert_close
from seeds import take
from tiny import large_params, logits_and_gradient, logits_of, make_optimizer

from tokenformer_jax import config
from tokenformer_jax.config import MeshConfig, growth
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.grow import apply, plan
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.lm import define_lm, unstack
from tokenformer_jax.model.params import Role
from tokenformer_jax.parallel import sharding
from tokenformer_jax.steps import step

METHODS = [('zero_keys', Role.KEY), ('group', Role.VALUE)]
IDS = np.random.default_rng(0).integers(0, 64, (8, 24), np.int32)


pytestmark = pytest.mark.slow
GROWING = [
  name
  for name, model in architectures.MODELS.items()
  if config.pattentions(model) and not isinstance(model.layer.ffn, config.ExpertsConfig)
]


def _each(first: int) -> pytest.MarkDecorator:
  """Take every third model in CI; tests of other properties take another third."""
  return pytest.mark.parametrize(
    'name', take(architectures.MODELS, [*architectures.MODELS][first::3])
  )


@_each(0)
def test_a_list_of_layers_computes_what_stacks_do(name):
  model = architectures.MODELS[name]
  params = large_params(model)
  logits = logits_of(model)(params, IDS)
  assert np.all(np.isfinite(logits)), 'logits are not finite'
  of_list = logits_of(model, Execution(layers='list'))(unstack(params, model), IDS)
  assert_close(of_list, logits, 'a list of layers is another model')


@_each(1)
def test_later_tokens_change_nothing(name):
  model = architectures.MODELS[name]
  changed = IDS.copy()
  changed[:, 13] = (IDS[:, 13] + 1) % 64
  first, second = (np.asarray(logits_of(model)(large_params(model), ids)) for ids in (IDS, changed))
  np.testing.assert_allclose(first[:, :13], second[:, :13], atol=1e-6, err_msg='it sees the future')
  assert np.abs(first[:, 13] - second[:, 13]).max() > 1e-3, 'it does not see its own token'


@_each(2)
def test_logits_and_gradients_do_not_depend_on_the_devices(name):
  model = architectures.MODELS[name]
  want = logits_and_gradient(model)(large_params(model), IDS)
  mesh, definition = sharding.make_mesh(MeshConfig(fsdp=4, tokens=2)), define_lm(model)
  with jax.set_mesh(mesh):
    shardings = sharding.tree_shardings(mesh, definition.axes)
    params = jax.device_put(large_params(model), shardings)
    got = logits_and_gradient(model)(params, jax.device_put(IDS, sharding.batch_sharding(mesh)))
  assert_close(jax.device_get(got), want, '8 devices compute another model')


@pytest.mark.parametrize('name', take(GROWING, GROWING[::3]))
def test_growth_is_exact(name):
  """And every new token learns, by its key or its value first."""
  method, first = METHODS[GROWING.index(name) % 2]
  model, how = architectures.MODELS[name], growth(method)
  counts = {one: count + 8 for one, count in config.token_counts(model).items()}
  larger = grown_model(model, counts, how)
  steps = plan.check(model, larger, how)
  assert not plan.inexact(steps)
  definition = define_lm(model)
  tx = make_optimizer(config.AdamWConfig(), 10, definition.info)
  old = jax.eval_shape(lambda: step.initial_state(definition, tx, 0))
  old = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), old)
  grow = jax.jit(lambda old: apply.grow_state(old, model, steps, how)['params'])
  got, gradient = logits_and_gradient(larger)(grow({**old, 'params': large_params(model)}), IDS)
  want = logits_of(model)(large_params(model), IDS)
  np.testing.assert_allclose(
    got, want, atol=1e-6 * np.abs(want).max(), err_msg='growth changes the model'
  )
  for path, info in jax.tree_util.tree_leaves_with_path(define_lm(larger).info):
    if info.role is not first:
      continue
    of_tokens = functools.reduce(lambda tree, one: tree[one.key], path, gradient)
    before = of_tokens.shape[1] - 8
    alive = np.abs(of_tokens[:, before:]).max(axis=(1, 2))
    assert np.all(alive > 0), f'new tokens of {jax.tree_util.keystr(path)} can never learn'
