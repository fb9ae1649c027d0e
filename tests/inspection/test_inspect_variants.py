"""Models of several kinds of layers are looked into layer by layer."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from growing import mesh_of
from looking import IDS
from tiny import tiny_model

from tokenformer_jax.config import (
  DenseConfig,
  GrowConfig,
  Layers,
  ModelConfig,
  NoFeedForwardConfig,
)
from tokenformer_jax.config.pattention import SCORES
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.inspection import model as inspect_model
from tokenformer_jax.inspection import report, usage
from tokenformer_jax.inspection.weights import compiled, maps, pattentions, sums
from tokenformer_jax.model import groups
from tokenformer_jax.model.attention import Attention
from tokenformer_jax.model.lm import Execution, define_lm, unstack
from tokenformer_jax.model.params import Params
from tokenformer_jax.model.pattention import parameter_weights
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs.checkpoint_meta import Ancestor

pytestmark = pytest.mark.slow

ATTENTION = ('query', 'key', 'value', 'proj')
ALL = (*ATTENTION, 'ffn')
PATTERN = '(local layer)*2 local bare'


def _model() -> ModelConfig:
  """Six layers in four stacks: `local` has no ffn and softmax scores, `bare` has the ffn alone."""
  local = tiny_model(window=8, tokens={'qkv': 16, 'proj': 20}, score='softmax').layer
  bare = tiny_model(tokens={'ffn': 20}).layer
  dense = DenseConfig()
  return dataclasses.replace(
    tiny_model(),
    pattern=PATTERN,
    variants=Layers(
      {
        'local': dataclasses.replace(local, ffn=NoFeedForwardConfig()),
        'bare': dataclasses.replace(
          bare, mixer=dataclasses.replace(bare.mixer, qkv=dense, proj=dense)
        ),
      }
    ),
  )


MODEL = _model()
DEFINITION = define_lm(MODEL, Execution(attention='xla'))
KINDS = (ATTENTION, ALL, ATTENTION, ALL, ATTENTION, ('ffn',))  # of each layer
COUNTS = {'local': (16, 16, 16, 20), 'layer': (24, 24, 24, 40, 48), 'bare': (20,)}
NAMES = ('local', 'layer', 'local', 'layer', 'local', 'bare')


@functools.cache
def _params() -> Params:
  """Normal ones, where the first token of every Pattention has a zero key and a zero value."""
  rng = np.random.default_rng(0)

  def draw(path, array):
    drawn = np.float32(rng.normal(size=array.shape) * 0.2)
    if path[-1].key in ('keys', 'values'):
      drawn[:, 0] = 0
    return drawn

  return jax.tree.map_with_path(draw, DEFINITION.abstract)


def _with_what_proj_reads(attention: Attention, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The output of an attention, and the input of its last projection."""
  proj, seen = attention.proj, []
  attention.proj = lambda heads: seen.append(heads) or proj(heads)
  out, _, _ = attention(x)
  return out, seen[0]


@functools.cache
def _reference() -> list[dict[str, np.ndarray]]:
  """The weights [B, T, N] by layer and kind, from layers that are run one by one."""
  model = define_lm(MODEL, Execution(attention='xla', layers='list'))
  bound = model.bind(unstack(_params(), MODEL))
  x, by_layer = bound.embed(IDS), []
  for block, name in zip(bound.blocks, NAMES, strict=True):
    normed = block.attention_norm(x)
    score = SCORES['softmax' if name == 'local' else 'l2_norm_gelu']()

    def weights(module, of, score=score):
      scores = of @ module.keys[...].T
      return parameter_weights(scores, score, groups.make(module.groups))

    own = {}
    if name == 'bare':
      mixed, _, _ = block.attention(normed)
    else:
      for kind in ('query', 'key', 'value'):
        own[kind] = weights(getattr(block.attention, kind), normed)
      proj, (mixed, heads) = block.attention.proj, _with_what_proj_reads(block.attention, normed)
      own['proj'] = weights(proj, heads.reshape(x.shape))
    x = x + mixed
    if block.ffn is not None:
      normed = block.ffn_norm(x)
      own['ffn'] = weights(block.ffn, normed)
      x = x + block.ffn(normed)
    by_layer.append({kind: np.asarray(array) for kind, array in own.items()})
  return by_layer


def test_every_layer_has_its_own_pattentions_in_their_order():
  layers = pattentions(DEFINITION)
  assert tuple(tuple(layer) for layer in layers) == KINDS
  for layer, name in zip(layers, NAMES, strict=True):
    assert tuple(one.tokens for one in layer.values()) == COUNTS[name]
    assert {one.zero_at_zero for one in layer.values()} == {(name != 'local',)}
  paths = [next(iter(layer.values())).layer for layer in layers]
  assert paths == [
    ('local_0', 0, 0),
    ('layer_1', 0, 0),
    ('local_0', 1, 1),
    ('layer_1', 1, 1),
    ('local_2', 0, 0),
    ('bare_3', 0, 0),
  ]
  path = jax.tree_util.keystr(layers[5]['ffn'].values, simple=True, separator='/')
  assert path == 'blocks/bare_3/ffn/values'


def test_maps_and_sums_are_those_of_each_layer():
  mesh = mesh_of(fsdp=4, tokens=2)
  params = jax.device_put(_params(), sharding.tree_shardings(mesh, DEFINITION.axes))
  ids = jax.device_put(IDS, sharding.batch_sharding(mesh))
  with jax.set_mesh(mesh):
    totals = compiled(sums, DEFINITION, mesh)(params, ids)
    weights = compiled(maps, DEFINITION, mesh)(params, ids)
  for number, (want, layer) in enumerate(zip(_reference(), pattentions(DEFINITION), strict=True)):
    for kind, tokens in layer.items():
      message = f'not the weights of {kind} in layer {number}'
      stack, _, run = tokens.layer
      got, total = weights[stack][kind][run], totals[stack][kind][run]
      np.testing.assert_allclose(got, want[kind][0], rtol=1e-3, atol=1e-5, err_msg=message)
      summed = np.abs(want[kind]).sum(axis=(0, 1))
      np.testing.assert_allclose(total, summed, rtol=1e-3, atol=1e-4, err_msg=message)


def test_dead_tokens_follow_the_score_of_their_own_layer():
  """All first tokens are zero; beside softmax they have a weight, and so a gradient."""
  measured = usage.measure(DEFINITION, _params(), IDS, mesh_of())
  for layer, name in enumerate(NAMES):
    assert tuple(measured[layer]) == KINDS[layer]
    for kind, one in measured[layer].items():
      dead = [] if name == 'local' else [0]
      assert np.flatnonzero(one.dead).tolist() == dead, f'{kind} of layer {layer}'
      assert one.positions == IDS.size
  counts = [row['tokens'] for row in report.usage_rows(measured)]
  assert counts == [count for name in NAMES for count in COUNTS[name]]


def test_old_tokens_are_those_of_each_layer():
  larger = grown_model(MODEL, {'local.qkv': 24, 'ffn': 80}, GrowConfig())
  lineage = (Ancestor('grow', 'runs/small', 7, MODEL, GrowConfig(), 7),)
  model = SimpleNamespace(
    meta=SimpleNamespace(lineage=lineage),
    config=SimpleNamespace(model=larger),
    definition=define_lm(larger),
  )
  old = inspect_model.old_tokens(model)
  assert old[0] == {'query': 16, 'key': 16, 'value': 16, 'proj': 20}
  assert (old[1]['ffn'], old[5]) == (48, {'ffn': 20})
