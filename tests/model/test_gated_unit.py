"""The gated attention unit against golden values, and what holds for it whatever its parameters."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import gated_model, tiny_model

from tokenformer_jax.config import (
  DenseConfig,
  GatedUnitConfig,
  LengthScaleConfig,
  MeshConfig,
  NoFeedForwardConfig,
  NoPositionsConfig,
  PositionScaleConfig,
  PostNormConfig,
  RotaryConfig,
  SeenScaleConfig,
)
from tokenformer_jax.config.model import Layers
from tokenformer_jax.model import trunk
from tokenformer_jax.model.blocks import architecture
from tokenformer_jax.model.execution import DEFAULT
from tokenformer_jax.model.layer import FROM_START, Context
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.mixers.gated_unit import GatedUnit
from tokenformer_jax.model.params import Params, define
from tokenformer_jax.parallel import sharding

pytestmark = pytest.mark.slow  # because of what is compiled

# Computed in float64 by bert4keras and GAU-alpha on random weights; `meta` has their commits.
GOLDEN = dict(np.load(Path(__file__).parents[1] / 'golden' / 'gau.npz'))
META = json.loads(str(GOLDEN['meta']))
LENGTHS = np.array(META['lengths'])  # of the rows, which end with padding
IS_TOKEN = GOLDEN['padding_mask']
SEEN = SeenScaleConfig()  # the softmax_plus of the source is softmax with this scale
ROTARY = RotaryConfig(fraction=1.0, layout='interleaved')
PATHS = {
  'uvq/kernel': 'i_dense/kernel',
  'uvq/bias': 'i_dense/bias',
  'query/scale': 'q_scaleoffset/gamma',
  'query/bias': 'q_scaleoffset/beta',
  'key/scale': 'k_scaleoffset/gamma',
  'key/bias': 'k_scaleoffset/beta',
  'out/kernel': 'o_dense/kernel',
  'out/bias': 'o_dense/bias',
}


def unit(**changes) -> GatedUnitConfig:
  """Return the config of a layer of the file."""
  sizes = {'width': META['e'], 'head_width': META['s'], 'length_scale': SEEN, 'positions': ROTARY}
  bias = DenseConfig(changes.pop('bias', False))
  return GatedUnitConfig(**{**sizes, 'uvq': bias, 'out': bias, 'offset': bias.bias, **changes})


def model_of(*units: GatedUnitConfig, **changes):
  """Return the post-norm model of the file with these layers."""
  rest = {'ffn': NoFeedForwardConfig(), 'norm': 'rms_plain', 'wiring': PostNormConfig()}
  layers = [dataclasses.replace(tiny_model().layer, mixer=unit, **rest) for unit in units]
  names = ('layer', 'last')[: len(layers)]
  whole = {
    'pattern': ' '.join(f'{name}*{count}' for name, count in zip(names, (2, 1), strict=False)),
    'layer': layers[0],
    'variants': Layers(dict(zip(names[1:], layers[1:], strict=True))),
    'vocab_size': META['vocab'],
    'norm_epsilon': META['rms_epsilon'],
    'embedding_norm': 'rms_plain',
    'final_norm': 'none',
    **changes,
  }
  return tiny_model(**whole)


def nested(flat: dict) -> Params:
  """Return arrays by path as a tree."""
  tree: Params = {}
  for path, array in flat.items():
    *parents, last = path.split('/')
    functools.reduce(lambda node, name: node.setdefault(name, {}), parents, tree)[last] = array
  return tree


def weights(layer: str) -> dict[str, np.ndarray]:
  """Return the arrays of a layer of the file by their paths in a `GatedUnit`."""
  names = {ours: f'weights/{layer}/gau/{theirs}' for ours, theirs in PATHS.items()}
  return {ours: GOLDEN[name] for ours, name in names.items() if name in GOLDEN}


def roll(rows: np.ndarray, back: bool = False) -> np.ndarray:
  """Move the padding at the end of each row to its beginning, or back.

  Relative positions are the same after it, so the outputs of tokens are as well.
  """
  shifts = rows.shape[1] - LENGTHS
  return np.stack([np.roll(row, -n if back else n, 0) for row, n in zip(rows, shifts, strict=True)])


CASES = {
  'layer/full_plus_rope': (False, False, unit()),
  'layer/causal_plus_rope': (True, False, unit()),
  'layer/window_softmax_rope': (True, False, unit(window=5, length_scale=LengthScaleConfig())),
  'layer/causal_sqrelu_rope': (
    True,
    False,
    unit(normalise='squared_relu', length_scale=LengthScaleConfig()),
  ),
  'layer/causal_pad_plus_rope': (True, True, unit()),
  'biased/causal_plus_rope': (True, False, unit(bias=True)),
}


@pytest.mark.parametrize('case', CASES)
def test_golden_layers_and_their_gradients(case):
  causal, padded, config = CASES[case]
  layer = 'biased' if case.startswith('biased') else 'layer_0'
  moved = roll if padded else lambda rows, back=False: rows
  cotangent = moved(GOLDEN['cotangent'] * (IS_TOKEN[..., None] if padded else 1))
  context = Context(0, 24 - LENGTHS if padded else None)
  definition = define(
    lambda rngs: GatedUnit(config, tiny_model(), causal=causal, execution=DEFAULT, rngs=rngs)
  )

  def objective(flat: dict, x_BxTxD: jax.Array) -> tuple[jax.Array, jax.Array]:
    y_BxTxD = definition.bind(nested(flat))(x_BxTxD, context)[0]
    return jnp.sum(y_BxTxD * cotangent), y_BxTxD

  run = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))
  (_, y), (of_weights, of_x) = run(weights(layer), moved(GOLDEN['x']))
  got, want = moved(np.asarray(y), back=True), GOLDEN[f'{case}/y']
  compared = IS_TOKEN if padded else np.ones_like(IS_TOKEN)
  limit = 2e-6 * np.abs(want).max()
  np.testing.assert_allclose(got[compared], want[compared], rtol=0, atol=limit, err_msg=case)
  gradient = {PATHS[path]: array for path, array in of_weights.items()} | {'x': of_x}
  norms = [np.linalg.norm(gradient[name]) for name in META['cases'][case]['grad_norm_order']]
  np.testing.assert_allclose(norms, GOLDEN[f'{case}/grad_norm'], rtol=1e-4, err_msg=case)


def _run_layers(model, params: Params, x_BxTxD: jax.Array, causal: bool, context=FROM_START):
  """Run the layers of a model alone, on an input in the place of the embeddings."""
  layers = architecture(model, causal=causal)
  definition = define(lambda rngs: trunk.make(layers, execution=DEFAULT, rngs=rngs))
  return trunk.run(definition.bind(params), layers.repeats, x_BxTxD, context, execution=DEFAULT)[0]


def _stacked(*layers: str) -> Params:
  """Return layers of the file as a stack."""
  flat = [weights(layer) for layer in layers]
  arrays = {path: np.stack([one[path] for one in flat]) for path in flat[0]}
  return {'attention': nested(arrays)}


LOCAL = unit(window=META['window'], length_scale=LengthScaleConfig())
HWFA = {
  'hwfa': model_of(LOCAL, unit(positions=NoPositionsConfig())),
  'hwfa_per_query_log': model_of(
    LOCAL, unit(positions=NoPositionsConfig(), length_scale=PositionScaleConfig(length=8))
  ),
}
OF_HWFA = {'layer_0': _stacked('layer_0', 'layer_1'), 'last_1': _stacked('layer_2')}


@pytest.mark.parametrize('name', HWFA)
def test_golden_windows_and_a_full_layer(name):
  def objective(params: Params, x_BxTxD: jax.Array) -> tuple[jax.Array, jax.Array]:
    y_BxTxD = _run_layers(HWFA[name], params, x_BxTxD, True)
    return jnp.sum(y_BxTxD * GOLDEN['cotangent']), y_BxTxD

  run = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))
  (of_params, of_x), y = run(OF_HWFA, GOLDEN['x'])
  np.testing.assert_allclose(y, GOLDEN[f'{name}/y'], rtol=0, atol=3e-5, err_msg=f'not the {name}')
  if name != 'hwfa':
    return
  norms = {'x': np.linalg.norm(of_x)}
  for number, (stack, index) in enumerate([('layer_0', 0), ('layer_0', 1), ('last_1', 0)]):
    for path, array in jax.tree_util.tree_leaves_with_path(of_params[stack]['attention']):
      ours = '/'.join(key.key for key in path)
      norms[f'layer_{number}/gau/{PATHS[ours]}'] = np.linalg.norm(array[index])
  got = [norms[path] for path in META['hwfa']['grad_norm_order']]
  np.testing.assert_allclose(got, GOLDEN['hwfa/grad_norm'], rtol=1e-4, err_msg='gradients')


WHOLE = model_of(unit(), pattern='layer*3')


OF_WHOLE = {
  'embedding': GOLDEN['weights/word_embeddings'],
  'blocks': _stacked('layer_0', 'layer_1', 'layer_2'),
}


@functools.partial(jax.jit, static_argnames='causal')
def _whole_logits(
  ids: jax.Array, padding: jax.Array, ends: jax.Array | None, causal: bool
) -> jax.Array:
  module, context = define_lm(WHOLE).bind(OF_WHOLE), Context(0, padding, ends)
  if causal:
    return module(ids, context)[0]
  # A language model is causal; the same layers without a mask are run by hand.
  x_BxTxD = module.embed(ids, context)
  x_BxTxD = _run_layers(WHOLE, OF_WHOLE['blocks'], x_BxTxD, causal, context)
  return x_BxTxD @ OF_WHOLE['embedding'].T


def _assert_golden(logits: np.ndarray, name: str) -> None:
  np.testing.assert_allclose(
    logits * IS_TOKEN[..., None],  # The file has zeros where it has padding.
    GOLDEN[f'{name}/logits'],
    rtol=0,
    atol=5e-5,
    err_msg=f'{name} of GAU-alpha computes other logits',
  )


def test_golden_logits_of_a_language_model_with_padding_at_either_end():
  ids, at_end, none = GOLDEN['input_ids'], 24 - LENGTHS, 0 * LENGTHS
  moved = np.asarray(_whole_logits(roll(ids), at_end, none + 24, True))
  _assert_golden(roll(moved, back=True), 'model_lm')
  _assert_golden(np.asarray(_whole_logits(ids, none, LENGTHS, True)), 'model_lm')


def test_golden_logits_without_a_causal_mask():
  moved = np.asarray(_whole_logits(roll(GOLDEN['input_ids']), 24 - LENGTHS, None, False))
  _assert_golden(roll(moved, back=True), 'model_mlm')
  with pytest.raises(ValueError, match='which tokens see without a causal mask; pad the rows'):
    _whole_logits(GOLDEN['input_ids'], 0 * LENGTHS, LENGTHS, False)


def test_devices_do_not_exchange_what_is_cut():
  definition = define_lm(gated_model(dense=True, bias=True))
  mesh = sharding.make_mesh(MeshConfig(fsdp=4, tokens=2))
  params = sharding.with_shardings(
    definition.abstract, sharding.tree_shardings(mesh, definition.axes)
  )
  ids = jax.ShapeDtypeStruct((8, 24), jnp.int32, sharding=sharding.batch_sharding(mesh))
  with jax.set_mesh(mesh):
    forward = jax.jit(lambda params, ids: definition.bind(params)(ids)[0])
    program = forward.lower(params, ids).compile().as_text()
  moved = re.findall(r'(\w+\[[\d,]+\])\S* (?:collective-permute|all-to-all)\(', program)
  of_activations = [shape for shape in moved if shape.count(',') >= 2]
  assert not of_activations, f'parts of outputs move between devices: {of_activations}'
