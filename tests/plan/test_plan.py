"""Test the plan's figures and tables, chains, stages and mistakes, without the TPU compiler."""

import dataclasses
import importlib.util
import json
import math
import runpy

import pytest
import tiny_run

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import groups_as_text, growth, pattentions, token_counts
from tokenformer_jax.data import images
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import flops
from tokenformer_jax.parallel import sharding
from tokenformer_jax.plan import (
  chain,
  estimate,
  largest_batch,
  program,
  stages,
  table,
  topology,
  tune,
)
from tokenformer_jax.plan.costs import Costs, Traffic
from tokenformer_jax.plan.estimate import Plan
from tokenformer_jax.plan.operations import Operation
from tokenformer_jax.plan.program import Memory
from tokenformer_jax.steps.fit import DoesNotFitError

V5P = topology.parse('v5p:4x4x4')


def _config(**changes):
  return tiny_run.config('files:/nothing/*.txt', '/nothing', **changes)


def _plan_of(config, on=V5P, before=None, *, quick=False, compute=2.0, network=0.5):
  """Return a plan as the compiler would give it, for a step of these seconds."""
  del before, quick
  step = program.make_step(config)
  traffic = (Traffic('fsdp', 'all-gather', 'ICI', 3, 1.5, network),)
  cycles = int(compute * on.chip.clock)
  one = Operation('step', 'fusion', 1, compute, compute, 0.0, 0.0, 0.0, 0.0, (), ())
  costs = Costs(cycles, 0.0, 2e12, compute, traffic, (), (one,), (), compute + network / 2)
  return Plan(
    config=step.config,
    topology=on,
    mesh=sharding.mesh_sizes(config.mesh, on.devices),
    parameters=step.task.definition.count,
    memory=Memory(2**30, 2**31, 0, 2**32, on.chip.hbm),
    costs=costs,
    has_cycles=True,
    compile_seconds=3.0,
  )


def _compiled(compute=2.0, network=0.5, **changes):
  return _plan_of(_config(**changes), compute=compute, network=network)


def test_overlap_bounds_the_step_and_the_hours_are_those_of_all_steps():
  plan = _compiled(train__steps=3600)
  assert plan.step_seconds == pytest.approx((2.0, 2.5)), 'the longer of the two, and their sum'
  peak = 459e12 * 64
  assert plan.mfu == pytest.approx([plan.model_flops / peak / s for s in (2.0, 2.5)])
  assert plan.hours == pytest.approx((2.0, 2.5))
  assert plan.to_json()['chip_hours'] == pytest.approx([128, 160])
  assert _compiled(train__steps=1000, train__examples=100).steps == 13, '100 rows in batches of 8'
  assert _compiled(train__steps=1000, train__epochs=2.0).steps is None


def test_a_run_in_stages_has_the_memory_of_its_largest_and_the_cost_of_all(monkeypatch):
  def planned(config, on, *, quick):
    plan = _plan_of(config, on, compute=config.data.batch_size / 8)
    size = config.data.batch_size * config.data.sequence_length
    return dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, temporaries=size))

  monkeypatch.setattr(stages, 'plan', planned)
  points = {'data__sequence_length_by_step': '0:8 12:32', 'data__batch_size_by_step': '0:32 15:64'}
  staged = stages.plan_stages(_config(**points, train__steps=20), V5P)
  assert [leg.plan.memory.temporaries for leg in staged.legs] == [32 * 8, 32 * 32, 64 * 32]
  spent = [leg.steps * leg.plan.model_flops for leg in staged.legs]
  assert [leg.steps for leg in staged.legs] == [12, 3, 5] and staged.model_flops == sum(spent)
  assert staged.chip_hours[0] == pytest.approx(64 * (15 * 4 + 5 * 8) / 3600)
  assert staged.largest.name == 'after step 15: 64 × 32'
  names = [line.partition('  ')[0] for line in stages.render(staged).splitlines()[1:5]]
  assert names == [*(leg.name for leg in staged.legs), 'the run']
  assert json.loads(json.dumps(staged.to_json()))['stages'][1]['steps'] == 3
  with pytest.raises(UserError, match=r'config\.train\.epochs is set, and the stages'):
    stages.plan_stages(_config(**points, train__steps=1000, train__epochs=1.0), V5P)


def test_a_plan_says_that_it_leaves_a_teacher_out():
  plan = _compiled(distill__teacher='runs/large')
  assert 'note: the teacher runs/large is left out' in table.render(plan)
  assert plan.model_flops == _compiled().model_flops, "FLOPs of a teacher count as the model's"
  unused = _compiled(distill__teacher='runs/large', distill__weight=0.0)
  assert 'teacher' not in table.render(unused)


def test_the_table_has_what_the_plan_has():
  text = table.render(_compiled(train__steps=3600))
  rows = {line.split('  ')[0]: line.split() for line in text.splitlines()}
  assert rows['peak'][1] == '7.00', '1 GiB of parameters, 2 of moments, 4 of the rest'
  assert rows['left'][1] == '88.00'
  assert rows['fsdp: all-gather'][2:] == ['3', 'ICI', '1.500', '500.00']
  assert rows['ms a step'][-2:] == ['2,000.00', '2,500.00']
  assert rows['chip-hours'][-2:] == ['128', '160']


@pytest.mark.parametrize(
  ('name', 'size'),
  [
    ('h200:1', '1 GPU, '),
    ('h200:8', '8 GPUs, '),
    ('v5e:1x1', '1 chip, 1 device, '),
    ('v5p:4x4x4', '64 chips, 64 devices, '),
  ],
)
def test_the_table_begins_with_the_devices(name, size):
  on = topology.parse(name)
  assert table.render(_plan_of(_config(), on)).startswith(f'{name}: {size}')


def test_before_there_are_cycles_times_are_rough():
  plan = _compiled(compute=2.0, network=0.5)
  costs = dataclasses.replace(plan.costs, cycles=0, rough_seconds=1.5)
  plan = dataclasses.replace(plan, costs=costs, has_cycles=False)
  assert plan.step_seconds == pytest.approx((1.5, 2.0))
  text = table.render(plan)
  assert 'laid out in 3 s: no code is generated; times are rough' in text
  assert 'cycles' not in text
  assert 'after 3 s: it fits, in 7.00 of 95 GiB of HBM' in plan.summary
  assert 'moves 1.50 GB and takes roughly 1,500 ms' in plan.summary


def test_a_plan_that_does_not_fit_says_by_how_much_and_what_to_do():
  error = DoesNotFitError.from_bytes(20 * 2**30, 16 * 2**30)
  config = _config(data__batch_size=2**22, train__remat='score_inputs')
  text = str(estimate.advice(config, error, V5P))
  assert 'needs 20.00 GiB of HBM a device and may use 16.00 on v5p:4x4x4' in text
  assert 'config.train.remat=full' in text
  assert 'config.optim.accumulation_steps=2 (or a smaller batch: it is 65536 a device)' in text
  config = _config(data__batch_size=2**22, train__remat='full')
  assert 'config.train.remat=offload' in str(estimate.advice(config, error, V5P))


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
    ('V6e-256', "'V6e-256' is not a known chip; did you mean 'v6e'?"),
    ('v5e:4x0', "has the shape '4x0'; give a shape as in v5e:4x4"),
  ],
)
def test_unknown_topologies(name, says):
  with pytest.raises(UserError, match='topology=') as raised:
    topology.parse(name)
  assert says in str(raised.value)


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
  groups = [one.groups[0] for one in pattentions(grown.model).values()]
  firsts = [(group.tokens, group.reference) for group in groups]
  assert firsts == [(32, 32), (32, 32), (64, 64)], 'the old tokens or their scale changed'
  assert grown.train.steps == 10, 'a stage is as long as the one before, if nothing is said'
  deeper = chain.stage(grown, 'ffn=256,layers=8')
  assert (deeper.model.pattern, token_counts(deeper.model)['ffn']) == ('layer*8', 256)


def test_a_chain_in_epochs_is_refused():
  with pytest.raises(UserError, match='--grow compares tokens'):
    chain.plan_chain(_config(train__epochs=1.0, train__steps=1000), [], V5P)


def test_a_stage_may_add_experts():
  grown = chain.stage(_config(), 'experts=4,expert_tokens=32,top_k=2,layers=8')
  ffn = grown.model.layer.ffn
  assert (ffn.kind, ffn.count, ffn.router.top_k, grown.model.depth) == ('experts', 4, 2, 8)
  before = config_lib.with_references(_config().model)
  assert (ffn.shared, ffn.expert.tokens) == (before.layer.ffn, 32)
  more = chain.stage(grown, 'experts=8,ffn.shared=256')
  assert more.model.layer.ffn.count == 8
  assert token_counts(more.model)['ffn.shared'] == 256
  with pytest.raises(UserError, match='go with experts=N'):
    chain.stage(grown, 'top_k=1')
  with pytest.raises(UserError, match='2 are fewer'):
    chain.stage(grown, 'experts=2')


def test_a_stage_has_the_groups_that_its_growth_makes():
  config = dataclasses.replace(_config(), grow=growth(method='group'))
  grown = chain.stage(chain.stage(config, 'qkv=64,ffn=128'), 'ffn=160')
  groups = [groups_as_text(one.groups) for one in pattentions(grown.model).values()]
  assert groups == ['32:32*2', '32:32', '64:64*2 32:32']


def test_tied_layers_are_planned_with_one_set_of_arrays_and_untied_by_a_stage():
  tied = _config(model__pattern='layer layer^2')
  own = chain.stage(tied, 'pattern=layer*3')
  two, three = (_config(model__pattern=f'layer*{count}') for count in (2, 3))
  for config, counted in ((tied, two), (own, three)):
    assert _plan_of(config).parameters == _plan_of(counted).parameters
    assert flops.step_flops(program.make_step(config).config) == flops.step_flops(
      program.make_step(three).config
    )


@pytest.mark.parametrize(
  ('text', 'says'),
  [
    ('qkv=x', "has 'qkv=x'; it must be qkv=N"),
    ('layers=1', 'at least as many'),
    ('pattern=layr', "pattern is 'layr', and 'layr' is not a layer"),
    ('steps=5', 'must make no count smaller and one larger'),
  ],
)
def test_stages_that_are_none(text, says):
  with pytest.raises(UserError) as raised:
    chain.stage(_config(), text)
  assert says in str(raised.value)


def test_a_chain_against_the_largest_from_scratch(monkeypatch):
  def planned(config, on, before=None, *, quick):
    seconds = sum(token_counts(config.model).values()) / 128
    return _plan_of(config, on, compute=seconds, network=0.0)

  monkeypatch.setattr(chain, 'plan', planned)
  stage = 'qkv=256,proj=256,ffn=512,steps=50'  # eight times the parameter tokens
  grown = chain.plan_chain(_config(train__steps=100), [stage], V5P)
  assert [leg.steps for leg in grown.sizes.legs] == [100, 50]
  assert grown.scratch.steps == 150, 'as many tokens as the chain'
  assert grown.sizes.model_flops < grown.scratch.model_flops
  share = f'{(100 + 50 * 8) / (150 * 8):.1%}'
  said = chain.render(grown)
  assert f'costs {share} to {share} of' in said
  assert 'will it pay? Outside of what was measured' in said and 'after 67 % of' in said
  assert len(grown.to_json()['stages']) == 2


def test_a_search_tries_meshes_and_ends_with_the_fastest(monkeypatch):
  on, config = topology.parse('v5p:2x2x2'), _config(mesh__tokens=2)
  assert [mesh.tokens for mesh in tune.meshes(config, on)] == [2, 1, 4], '4 heads'
  seconds = {2: 2.0, 1: 1.0}

  def planned(config, on, *, quick):
    if config.mesh.tokens not in seconds:
      raise DoesNotFitError.from_bytes(20 * 2**30, 16 * 2**30)
    return _plan_of(config, on, compute=seconds[config.mesh.tokens], network=0.0)

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


def _planned_with_bytes(config, on, *, quick):
  """Return the plan of a step with 10 GiB, and 100 MiB for each row of a device."""
  needed = 10 * 2**30 + 100 * 2**20 * config.data.batch_size / 64
  if needed > on.chip.hbm:
    raise DoesNotFitError.from_bytes(needed, on.chip.hbm)
  plan = _plan_of(config, on)
  return dataclasses.replace(plan, memory=Memory(needed, 0, 0, 0, on.chip.hbm))


@pytest.mark.parametrize('first', [64, 128_000], ids=['small', 'large'])
def test_the_largest_batch_that_fits_takes_few_programs(first, monkeypatch):
  monkeypatch.setattr(largest_batch, 'plan', _planned_with_bytes)
  config = _config(data__batch_size=first, train__remat='full')
  tried = largest_batch.search(config, V5P)
  best = [one for one in tried if one.plan][-1]
  assert best.batch == 64 * (85 * 2**30 // (100 * 2**20)), 'of 95 GiB'
  assert len(tried) <= 4, [one.batch for one in tried]
  assert {one.plan.config.train.remat for one in tried if one.plan} == {'full'}
  text = largest_batch.render(tried, V5P)
  assert f'config.data.batch_size={best.batch} config.train.remat=full' in text
  assert 'does not fit' in text


def test_the_search_ends_where_the_compiler_computes_more_again_in_what_does_not_fit():
  needed = lambda size: 5 + 0.25 * size if size < 345 else 90 + size / 100  # noqa: E731
  sizes, count = {}, 1024
  while count is not None and len(sizes) < 10:
    sizes[count] = needed(count)
    count = largest_batch.next_count(
      sizes, max((s for s in sizes if sizes[s] <= 91), default=0), 91
    )
  assert count is None
  assert max(size for size in sizes if sizes[size] <= 91) == 344


def test_no_batch_fits(monkeypatch):
  def refused(config, on, *, quick):
    raise DoesNotFitError.from_bytes(200 * 2**30, on.chip.hbm)

  monkeypatch.setattr(largest_batch, 'plan', refused)
  with pytest.raises(UserError, match=r'no batch fits on v5p:4x4x4 with .*: 64 needs 200'):
    largest_batch.search(_config(data__batch_size=256), V5P)


@pytest.mark.parametrize(
  ('needed', 'fits', 'following'),
  [
    ({4: 10.0}, 4, 40),  # in proportion, until two are known
    ({4: 10.0, 40: 82.0}, 40, 49),
    ({49: 100.0, 50: 102.0}, 49, None),
    ({8: math.inf}, 0, 4),  # the compiler does not say by how much
    ({1: math.inf}, 0, None),
    ({1024: 236.0, 423: 107.0}, 0, 390),
    ({423: 107.0, 416: 106.9}, 0, 104),  # The compiler has computed more again, to need less.
    ({1024: 236.0, 438: 107.0, 416: 106.9}, 0, 208),
    ({104: 31.0, 416: 107.0}, 104, 335),
    ({104: 31.0, 300: 80.0, 360: 105.0}, 300, 330),  # The line is wrong beyond 330.
  ],
)
def test_the_next_batch_to_try(needed, fits, following):
  assert largest_batch.next_count(needed, fits, 100.0) == following


def test_data_is_not_read_if_every_size_is_there():
  tokenizer = {'data__tokenizer': '/nothing/tokenizer.json', 'model__vocab_size': 512}
  assert program.make_step(_config(**tokenizer)).config.model.vocab_size == 512
  sentence = r'/nothing/tokenizer\.json.*give config\.model\.vocab_size=N'
  with pytest.raises(UserError, match=sentence):
    program.make_step(_config(data__tokenizer='/nothing/tokenizer.json'))


def test_imagenet_is_not_needed_for_a_plan(monkeypatch):
  monkeypatch.setattr(images, 'open_images', lambda _: pytest.fail('the data is looked for'))
  values = runpy.run_path(str(tiny_run.ROOT / 'configs/vit_imagenet.py'))['get_config']('l16')
  plan = _plan_of(config_lib.resolve(values))
  assert (plan.config.model.classes, plan.config.model.channels) == (1000, 3)
  assert plan.steps == math.ceil(200 * 1_281_167 / 4096), 'the run has another length'
  assert 'hours of' in table.render(plan)


def test_images_that_are_not_here_need_their_classes():
  sizes = {'model__channels': 0, 'data__source': 'folder:/nothing'}
  step = program.make_step(tiny_run.vit_config(model__classes=7, **sizes))
  assert (step.config.model.classes, step.config.model.channels) == (7, 3)
  assert (step.config.data.unit, step.config.data.units_per_step) == ('images', 16)
  with pytest.raises(UserError, match=r'/nothing.*give config\.model\.classes=N'):
    program.make_step(tiny_run.vit_config(**sizes))
