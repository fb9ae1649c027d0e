"""Pattention against its formulas, and the properties that growth relies on."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import with_gradients

from tokenformer_jax.config import MeshConfig, PattentionConfig, TokenGroup
from tokenformer_jax.config.pattention import SCORES as SCORE_CONFIGS
from tokenformer_jax.config.pattention import L2NormGELU, score_like
from tokenformer_jax.model import gelu as gelu_lib
from tokenformer_jax.model import groups
from tokenformer_jax.model.gelu import activate_rows
from tokenformer_jax.model.params import define
from tokenformer_jax.model.pattention import Pattention, parameter_weights, pattention
from tokenformer_jax.parallel import sharding
from tokenformer_jax.plan import gpu
from tokenformer_jax.plan.hlo import parse

SCORES = ['l2_norm_gelu', 'gelu_l2_norm', 'gelu_l1_norm', 'softmax', 'exp_l2_norm']
WITH_GELU = SCORES[:3]
EACH_SCORE = pytest.mark.parametrize('score', SCORES)
EACH_WITH_GELU = pytest.mark.parametrize('score', WITH_GELU)


_erf = np.vectorize(math.erf)


def _gelu(x: np.ndarray, form: str = 'exact') -> np.ndarray:
  if form == 'tanh':
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
  return x / 2 * (1 + _erf(x / math.sqrt(2)))


def _reference(scores: np.ndarray, score: str, gelu: str, reference_tokens: int) -> np.ndarray:
  """Θ in float64, as the papers write it."""
  tau = math.sqrt(reference_tokens)
  if score == 'l2_norm_gelu':
    return _gelu(tau * scores / np.linalg.norm(scores, axis=-1, keepdims=True), gelu)
  activated = np.exp(scores) if score in ('softmax', 'exp_l2_norm') else _gelu(scores, gelu)
  if score in ('gelu_l1_norm', 'softmax'):
    return tau**2 * activated / np.abs(activated).sum(axis=-1, keepdims=True)
  return tau * activated / np.linalg.norm(activated, axis=-1, keepdims=True)


@functools.partial(jax.jit, static_argnames=('score', 'gelu', 'reference_tokens'))
def _weights(scores, score='l2_norm_gelu', gelu='exact', reference_tokens=None):
  reference_tokens = reference_tokens or scores.shape[-1]
  one = groups.make((TokenGroup(scores.shape[-1], reference_tokens),))
  return parameter_weights(scores, score_like(L2NormGELU(gelu=gelu), score), one)


@functools.partial(jax.jit, static_argnames=('score', 'reference_tokens'))
def _pattention(x, keys, values, score='l2_norm_gelu', reference_tokens=12):
  one = (TokenGroup(len(keys), reference_tokens, SCORE_CONFIGS[score]()),)
  return pattention(x, keys, values, groups=one)


def _normal(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
  rng = np.random.default_rng(seed)
  return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def _example(seed: int, tokens: int = 12) -> list[np.ndarray]:
  """x [B, T, D_in], keys and values, of different sizes everywhere."""
  return _normal(seed, (2, 3, 8), (tokens, 8), (tokens, 5))


@pytest.mark.parametrize('gelu', ['exact', 'tanh'])
@EACH_SCORE
def test_weights_are_the_formula(score, gelu):
  (scores,) = _normal(0, (2, 3, 12))
  np.testing.assert_allclose(
    _weights(scores, score, gelu, 7),
    _reference(np.float64(scores), score, gelu, 7),
    rtol=2e-5,
    atol=1e-6,
    err_msg=f'{score} is not Θ of the paper',
  )


@functools.cache
def _written(tokens: int) -> tuple[list[np.ndarray], tuple[np.ndarray, ...]]:
  """Arguments, and the output and the gradients of the formula."""

  def written(x, keys, values):
    scores = x @ keys.T
    scores = scores / jnp.linalg.norm(scores, axis=-1, keepdims=True) * math.sqrt(12)
    return jax.nn.gelu(scores, approximate=False) @ values

  arrays = _normal(0, (8, 4, 16), (tokens, 16), (tokens, 8))
  return arrays, jax.device_get(jax.jit(functools.partial(with_gradients, written))(*arrays))


MIXED, ALONG_TOKENS = {'replica': 2, 'fsdp': 2, 'tokens': 2}, {'fsdp': 1, 'tokens': 8}
SEQUENCE = {'fsdp': 2, 'sequence': 2, 'tokens': 2}
# The number of tokens, the width of 4 heads with the zeros that fill them, and a mesh. The gradient
# of the norm goes through KᵀK from 8 · 16 tokens a device on, if there are no heads.
SIZES = [
  (16, 6, None),
  (128, 0, None),
  (1024, 0, ALONG_TOKENS),
  (128, 0, MIXED),
  (128, 6, MIXED),
  (16, 4, SEQUENCE),
]


@pytest.mark.parametrize(('tokens', 'head_width', 'mesh'), SIZES)
def test_gradients_are_those_of_the_formula_however_many_tokens(tokens, head_width, mesh):
  (x, keys, values), (out, of_x, *others) = _written(tokens)

  def as_heads(x):
    return np.pad(x.reshape(8, 4, 4, 4), [(0, 0)] * 3 + [(0, head_width - 4)]) if head_width else x

  with jax.set_mesh(sharding.make_mesh(MeshConfig(**mesh))) if mesh else contextlib.nullcontext():
    apply = functools.partial(pattention, groups=(TokenGroup(12, 12),))
    got = jax.jit(functools.partial(with_gradients, apply))(as_heads(x), keys, values)
  for one, other in zip(got, (out, as_heads(of_x), *others), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def _zero_inputs() -> dict[str, list[np.ndarray]]:
  x, keys, values = _example(0)
  row = x.copy()
  row[0, 1] = 0
  return {'a zero row': [row, keys, values], 'zero keys': [x, 0 * keys, values]}


@functools.cache
def _value_and_gradients(score: str):
  def total(*arguments):
    return jnp.sum(_pattention(*arguments, score) ** 2)

  return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))


@pytest.mark.parametrize('zero', _zero_inputs())
@EACH_SCORE
def test_zero_scores_have_finite_values_and_gradients(score, zero):
  value, gradients = _value_and_gradients(score)(*_zero_inputs()[zero])
  finite = [bool(jnp.all(jnp.isfinite(leaf))) for leaf in (value, *gradients)]
  assert all(finite), f'{zero} gives NaN or infinity (value, d/dx, d/dkeys, d/dvalues: {finite})'


@EACH_WITH_GELU
def test_tokens_with_zero_keys_change_nothing(score):
  x, keys, values = _example(0)
  (new_values,) = _normal(1, (20, 5))
  new_keys = np.zeros((20, 8), np.float32)
  np.testing.assert_allclose(
    _pattention(x, np.append(keys, new_keys, 0), np.append(values, new_values, 0), score, 12),
    _pattention(x, keys, values, score, 12),
    rtol=1e-4,
    atol=1e-5,
    err_msg='a model does not compute the same after it has grown',
  )


def _layer():
  """A function of (parameters, x), and its arguments. Only the parameter tokens are 12."""
  definition = define(
    lambda rngs: Pattention(
      8,
      5,
      PattentionConfig(12, 12),
      key_std=1.0,
      value_std=1.0,
      rngs=rngs,
    )
  )
  x, keys, values = _example(0)
  return (lambda params, x: definition.bind(params)(x)), ({'keys': keys, 'values': values}, x)


def test_the_norms_of_the_scores_are_kept_and_not_the_scores():
  apply, arguments = _layer()
  backward = jax.eval_shape(lambda *arguments: jax.vjp(apply, *arguments)[1], *arguments)
  kept = [leaf.shape for leaf in jax.tree.leaves(backward)]
  assert (2, 3, 12) not in kept, f'arrays of the shapes {kept} are kept'
  assert (2, 3, 1) in kept, 'with split tokens, the backward pass reduces over the devices again'


def test_the_backward_pass_sums_over_a_row_once():
  apply, arguments = _layer()
  program = jax.make_jaxpr(
    lambda *arguments: jax.vjp(apply, *arguments)[1](np.ones((2, 3, 5), np.float32))
  )(*arguments)
  (recomputed,) = [one.params['jaxpr'] for one in program.eqns if 'policy' in one.params]
  sums = [one for one in recomputed.eqns if one.primitive.name == 'reduce_sum']
  of_rows = [one for one in sums if one.invars[0].aval.shape == (2, 3, 12)]
  assert len(of_rows) == 1, 'the norm is summed again, and what is computed again waits for it'


@pytest.mark.parametrize('score', ['softmax', 'exp_l2_norm'])
def test_large_scores_do_not_overflow(score):
  scores = np.array([[[1e4, 1e4 - 1, -1e4, 0]]], np.float32)
  want = _reference(np.float64(scores) - 1e4, score, 'exact', 4)
  np.testing.assert_allclose(
    _weights(scores, score), want, rtol=1e-3, atol=1e-6, err_msg='exp overflows'
  )


# The factor of l2_norm_gelu is itself rounded to bfloat16.
@pytest.mark.parametrize(
  ('score', 'bound'), [(s, 5e-3 if s == 'l2_norm_gelu' else 1e-3) for s in SCORES]
)
def test_norms_of_bfloat16_scores_are_summed_in_float32(score, bound):
  scores = jnp.asarray(_normal(0, (1, 64, 4096))[0], jnp.bfloat16)
  got, want = (
    np.float64(_weights(scores, score)),
    _reference(np.float64(scores), score, 'exact', 4096),
  )
  # Single weights are rounded to bfloat16; their common factor must not be.
  factor = np.sum(got * want, axis=-1) / np.sum(want**2, axis=-1)
  assert np.max(np.abs(factor - 1)) < bound, 'the norm of a long row has lost its precision'


@EACH_SCORE
def test_weights_have_the_dtype_of_the_scores(score):
  weights = jax.eval_shape(lambda a: _weights(a, score), jnp.ones((1, 1, 4), jnp.bfloat16))
  assert weights.dtype == jnp.bfloat16, 'the product with the values leaves bfloat16'


@pytest.mark.parametrize('score', ['l2_norm_gelu', 'softmax'])
def test_gradients_of_bfloat16_scores_are_those_of_float32_rounded(score):
  scores, cotangent = _normal(0, (1, 8, 256), (1, 8, 256))
  scores, cotangent = (jnp.asarray(a, jnp.bfloat16) for a in (scores, cotangent))

  def gradient(dtype):
    backward = jax.vjp(lambda a: _weights(a, score), scores.astype(dtype))[1]
    return np.float64(backward(cotangent.astype(dtype))[0])

  got, want = gradient(jnp.bfloat16), gradient(jnp.float32)
  # Two roundings, of 2⁻⁹ at most each: of what waits for the row's sum, and of all.
  error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
  assert 0 < np.max(error) < 2**-8, 'more is rounded than what waits and the result'


@functools.partial(jax.jit, static_argnames='gelu')
def _rows(scores, cotangent, gelu):
  """The weights of scores and their gradient, in the form for GPUs."""
  weights, backward = jax.vjp(lambda a: activate_rows(a, 7, gelu), scores)
  return weights, backward(cotangent)[0]


@pytest.mark.parametrize('gelu', ['exact', 'tanh'])
def test_weights_in_kernels_of_rows_and_their_gradients_are_those_of_the_formula(gelu):
  scores, cotangent = _normal(0, (2, 3, 12), (2, 3, 12))
  backward = jax.vjp(lambda a: _weights(a, 'l2_norm_gelu', gelu, 7), scores)[1]
  weights, gradient = _rows(scores, cotangent, gelu)
  want = _reference(np.float64(scores), 'l2_norm_gelu', gelu, 7)
  np.testing.assert_allclose(weights, want, rtol=2e-5, atol=1e-6)
  np.testing.assert_allclose(gradient, backward(cotangent)[0], rtol=1e-5, atol=1e-6)


def test_gradients_in_kernels_of_rows_are_rounded_once():
  scores, cotangent = (jnp.asarray(a, jnp.bfloat16) for a in _normal(0, (1, 8, 256), (1, 8, 256)))
  _, got = _rows(scores, cotangent, 'exact')
  _, want = _rows(*(a.astype(jnp.float32) for a in (scores, cotangent)), 'exact')
  np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


@pytest.mark.parametrize('size', [0.0, 1e-9])
def test_a_row_of_tiny_scores_has_finite_gradients_in_kernels_of_rows(size):
  scores, cotangent = _normal(0, (1, 1, 12), (1, 1, 12))
  backward = jax.vjp(lambda a: _weights(a, 'l2_norm_gelu', 'exact', 7), size * scores)[1]
  _, gradient = _rows(size * scores, cotangent, 'exact')
  np.testing.assert_allclose(gradient, backward(cotangent)[0], rtol=1e-4)


def test_gelu_by_exp_is_the_tanh_form_with_its_slope(monkeypatch):
  x = np.float32(np.linspace(-30, 30, 601))
  monkeypatch.setattr(gelu_lib, 'platform', lambda: 'gpu')
  got, slope = jax.jvp(lambda x: gelu_lib.activate(x, 'tanh'), (x,), (np.ones_like(x),))
  want = jax.jvp(lambda x: jax.nn.gelu(x, approximate=True), (x,), (np.ones_like(x),))
  np.testing.assert_allclose((got, slope), want, rtol=1e-6, atol=1e-5)


def _lower(mesh, tokens: int, gelu: str) -> jax.stages.Lowered:
  """Lower the output and the gradients of a Pattention that keeps its scores."""
  whole = jax.NamedSharding(mesh, jax.P())
  shapes = [(2, 512, 768), (tokens, 768), (tokens, 768), (2, 512, 768)]
  arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole) for shape in shapes]
  one = (TokenGroup(tokens, tokens, L2NormGELU(gelu=gelu)),)

  def both(x, keys, values, change):
    apply = functools.partial(pattention, groups=one, keep_scores=True)
    out, backward = jax.vjp(apply, x, keys, values)
    return out, backward(change)

  return jax.jit(both).lower(*arrays)


@pytest.mark.slow
@pytest.mark.skipif(not gpu.folder().is_dir(), reason=f'no compiler for GPUs in ${gpu.FOLDER}')
@pytest.mark.parametrize('gelu', ['exact', 'tanh'])
@pytest.mark.parametrize('tokens', [768, 3072])
def test_a_gpu_takes_a_kernel_for_the_weights_and_one_for_their_gradient(tokens, gelu):
  text = gpu.compile_text(_lower, tokens, gelu, on='h200')
  counts = gpu.count_kernels(text)
  assert counts['product'] == 6, 'the scores are computed again from x'
  assert (counts['triton'], counts['fusion']) == (2, 0)
  kernels = parse(text).entry.instructions.values()
  assert not any(f'f32[2,512,{tokens}]' in one.shape for one in kernels)
