"""Checkpoints of the released TPU code: they compute here what they do there."""

import types

import hub_folders
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import released

from tokenformer_jax.cli import convert
from tokenformer_jax.config import MeshConfig, token_counts
from tokenformer_jax.convert import released_tpu
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import files
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import checkpoint

LAYERS, WIDTH, HEADS, SLOTS, VOCABULARY = 2, 16, 2, 12, 64


def _weights(slots: int = SLOTS) -> dict:
  """Random arrays as that code stores them, the layers along axis 1."""
  rng = np.random.default_rng(0)

  def normal(*shape: int, std: float) -> np.ndarray:
    return np.float32(std * rng.normal(size=shape))

  key_std, value_std = WIDTH**-0.5, slots**-0.5
  attention = {
    'qkv_key_slot': normal(WIDTH, LAYERS, 3, slots, std=key_std),
    'proj_key_slot': normal(WIDTH, LAYERS, slots, std=key_std),
    **{
      f'{name}_value_slot': normal(slots, LAYERS, WIDTH, std=value_std)
      for name in ('q', 'k', 'v', 'proj')
    },
  }
  mlp = {
    'wi': normal(WIDTH, LAYERS, 4 * slots, std=key_std),
    'wo': normal(4 * slots, LAYERS, WIDTH, std=value_std),
  }
  return {
    'decoder': {
      'layers': {'self_attention': attention, 'mlp': mlp},
      'decoder_norm': {'scale': normal(WIDTH, std=0.1), 'bias': normal(WIDTH, std=0.1)},
    },
    'token_embedder': {'embedding': normal(VOCABULARY, WIDTH, std=1)},
  }


def _kernels(weights: dict) -> dict:
  """The same as the layers of that code name them: the array of a dense layer is its kernel."""
  layers = weights['decoder']['layers']
  named = {of: {n: {'kernel': a} for n, a in arrays.items()} for of, arrays in layers.items()}
  return {**weights, 'decoder': {**weights['decoder'], 'layers': named}}


def _write(directory, weights: dict, **rest) -> None:
  """A training state, or its parameters alone, as that code saves them."""
  state = {'params': {'params': weights}, **rest}
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
    writer.save(directory, args=ocp.args.PyTreeSave(state))


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  """Step 3 of a run, moments included."""
  directory = tmp_path_factory.mktemp('tpu') / '3'
  directory.mkdir()
  weights = _kernels(_weights())
  zeros = jax.tree.map(np.zeros_like, weights)
  _write(directory / 'items', weights, opt_state={'mu': {'params': zeros}}, step=np.int32(3))
  released.write_tokenizer(directory)
  return directory


def _convert(source, target, **options):
  convert.to_jax(source, target, heads=HEADS, **options)
  checkpoints, meta = checkpoint.open_source(target, None)
  state = files.read(checkpoints, meta, sharding.make_mesh(MeshConfig()))
  return meta.config.model, state['params']


def _gelu(x: np.ndarray) -> np.ndarray:
  return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _norm(x: np.ndarray) -> np.ndarray:
  x = x - x.mean(-1, keepdims=True)
  return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5)


def _l2_norm_gelu(scores: np.ndarray, reference: int) -> np.ndarray:
  norm = np.linalg.norm(scores, axis=-1, keepdims=True)
  return _gelu(scores / (norm + 1e-5) * np.sqrt(reference))


def _gelu_l2_norm(scores: np.ndarray, reference: int) -> np.ndarray:
  weights = _gelu(scores)
  return weights / (np.linalg.norm(weights, axis=-1, keepdims=True) + 1e-8) * np.sqrt(reference)


def _softmax(scores: np.ndarray, reference: int) -> np.ndarray:
  exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
  return exponentials / exponentials.sum(axis=-1, keepdims=True) * reference


def _logits(weights: dict, ids: np.ndarray, reference: int, _scores=_l2_norm_gelu) -> np.ndarray:
  """What the released TPU code computes, in float64 on its own arrays (SPEC: no positions)."""
  weights = jax.tree.map(np.float64, weights)
  decoder, embedding = weights['decoder'], weights['token_embedder']['embedding']
  attention, mlp = (decoder['layers'][name] for name in ('self_attention', 'mlp'))
  x, length = embedding[ids], ids.shape[1]
  for i in range(LAYERS):
    keys = attention['qkv_key_slot'][:, i]
    scores = _scores(np.einsum('btd,djn->btjn', _norm(x), keys), reference)
    query, key, value = (
      (scores[:, :, j] @ attention[f'{name}_value_slot'][:, i]).reshape(*ids.shape, HEADS, -1)
      for j, name in enumerate('qkv')
    )
    products = np.einsum('bthk,bshk->bhts', query / np.sqrt(WIDTH / HEADS), key)
    products = np.where(np.tri(length, dtype=bool), products, -np.inf)
    exponentials = np.exp(products - products.max(-1, keepdims=True))
    mixed = exponentials / exponentials.sum(-1, keepdims=True)
    mixed = np.einsum('bhts,bshk->bthk', mixed, value).reshape(x.shape)
    scores = _scores(mixed @ attention['proj_key_slot'][:, i], reference)
    x = x + scores @ attention['proj_value_slot'][:, i]
    x = x + _scores(_norm(x) @ mlp['wi'][:, i], 4 * reference) @ mlp['wo'][:, i]
  norm = decoder['decoder_norm']
  x = _norm(x) * (norm['scale'] + 1) + norm['bias']
  return x @ embedding.T / np.sqrt(WIDTH)


@pytest.mark.parametrize(
  'zoom_dim',
  [None, pytest.param(8, marks=pytest.mark.slow)],
  ids=['the counts', 'zoom_dim'],
)
def test_it_computes_what_the_released_code_does(source, tmp_path, zoom_dim):
  model, params = _convert(source, tmp_path / 'run', zoom_dim=zoom_dim)
  assert token_counts(model) == {'qkv': SLOTS, 'proj': SLOTS, 'ffn': 4 * SLOTS}
  ids = np.random.default_rng(1).integers(0, VOCABULARY, (2, 9))
  definition = define_lm(model)
  got = jax.jit(lambda p: definition.bind(p)(ids)[0])(params)
  want = _logits(_weights(), ids, zoom_dim or SLOTS)
  np.testing.assert_allclose(got, want, atol=1e-5, err_msg='the converted model is another one')


@pytest.mark.parametrize('theta', [_gelu_l2_norm, _softmax])
def test_it_computes_the_other_scores_of_the_released_code(source, theta):
  arrays = released_tpu.find(source / 'items')
  score = theta.__name__.removeprefix('_')
  model = released_tpu.infer_model(arrays, heads=HEADS, score=score)
  params = hub_folders.made(released_tpu.deferred(model, arrays))
  ids = np.random.default_rng(1).integers(0, VOCABULARY, (2, 9))
  definition = define_lm(model)
  got = jax.jit(lambda p: definition.bind(p)(ids)[0])(params)
  want = _logits(_weights(), ids, SLOTS, theta)
  np.testing.assert_allclose(got, want, atol=1e-5, err_msg='the converted model is another one')


def test_weights_that_are_not_finite_are_refused(source, tmp_path):
  weights = _weights()
  weights['token_embedder']['embedding'][3, 4:6] = np.nan, np.inf
  _write(tmp_path / 'items', weights)
  options = {'tokenizer': str(source / 'tokenizer.json'), 'heads': HEADS}
  with pytest.raises(UserError, match=r'has 2 weights .* in the tensor token_embedder/embedding'):
    convert.to_jax(tmp_path / 'items', tmp_path / 'run', **options)
  assert not (tmp_path / 'run').exists(), 'something is left of the target'
  convert.to_jax(tmp_path / 'items', tmp_path / 'run', allow_nonfinite=True, **options)


def test_arrays_that_the_files_cannot_hold_are_refused(source, tmp_path):
  """A few kilobytes of packed zeros that would become gigabytes."""
  weights = _weights()
  weights['token_embedder']['embedding'] = np.zeros((2**17, WIDTH), np.float32)
  _write(tmp_path / 'items', weights)
  with pytest.raises(UserError, match='weights cannot be packed so far'):
    convert.to_jax(
      tmp_path / 'items', tmp_path / 'run', tokenizer=str(source / 'tokenizer.json'), heads=HEADS
    )
  assert not (tmp_path / 'run').exists(), 'something is left of the target'


def test_names_that_lead_elsewhere_are_refused(tmp_path, monkeypatch):
  """Orbax makes paths of files of them."""
  tree = {'params': {'../../elsewhere': _weights()}}

  class Reader(ocp.Checkpointer):
    def metadata(self, directory):
      return types.SimpleNamespace(item_metadata=types.SimpleNamespace(tree=tree))

  monkeypatch.setattr(released_tpu.ocp, 'Checkpointer', Reader)
  with pytest.raises(UserError, match=r'names an array .* must not lead elsewhere'):
    released_tpu.find(tmp_path)


def test_arrays_in_pieces_larger_than_they_are_are_refused(tmp_path):
  """TensorStore reads a piece as a whole, however small the array is."""
  array = types.SimpleNamespace(
    shape=(4, 4), storage=types.SimpleNamespace(chunk_shape=(2**20, 2**20))
  )
  with pytest.raises(UserError, match=r'stores x in pieces of \[1048576, 1048576\]'):
    released_tpu._check_chunks(tmp_path, 'x', array)


def test_parameters_alone_by_their_plain_names(source, tmp_path):
  """A checkpoint of parameters only; the directory of the arrays itself is named."""
  _write(tmp_path / 'items', _weights())
  tokenizer = str(source / 'tokenizer.json')
  _, params = _convert(tmp_path / 'items', tmp_path / 'run', tokenizer=tokenizer)
  _, want = _convert(source, tmp_path / 'again')
  jax.tree.map(np.testing.assert_array_equal, params, want)


def _without(weights: dict, *path: str) -> dict:
  if len(path) == 1:
    return {key: value for key, value in weights.items() if key != path[0]}
  return {**weights, path[0]: _without(weights[path[0]], *path[1:])}


def _misshapen() -> dict:
  weights = _weights()
  weights['decoder']['layers']['mlp']['wo'] = np.zeros((7, LAYERS, WIDTH), np.float32)
  return weights


@pytest.mark.parametrize(
  ('weights', 'sentence'),
  [
    (
      _without(_weights(), 'decoder', 'layers', 'mlp', 'wi'),
      'the array params/…/decoder/layers/mlp/wi is missing in',
    ),
    (_misshapen(), r'the array decoder/layers/mlp/wo has the shape \[7, 2, 16\]; by .* it must be'),
  ],
  ids=['missing', 'misshapen'],
)
def test_what_is_no_whole_model_is_refused(source, tmp_path, weights, sentence):
  _write(tmp_path / 'items', weights)
  with pytest.raises(UserError, match=sentence):
    convert.to_jax(
      tmp_path / 'items', tmp_path / 'run', tokenizer=str(source / 'tokenizer.json'), heads=HEADS
    )
  assert not (tmp_path / 'run').exists(), 'something is left of the target'


@pytest.mark.parametrize(
  ('options', 'sentence'),
  [
    ({}, 'the width 16 is not a multiple of 64, so the number of heads'),
    ({'heads': 3}, 'is not a multiple of 3 heads'),
    ({'heads': 2, 'zoom_dim': 8, 'score': 'softmax'}, '--zoom_dim=8 has no meaning with --score=s'),
    ({'heads': 2, 'rotary_fraction': 0.5}, '--rotary_fraction has no meaning for'),
  ],
)
def test_options_that_do_not_fit_are_refused(source, tmp_path, options, sentence):
  with pytest.raises(UserError, match=sentence):
    convert.to_jax(source, tmp_path / 'run', **options)


def test_zoom_dim_is_for_tpu_checkpoints_only(tmp_path):
  weights = released.write(tmp_path / 'pytorch_model.bin')
  with pytest.raises(UserError, match='--zoom_dim has no meaning for'):
    convert.to_jax(weights, tmp_path / 'run', zoom_dim=8, **released.OPTIONS)


def test_a_damaged_array_is_named_and_nothing_is_left(source, tmp_path):
  directory = tmp_path / 'items'
  _write(directory, _weights())
  for data in directory.rglob('*'):
    if data.is_file() and data.parent.name == 'd':
      data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
  with pytest.raises(UserError, match=r'(the array .* cannot be read|not an Orbax checkpoint)'):
    convert.to_jax(
      directory, tmp_path / 'run', tokenizer=str(source / 'tokenizer.json'), heads=HEADS
    )
  assert not (tmp_path / 'run').exists(), 'something is left of the target'


def test_it_does_not_go_to_the_pytorch_layout(source, tmp_path):
  _convert(source, tmp_path / 'run')
  with pytest.raises(UserError, match=r"positions\.kind is 'none'; the released layout is for"):
    convert.to_torch(str(tmp_path / 'run'), tmp_path / 'model.safetensors')
