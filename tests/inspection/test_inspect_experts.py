"""`inspect` shows the choices of the model's own routers, in tables of experts."""

import dataclasses

import jax
import numpy as np
import pytest
from growing import mesh_of
from mixtures import KINDS
from tiny import large_params, two_kinds

from tokenformer_jax.data.tokenizers import ByteTokenizer
from tokenformer_jax.inspection import experts, report
from tokenformer_jax.model.layer import Counts, layer_means
from tokenformer_jax.model.lm import define_lm

IDS = np.random.default_rng(0).integers(0, 64, (8, 13), np.int32)


def _measure(model, devices=1, ids=IDS):
  return experts.measure(define_lm(model), large_params(model), ids, mesh_of(devices))


@pytest.fixture(scope='module')
def model():
  """Layers of two kinds, of which every other one has experts."""
  model = two_kinds()
  ffn = KINDS['fine-grained']
  return dataclasses.replace(model, layer=dataclasses.replace(model.layer, ffn=ffn))


@pytest.mark.slow
def test_the_load_is_that_of_the_model(model):
  answers = _measure(model)
  assert list(answers) == [1, 3], 'the layers with a router, from 0 on'
  definition = define_lm(model)
  counts = Counts(targets=IDS.size, tokens=IDS.size, sequences=len(IDS))
  means = jax.jit(lambda p, ids: definition.bind(p).hidden(ids)[2].divided(counts)[1])(
    large_params(model), IDS
  )
  figures = layer_means(means)
  mean = np.mean([one.load for one in answers.values()], axis=0)
  want = [figures[f'router/load/{i}'] for i in range(8)]
  np.testing.assert_allclose(mean, want, atol=1e-6)
  for one in answers.values():
    assert len(one.ids) == len(one.experts) == IDS.size * 3


@pytest.mark.slow
def test_padding_counts_in_no_load(model):
  padded = np.concatenate([IDS, np.full((3, 13), -1, np.int32)])
  for one, other in zip(
    _measure(model).values(), _measure(model, ids=padded).values(), strict=True
  ):
    np.testing.assert_array_equal(one.load, other.load)


def test_the_tokens_of_an_expert_are_counted():
  answers = experts.Answers(
    ids=np.array([5, 5, 5, 9, 9, 7]), experts=np.array([0, 0, 2, 0, 2, 2]), count=4
  )
  assert answers.load.tolist() == [0.5, 0, 0.5, 0]
  assert answers.tokens(0, 5) == [(5, 2 / 3, 2 / 3), (9, 1 / 3, 1 / 2)]
  assert answers.tokens(2, 1) == [(5, 1 / 3, 1 / 3)] and answers.tokens(1, 3) == []
  (row,) = report.expert_rows({4: answers})
  assert (row['layer'], row['unused'], row['max_violation']) == (4, 2, 1)
  rows = report.answer_rows({4: answers}, ByteTokenizer(), 1)
  assert [one['expert'] for one in rows] == [0, 2, 1, 3], 'not the busiest first'
  table = report.answer_table(rows, 2)
  assert len(table.splitlines()) == 3 and '67%, 67%' in table


def test_a_model_without_experts_has_nothing_to_show():
  assert _measure(two_kinds()) == {}, 'a layer without a router is shown'


@pytest.mark.slow
def test_a_mixture_on_eight_devices(model):
  for one, other in zip(_measure(model).values(), _measure(model, 8).values(), strict=True):
    np.testing.assert_allclose(one.load, other.load, atol=1e-6)
