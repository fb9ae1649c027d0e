"""Linear attention is its formula: in chunks, with padding, after a state, and in its gradients."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from jax.extend import core
from tiny import linear, normal_params, tiny_model, with_gradients

from tokenformer_jax.config import NoPositionsConfig, RotaryConfig
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.mixers.linear import (
  LinearAttention,
  State,
  causal_attention,
  full_attention,
)
from tokenformer_jax.model.params import define
from tokenformer_jax.model.positions import Rotary

pytestmark = pytest.mark.slow  # because of what is compiled

GOLDEN = np.load(tiny_run.ROOT / 'tests/golden/rope.npz')
ROTARY = RotaryConfig(fraction=0.5, layout='interleaved')
CAUSAL = pytest.mark.parametrize('causal', [True, False], ids=['causal', 'bidirectional'])


def _attend(query, key, value, positions=None, *, rotary=ROTARY, causal=True, state=None):
  """The outputs alone; positions from 0 on unless given, [T] or [B, T]."""
  positions = jnp.arange(query.shape[1]) if positions is None else jnp.asarray(positions)
  arguments = (query, key, value, jnp.atleast_2d(positions))
  how = {'rotary': Rotary(rotary, query.shape[-1])}
  return (
    causal_attention(*arguments, state, **how)[0] if causal else full_attention(*arguments, **how)
  )


def _inputs(length: int, seed: int = 0, dtype=np.float32) -> list[np.ndarray]:
  """Queries and keys [2, T, 3, 8], and values [2, T, 3, 5]."""
  rng = np.random.default_rng(seed)
  return [rng.normal(size=(2, length, 3, width)).astype(dtype) for width in (8, 8, 5)]


def _quadratic(query, key, value, *, rotary=ROTARY, causal=True):
  """RoFormer, eq. 19, with all scores at once."""
  positions, turn = jnp.arange(query.shape[1])[None], Rotary(rotary, query.shape[-1])
  query, key = (jax.nn.elu(x) + 1 for x in (query, key))
  pairs = 'BTHK,BSHK->BHTS'
  scores = jnp.einsum(pairs, turn(query, positions), turn(key, positions))
  weights = jnp.einsum(pairs, query, key)
  if causal:
    scores, weights = jnp.tril(scores), jnp.tril(weights)
  total = weights.sum(axis=-1, keepdims=True)
  shares = jnp.where(total > 0, scores / jnp.where(total > 0, total, 1), 0)
  return jnp.einsum('BHTS,BSHL->BTHL', shares, value)


@CAUSAL
def test_golden_values_and_gradients(causal):
  """A transcription of the formula in float64."""
  arguments = [jnp.asarray(GOLDEN[name]) for name in ('q', 'k', 'linear/v')]
  rotary = RotaryConfig(fraction=1.0, layout='interleaved')
  attend = jax.jit(functools.partial(_attend, rotary=rotary, causal=causal))
  out, backward = jax.vjp(attend, *arguments)
  name = f'linear/{"causal" if causal else "bidirectional"}'
  parts = ('y', 'grad_q', 'grad_k', 'grad_v')
  got = (out, *backward(GOLDEN['linear/cotangent']))
  for part, array in zip(parts, got, strict=True):
    np.testing.assert_allclose(
      array, GOLDEN[f'{name}/{part}'], atol=5e-6, err_msg=f'{part} is not that of eq. 19'
    )


# One position, and the borders of chunks of at most 128.
@CAUSAL
@pytest.mark.parametrize('length', [1, 300])
def test_linear_attention_equals_its_quadratic_form(length, causal):
  arguments = [jnp.asarray(x) for x in _inputs(length)]
  got, want = (
    jax.jit(functools.partial(with_gradients, functools.partial(f, causal=causal)))(*arguments)
    for f in (_attend, _quadratic)
  )
  for name, one, other in zip(('output', *'qkv'), got, want, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5, err_msg=f'{name}: sums are not eq. 19')


def test_very_negative_inputs_keep_their_features():
  """elu(−16) + 1 is e⁻¹⁶, of which exp(−16) − 1 + 1 keeps one bit in float32."""
  query, value = np.zeros((1, 2, 1, 4), np.float32), np.float32([0, 1]).reshape(1, 2, 1, 1)
  key = query + np.float32([-16, -15]).reshape(1, 2, 1, 1)
  attend = jax.jit(functools.partial(_attend, rotary=NoPositionsConfig()))
  share = float(np.asarray(attend(query, key, value))[0, 1, 0, 0])
  assert share == pytest.approx(1 / (1 + np.exp(-1)), rel=1e-5), 'keys lose their features'


@CAUSAL
def test_padding_counts_nowhere(causal):
  arguments, padding = _inputs(140), np.array([0, 31])
  attend = jax.jit(functools.partial(_attend, causal=causal))
  got = attend(*arguments, np.arange(140) - padding[:, None])
  for row, first in enumerate(padding):
    alone = attend(*(x[row : row + 1, first:] for x in arguments))
    np.testing.assert_allclose(
      got[row, first:], alone[0], atol=1e-5, err_msg=f'{first} slots of padding change a row'
    )


@CAUSAL
def test_a_denominator_of_zero_gives_zeros(causal):
  """Padded queries see no key, and features of very negative keys are 0."""
  positions = np.broadcast_to(np.arange(6) - 2, (2, 6))
  query, key, value = _inputs(6)
  key[1] = -200
  attend = functools.partial(_attend, positions=positions, causal=causal)
  out, *gradients = jax.jit(functools.partial(with_gradients, attend))(query, key, value)
  for name, array in zip(('output', *'qkv'), (out, *gradients), strict=True):
    assert np.all(np.isfinite(array)), f'{name} is not finite'
  if causal:
    np.testing.assert_array_equal(out[:, :2], 0, err_msg='padding attends to something')
  np.testing.assert_array_equal(out[1], 0, err_msg='keys without features are attended to')


def test_a_text_may_come_in_parts():
  """One position, some, and more than a chunk, each after the state of those before."""
  arguments = _inputs(300)
  how = {'rotary': Rotary(ROTARY, 8)}
  attend = jax.jit(functools.partial(causal_attention, **how))
  state = State(jnp.zeros((2, 3, 8, 5)), jnp.zeros((2, 3, 8)))
  parts, start = [], 0
  for end in (1, 2, 151, 300):
    part, positions = (x[:, start:end] for x in arguments), np.arange(start, end)[None]
    out, state = attend(*part, positions, state)
    parts.append(out)
    start = end
  np.testing.assert_allclose(
    np.concatenate(parts, axis=1), jax.jit(_attend)(*arguments), atol=1e-5, err_msg='the state'
  )


def test_sums_of_a_bfloat16_model_are_float32():
  """With 16 bits a sum of chunks of equal size stops growing after 256 of them."""
  ones = np.ones((1, 2**16, 1, 2), jnp.bfloat16)
  attend = functools.partial(_attend, rotary=NoPositionsConfig())
  out = jax.jit(attend)(ones, ones, ones)
  assert out.dtype == jnp.bfloat16, 'another dtype than the values have'
  np.testing.assert_array_equal(np.float32(out), 1, err_msg='a sum is rounded to bfloat16')
  products = _equations(jax.make_jaxpr(attend)(ones, ones, ones).jaxpr)
  dtypes = {e.outvars[0].aval.dtype.name for e in products if e.primitive.name == 'dot_general'}
  assert dtypes == {'float32'}, 'products inside a chunk are rounded before they are added'


def _equations(jaxpr) -> Iterator[core.JaxprEqn]:
  """All equations of a program, inner ones included."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in core.jaxprs_in_params(eqn.params):
      yield from _equations(inner)


def _widest(jaxpr, length: int) -> list[tuple[int, ...]]:
  """The shapes in a program in which two axes are as long as the text."""
  arrays = (v for eqn in _equations(jaxpr) for v in (*eqn.invars, *eqn.outvars))
  shapes = [getattr(v.aval, 'shape', ()) for v in arrays]
  return [shape for shape in shapes if sum(size >= length for size in shape) > 1]


@CAUSAL
def test_memory_is_proportional_to_the_length(causal):
  shapes = [jax.ShapeDtypeStruct((1, 4096, 2, width), jnp.float32) for width in (16, 16, 16)]

  def program(f) -> list[tuple[int, ...]]:
    total = lambda *x: jnp.sum(f(*x, causal=causal))  # noqa: E731
    return _widest(
      jax.make_jaxpr(jax.value_and_grad(total, argnums=(0, 1, 2)))(*shapes).jaxpr, 4096
    )

  assert program(_quadratic), 'the search finds no array of T × T where there are some'
  assert not program(_attend), 'there is an array of T × T'


def _module(model, causal: bool = True) -> LinearAttention:
  definition = define(
    lambda rngs: LinearAttention(
      model.layer.mixer, model, causal=causal, execution=Execution(), rngs=rngs
    )
  )
  return definition.bind(normal_params(definition))


def test_the_state_has_a_constant_size():
  module = _module(linear(tiny_model()))
  sizes = {
    tuple(x.shape for x in module.init_cache(2, length, jnp.bfloat16)) for length in (1, 64, 10**6)
  }
  assert sizes == {((2, 4, 8, 8), (2, 4, 8))}, 'the cache grows with the text'
  assert {x.dtype for x in module.init_cache(2, 64, jnp.bfloat16)} == {jnp.dtype('float32')}
  axes = module.cache_axes()
  assert [len(names) for names in axes] == [4, 3] and axes.keys == ('batch', 'heads', None)
