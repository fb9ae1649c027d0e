"""A document gives the same beside others in its row and alone, on every path of attention."""

import functools

import architectures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from outcomes import assert_close
from tiny import gated_model, large_params, tiny_model, with_gradients, with_mixer

from tokenformer_jax.config import MeshConfig, SeenScaleConfig
from tokenformer_jax.model import kernels, splash, trunk
from tokenformer_jax.model.blocks import architecture
from tokenformer_jax.model.execution import DEFAULT, Execution
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import define
from tokenformer_jax.parallel import sharding

END, LENGTH = 0, 150  # longer than a block of queries, and than a chunk of sums
# The first slot of each document, by row; a document of one slot is empty.
STARTS = ((0, 5, 6, 40, 131), (0,), (0, 128), (0, 1, 2, 3, 149))

# One for each kind of scores, masks and sums; other architectures mix them.
MODELS = {
  'shaped': architectures.MODELS['skips and norms'],
  'hybrid': architectures.MODELS['hybrid'],
  'clipped': architectures.MODELS['clipped'],
  'seen scale, window': with_mixer(
    tiny_model(window=6), length_scale=SeenScaleConfig(least=2, base=4.0)
  ),
  'gated units, window, relu²': gated_model(window=9, scores='squared_relu'),
  'linear': architectures.MODELS['linear'],
  'learned': tiny_model(position_embedding='learned', max_length=LENGTH, rotary=0),
}
WITH_GRADIENTS = ('hybrid', 'linear')  # of softmax attention, and of sums over chunks


def _packed() -> np.ndarray:
  """Return rows of ids [B, T] with documents that begin at `STARTS`."""
  ids_BxT = np.random.default_rng(0).integers(1, 64, (len(STARTS), LENGTH), np.int32)
  for ids_T, starts in zip(ids_BxT, STARTS, strict=True):
    ids_T[list(starts[1:])] = END
  return ids_BxT


def _alone(rows_BxTx: np.ndarray, filling: int = 1) -> np.ndarray:
  """Return each document of packed rows in a row of its own, filled up behind."""
  documents = []
  for row_Tx, starts in zip(rows_BxTx, STARTS, strict=True):
    for start, stop in zip(starts, (*starts[1:], LENGTH), strict=True):
      one = np.full_like(row_Tx, filling)
      one[: stop - start] = row_Tx[start:stop]
      documents.append(one)
  return np.stack(documents)


IDS = _packed()
COUNTED = _alone(np.ones_like(IDS), 0)


@functools.cache
def _run(name: str, choice: str):
  """Return a function of parameters, ids and weights: logits, and a gradient of a sum of them."""
  definition = define_lm(MODELS[name], Execution(remat='everything'))

  def loss(params, ids_BxT, weights_BxT):
    context = Context.from_ids(ids_BxT, ids_BxT == END, choice)
    logits, _ = definition.bind(params)(ids_BxT, context)
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) * weights_BxT), logits

  def run(params, ids_BxT, weights_BxT):
    if name not in WITH_GRADIENTS:
      return loss(params, ids_BxT, weights_BxT)[1], ()
    (_, logits), gradient = jax.value_and_grad(loss, has_aux=True)(params, ids_BxT, weights_BxT)
    return logits, gradient

  return jax.jit(run)


def _check_alone(name: str, choice: str) -> None:
  params = large_params(MODELS[name])
  logits, gradient = _run(name, choice)(params, IDS, np.ones_like(IDS))
  alone, want = _run(name, 'joined')(params, _alone(IDS), COUNTED)
  counted = COUNTED[..., None]
  got = _alone(np.asarray(logits), 0)
  np.testing.assert_allclose(got * counted, alone * counted, atol=1e-5 * np.abs(alone).max())
  assert_close(gradient, want, 'the gradient depends on the documents beside')


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_a_document_is_the_same_packed_and_alone(name):
  _check_alone(name, 'separate')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['seen scale, window', 'linear'])
def test_relative_positions_need_no_restart(name):
  _check_alone(name, 'masked')


@pytest.mark.slow
def test_documents_do_not_depend_on_the_devices():
  model, ones = MODELS['hybrid'], np.ones_like(IDS)
  want = _run('hybrid', 'separate')(large_params(model), IDS, ones)
  mesh, definition = sharding.make_mesh(MeshConfig(fsdp=4, tokens=2)), define_lm(model)
  with jax.set_mesh(mesh):
    params = jax.device_put(large_params(model), sharding.tree_shardings(mesh, definition.axes))
    ids, ones = (jax.device_put(x, sharding.batch_sharding(mesh)) for x in (IDS, ones))
    got = _run('hybrid', 'separate')(params, ids, ones)
  assert_close(jax.device_get(got), want, '8 devices compute another model')


def _context(choice: str = 'separate', ids_BxT: np.ndarray = IDS) -> Context:
  return Context.from_ids(ids_BxT, ids_BxT == END, choice)


def test_the_token_between_documents_begins_the_later_one():
  ids_BxT = np.array([[3, END, 4, 5, END, END, 6, -1], [END, 3, 4, 5, 6, 7, 8, 9]])
  context = _context('masked', ids_BxT)
  starts = [[0, 1, 1, 1, 4, 5, 5, 5], [0] * 8]
  np.testing.assert_array_equal(context.starts_BxT, starts)
  np.testing.assert_array_equal(context.positions(8)[0], np.arange(8), 'positions restart')
  restarted = [[0, 0, 1, 2, 0, 0, 1, 2], list(range(8))]
  np.testing.assert_array_equal(context.document_positions(context.positions(8)), restarted)
  context = _context('separate', ids_BxT)
  np.testing.assert_array_equal(context.positions(8), restarted, 'positions do not restart')
  np.testing.assert_array_equal(context.document_positions(context.positions(8)), restarted)
  assert _context('joined', ids_BxT).starts_BxT is None, 'joined documents are told apart'


def _seen(window: int, length: int, starts_BxT: np.ndarray) -> np.ndarray:
  """Return the keys that each query sees, by the definition: bool [B, T, S]."""
  slots = np.arange(length)
  distance = slots[:, None] - slots[None]
  return (distance >= 0) & (distance < (window or length)) & (slots >= starts_BxT[..., None])


def _arrays(length: int) -> list[np.ndarray]:
  return [*np.random.default_rng(0).normal(size=(3, 2, length, 2, 8)).astype(np.float32)]


def _starts(length: int) -> np.ndarray:
  firsts = np.zeros((2, length), np.int32)
  for row, starts in zip(firsts, ([1, 2, 50, 129, 200], [128, 130, 255]), strict=True):
    kept = [start for start in starts if start < length]
    row[kept] = kept
  return np.maximum.accumulate(firsts, axis=1)


def _reference(window: int, starts_BxT: np.ndarray, query, key, value) -> jax.Array:
  scores = jnp.einsum('BTHK,BSHK->BHTS', query, key) / np.sqrt(query.shape[-1])
  seen = _seen(window, query.shape[1], starts_BxT)[:, None]
  weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
  return jnp.einsum('BHTS,BSHK->BTHK', weights, value)


@functools.cache
def _masked(window: int) -> tuple[jax.Array, ...]:
  reference = functools.partial(_reference, window, _starts(256))
  return jax.jit(functools.partial(with_gradients, reference))(*_arrays(256))


@pytest.mark.parametrize(('kernel', 'window'), [('xla', 100), ('splash', 0), ('cudnn', 100)])
def test_kernels_mask_other_documents(kernel, window, monkeypatch):
  """cuDNN needs a GPU: here XLA computes the call, with its mask and window."""
  monkeypatch.setattr(splash, 'attention', functools.partial(splash.attention, interpret=True))
  plain = jax.nn.dot_product_attention
  monkeypatch.setattr(
    jax.nn,
    'dot_product_attention',
    lambda *arrays, **how: plain(*arrays, **{**how, 'implementation': 'xla'}),
  )
  starts_BxT = _starts(256)
  how = {'causal': True, 'window': window, 'implementation': kernel, 'starts_BxT': starts_BxT}
  got = jax.jit(lambda *x: with_gradients(functools.partial(kernels.attend, **how), *x))
  assert_close(got(*_arrays(256)), _masked(window), kernel)


def test_cudnn_is_not_asked_for_a_mask_of_odd_sides(monkeypatch):
  monkeypatch.setattr(jax.nn, 'dot_product_attention', None)
  starts_BxT, arrays = _starts(33), _arrays(33)
  how = {'causal': True, 'implementation': 'cudnn', 'starts_BxT': starts_BxT}
  got = jax.jit(functools.partial(kernels.attend, **how))(*arrays)
  want = jax.jit(functools.partial(_reference, 0, starts_BxT))(*arrays)
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_cudnn_is_not_asked_for_a_cap_of_scores(monkeypatch):
  monkeypatch.setattr(jax.nn, 'dot_product_attention', None)
  how, arrays = {'weigh': kernels.Softmax(1.5), 'window': 9}, _arrays(32)
  attend = functools.partial(kernels.attend, causal=True, implementation='cudnn', **how)
  want = jax.jit(functools.partial(kernels.causal_attention, **how))(*arrays)
  np.testing.assert_array_equal(jax.jit(attend)(*arrays), want)


def test_caches_and_images_hold_no_documents():
  with pytest.raises(ValueError, match='a cache holds one document a row'):
    trunk.run([], (), jnp.zeros(0), _context(), (), execution=DEFAULT)
  layer = architecture(tiny_model(), causal=False).makers['layer']
  block = define(lambda rngs: layer(execution=DEFAULT, rngs=rngs))
  with pytest.raises(ValueError, match='needs a causal mask'):
    block.bind(block.abstract)(np.zeros((4, LENGTH, 32)), _context())
