"""Test what devices that split experts exchange, by formula, and plans of mixtures."""

import dataclasses
import itertools

import pytest
import tiny_run

from tokenformer_jax.config import MLPConfig
from tokenformer_jax.plan import estimate, exchange, table, topology, tune

EXPERTS = {
  'model__pattern': 'dense moe*3',
  'model__variants': {
    'dense': {},
    'moe': {
      'ffn': {
        'kind': 'experts',
        'count': 8,
        'expert': {'kind': 'mlp', 'width': 16},
        'router': {'top_k': 2},
        'dispatch': {'kind': 'grouped', 'device_factor': 1.5},
      }
    },
  },
}
CAPACITY = {'kind': 'capacity', 'factor': 1.25, 'least': 4}


def _config(dispatch=None, **changes):
  moe = EXPERTS['model__variants']['moe']['ffn']
  variants = {'dense': {}, 'moe': {'ffn': {**moe, **({'dispatch': dispatch} if dispatch else {})}}}
  everything = {**EXPERTS, 'model__variants': variants, **changes}
  return tiny_run.config('files:/nothing/*.txt', '/nothing', **everything)


def _of(model):
  ((experts, layers),) = exchange.count_layers(model)
  assert layers == 3
  return experts


def test_sorted_rows_are_exchanged_by_places_of_devices():
  model = _config().model
  # 2 rows of 32 tokens, 2 experts each: 128 choices, 32 for each of 4 devices, times 1.5.
  assert exchange.count_slots(_of(model), 2, 32, 4) == 4 * 48
  one = exchange.layer_exchange(_of(model), 32, 2, 32, 4)
  rows, numbers = 4 * 48 * 3 / 4 * 32 * 2, 4 * 48 * 3 / 4 * 4
  assert one == exchange.Exchange(8, 6 * rows + 2 * numbers)
  kept = exchange.layer_exchange(_of(model), 32, 2, 32, 4, again=False)
  assert kept == exchange.Exchange(5, 4 * rows + numbers)
  assert exchange.step_exchange(model, 2, 32, 4) == exchange.Exchange(24, 3 * one.received)


def test_without_a_factor_every_choice_has_a_place():
  experts = _of(_config({'kind': 'grouped'}).model)
  assert exchange.count_slots(experts, 2, 32, 4) == 4 * 128
  assert exchange.count_slots(experts, 2, 32, 8) == 8 * 64, (
    'a device has one expert: a choice a token'
  )


def test_a_capacity_is_exchanged_by_places_of_experts():
  model = _config(CAPACITY).model
  # 1.25 · 2 · 32 / 8 places of an expert in each row
  assert exchange.count_slots(_of(model), 2, 32, 4) == 8 * 2 * 10
  one = exchange.layer_exchange(_of(model), 32, 2, 32, 4)
  assert one == exchange.Exchange(6, 6 * 160 * 3 / 4 * 32 * 2)


def test_one_device_and_a_dense_model_exchange_nothing():
  model = _config().model
  assert exchange.step_exchange(model, 2, 32, 1) == exchange.NONE
  dense = tiny_run.config('files:/nothing/*.txt', '/nothing').model
  assert exchange.step_exchange(dense, 2, 32, 4) == exchange.NONE


def test_gpus_exchange_tokens_by_formula():
  on = topology.parse('gpu-h100:8')
  found = estimate.plan(_config(mesh__experts=4), on)
  rows = {(row.axis, row.kind): row for row in found.costs.traffic}
  row = rows['experts', 'all-to-all']
  assert row.count == 24
  moved = exchange.step_exchange(found.config.model, 1, 32, 4).received
  assert row.gigabytes == pytest.approx(moved / 1e9)
  # Arrays of experts are gathered over fsdp, a half of the width of 2 experts in 3 layers; the rest
  # over both axes.
  of_experts = 3 * 2 * 2 * 32 * 16 * 2
  assert rows['fsdp', 'all-gather'].gigabytes == pytest.approx(2 * of_experts / 2 / 1e9)
  assert ('fsdp+experts', 'all-gather') in rows
  assert 'experts: all-to-all' in table.render(found)


def test_experts_take_memory_for_their_places():
  on = topology.parse('gpu-h100:8')
  few, many = (
    estimate.plan(
      _config({'kind': 'grouped', 'device_factor': factor}, mesh__experts=4, train__remat='full'),
      on,
    ).memory.temporaries
    for factor in (1.0, 2.0)
  )
  places = 1 * 32 * 2
  assert many - few == 2 * places * (4 * 32 + 3 * 16)


def test_model_flops_are_those_of_active_experts():
  on = topology.parse('gpu-h100:8')
  plan = estimate.plan(_config(mesh__experts=4), on)
  ffn = dataclasses.replace(_of(plan.config.model), count=16)
  model = plan.config.model.map_layers(
    lambda name, layer: dataclasses.replace(layer, ffn=ffn) if name == 'moe' else layer
  )
  larger = dataclasses.replace(plan, config=dataclasses.replace(plan.config, model=model))
  routers = 8 * 32 * 3 * 6 * 8 * 32  # of 8 more experts in 3 layers, for 8 rows of 32 tokens
  assert larger.model_flops - plan.model_flops == routers
  assert isinstance(ffn.expert, MLPConfig)


def test_a_search_keeps_the_experts_of_the_mesh():
  config, on = _config(mesh__experts=2), topology.parse('gpu-h100:8')
  meshes = [one.mesh for one in itertools.islice(tune.candidates(config, on), 60)]
  assert (meshes[0].fsdp, meshes[0].experts) == (4, 2), 'the config comes first'
  assert {mesh.experts for mesh in meshes} == {2}
  assert all(mesh.fsdp * mesh.experts * mesh.tokens == 8 for mesh in meshes)
