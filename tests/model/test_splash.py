"""Attention by the splash kernel, interpreted: what a TPU computes, on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info
from outcomes import paths
from tiny import normal_params, tiny_model

from tokenformer_jax.config import MeshConfig
from tokenformer_jax.model import splash, stack
from tokenformer_jax.model.attention import Attention
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.kernels import Softmax, causal_attention, full_attention, kernel
from tokenformer_jax.model.params import define
from tokenformer_jax.parallel import rules, sharding


def _inputs(batch: int, length: int, heads: int, key_heads: int = 0) -> list[np.ndarray]:
  rng, heads_of = np.random.default_rng(0), (heads, key_heads or heads, key_heads or heads)
  return [np.float32(rng.normal(size=(batch, length, h, 32))) for h in heads_of]


def _value_and_gradients(attend, inputs: list[np.ndarray]):
  def loss(query, key, value):
    out = attend(query, key, value)
    return jnp.sum(jnp.sin(out)), out

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)


# In a window of 130 the first keys of three blocks of 128 are seen by the last queries by one.
@pytest.mark.parametrize(
  ('causal', 'window', 'cap', 'key_heads'), [(False, 0, 0, 2), (True, 130, 1.5, 1)]
)
def test_splash_is_softmax_attention(causal, window, cap, key_heads):
  inputs = _inputs(2, 384 if window else 256, 2, key_heads)
  (_, got), got_gradients = _value_and_gradients(
    lambda *x: splash.attention(*x, causal=causal, window=window, cap=cap, interpret=True), inputs
  )
  plain = functools.partial(causal_attention, window=window) if causal else full_attention
  plain = functools.partial(plain, weigh=Softmax(cap))
  (_, want), gradients = _value_and_gradients(plain, inputs)
  np.testing.assert_allclose(got, want, atol=1e-5)
  for name, one, other in zip('qkv', got_gradients, gradients, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5, err_msg=f'the gradient of {name}')


def test_zeros_that_fill_heads_change_nothing():
  inputs = _inputs(batch=1, length=128, heads=2)
  filled = [np.pad(x, ((0, 0), (0, 0), (0, 0), (0, 96))) for x in inputs]
  attention = functools.partial(splash.attention, head_width=32, causal=True, interpret=True)
  got = np.asarray(jax.jit(attention)(*filled))
  np.testing.assert_allclose(got[..., :32], jax.jit(causal_attention)(*inputs), atol=1e-5)


@pytest.mark.slow
def test_a_layer_that_fills_its_heads_computes_what_another_kernel_does(monkeypatch):
  interpreted = functools.partial(splash.attention, interpret=True)
  monkeypatch.setattr(splash, 'attention', interpreted)
  model = tiny_model(width=192, heads=2)
  assert splash.filled(96) == 128
  x_BxTxD = np.float32(np.random.default_rng(0).normal(size=(1, 128, model.width)))

  def gradient(name: str) -> dict[str, np.ndarray]:
    execution = Execution(attention=name)
    layer = define(lambda rngs: Attention(model.layer.mixer, model, execution=execution, rngs=rngs))
    loss = jax.grad(lambda params: jnp.sum(jnp.sin(layer.bind(params)(x_BxTxD)[0])))
    return paths(jax.jit(loss)(normal_params(layer, 0.05)))

  want = gradient('xla')
  for path, one in gradient('splash').items():
    atol = 1e-5 * np.abs(want[path]).max()
    np.testing.assert_allclose(one, want[path], atol=atol, err_msg=f'the gradient of {path}')


@pytest.mark.parametrize(('remat', 'keeps'), [('full', False), ('attention', True), ('dots', True)])
def test_outputs_of_attention_are_kept_for_the_backward_pass(remat, keeps):
  inputs = _inputs(batch=2, length=128, heads=4)
  run = functools.partial(splash.attention, causal=True, interpret=True)
  run = jax.checkpoint(run, policy=stack._POLICIES[remat])
  backward = jax.eval_shape(lambda *x: jax.vjp(run, *x)[1], *inputs)
  shapes = {leaf.shape for leaf in jax.tree.leaves(backward)}
  returned = {(2, 4, 128, 32), (2, 4, 128)}  # heads, and the logarithm of each query's sum
  assert returned & shapes == (returned if keeps else set()), 'attention runs a second time'


@pytest.mark.parametrize(
  ('length', 'window', 'block'),
  [(2048, 0, 1024), (1536, 0, 512), (640, 0, 128), (4096, 512, 512), (4096, 2048, 1024)],
)
def test_blocks_are_large_unless_a_window_leaves_more_out_of_small_ones(length, window, block):
  assert splash.block_size(length, window) == block


@pytest.mark.parametrize(
  ('length', 'window', 'kind', 'fused'),
  [
    (4096, 0, 'TPU v4', True),
    (131072, 0, 'TPU v5', True),
    (131072, 0, 'TPU v5 lite', False),
    (131072, 8192, 'TPU v5', False),
  ],
)
def test_one_kernel_computes_all_gradients_if_its_partial_ones_fit(length, window, kind, fused):
  block, size = splash.block_size(length, window), 2**27  # of the queries of 32,768 tokens of 1_5b
  assert splash.is_fused(length, block, window, size, kind) == fused


@pytest.mark.parametrize('window', [0, 1, 2, 128, 129, 130, 257, 258, 1000])
def test_the_blocks_that_are_computed_are_those_in_which_a_key_is_seen(window):
  seen_TxT = np.tri(640, dtype=bool)
  if window:
    seen_TxT &= ~np.tri(640, k=-window, dtype=bool)
  blocks = seen_TxT.reshape(5, 128, 5, 128).any(axis=(1, 3)).sum()
  assert splash.computed_blocks(640, window, 128) == blocks, 'time is planned for other blocks'


def test_the_kernel_gets_the_table_of_blocks_of_the_whole_mask():
  for process in (mask_info.process_mask, mask_info.process_mask_dkv):
    got, want = (
      process(masks.MultiHeadMask((mask((640, 640)),) * 2), (128, 128))[0]
      for mask in (splash._causal_mask(), masks.CausalMask)
    )
    for one, other in zip(got, want, strict=True):
      np.testing.assert_array_equal(one, other)


def test_rows_and_heads_stay_on_their_devices():
  mesh = sharding.make_mesh(MeshConfig(replica=2, fsdp=2, tokens=2))
  inputs = _inputs(batch=4, length=128, heads=2)
  attend = jax.jit(lambda *x: splash.attention(*x, causal=True, interpret=True))
  place = jax.NamedSharding(mesh, rules.spec(('batch', None, 'heads', None)))
  with jax.set_mesh(mesh):
    compiled = attend.lower(*jax.device_put(inputs, place)).compile()
    got = compiled(*jax.device_put(inputs, place))
  np.testing.assert_allclose(got, jax.jit(causal_attention)(*inputs), atol=1e-5)
  for collective in ('all-gather', 'all-reduce', 'all-to-all', 'collective-permute'):
    assert collective not in compiled.as_text(), f'{collective} moves what every device has'


@pytest.mark.parametrize(
  ('sizes', 'fits'),
  [((4, 2, 256), True), ((4, 2, 200), False), ((2, 2, 256), False), ((4, 1, 256), False)],
)
def test_lengths_rows_and_heads_that_do_not_divide_are_left_to_xla(sizes, fits):
  with jax.set_mesh(sharding.make_mesh(MeshConfig(replica=2, fsdp=2, tokens=2))):
    assert splash.fits(*sizes) == fits


def test_the_platform_chooses_the_kernel():
  chosen = {platform: kernel('auto', jnp.bfloat16, platform) for platform in ('cpu', 'gpu', 'tpu')}
  assert chosen == {'cpu': 'xla', 'gpu': 'cudnn', 'tpu': 'splash'}
  assert kernel('auto', jnp.float32, 'gpu') == 'xla', 'cuDNN has no attention in float32'
  assert kernel('xla', jnp.bfloat16, 'tpu') == 'xla', 'a name that is given is taken'
