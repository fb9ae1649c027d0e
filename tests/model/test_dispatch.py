"""The way of tokens to experts: places, order, drops, and the same on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import inputs, large, layer, of_rows, unbalanced

from tokenformer_jax.config import (
  CapacityConfig,
  GroupedConfig,
  LossBalanceConfig,
  MeshConfig,
  MLPConfig,
  RouterConfig,
)
from tokenformer_jax.model import dispatch, grouped
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.router import Choice
from tokenformer_jax.parallel import sharding

PLENTY = CapacityConfig(factor=100, eval_factor=100)
ONE, SPLIT = {'fsdp': 1}, {'fsdp': 2, 'experts': 2, 'tokens': 2}


def _copy(rows, product, matrices):
  """An expert that multiplies its rows by its own number + 1."""
  return product(rows, matrices)


def _numbered(experts, config, training=True, gates=None, count=4):
  """Run experts on ones: each choice that is kept adds the expert's number + 1, times its gate."""
  experts = np.asarray(experts, np.int32)
  gates = np.ones(experts.shape) if gates is None else np.asarray(gates)
  matrices = [np.arange(1, count + 1, dtype=np.float32)[:, None, None]]
  x = np.ones((*experts.shape[:2], 1), np.float32)
  axes = [('experts', 'expert_width', 'expert_hidden')]

  @jax.jit
  def run(x, experts, gates, matrices):
    choice = Choice(experts, gates)
    return dispatch.run(_copy, x, choice, matrices, axes, config, training=training)

  return run(x, experts, np.float32(gates), matrices)


def test_a_capacity_is_the_slots_of_an_expert():
  config = CapacityConfig(factor=1.25, eval_factor=2.0, least=4)
  assert dispatch.capacities(config, 24, 1, 4, training=True)[24] == 8  # 7.5: halves to even
  assert dispatch.capacities(config, 24, 1, 4, training=False)[24] == 12
  assert dispatch.capacities(config, 24, 2, 4, training=True)[24] == 15
  few = dispatch.capacities(config, 24, 1, 64, training=True)
  assert few[24] == 4, 'the least'
  assert few[3] == 3, 'more places than tokens'


def test_an_expert_that_all_choose_takes_the_first_tokens_only():
  config = CapacityConfig(factor=1.0, least=1)
  out, kept = _numbered(np.full((2, 12, 1), 2), config)
  want = np.repeat([3, 0], [3, 9])
  np.testing.assert_array_equal(out[..., 0], [want, want], 'not exactly `capacity`, first in order')
  np.testing.assert_array_equal(kept[..., 0], [want > 0] * 2)


def test_experts_without_slots_add_nothing():
  out, kept = _numbered(np.zeros((1, 6, 1)), CapacityConfig(factor=0.01, least=0))
  assert not np.any(out) and not np.any(kept)


def test_neither_padding_nor_other_rows_change_what_a_row_keeps():
  config = CapacityConfig(eval_factor=1.0, least=1)
  definition = layer(unbalanced(dispatch=config, balance=LossBalanceConfig()))
  params, x, count = large(definition), np.asarray(inputs(2, 12, 16)), 5

  @jax.jit
  def run(x, padding=None, ends=None):
    return definition.bind(params)(x, Context(0, padding, ends))

  tokens = x[1, :count]
  alone, aux = run(tokens[None])
  assert aux.figures['router/dropped'] > 0, 'every token has a place anyway'
  row = np.pad(tokens, ((4, 12 - 4 - count), (0, 0)))
  y, _ = run(np.stack([x[0], row]), np.array([0, 4]), np.array([12, 4 + count]))
  np.testing.assert_allclose(np.asarray(y)[1, 4 : 4 + count], alone[0], atol=1e-5)
  _, beside = run(np.stack([0 * x[0], row]), np.array([0, 4]), np.array([0, 9]))
  for name, total in aux.losses.items():
    np.testing.assert_allclose(beside.losses[name], total, rtol=1e-6, err_msg='empty rows count')
  for name in ('router/entropy', 'router/dropped'):
    assert beside.figures[name] == pytest.approx(aux.figures[name])


@pytest.mark.parametrize('config', [PLENTY, GroupedConfig()], ids=['capacity', 'grouped'])
def test_every_expert_of_a_token_adds_its_part(config):
  experts = np.array([[[0, 2], [3, 1], [4, 4], [1, 3]]])  # 4 is no expert
  gates = np.array([[[0.5, 0.25], [1, 1], [1, 1], [0.125, 2]]])
  out, kept = _numbered(experts, config, gates=gates)
  assert out[0, :, 0].tolist() == [0.5 + 0.75, 4 + 2, 0, 0.25 + 8]
  assert kept[0].tolist() == [[True, True], [True, True], [False, False], [True, True]]


@pytest.mark.parametrize('platform', ['cpu', 'tpu'])
@pytest.mark.parametrize('rows', [1, 200])
def test_sorted_rows_meet_the_matrix_of_their_expert(platform, rows, monkeypatch):
  # In blocks on CPUs, by `ragged_dot` elsewhere.
  monkeypatch.setattr(grouped, 'platform', lambda: platform)
  rng = np.random.default_rng(0)
  experts = rng.choice([0, 1, 3, 5, 6], rows)  # some have no rows, and 6 is none
  x, matrices = inputs(rows, 8), inputs(6, 8, 5, seed=2)

  @jax.jit
  def f(experts, x):
    order = grouped.sort(experts, 6)
    return order.back(order.product(order.rows(x), matrices))

  got = f(np.int32(experts), x)
  whole = np.concatenate([matrices, np.zeros((1, 8, 5), np.float32)])
  np.testing.assert_allclose(got, np.einsum('MI,MIO->MO', x, whole[experts]), atol=1e-5)


def test_gradients_of_matrices_in_bfloat16_are_summed_in_float32():
  # Sums in bfloat16 over the 256 blocks of an expert on a CPU would be 3 % off.
  rng = np.random.default_rng(0)
  x, cotangent = np.abs(rng.normal(size=(2, 2**16, 4))).astype(jnp.bfloat16)
  experts = np.arange(2**16, dtype=np.int32) % 2

  @jax.jit
  @jax.grad
  def gradient(matrices, x, cotangent, experts):
    order = grouped.sort(experts, 2)
    y = order.back(order.product(order.rows(x), matrices))
    return jnp.sum(y.astype(jnp.float32) * cotangent)

  got = gradient(np.ones((2, 4, 4), jnp.bfloat16), x, cotangent, experts)
  exact = [x[i::2].astype(float).T @ cotangent[i::2].astype(float) for i in range(2)]
  np.testing.assert_allclose(np.asarray(got, float), exact, rtol=4e-3)


def test_both_dispatches_agree_where_nothing_is_dropped():
  router = RouterConfig(top_k=2, renormalize=True)
  config = unbalanced(router=router, expert=MLPConfig(8, gated=True), balance=LossBalanceConfig())
  params, x = large(layer(config)), inputs(4, 12, 16)

  def compute(how):
    definition = layer(dataclasses.replace(config, dispatch=how))

    def f(params, x):
      y, aux = definition.bind(params)(x, Context(training=True))
      return jnp.mean(jnp.square(y)) + aux.divided(of_rows(4, 12))[0], y

    return jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(params, x)

  by_places, by_groups = (
    jax.tree.leaves(jax.device_get(compute(how))) for how in (PLENTY, GroupedConfig())
  )
  for one, two in zip(by_places, by_groups, strict=True):
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5 * np.abs(one).max())


@pytest.mark.slow
def test_decoding_token_by_token_drops_none():
  config = unbalanced(dispatch=CapacityConfig(factor=0.01, eval_factor=0.01, least=0))
  definition = layer(config)
  params, x = large(definition), inputs(2, 3, 16)

  def dropped(start):
    run = definition.bind(params)
    return jax.jit(lambda: run(x, Context(start))[1].figures['router/dropped'])()

  assert (dropped(0), dropped(np.int32(5))) == (2 * 3, 0)


def _on_mesh(sizes, config, experts, x):
  count = int(np.prod(list(sizes.values())))
  mesh = sharding.make_mesh(MeshConfig(**sizes), jax.devices()[:count])
  matrix = inputs(8, 4, 6, seed=4)

  def f(x, experts, matrix):
    choice = Choice(experts, 0.5 + 0 * experts.astype(jnp.float32))
    axes = [
      ('experts', 'expert_width', 'expert_hidden'),
      ('experts', 'expert_hidden', 'expert_width'),
    ]
    both = [matrix, jnp.swapaxes(matrix, 1, 2)]

    def apply(rows, product, up, down):
      return product(product(rows, up), down)

    return dispatch.run(apply, x, choice, both, axes, config, training=True)

  with jax.set_mesh(mesh):
    places = sharding.batch_sharding(mesh)
    return jax.jit(f, in_shardings=(places, places, None))(x, experts, matrix)


SOME_DROP = {'capacity': CapacityConfig(factor=1.0, least=1), 'grouped': GroupedConfig()}


@pytest.mark.slow
@pytest.mark.parametrize('name', SOME_DROP)
def test_a_token_is_dropped_or_kept_on_every_mesh(name):
  experts = jnp.asarray(np.random.default_rng(0).integers(0, 8, (16, 12, 2)), jnp.int32)
  x, config = inputs(16, 12, 4), SOME_DROP[name]
  want, got = (_on_mesh(sizes, config, experts, x) for sizes in (ONE, SPLIT))
  np.testing.assert_array_equal(got.kept_BxTxK, want.kept_BxTxK)
  assert np.all(want.kept_BxTxK) == (name == 'grouped')
  np.testing.assert_allclose(got.out_BxTxD, want.out_BxTxD, atol=1e-4)


@pytest.mark.slow
def test_a_device_with_too_few_slots_reports_its_drops():
  experts = jnp.zeros((16, 12, 2), jnp.int32)
  x, sizes = inputs(16, 12, 4), {'fsdp': 1, 'experts': 4}
  _, kept = _on_mesh(sizes, GroupedConfig(device_factor=2.0), experts, x)
  # A device has 4 · 12 · 2 choices, all for the first one, and that has places for half of them.
  assert np.mean(kept) == 0.5
