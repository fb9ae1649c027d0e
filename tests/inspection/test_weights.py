"""The weights are those of the forward pass, and are reduced on the way."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from growing import mesh_of
from looking import IDS, KINDS, MODEL, of_kind, params_of, reference_maps
from tiny import tiny_model

from tokenformer_jax.config import MLPConfig
from tokenformer_jax.config.pattention import GELUScore
from tokenformer_jax.inspection import usage
from tokenformer_jax.inspection.weights import maps, pattentions, sums
from tokenformer_jax.model.lm import Execution, define_lm

DEFINITION = define_lm(MODEL, Execution(attention='xla'))
PADDED = np.where(np.arange(13) < np.arange(6, 14)[:, None], IDS, -1)


def test_names_are_those_of_the_modules_in_the_order_of_the_forward_pass():
  inner = {kind: kind if kind == 'ffn' else f'attention/{kind}' for kind in KINDS}
  for index, layer in enumerate(pattentions(DEFINITION)):
    assert tuple(layer) == KINDS, 'reports and pictures have another order'
    assert {one.layer.row for one in layer.values()} == {index}, 'of another layer'
    for name in ('keys', 'values'):
      paths = {
        kind: jax.tree_util.keystr(getattr(one, name), simple=True, separator='/')
        for kind, one in layer.items()
      }
      assert paths == {kind: f'blocks/{inner[kind]}/{name}' for kind in KINDS}


@functools.cache
def _maps():
  return jax.jit(lambda params, ids: maps(DEFINITION.bind(params), ids)[''])


@functools.cache
def _sums():
  return jax.jit(lambda params, ids: sums(DEFINITION.bind(params), ids)[''])


def test_maps_are_what_the_formulas_say():
  maps_by_kind = _maps()(params_of(), IDS)
  for layer, want in enumerate(reference_maps()):
    for kind in KINDS:
      message = f'not the weights of {kind} in layer {layer}'
      got = np.asarray(maps_by_kind[kind])[layer]
      np.testing.assert_allclose(got, want[kind][0], rtol=1e-4, atol=1e-5, err_msg=message)


def _summed(counted: np.ndarray, kind: str) -> np.ndarray:
  """The reference's absolute weights, summed over the counted positions, [L, N]."""
  return np.stack([np.abs(layer[kind][counted]).sum(axis=0) for layer in reference_maps()])


@pytest.mark.parametrize('ids', [IDS, PADDED], ids=['whole', 'padded'])
def test_sums_are_those_of_the_maps(ids):
  got = _sums()(params_of(), ids)
  for kind in KINDS:
    np.testing.assert_allclose(got[kind], _summed(ids >= 0, kind), rtol=1e-4, err_msg=kind)


def test_no_more_than_one_layer_is_kept():
  program = str(jax.make_jaxpr(lambda params: sums(DEFINITION.bind(params), IDS))(params_of()))
  counts = {of_kind(DEFINITION.abstract['blocks'], kind)['keys'].shape[1] for kind in KINDS}
  assert all(f'[8,13,{count}]' in program for count in counts), 'this test looks for other shapes'
  for count in counts:
    assert f'[2,8,13,{count}]' not in program, 'the weights of all layers are there at once'


def test_bfloat16_is_summed_in_float32():
  definition = define_lm(MODEL, Execution(jnp.dtype('bfloat16'), attention='xla'))

  def both(params):
    model = definition.bind(params)
    return sums(model, IDS[:1])['']['ffn'][1], maps(model, IDS[:1])['']['ffn'][1]

  total, weights = map(np.asarray, jax.jit(both)(params_of()))
  assert total.dtype == np.float32
  sizes = np.abs(np.float64(weights))
  want = sizes.sum(axis=0)
  np.testing.assert_allclose(total, want, rtol=1e-5, err_msg='the sum itself is rounded')
  of_float32 = np.abs(reference_maps()[1]['ffn'][0]).mean()
  assert 1e-5 < abs(np.mean(sizes) / of_float32 - 1) < 0.02, 'not the activations asked for'


def test_hidden_units_of_an_mlp_are_tokens():
  """An MLP with GELU is a group of tokens with that score, word for word."""
  base = tiny_model()
  group = dataclasses.replace(base.layer.ffn, score=GELUScore())
  mlp = MLPConfig(width=group.tokens, activation='gelu')
  tokens, dense = (
    dataclasses.replace(base, layer=dataclasses.replace(base.layer, ffn=ffn))
    for ffn in (group, mlp)
  )
  params = params_of(tokens)
  ffn = params['blocks']['ffn']
  matrices = {
    'up': {'kernel': np.swapaxes(ffn['keys'], 1, 2)},
    'down': {'kernel': ffn['values']},
  }
  twins = {**params, 'blocks': {**params['blocks'], 'ffn': matrices}}
  measured = [
    usage.measure(define_lm(model, Execution(attention='xla')), own, IDS, mesh_of())
    for model, own in ((tokens, params), (dense, twins))
  ]
  for layer in range(tokens.depth):
    assert tuple(measured[1][layer]) == KINDS
    for field in ('mean', 'value_norms', 'dead'):
      wanted, got = (getattr(one[layer]['ffn'], field) for one in measured)
      np.testing.assert_allclose(got, wanted, rtol=1e-4, err_msg=field)
