"""The parts of blocks by themselves; blocks and models are tested in test_lm.py and test_vit.py."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tokenformer_jax.layers import LayerNorm


@pytest.mark.parametrize(
  ('form', 'params'), [('plain', set()), ('bias', {'bias'}), ('affine', {'scale', 'bias'})]
)
def test_a_layer_norm_has_the_parameters_of_its_form_and_uses_them(form, params):
  norm = LayerNorm(6, form, epsilon=1e-5, rngs=nnx.Rngs(0))
  rng = np.random.default_rng(0)
  values = {name: rng.normal(size=6).astype(np.float32) for name in params}
  assert set(nnx.to_pure_dict(nnx.state(norm, nnx.Param))) == params
  for name, value in values.items():
    getattr(norm, name)[...] = value
  x = rng.normal(3, 2, (2, 4, 6)).astype(np.float32)
  want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
  want = want * values.get('scale', 1) + values.get('bias', 0)
  np.testing.assert_allclose(norm(jnp.asarray(x)), want, rtol=1e-5, atol=1e-5)
