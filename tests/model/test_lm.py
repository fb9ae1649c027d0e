"""The language model against golden values, published sizes, and itself computed in other ways."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from outcomes import paths
from tiny import large_params, logits_of, tiny_model

from tokenformer_jax.config import InitConfig, MeshConfig, ModelConfig, PattentionConfig
from tokenformer_jax.model.execution import DEFAULT, Execution
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.loss import objective
from tokenformer_jax.model.params import Params, define, stack
from tokenformer_jax.model.pattention import Pattention
from tokenformer_jax.parallel import sharding

# Computed in float32 by the authors' PyTorch layers on random weights; the model is below.
GOLDEN = dict(np.load(Path(__file__).parents[1] / 'golden' / 'tokenformer_lm.npz'))
GOLDEN_MODEL = tiny_model(heads=2, tokens={'qkv': 32, 'proj': 32, 'ffn': 128})
GOLDEN_PROJECTIONS = {
  ('attention', 'query'): 'attention.query',
  ('attention', 'key'): 'attention.key',
  ('attention', 'value'): 'attention.value',
  ('attention', 'proj'): 'attention.proj',
  ('ffn',): 'mlp',
}
DENSE = {'dense': True, 'bias': True, 'norm': 'affine'}
LEARNED = {'rotary': 0, 'position_embedding': 'learned'}


def _from_golden(kind: str) -> Params:
  """The golden arrays `kind/…` as a tree of parameters, those of the layers stacked."""

  def stacked(name: str) -> np.ndarray:
    return np.stack([GOLDEN[f'{kind}/sequential.{2 + i}.{name}'] for i in range(2)])

  blocks = {'attention': {}}
  for (*parents, last), name in GOLDEN_PROJECTIONS.items():
    parent = blocks[parents[0]] if parents else blocks
    parent[last] = {
      'keys': stacked(f'{name}.key_param_tokens'),
      'values': stacked(f'{name}.value_param_tokens'),
    }
  return {
    'embedding': GOLDEN[f'{kind}/sequential.0.word_embeddings.weight'],
    'blocks': blocks,
    'final_norm': {
      'scale': GOLDEN[f'{kind}/sequential.5.norm.weight'],
      'bias': GOLDEN[f'{kind}/sequential.5.norm.bias'],
    },
  }


def _golden_gradient(remat: str, chunk: int) -> tuple[float, Params]:
  definition = define_lm(GOLDEN_MODEL, Execution(remat=remat))
  ids = jnp.asarray(GOLDEN['input_ids'])
  targets = jnp.concatenate([ids[:, 1:], jnp.full((2, 1), -1)], axis=1)

  def loss(params):
    model = definition.bind(params)
    hidden = model.hidden(ids)[0]
    total, sums = objective(hidden, model.output_embedding, targets, z_loss=0.0, chunk=chunk)
    return total / sums.tokens

  value, gradient = jax.jit(jax.value_and_grad(loss))(_from_golden('weights'))
  return float(value), gradient


def _ids(batch: int, length: int) -> np.ndarray:
  return np.random.default_rng(0).integers(0, 64, (batch, length), np.int32)


def test_logits_are_the_golden_ones():
  got = logits_of(GOLDEN_MODEL)(_from_golden('weights'), GOLDEN['input_ids'])
  np.testing.assert_allclose(
    got, GOLDEN['logits'], atol=1e-5, err_msg='the model is not the one that was released'
  )


# 32 positions: 7 does not divide them, and 256 is more than there are.
@pytest.mark.parametrize(('remat', 'chunk'), [('score_inputs', 7), ('offload', 256)])
def test_loss_and_gradients_are_the_golden_ones(remat, chunk):
  loss, gradient = _golden_gradient(remat, chunk)
  assert abs(loss - GOLDEN['loss']) < 1e-5, 'the loss is not the mean over the predicted tokens'
  norms = {
    path: np.sqrt(np.sum(np.square(g), axis=tuple(range(path.startswith('blocks'), g.ndim))))
    for path, g in paths(gradient).items()
  }
  for path, want in paths(_from_golden('grad_norm')).items():
    np.testing.assert_allclose(
      norms[path], want, rtol=1e-4, err_msg=f'the gradient of {path} is wrong'
    )


def _tokens(attention: int, ffn: int) -> dict[str, dict[str, int]]:
  return {'tokens': {'qkv': attention, 'proj': attention, 'ffn': ffn}}


# TokenFormer, Table 9. The paper rounds those trained on OpenWebText: 123.6M and 1309.7M.
@pytest.mark.parametrize(
  ('changes', 'count'),
  [
    pytest.param(_tokens(768, 3072), 151_881_216, id='pile-150M'),
    pytest.param(_tokens(1536, 6144) | {'layers': 40, 'width': 1536}, 1_587_219_456, id='pile-1B5'),
    pytest.param(_tokens(576, 2304), 123_569_664, id='openwebtext-124M'),
    pytest.param(_tokens(8620, 34480), 1_309_705_728, id='openwebtext-1B4'),
    pytest.param({**DENSE, **LEARNED, 'vocab_size': 50257}, 124_439_808, id='gpt2-124M'),
    pytest.param({**DENSE, 'tied_head': False}, 162_322_944, id='pythia-160M'),
  ],
)
def test_published_sizes(changes, count):
  sizes = {'layers': 12, 'width': 768, 'heads': 12, 'vocab_size': 50304, 'max_length': 1024}
  model = tiny_model(**{**sizes, **changes})
  assert define_lm(model).count == count, 'a published size has other parameters'


def test_a_logit_sees_no_later_token_and_its_own():
  model, ids = tiny_model(), _ids(2, 16)
  changed = ids.copy()
  changed[:, 7] = (ids[:, 7] + 1) % 64
  before, after = (np.asarray(logits_of(model)(large_params(model), x)) for x in (ids, changed))
  same = before[:, :7] == after[:, :7]  # False for NaN, too
  assert np.all(same), 'a logit before position 7 depends on the token there'
  moved = np.abs(after - before).max(axis=-1)[:, 7:]
  assert np.all(moved > 1e-4), 'a logit from position 7 on ignores the token there'


# So large that chance moves no standard deviation by 5 %.
LARGER = {'layers': 3, 'width': 64, 'vocab_size': 512, 'init': InitConfig(std=0.03)}


@functools.cache
def _initial(kind: str) -> dict[str, np.ndarray]:
  changes = {**DENSE, **LEARNED, 'tied_head': False} if kind == 'transformer' else {}
  definition = define_lm(tiny_model(**LARGER, **changes))
  return paths(jax.jit(definition.init)(jax.random.key(0)))


TO_RESIDUAL = 2 / (3 * 64**0.5)


@pytest.mark.parametrize(
  ('kind', 'name', 'std'),
  [
    ('tokenformer', 'embedding', 0.03),
    ('tokenformer', 'attention/query/keys', 0.03),
    ('tokenformer', 'attention/query/values', TO_RESIDUAL),
    ('tokenformer', 'attention/proj/keys', 0.03),
    ('tokenformer', 'attention/proj/values', TO_RESIDUAL),
    ('tokenformer', 'ffn/keys', 0.03),
    ('tokenformer', 'ffn/values', TO_RESIDUAL),
    ('transformer', 'positions', 0.03),
    ('transformer', 'head', 0.03),
    ('transformer', 'attention/query/kernel', 0.03),
    ('transformer', 'attention/proj/kernel', TO_RESIDUAL),
    ('transformer', 'ffn/up/kernel', 0.03),
    ('transformer', 'ffn/down/kernel', TO_RESIDUAL),
  ],
)
def test_initial_weights_have_the_spread_of_the_config(kind, name, std):
  path = f'blocks/{name}' if '/' in name else name
  got = np.std(_initial(kind)[path])
  np.testing.assert_allclose(got, std, rtol=0.05, err_msg=f'{path} does not start as released')


def test_equal_models_are_each_drawn_as_its_own_config_says():
  model = tiny_model(**LARGER)
  other = tiny_model(**{**LARGER, 'init': InitConfig(std=0.03, embedding_std=1.0)})
  assert other == model, 'another start makes another model'
  for one, std in ((model, 0.03), (other, 1)):
    drawn = define_lm(one).info['embedding'].initializer(jax.random.key(0), (512, 64), jnp.float32)
    np.testing.assert_allclose(np.std(drawn), std, rtol=0.05, err_msg='drawn as an equal model is')


@pytest.mark.parametrize('kind', ['tokenformer', 'transformer'])
def test_norms_and_biases_start_as_no_change_and_no_two_matrices_alike(kind):
  matrices = []
  for path, leaf in _initial(kind).items():
    if path.endswith(('scale', 'bias')):
      assert np.all(leaf == path.endswith('scale')), f'{path} changes what it gets'
    else:
      matrices += list(leaf) if path.startswith('blocks') else [leaf]
  firsts = {round(float(matrix[0, 0] / matrix.std()), 3) for matrix in matrices}
  assert len(firsts) == len(matrices), 'two matrices are drawn from the same random numbers'


def test_init_does_not_depend_on_the_devices():
  """A stack of Pattentions is enough: every layer is stacked in the same way."""
  layer = PattentionConfig(tokens=24)

  def make(rngs):
    one = functools.partial(Pattention, 16, 8, layer, key_std=1.0, value_std=1.0)
    return stack(lambda rngs: one(rngs=rngs), 3, rngs=rngs)

  definition = define(make)
  shardings = sharding.tree_shardings(
    sharding.make_mesh(MeshConfig(fsdp=2, tokens=4)), definition.axes
  )
  got, want = (
    jax.jit(definition.init, out_shardings=where)(jax.random.key(0)) for where in (shardings, None)
  )
  for name, array in want.items():
    np.testing.assert_allclose(
      got[name], array, rtol=1e-6, err_msg=f'{name} start elsewhere on 8 devices'
    )


def test_bfloat16_is_close_to_float32():
  model = tiny_model()
  got, want = (
    np.asarray(logits_of(model, execution)(large_params(model), _ids(2, 16)))
    for execution in (Execution(dtype=jnp.bfloat16), DEFAULT)
  )
  error = np.sqrt(np.mean((got - want) ** 2)) / np.std(want)
  assert error < 0.03, 'something other than the activations has lost its precision'


GRADIENTS = {
  'tied': {},
  'untied, with biases': {**DENSE, **LEARNED, 'tied_head': False},
}


def _gradient_of_text(model: ModelConfig, dtype: str) -> dict[str, np.ndarray]:
  """The gradient of the loss of 24,576 tokens, distributed as those of text (Zipf)."""
  definition = define_lm(model, Execution(dtype=jnp.dtype(dtype)))
  likely = 1 / np.arange(1, model.vocab_size + 1)
  ids = np.random.default_rng(0).choice(model.vocab_size, (1536, 17), p=likely / likely.sum())

  def loss(params):
    bound = definition.bind(params)
    hidden_BxTxD, _, _ = bound.hidden(ids[:, :-1])
    total, sums = objective(hidden_BxTxD, bound.output_embedding, ids[:, 1:], z_loss=0.0, chunk=16)
    return total / sums.tokens

  gradient = jax.jit(jax.grad(loss))(large_params(model))
  return {path: leaf.astype(np.float64) for path, leaf in paths(gradient).items()}


@pytest.mark.slow
@pytest.mark.parametrize('changes', GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_in_bfloat16_are_summed_in_float32(changes):
  sizes = {'layers': 1, 'width': 16, 'heads': 2, 'vocab_size': 128}
  model = tiny_model(**sizes, **changes)
  want, got = (_gradient_of_text(model, dtype) for dtype in ('float32', 'bfloat16'))
  for tree in (want, got):
    tree.pop('blocks/attention/key/bias', None)  # Softmax takes no notice of it: it is 0.
  for path in want:
    error = np.linalg.norm(got[path] - want[path]) / np.linalg.norm(want[path])
    assert error < 0.03, f'{path} is off by {error:.1%}: is it a sum over tokens in bfloat16?'
  norms = [np.sqrt(sum(np.sum(g**2) for g in tree.values())) for tree in (want, got)]
  assert abs(norms[1] / norms[0] - 1) < 0.005, 'grad_norm, and what is clipped by it, is wrong'
  row = [np.linalg.norm(tree['embedding'][0]) for tree in (want, got)]
  assert abs(row[1] / row[0] - 1) < 0.01, 'a frequent token learns at another rate'


def test_logits_and_parameters_are_float32_whatever_the_activations_are():
  definition = define_lm(tiny_model(), Execution(dtype=jnp.bfloat16))
  ids = jax.ShapeDtypeStruct((1, 4), jnp.int32)
  logits = jax.eval_shape(
    lambda params, ids: definition.bind(params)(ids)[0], definition.abstract, ids
  )
  assert logits.dtype == jnp.float32, 'the loss of a large vocabulary needs float32 logits'
  dtypes = {leaf.dtype for leaf in jax.tree.leaves(definition.abstract)}
  assert dtypes == {jnp.dtype('float32')}, 'small updates are lost in bfloat16 parameters'


def test_a_layer_is_traced_once_however_many_there_are():
  def products(layers: int) -> int:
    definition = define_lm(tiny_model(layers=layers))
    ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)

    forward = jax.make_jaxpr(lambda params, ids: definition.bind(params)(ids)[0])
    return str(forward(definition.abstract, ids)).count('dot_general')

  assert products(2) == products(6), 'the time to compile grows with the number of layers'
