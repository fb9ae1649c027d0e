"""Test plans by formula, tables, chains and mistakes, all without the TPU compiler."""

import dataclasses
import importlib.util
import json
import math
import runpy

import pytest
import tiny_run

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import groups_as_text, growth, pattentions, token_counts, token_groups
from tokenformer_jax.data import images
from tokenformer_jax.errors import UserError
from tokenformer_jax.plan import (
  chain,
  estimate,
  formulas,
  stages,
  table,
  topology,
  tune,
)
from tokenformer_jax.plan.costs import Costs, Traffic
from tokenformer_jax.plan.operations import Operation
from tokenformer_jax.plan.program import Memory
from tokenformer_jax.steps.fit import DoesNotFitError


def _config(**changes):
  return tiny_run.config('files:/nothing/*.txt', '/nothing', **changes)


def _plan(on='gpu-h100:4', **changes):
  return estimate.plan(_config(**changes), topology.parse(on))


def _compiled(compute=2.0, network=0.5, **changes):
  """Return a plan as the compiler would give it, for a step of these seconds."""
  on = topology.parse('v5p:4x4x4')
  traffic = (Traffic('fsdp', 'all-gather', 'ICI', 3, 1.5, network),)
  cycles = int(compute * on.chip.clock)
  step = Operation('step', 'fusion', 1, compute, compute, 0.0, 0.0, 0.0, 0.0, (), ())
  costs = Costs(cycles, 0.0, 2e12, compute, traffic, (), (step,), (), compute + network / 2)
  memory = Memory(2**30, 2**31, 0, 2**32, on.chip.hbm)
  return dataclasses.replace(
    _plan(**changes), topology=on, costs=costs, memory=memory, source='cycles'
  )


def test_overlap_bounds_the_step_and_the_hours_are_those_of_all_steps():
  plan = _compiled(train__steps=3600)
  assert plan.step_seconds == pytest.approx((2.0, 2.5)), 'the longer of the two, and their sum'
  peak = 459e12 * 64
  assert plan.mfu == pytest.approx([plan.model_flops / peak / s for s in (2.0, 2.5)])
  assert plan.hours == pytest.approx((2.0, 2.5))
  assert plan.to_json()['chip_hours'] == pytest.approx([128, 160])
  assert _compiled(train__steps=1000, train__examples=100).steps == 13, '100 rows in batches of 8'
  assert _compiled(train__steps=1000, train__epochs=2.0).steps is None


def test_a_run_in_stages_has_the_memory_of_its_largest_and_the_cost_of_all():
  on = topology.parse('gpu-h100:4')
  points = {'data__sequence_length_by_step': '0:8 12:32', 'data__batch_size_by_step': '0:32 15:64'}
  staged = stages.plan_stages(_config(**points, train__steps=20), on)
  counts = [(12, 32, 8), (3, 32, 32), (5, 64, 32)]
  alone = [
    _plan(data__batch_size=rows, data__sequence_length=length, train__steps=steps)
    for steps, rows, length in counts
  ]
  assert [leg.plan.memory for leg in staged.legs] == [one.memory for one in alone]
  assert staged.model_flops == sum(one.steps * one.model_flops for one in alone)
  assert staged.chip_hours[0] == pytest.approx(4 * sum(one.hours[0] for one in alone))
  assert staged.largest.name == 'after step 15: 64 × 32'
  names = [line.partition('  ')[0] for line in stages.render(staged).splitlines()[1:5]]
  assert names == [*(leg.name for leg in staged.legs), 'the run']
  assert json.loads(json.dumps(staged.to_json()))['stages'][1]['steps'] == 3
  with pytest.raises(UserError, match=r'config\.train\.epochs is set, and the stages'):
    stages.plan_stages(_config(**points, train__steps=1000, train__epochs=1.0), on)


def test_a_plan_says_that_it_leaves_a_teacher_out():
  plan = _plan(distill__teacher='runs/large')
  assert 'note: the teacher runs/large is left out' in table.render(plan)
  assert plan.model_flops == _plan().model_flops, "FLOPs of a teacher count as the model's"
  assert 'teacher' not in table.render(_plan(distill__teacher='runs/large', distill__weight=0.0))


def test_the_table_has_what_the_plan_has():
  text = table.render(_compiled(train__steps=3600))
  rows = {line.split('  ')[0]: line.split() for line in text.splitlines()}
  assert rows['peak'][1] == '7.00', '1 GiB of parameters, 2 of moments, 4 of the rest'
  assert rows['left'][1] == '88.00'
  assert rows['fsdp: all-gather'][2:] == ['3', 'ICI', '1.500', '500.00']
  assert rows['ms a step'][-2:] == ['2,000.00', '2,500.00']
  assert rows['chip-hours'][-2:] == ['128', '160']


def test_masks_of_documents_take_memory_on_gpus():
  plain, masked = _plan(), _plan(data__documents='masked')
  assert masked.model_flops == plain.model_flops, 'masked pairs of positions are left out'
  added = masked.memory.temporaries - plain.memory.temporaries
  assert added == 2 * 2 * 32**2, 'the mask is not that of 2 rows on each of 4 devices in bfloat16'


def test_recomputation_costs_flops_and_saves_memory():
  plans = {
    remat: _plan(train__remat=remat, train__layers='scan')
    for remat in ('offload', 'full', 'dots', 'score_inputs', 'everything')
  }
  passes = [round(3 * one.costs.flops * 4 / one.model_flops, 2) for one in plans.values()]
  assert passes == [4, 4, 3.5, 3.5, 3], 'scores are half of a forward pass'
  memory = [one.memory.temporaries for one in plans.values()]
  assert memory == sorted(set(memory))
  full, offload = plans['full'].memory, plans['offload'].memory
  assert full.temporaries - offload.temporaries == offload.host > 0 == full.host
  unrolled = _plan(train__remat='everything', train__layers='unrolled').memory.temporaries
  assert unrolled > memory[-1], 'there are no gaps between the values'
  loop = {**tiny_run.DENSE, 'train__layers': 'scan'}
  dense = [_plan(**loop, train__remat=remat) for remat in ('score_inputs', 'everything')]
  assert dense[0].memory == dense[1].memory, 'there are no scores to keep'
  assert dense[0].costs.flops * 4 == pytest.approx(dense[0].model_flops)


def test_before_there_are_cycles_times_are_rough():
  plan = dataclasses.replace(_compiled(compute=2.0, network=0.5), source='layout')
  costs = dataclasses.replace(plan.costs, cycles=0, rough_seconds=1.5)
  plan = dataclasses.replace(plan, costs=costs, compile_seconds=3.0)
  assert plan.step_seconds == pytest.approx((1.5, 2.0))
  text = table.render(plan)
  assert 'laid out in 3 s: no code is generated; times are rough' in text
  assert 'cycles' not in text
  assert 'after 3 s: it fits, in 7.00 of 95 GiB of HBM' in plan.summary
  assert 'moves 1.50 GB and takes roughly 1,500 ms' in plan.summary


def test_state_is_split_over_the_mesh():
  whole, split = (_plan(on, data__batch_size=8) for on in ('gpu-h100:1', 'gpu-h100:4'))
  assert whole.memory.parameters == 4 * whole.parameters
  assert split.memory.parameters == pytest.approx(whole.memory.parameters / 4, rel=0.05)
  assert whole.memory.optimizer == pytest.approx(2 * whole.memory.parameters, rel=1e-3)


def test_a_plan_that_does_not_fit_says_by_how_much_and_what_to_do():
  config = _config(data__batch_size=2**22, train__remat='score_inputs')
  on = topology.parse('gpu-h100:4')
  with pytest.raises(DoesNotFitError) as raised:
    estimate.plan(config, on)
  text = str(estimate.advice(config, raised.value, on))
  assert '--config.train.remat=full' in text
  assert '--config.optim.accumulation_steps=2 (or a smaller batch: it is 1048576 a device)' in text
  config = _config(data__batch_size=2**22, train__remat='full')
  assert '--config.train.remat=offload' in str(estimate.advice(config, raised.value, on))


@pytest.mark.parametrize(
  ('message', 'needed', 'capacity'),
  [
    ('the total memory required for HLO temporaries (81.98G) exceeds available HBM (15.75G).',
     81.98, 15.75),
    ('Ran out of memory in memory space hbm. Used 512.50M of 0.25G hbm. Exceeded', 0.5005, 0.25),
    ('something new', None, None),
  ],
)  # fmt: skip
def test_the_plan_reports_the_compilers_memory(message, needed, capacity):
  error = DoesNotFitError(f'RESOURCE_EXHAUSTED: {message}')
  assert error.needed == (needed and pytest.approx(needed, rel=1e-3))
  assert error.capacity == capacity


@pytest.mark.parametrize(
  ('name', 'says'),
  [
    ('v5q:4x4', "'v5q' is not a known chip; did you mean 'v5e'?"),
    ('V6e-256', "'V6e-256' is not a known chip; did you mean 'v6e'?"),
    ('v5p', "has the shape ''; give a shape as in v5p:4x4x4"),
    ('v5e:4x0', "has the shape '4x0'; give a shape as in v5e:4x4"),
    ('gpu-h100:2x4', "has the shape '2x4'; give a shape as in gpu-h100:8"),
  ],
)
def test_unknown_topologies(name, says):
  with pytest.raises(UserError, match='--topology=') as raised:
    topology.parse(name)
  assert says in str(raised.value)


def test_slices_of_gpus_are_refused():
  with pytest.raises(UserError, match='--slices=2 is for TPUs'):
    topology.parse('gpu-h100:8', 2)


def test_without_libtpu_one_sentence(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match=r'pip install -e "\.\[tpu\]"'):
    topology.devices(topology.parse('v5e:4x4'))


@pytest.mark.parametrize(('name', 'devices'), [('v5p:4x4x4', 64), ('tpu7x:2x2x1', 8)])
def test_a_topology_has_the_product_of_its_sides_as_devices(name, devices):
  on = topology.parse(name, 2)
  assert on.devices == 2 * devices
  assert on.chips == (128 if name.startswith('v5p') else 8), 'a chip of TPU7x is two devices'


def test_stages_of_a_chain():
  config = _config(train__steps=50)
  grown = chain.stage(chain.stage(config, 'qkv=64,ffn=128,steps=10'), 'proj=64')
  assert token_counts(grown.model) == {'qkv': 64, 'proj': 64, 'ffn': 128}
  groups = [token_groups(one)[0] for one in pattentions(grown.model).values()]
  firsts = [(group.tokens, group.reference) for group in groups]
  assert firsts == [(32, 32), (32, 32), (64, 64)], 'the old tokens or their scale changed'
  assert grown.train.steps == 10, 'a stage is as long as the one before, if nothing is said'
  deeper = chain.stage(grown, 'ffn=256,layers=8')
  assert (deeper.model.pattern, token_counts(deeper.model)['ffn']) == ('layer*8', 256)


def test_a_stage_may_add_experts():
  grown = chain.stage(_config(), 'experts=4,expert_tokens=32,top_k=2,layers=8')
  ffn = grown.model.layer.ffn
  assert (ffn.kind, ffn.count, ffn.router.top_k, grown.model.depth) == ('experts', 4, 2, 8)
  assert (ffn.shared, ffn.expert.tokens) == (_config_filled().model.layer.ffn, 32)
  more = chain.stage(grown, 'experts=8,ffn.shared=256')
  assert more.model.layer.ffn.count == 8
  assert token_counts(more.model)['ffn.shared'] == 256
  with pytest.raises(UserError, match='go with experts=N'):
    chain.stage(grown, 'top_k=1')
  with pytest.raises(UserError, match='2 are fewer'):
    chain.stage(grown, 'experts=2')


def _config_filled():
  config = _config()
  return dataclasses.replace(config, model=config_lib.with_references(config.model))


def test_a_stage_has_the_groups_that_its_growth_makes():
  config = dataclasses.replace(_config(), grow=growth(method='group'))
  grown = chain.stage(chain.stage(config, 'qkv=64,ffn=128'), 'ffn=160')
  groups = [groups_as_text(token_groups(one)) for one in pattentions(grown.model).values()]
  assert groups == ['32:32*2', '32:32', '64:64*2 32:32']


@pytest.mark.parametrize(
  ('text', 'says'),
  [
    ('qvk=64', "names 'qvk'; did you mean 'qkv'?"),
    ('qkv=x', "has 'qkv=x'; it must be qkv=N"),
    ('qkv=16', 'must make no count smaller'),
    ('layers=1', 'at least as many'),
    ('pattern=layr', "--pattern is 'layr', and 'layr' is not a layer"),
    ('steps=5', 'must make no count smaller and one larger'),
  ],
)
def test_stages_that_are_none(text, says):
  with pytest.raises(UserError) as raised:
    chain.stage(_config(), text)
  assert says in str(raised.value)


def test_a_chain_against_the_largest_from_scratch():
  on = topology.parse('gpu-h100:4')
  grown = chain.plan_chain(_config(train__steps=100), ['qkv=256,proj=256,ffn=512,steps=50'], on)
  assert [leg.steps for leg in grown.sizes.legs] == [100, 50]
  assert grown.scratch.steps == 150, 'as many tokens as the chain'
  small, large = (leg.plan for leg in grown.sizes.legs)
  spent = 100 * small.model_flops + 50 * large.model_flops
  assert grown.sizes.model_flops == spent < grown.scratch.model_flops
  share = f'{spent / grown.scratch.model_flops:.1%}'  # at the peak
  assert f'costs {share} to {share} of' in chain.render(grown)
  assert len(grown.to_json()['stages']) == 2


def test_a_search_tries_meshes_and_ends_with_the_fastest(monkeypatch):
  on, config = topology.parse('v5p:2x2x2'), _config(mesh__tokens=2)
  assert [mesh.tokens for mesh in tune.meshes(config, on)] == [2, 1, 4], '4 heads'
  seconds = {2: 2.0, 1: 1.0}

  def planned(config, on, *, quick):
    if config.mesh.tokens not in seconds:
      raise DoesNotFitError.from_bytes(20 * 2**30, 16 * 2**30)
    plan = _compiled(compute=seconds[config.mesh.tokens], network=0.0)
    return dataclasses.replace(plan, config=config)

  monkeypatch.setattr(tune, 'plan', planned)
  tried = tune.search(config, on)
  assert [one.mesh.tokens for one in tried] == [1, 2, 4]
  assert 'tokens=1: 2.00 times as fast as the mesh' in tune.advice(config, tried)
  assert 'needs 20.0 of 16.0 GiB' in tune.render(tried)
  assert tune.advice(tried[0].plan.config, tried).startswith('no mesh is faster')
  seconds.clear()
  with pytest.raises(UserError, match='no mesh fits on v5p:2x2x2'):
    tune.search(config, on)


def test_a_search_keeps_the_experts_of_the_mesh():
  meshes = tune.meshes(_config(mesh__experts=2), topology.parse('v5p:2x2x2'))
  assert [(mesh.fsdp, mesh.experts, mesh.tokens) for mesh in meshes[1:]] == [(2, 2, 2), (1, 2, 4)]


def test_a_mixture_takes_memory_for_its_slots():
  ffn = {
    'kind': 'experts',
    'count': 8,
    'expert': {'kind': 'mlp', 'width': 16},
    'router': {'top_k': 2},
  }

  def plan(**dispatch):
    changes = {'model__layer__ffn': {**ffn, 'dispatch': dispatch}, 'train__remat': 'full'}
    return _plan('gpu-h100:8', **changes, mesh__experts=4)

  few, many = (plan(kind='grouped', device_factor=factor) for factor in (1.0, 2.0))
  slots = 1 * 32 * 2  # a row of 32 tokens on a device, two experts each
  assert many.memory.temporaries - few.memory.temporaries == 2 * slots * (4 * 32 + 3 * 16)
  experts = few.config.model.layer.ffn
  assert formulas.count_slots(experts, 2, 32, 4) == 4 * 32
  free = dataclasses.replace(experts.dispatch, device_factor=0.0)
  assert formulas.count_slots(dataclasses.replace(experts, dispatch=free), 2, 32, 8) == 8 * 64, (
    'a device has one expert: a choice a token'
  )
  capacity = plan(kind='capacity', factor=1.25, least=4).config.model.layer.ffn
  assert formulas.count_slots(capacity, 2, 32, 4) == 8 * 2 * 10, '1.25 · 2 · 32 / 8 in each row'


def test_by_default_a_plan_has_the_fastest_remat_plan_that_fits():
  few, many = (_plan(data__batch_size=rows) for rows in (2**12, 2**21))
  assert few.config.train.remat == 'everything', 'what fits is computed again'
  assert many.config.train.remat != 'everything' and many.memory.left >= 0


def test_data_is_not_read_if_every_size_is_there():
  tokenizer = {'data__tokenizer': '/nothing/tokenizer.json', 'model__vocab_size': 512}
  assert _plan(**tokenizer).config.model.vocab_size == 512
  sentence = r'/nothing/tokenizer\.json.*give --config\.model\.vocab_size=N'
  with pytest.raises(UserError, match=sentence):
    _plan(data__tokenizer='/nothing/tokenizer.json')


@pytest.mark.parametrize('variant', ['b16', 'l16'])
def test_imagenet_is_not_needed_for_a_plan(variant, monkeypatch):
  monkeypatch.setattr(images, 'open_images', lambda _: pytest.fail('the data is looked for'))
  values = runpy.run_path(str(tiny_run.ROOT / 'configs/vit_imagenet.py'))['get_config'](variant)
  found = estimate.plan(config_lib.resolve(values), topology.parse('gpu-h100:64'))
  assert (found.config.model.classes, found.config.model.channels) == (1000, 3)
  epochs = {'b16': 300, 'l16': 200}[variant]
  assert found.steps == math.ceil(epochs * 1_281_167 / 4096), 'the run has another length'
  assert 'hours of' in table.render(found)


def test_images_that_are_not_here_need_their_classes():
  sizes = {'model__channels': 0, 'data__source': 'folder:/nothing'}
  on = topology.parse('gpu-h100:4')
  found = estimate.plan(tiny_run.vit_config(model__classes=7, **sizes), on)
  assert (found.config.model.classes, found.config.model.channels) == (7, 3)
  assert found.units == ('images', 16)
  assert found.memory.batch == 4 * (8 * 8 * 3 + 4), 'four images of bytes, and their labels'
  with pytest.raises(UserError, match=r'/nothing.*give --config\.model\.classes=N'):
    estimate.plan(tiny_run.vit_config(**sizes), on)
