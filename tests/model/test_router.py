"""Routers: choice and losses against the reference, the float32 rule, and the bias."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import inputs, of_rows, unbalanced

from tokenformer_jax.config import BiasBalanceConfig, LMConfig, RouterConfig
from tokenformer_jax.model import grouped, router
from tokenformer_jax.model.layer import MAX_VIOLATION, layer_means
from tokenformer_jax.model.params import define

pytestmark = pytest.mark.slow  # because of what is compiled

GOLDEN = Path(__file__).parents[1] / 'golden'
SWITCH = np.load(GOLDEN / 'switch.npz')  # by google/flaxformer: see its `meta`
TOP_1 = RouterConfig()


def _gates(logits) -> jax.Array:
  return jax.nn.softmax(jnp.asarray(logits))


def _dispatch(name: str, capacity: int, valid=None):
  """Return the dispatch and the combine array [G, T, E, C] of the logits in a golden file."""
  logits = SWITCH[f'{name}/logits'] if f'{name}/logits' in SWITCH else SWITCH['router/logits']

  @jax.jit
  def run():
    choice = router.choose(jnp.asarray(logits), TOP_1, valid_BxT=valid)
    experts, gates = choice.experts_BxTxK[..., 0], choice.gates_BxTxK[..., 0]
    places = jax.vmap(lambda e: grouped.rank(e, 4).rank_M)(experts)
    of_expert = jax.nn.one_hot(experts, 4)[..., None]
    taken = of_expert * jax.nn.one_hot(places, capacity)[:, :, None]
    return taken, taken * gates[..., None, None]

  return map(np.asarray, run())


@pytest.mark.parametrize(('name', 'capacity'), [('router', 2), ('router', 8), ('router_padded', 4)])
def test_tokens_get_the_slots_of_the_reference(name, capacity):
  valid = SWITCH['router_padded/valid'] if name == 'router_padded' else None
  taken, weights = _dispatch(name, capacity, valid)
  want = f'{name}/capacity_{capacity}'
  np.testing.assert_array_equal(taken, SWITCH[f'{want}/dispatch'])
  np.testing.assert_allclose(weights, SWITCH[f'{want}/combine'], atol=1e-6)


@jax.jit
def _balance(logits: jax.Array, weight: jax.Array) -> jax.Array:
  gates = _gates(logits)
  chosen = jax.nn.one_hot(jnp.argmax(gates, -1), gates.shape[-1]) * weight[..., None]
  return router.balance_loss(chosen, gates, weight, over=(1,)) / len(logits)


def _z_loss(logits: jax.Array, weight: jax.Array) -> jax.Array:
  return router.z_loss(logits, weight) / jnp.sum(weight)


LOSSES = {'aux_loss': _balance, 'z_loss': _z_loss}


@pytest.mark.parametrize('name', LOSSES)
def test_losses_and_their_gradients_are_those_of_the_reference(name):
  loss, gradient = jax.jit(jax.value_and_grad(LOSSES[name]))(
    SWITCH['router/logits'], np.ones((4, 24), np.float32)
  )
  want = SWITCH[f'router/{name}_grad']
  np.testing.assert_allclose(loss, SWITCH[f'router/{name}'], atol=1e-5)
  np.testing.assert_allclose(gradient, want, atol=1e-5 * np.abs(want).max())


def test_padding_counts_in_no_mean():
  # The source divides f, P and z of a padded row by all its tokens, and a padded token adds
  # (log 4)² to z. We divide by the tokens that count, so that padding changes nothing.
  logits, valid = (SWITCH[f'router_padded/{name}'] for name in ('logits', 'valid'))
  weight = valid.astype(np.float32)
  z = np.asarray(jax.jit(_z_loss)(logits, weight))
  of_source = (z * valid.sum() + (~valid).sum() * np.log(4) ** 2) / valid.size
  np.testing.assert_allclose(of_source, SWITCH['router_padded/z_loss'], rtol=1e-5)

  tokens = valid.sum(1)
  of_rows = [_balance(row[None], one[None]) for row, one in zip(logits, weight, strict=True)]
  of_source = np.mean(np.asarray(of_rows) * np.square(tokens / valid.shape[1]))
  np.testing.assert_allclose(of_source, SWITCH['router_padded/aux_loss'], rtol=1e-5)

  alone = [
    _balance(row[valid][None], np.ones((1, valid.sum()), np.float32))
    for row, valid in zip(logits, valid, strict=True)
  ]
  np.testing.assert_allclose(_balance(logits, weight), np.mean(alone), rtol=1e-6)


@pytest.mark.parametrize('size', [50.0, 95.0])  # the gates' squares underflow, and the gates
def test_gates_next_to_0_have_shares_and_gradients(size):
  config, far = RouterConfig('sigmoid', top_k=2, renormalize=True), np.float32([3, 1, 0, 2])

  def f(logits):
    share = router.shares(logits, config)
    loss = router.balance_loss(jnp.ones((1, 1, 4)), share, jnp.ones((1, 1)), (1,))
    return loss + router.choose(logits, config).gates_BxTxK[0, 0] @ jnp.array([1.0, 2.0])

  logits = far[None, None] - size
  # So far out a gate is exp(logit), and shares are those of softmax gates.
  share = 1 / (1 + np.exp(1))  # of the second, beside softmax of 3 and 2
  want = np.array([-1, 0, 0, 1]) * share * (1 - share)
  np.testing.assert_allclose(np.asarray(jax.jit(jax.grad(f))(logits))[0, 0], want, atol=1e-5)


def test_equal_gates_go_by_number():
  logits = jnp.full((1, 1, 6), 0.25).at[0, 0, 4].set(0.5)
  found = router.choose(logits, RouterConfig(top_k=3)).experts_BxTxK
  assert found.tolist() == [[[4, 0, 1]]]


def test_the_loss_of_groups_has_the_mean_share_and_the_sum_of_gates():
  size, gates, weight = 2, np.asarray(_gates(inputs(3, 10, 8))), np.ones((3, 10), np.float32)
  chosen = np.eye(8, dtype=np.float32)[gates.argmax(-1)]
  # DeepSeekMoE, eq. 15 to 17.
  f, p = 8 * chosen.mean(1), gates.mean(1)
  f, p = f.reshape(3, -1, size).mean(-1), p.reshape(3, -1, size).sum(-1)
  want = (f * p).sum()
  got = jax.jit(lambda *x: router.balance_loss(*x, over=(1,), size=size))(chosen, gates, weight)
  assert got == pytest.approx(want, rel=1e-5)


def _router(**changes):
  config = unbalanced(**changes)
  definition = define(lambda rngs: router.Router(config, LMConfig(width=16), rngs=rngs))
  params = jax.tree.map(lambda p: inputs(*p.shape, seed=3), definition.abstract)
  return definition, params


@pytest.mark.parametrize(('dtype', 'exact'), [('float32', True), ('bfloat16', False)])
def test_products_and_gates_are_float32_whatever_the_activations_are(dtype, exact):
  definition, params = _router(router=RouterConfig(dtype=dtype))
  x = inputs(2, 12, 16).astype(jnp.bfloat16)
  gates = jax.jit(lambda params, x: definition.bind(params)(x)[0].gates_BxTxK)(params, x)
  assert gates.dtype == jnp.float32
  want = _gates(x.astype(jnp.float32) @ params['kernel']).max(-1, keepdims=True)
  assert np.allclose(gates, want, atol=1e-6) == exact


def test_jitter_is_drawn_in_training_only():
  definition, params = _router(router=RouterConfig(jitter=0.1))
  x = inputs(1, 6, 16)
  plain = _router()[0]

  @jax.jit
  def gates(key):
    calm, moved = (definition.bind(params)(x, None, one)[0] for one in (None, key))
    return calm.gates_BxTxK, moved.gates_BxTxK, plain.bind(params)(x, None, key)[0].gates_BxTxK

  calm, moved, without = map(np.asarray, gates(jax.random.key(0)))
  assert not np.allclose(calm, moved)
  assert np.array_equal(without, calm)


def test_the_bias_acts_on_the_choice_and_not_on_gates():
  definition, params = _router(balance=BiasBalanceConfig(), router=RouterConfig('sigmoid'))
  params |= {'bias': jnp.array([0.0, 0.0, 9.0, 0.0])}
  x = inputs(2, 12, 16)

  def f(params):
    choice, aux = definition.bind(params)(x)
    loss, _ = aux.divided(of_rows(2, 12))
    return jnp.sum(choice.gates_BxTxK) + loss, (choice, loss)

  (_, (choice, loss)), gradient = jax.jit(jax.value_and_grad(f, has_aux=True))(params)
  assert np.all(choice.experts_BxTxK == 2)
  want = jax.nn.sigmoid(x @ params['kernel'])[..., 2:3]
  np.testing.assert_allclose(choice.gates_BxTxK, want, atol=1e-6)
  assert loss == 0, 'the bias adds to the loss'
  # What reaches the bias is the excess of the load alone, whatever is made of the gates.
  np.testing.assert_allclose(gradient['bias'], [-0.25, -0.25, 0.75, -0.25], atol=1e-6)
  move = definition.info['bias'].own_update(gradient['bias'])
  np.testing.assert_allclose(move, [1e-3, 1e-3, -1e-3, 1e-3], atol=1e-9)


def test_figures_of_an_even_and_of_a_collapsed_router():
  def figures(definition, params, x):
    @jax.jit
    def run():
      _, aux = definition.bind(params)(x)
      _, means = aux.divided(of_rows(2, 6))
      return layer_means({name: [value[None]] for name, value in means.items()})

    return run()

  even = figures(*_router(router=RouterConfig(top_k=4)), inputs(2, 6, 16))
  assert even[MAX_VIOLATION] == pytest.approx(0, abs=1e-6)
  np.testing.assert_allclose([even[f'router/load/{i}'] for i in range(4)], 0.25)
  collapsed = np.zeros((16, 4), np.float32)
  collapsed[0, 3] = 50
  one = figures(_router()[0], {'kernel': collapsed}, np.ones((2, 6, 16), np.float32))
  assert one[MAX_VIOLATION] == pytest.approx(3)
  assert one['router/entropy'] == pytest.approx(0, abs=1e-6)
