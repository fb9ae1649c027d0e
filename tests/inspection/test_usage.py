"""What is counted as used, unused and dead is what the documentation says."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from growing import mesh_of
from looking import IDS, KINDS, MODEL, changed, of_kind, params_of, reference_maps

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.inspection import usage
from tokenformer_jax.model.lm import Execution, define_lm
from tokenformer_jax.model.params import Params


def _measure(
  params: Params, model: ModelConfig = MODEL, rows: np.ndarray = IDS
) -> dict[int, dict[str, usage.Usage]]:
  definition = define_lm(model, Execution(attention='xla'))
  return usage.measure(definition, params, rows, mesh_of())


@functools.cache
def _measured() -> dict[int, dict[str, usage.Usage]]:
  """Of parameters some tokens of whose `ffn` are zero in layer 0."""
  tokens = of_kind(params_of()['blocks'], 'ffn')
  keys, values = (np.array(tokens[name]) for name in ('keys', 'values'))
  keys[0, :3], values[0, 2:5] = 0, 0
  return _measure(changed(params_of(), 'ffn', keys=keys, values=values))


def test_figures_are_means_over_positions():
  got = _measured()[0]['query']
  sizes = np.stack([np.abs(layer['query']).reshape(-1, 24) for layer in reference_maps()])
  # The second layer reads what the changed ffn of the first one made.
  assert got.positions == IDS.size
  np.testing.assert_allclose(got.mean, sizes[0].mean(axis=0), rtol=1e-4)
  values = np.asarray(of_kind(params_of()['blocks'], 'query')['values'])[0]
  norms = np.linalg.norm(values, axis=-1)
  np.testing.assert_allclose(got.contribution, got.mean * norms, rtol=1e-5)


def test_a_zero_key_or_a_zero_value_is_unused():
  first, second = (_measured()[layer]['ffn'].unused for layer in (0, 1))
  assert np.flatnonzero(first).tolist() == [0, 1, 2, 3, 4]
  assert not second.any(), 'tokens of another layer are called unused'


def test_only_a_zero_key_with_a_zero_value_is_dead():
  dead = {
    (layer, kind): np.flatnonzero(measured.dead).tolist()
    for layer, of_layer in _measured().items()
    for kind, measured in of_layer.items()
  }
  assert {place: tokens for place, tokens in dead.items() if tokens} == {(0, 'ffn'): [2]}


def test_a_zero_key_is_not_dead_where_it_has_a_weight():
  tokens = of_kind(params_of()['blocks'], 'ffn')
  ffn = dataclasses.replace(MODEL.layer.ffn, groups='24 24::softmax', reference=0)
  model = dataclasses.replace(MODEL, layer=dataclasses.replace(MODEL.layer, ffn=ffn))
  ends = {name: np.array(array) for name, array in tokens.items()}
  for array in ends.values():
    array[:, [0, -1]] = 0
  for of_layer in _measure(changed(params_of(), 'ffn', **ends), model).values():
    measured = of_layer['ffn']
    assert np.flatnonzero(measured.dead).tolist() == [0], 'the score is that of its group'
    assert measured.mean[-1] > 0 and measured.unused[-1], 'a value of zero adds nothing'


def test_unused_is_less_than_a_hundredth_of_the_mean():
  ones = np.ones(4)
  mean = np.array([1.0, 1.0, 0.011, 0.004])
  measured = usage.Usage(positions=1, mean=mean, value_norms=ones, dead=ones == 0)
  assert measured.unused.tolist() == [False, False, False, True]
  np.testing.assert_allclose(measured.share.sum(), 1)
  assert [measured.tokens_for(f) for f in (0.4, 0.9, 0.998)] == [1, 2, 3]
  zeros = dataclasses.replace(measured, value_norms=0 * ones)
  assert zeros.unused.all() and not zeros.share.any()


def test_rows_may_come_in_any_number_at_once(monkeypatch):
  ids = IDS.ravel()[:100]
  rows = usage.as_rows(ids, 13)
  assert rows.shape == (8, 13) and np.array_equal(rows[rows >= 0], ids)
  once = _measure(params_of(), rows=rows)
  monkeypatch.setattr(usage, '_WEIGHTS_AT_ONCE', 3 * 13 * 48)  # three rows
  thrice = _measure(params_of(), rows=rows)
  for layer, kind in itertools.product(range(2), KINDS):
    assert thrice[layer][kind].positions == 100
    one, other = (measured[layer][kind].mean for measured in (once, thrice))
    np.testing.assert_allclose(one, other, rtol=1e-5, err_msg='the mean depends on the batch')


@pytest.mark.parametrize('devices', [1, 8])
def test_batches_are_equal_in_size_and_divide(devices):
  rows = np.arange(30, dtype=np.int32).reshape(10, 3)
  batches = [np.asarray(b) for b in usage.batches(rows, 2, mesh_of(fsdp=devices))]
  assert {batch.shape for batch in batches} == {(2 * devices, 3)}
  joined = np.concatenate(batches)
  np.testing.assert_array_equal(joined[:10], rows)
  assert np.all(joined[10:] == -1), 'what is filled up is counted'
