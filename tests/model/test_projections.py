"""The parts of blocks by themselves; blocks and models are tested in test_lm.py and test_vit.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import tiny_model

from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.norm import Norm
from tokenformer_jax.model.products import repeat
from tokenformer_jax.model.projections import projection


@pytest.mark.parametrize(
  ('form', 'params'), [('plain', set()), ('bias', {'bias'}), ('affine', {'scale', 'bias'})]
)
def test_a_layer_norm_has_the_parameters_of_its_form_and_uses_them(form, params):
  norm = Norm(form, tiny_model(width=6), rngs=nnx.Rngs(0))
  rng = np.random.default_rng(0)
  values = {name: rng.normal(size=6).astype(np.float32) for name in params}
  assert set(nnx.to_pure_dict(nnx.state(norm, nnx.Param))) == params
  for name, value in values.items():
    getattr(norm, name)[...] = value
  x = rng.normal(3, 2, (2, 4, 6)).astype(np.float32)
  want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
  want = want * values.get('scale', 1) + values.get('bias', 0)
  np.testing.assert_allclose(jax.jit(lambda x: norm(x))(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('form', ['plain', 'affine'])
def test_a_layer_norm_keeps_nothing_in_float32_for_each_element(form):
  norm = Norm(form, tiny_model(width=6), rngs=nnx.Rngs(0))
  x = jnp.ones((2, 4, 6), jnp.bfloat16)
  backward = jax.eval_shape(lambda x: jax.vjp(norm, x)[1], x)
  kept = [(leaf.dtype.name, leaf.size) for leaf in jax.tree.leaves(backward)]
  assert ('float32', 2 * 4) in kept, 'the moments of the rows are computed again'
  assert ('float32', x.size) not in kept, f'the backward pass finds {kept}'


@pytest.mark.parametrize('kind', ['pattention', 'dense'])
def test_heads_are_the_parts_of_the_width_and_zeros_that_fill_them_change_nothing(kind):
  model = tiny_model(dense=kind == 'dense', bias=kind == 'dense')
  mixer = model.layer.mixer

  def make(seed: int):
    axes = ('width', 'heads')
    return projection(mixer.qkv, model, axes, execution=Execution(), rngs=nnx.Rngs(seed))

  first, second = make(0), make(1)
  if kind == 'dense':
    first.bias[...] = np.arange(model.width, dtype=np.float32)
  heads, head_width = mixer.heads, model.width // mixer.heads
  x_BxTxD = np.float32(np.random.default_rng(0).normal(size=(2, 3, model.width)))

  @functools.partial(jax.jit, static_argnums=1)
  def through(x, of_heads):
    return first(x, of_heads), second(first(x, of_heads))

  flat, after = map(np.asarray, through(x_BxTxD, None))
  want = flat.reshape(2, 3, heads, head_width)
  got, after_heads = map(np.asarray, through(x_BxTxD, (heads, head_width + 3)))
  np.testing.assert_allclose(got[..., :head_width], want, atol=1e-5)
  assert not got[..., head_width:].any(), 'what fills a head is not zero'
  np.testing.assert_allclose(after_heads, after, atol=1e-5)


def test_the_gradient_of_what_is_repeated_is_summed_in_float32():
  rng = np.random.default_rng(0)
  parameter = np.float32(rng.normal(size=4))
  change = rng.normal(1, 1, (24, 1024, 4)).astype(jnp.bfloat16)

  @jax.jit
  def run(parameter):
    out, backward = jax.vjp(lambda p: repeat(p, change.shape, change.dtype), parameter)
    return out, *backward(change)

  out, gradient = map(np.asarray, run(parameter))
  assert (out == parameter.astype(jnp.bfloat16)).all()
  want = np.sum(change.astype(np.float64), axis=(0, 1))
  np.testing.assert_allclose(
    gradient, want, rtol=1e-5, err_msg='a bias has a sum over tokens in bfloat16'
  )
