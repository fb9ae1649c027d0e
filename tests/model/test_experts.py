"""Layers of experts against the reference, and the models that they become at their limits."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import SWIGLU, TOKENS, inputs, large, layer, of_rows, unbalanced
from tiny import tiny_model

from tokenformer_jax.config import (
  CapacityConfig,
  ExpertsConfig,
  LossBalanceConfig,
  MLPConfig,
  PattentionConfig,
  RouterConfig,
)
from tokenformer_jax.model import dispatch
from tokenformer_jax.model.execution import DEFAULT
from tokenformer_jax.model.feed_forward import feed_forward
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.params import define

GOLDEN = Path(__file__).parents[1] / 'golden'
SWITCH = np.load(GOLDEN / 'switch.npz')  # by google/flaxformer: see its `meta`
DEEPSEEK = np.load(GOLDEN / 'deepseekmoe.npz')  # by deepseek-ai/ESFT
RELU = MLPConfig(32, activation='relu')


def _norm(array) -> float:
  return np.linalg.norm(np.asarray(array))


class Means(NamedTuple):
  loss: jax.Array
  figures: dict[str, jax.Array]


@functools.cache
def _program(config):
  """Return a function of parameters, input and cotangent: the output and the layer's means."""
  definition = layer(config)

  def f(params, x, cotangent):
    y, aux = definition.bind(params)(x, Context(training=True))
    loss, figures = aux.divided(of_rows(*x.shape[:2]))
    return jnp.sum(y * cotangent) + loss, (y, Means(loss, figures))

  return f


@functools.cache
def _with_gradients(config):
  return jax.jit(jax.value_and_grad(_program(config), (0, 1), has_aux=True))


def _run(config, params, x, cotangent):
  """Return the output, the layer's means, and the gradients of parameters and input."""
  (_, (y, means)), gradients = _with_gradients(config)(params, x, cotangent)
  return y, means, *gradients


SWITCH_PARAMS = {
  'router': {'kernel': SWITCH['weights/router/kernel']},
  'experts': {'up': SWITCH['weights/experts/wi'], 'down': SWITCH['weights/experts/wo']},
}
FACTORS = ('1.0', '1.25')


def _switch(factor: str) -> ExpertsConfig:
  return ExpertsConfig(
    count=4,
    expert=RELU,
    router=RouterConfig(z_loss=0.001),
    dispatch=CapacityConfig(factor=float(factor), least=1),
  )


@pytest.mark.parametrize('factor', FACTORS)
def test_a_switch_layer_is_that_of_the_reference(factor):
  golden = {
    name.removeprefix(f'layer/factor_{factor}/'): SWITCH[name]
    for name in SWITCH.files
    if name.startswith(f'layer/factor_{factor}/')
  }
  config, meta = _switch(factor), json.loads(str(SWITCH['meta']))['layers'][factor]
  y, aux, of_params, of_x = _run(
    config, SWITCH_PARAMS, SWITCH['layer/x'], SWITCH['layer/cotangent']
  )
  np.testing.assert_allclose(y, golden['y'], atol=5e-6)
  want = 0.01 * golden['aux_loss'] + 0.001 * golden['z_loss']
  np.testing.assert_allclose(aux.loss, want, rtol=1e-6)
  assert dispatch.capacities(config.dispatch, 24, 1, 4, training=True)[24] == meta['capacity']
  dropped = float(aux.figures['router/dropped'])
  assert dropped == pytest.approx(meta['fraction_dropped'], abs=1e-6)
  router = golden['grad/router']
  np.testing.assert_allclose(
    of_params['router']['kernel'], router, atol=1e-5 * np.abs(router).max()
  )
  for ours, theirs in (('up', 'wi'), ('down', 'wo')):
    norms = [_norm(one) for one in of_params['experts'][ours]]
    np.testing.assert_allclose(norms, golden[f'grad_norm/experts/{theirs}'], rtol=1e-5)
  np.testing.assert_allclose(_norm(of_x), golden['grad_norm/x'], rtol=1e-5)


def _deepseek_weights():
  def kernel(name: str):
    return DEEPSEEK[f'weights/{name}.weight'].T

  def stacked(name: str):
    return np.stack([kernel(f'experts.{i}.{name}_proj') for i in range(8)])

  names = ('up', 'gate', 'down')
  return {
    'router': {'kernel': kernel('gate')},
    'experts': {name: stacked(name) for name in names},
    'shared': {name: {'kernel': kernel(f'shared_experts.{name}_proj')} for name in names},
  }


CASES = {
  'norm_0_seq_1': {'over': 'sequence'},
  'norm_1_seq_0': {'renormalize': True, 'over': 'batch'},
  'no_shared': {},
  'top1_norm': {'top_k': 1},  # of which the source ignores `norm_topk_prob`
}


def _deepseek(name: str) -> ExpertsConfig:
  case = CASES[name]
  router = RouterConfig(top_k=case.get('top_k', 3), renormalize=case.get('renormalize', False))
  return ExpertsConfig(
    count=8,
    expert=MLPConfig(8, **SWIGLU),
    shared=ExpertsConfig().shared if name == 'no_shared' else MLPConfig(16, **SWIGLU),
    router=router,
    balance=LossBalanceConfig(0.01, over=case.get('over', 'sequence')),
  )


@pytest.mark.parametrize('name', CASES)
def test_a_deepseekmoe_layer_is_that_of_the_reference(name):
  config, arguments = _deepseek(name), (DEEPSEEK['x'], DEEPSEEK['cotangent'])
  params = _deepseek_weights()
  if name == 'no_shared':
    params.pop('shared')
  if has_gradients := f'{name}/grad/gate.weight' in DEEPSEEK:
    y, aux, of_params, of_x = _run(config, params, *arguments)
  else:
    _, (y, aux) = jax.jit(_program(config))(params, *arguments)
  np.testing.assert_allclose(y, DEEPSEEK[f'{name}/y'], atol=2e-5)
  np.testing.assert_allclose(aux.loss, DEEPSEEK[f'{name}/aux_loss'], atol=1e-7)
  if not has_gradients:
    return
  want = DEEPSEEK[f'{name}/grad/gate.weight'].T
  np.testing.assert_allclose(
    of_params['router']['kernel'], want, atol=1e-4 * np.abs(want).max(), rtol=0
  )
  np.testing.assert_allclose(_norm(of_x), DEEPSEEK[f'{name}/grad_norm/x'], rtol=1e-4)
  norms = [
    _norm(of_params['experts'][part][i]) for i in range(8) for part in ('down', 'gate', 'up')
  ] + [_norm(of_params['shared'][part]['kernel']) for part in ('down', 'gate', 'up')]
  np.testing.assert_allclose(norms, DEEPSEEK[f'{name}/grad_norm/experts'], rtol=1e-4)


@pytest.mark.parametrize('case', ['norm_0_seq_1', 'norm_1_seq_0'])
def test_the_balance_loss_of_deepseekmoe_has_its_gradient(case):
  without_output = 0 * DEEPSEEK['cotangent']
  _, _, of_params, of_x = _run(_deepseek(case), _deepseek_weights(), DEEPSEEK['x'], without_output)
  name = f'{case[7:]}/aux_grad'
  np.testing.assert_allclose(
    of_params['router']['kernel'].T, DEEPSEEK[f'{name}/gate.weight'], atol=1e-7
  )
  want = DEEPSEEK[f'{name}/x']
  np.testing.assert_allclose(of_x, want, atol=1e-5 * np.abs(want).max())


def _output(config, params, x):
  definition = layer(config)
  return jax.jit(lambda params, x: definition.bind(params)(x)[0])(params, x)


def _alone(part, params, x):
  """Return what a feed-forward part without a router makes of x."""
  model = tiny_model(width=x.shape[-1])
  definition = define(lambda rngs: feed_forward(part, model, execution=DEFAULT, rngs=rngs))
  return definition.bind(params)(x)


@pytest.mark.slow
def test_groups_of_parameter_tokens_each_have_a_norm_of_their_own():
  shared = PattentionConfig(tokens=16, reference=16)
  router = RouterConfig('sigmoid', top_k=2)
  config = unbalanced(expert=TOKENS, shared=shared, router=router)
  params, x = large(layer(config)), np.asarray(inputs(2, 12, 16))
  gates = 1 / (1 + np.exp(-x @ np.asarray(params['router']['kernel'])))
  kept = np.where(gates >= np.sort(gates, -1)[..., -2:-1], gates, 0)

  @jax.jit
  def parts(params):
    every = jax.lax.map(lambda one: _alone(TOKENS, one, x), params['experts'])
    return every, _alone(shared, params['shared'], x)

  every, of_shared = map(np.asarray, parts(params))
  want = of_shared + np.einsum('BTE,EBTD->BTD', kept, every)
  np.testing.assert_allclose(_output(config, params, x), want, rtol=1e-4, atol=1e-4)


def test_activations_of_bfloat16_stay_near_float32_and_choose_by_it():
  config = unbalanced(router=RouterConfig(top_k=2))
  params, x = large(layer(config)), np.asarray(inputs(2, 12, 16)).astype(jnp.bfloat16)
  got, want = (np.asarray(_output(config, params, one)) for one in (x, x.astype(np.float32)))
  assert got.dtype == jnp.bfloat16
  # A choice that differs would move an output by its own size.
  np.testing.assert_allclose(got.astype(np.float32), want, atol=0.02 * np.abs(want).max())


def test_parameters_of_one_token_are_counted_by_its_share_of_experts():
  definition = layer(unbalanced(count=8, router=RouterConfig(top_k=2)))
  of_expert = 2 * 16 * 8
  assert definition.count == 16 * 8 + 8 * of_expert
  assert definition.active == 16 * 8 + 2 * of_expert
  assert definition.counts == f'{128 + 2048:,} parameters ({128 + 512:,} active)'
