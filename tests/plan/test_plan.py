"""Test plans by formula, tables, chains and mistakes, all without the TPU compiler."""

import dataclasses
import importlib.util
import json
import math
import re
import runpy
import tempfile

import jax
import numpy as np
import pytest
import tiny_run
from jax.sharding import Mesh

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import groups_as_text, growth, pattentions, token_counts, token_groups
from tokenformer_jax.data import images
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import flops
from tokenformer_jax.parallel import sharding
from tokenformer_jax.plan import (
  breakdown,
  breakdown_figure,
  chain,
  chips,
  estimate,
  stages,
  table,
  topology,
  tune,
)
from tokenformer_jax.plan.costs import Costs, Traffic
from tokenformer_jax.plan.operations import Operation
from tokenformer_jax.plan.program import Memory
from tokenformer_jax.steps import remat_plans
from tokenformer_jax.steps.fit import DoesNotFitError
from tokenformer_jax.steps.remat_plans import RematPlan


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
  found = Costs(cycles, 0.0, 2e12, compute, traffic, (), (step,), (), compute + network / 2)
  memory = Memory(2**30, 2**31, 0, 2**32, 0, on.chip.hbm)
  return dataclasses.replace(
    _plan(**changes), topology=on, costs=found, memory=memory, source='cycles'
  )


def test_overlap_bounds_the_step():
  plan = _compiled()
  assert plan.step_seconds == pytest.approx((2.0, 2.5)), 'the longer of the two, and their sum'
  peak = 459e12 * 64
  assert plan.mfu == pytest.approx([plan.model_flops / peak / s for s in (2.0, 2.5)])


def test_hours_are_those_of_all_steps():
  plan = _compiled(train__steps=3600)
  assert plan.hours == pytest.approx((2.0, 2.5))
  assert plan.to_json()['chip_hours'] == pytest.approx([128, 160])


def test_a_run_in_examples_has_steps_and_one_in_epochs_has_none():
  assert _compiled(train__steps=1000, train__examples=100).steps == 13, '100 rows in batches of 8'
  plan = _compiled(train__steps=1000, train__epochs=2.0)
  assert plan.steps is None
  assert 'its length is in epochs' in table.render(plan)


def test_a_run_in_stages_has_the_memory_of_its_largest_and_the_cost_of_all():
  on = topology.parse('gpu-h100:4')
  points = {'data__sequence_length_by_step': '0:8 12:32', 'data__batch_size_by_step': '0:32 15:64'}
  found = stages.plan_stages(_config(**points, train__steps=20), on)
  counts = [(12, 32, 8), (3, 32, 32), (5, 64, 32)]
  alone = [
    _plan(data__batch_size=rows, data__sequence_length=length, train__steps=steps)
    for steps, rows, length in counts
  ]
  assert [planned.memory for _, planned in found.stages] == [one.memory for one in alone]
  assert found.model_flops == sum(one.steps * one.model_flops for one in alone)
  bounds = zip(*(one.hours for one in alone), strict=True)
  assert found.hours == pytest.approx([sum(hours) for hours in bounds])
  assert found.largest[0].first == 15
  lines = stages.render(found).splitlines()
  assert [line.split()[:4] for line in lines[1:4]] == [
    [str(first), str(rows), '×', str(length)]
    for first, (_, rows, length) in zip((0, 12, 15), counts, strict=True)
  ]
  assert lines[4].startswith('the run') and 'after step 15:' in lines[6]
  assert json.loads(json.dumps(found.to_json()))['by_step']['12']['steps'] == 3
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


def test_memory_that_is_full_of_gaps_is_told():
  plan = _compiled()
  assert 'it may not fit' not in table.render(plan)
  full = dataclasses.replace(plan.memory, allocated=100 * 2**30)
  assert 'it may not fit' in table.render(dataclasses.replace(plan, memory=full))


def test_masks_of_documents_take_memory_on_gpus_and_a_plan_says_what_it_counts():
  plain, masked = _plan(), _plan(data__documents='masked')
  assert 'data.documents=masked' in table.render(masked)
  assert 'data.documents' not in table.render(plain)
  assert masked.model_flops == plain.model_flops, 'masked pairs of positions are left out'
  added = masked.memory.temporaries - plain.memory.temporaries
  assert added == 2 * 2 * 32**2, 'the mask is not that of 2 rows on each of 4 devices in bfloat16'


def test_gpus_are_by_formula_and_it_says_so():
  plan = _plan(train__remat='score_inputs')
  assert 'by formula: nothing is compiled' in table.render(plan)
  passes = plan.compute_seconds * 4 * 989e12 / plan.model_flops * 3
  assert passes == pytest.approx(3.5), 'scores are computed again, half of a forward pass'
  kept = _plan(train__remat='everything')
  assert kept.costs.flops * 4 == pytest.approx(kept.model_flops), 'nothing is computed again'
  full = _plan(train__remat='full')
  assert full.costs.flops == pytest.approx(plan.costs.flops * 4 / 3.5), 'one more forward pass'
  dense = _plan(**tiny_run.DENSE)
  assert dense.costs.flops * 4 == pytest.approx(dense.model_flops), 'nothing is computed again'


def test_the_memory_of_saved_values_follows_the_formula():
  for name, projections in (('pattention', {}), ('dense', tiny_run.DENSE)):
    projections = {**projections, 'train__layers': 'scan'}
    ways = [
      _plan(**projections, train__remat=remat).memory.temporaries
      for remat in ('offload', 'full', 'dots', 'score_inputs', 'everything')
    ]
    if name == 'dense':
      assert ways.pop() == ways[-1], 'there are no scores to keep'
    assert ways == sorted(set(ways)), name
  gaps = _plan(train__remat='everything', train__layers='unrolled').memory.temporaries
  assert gaps > _plan(train__remat='everything', train__layers='scan').memory.temporaries


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


def test_a_quick_plan_says_each_program_as_it_is_laid_out(monkeypatch, capsys, tmp_path):
  def compile_step(step, mesh, tell, meanwhile):
    if step.config.train.remat == 'everything':
      raise DoesNotFitError.from_bytes(20 * 2**30, 16 * 2**30)
    assert not tell('HloModule', 2**30, 0), 'the compiler goes on'

  tried = [RematPlan('everything', 'unrolled'), RematPlan('full', 'scan')]
  monkeypatch.setattr(remat_plans, 'affordable', lambda *_: iter(tried))
  monkeypatch.setattr(
    sharding,
    'make_mesh',
    lambda config, _: Mesh(
      np.array(jax.devices()[:1]).reshape([1] * 5), [*dataclasses.asdict(config)]
    ),
  )
  monkeypatch.setattr(topology, 'devices', lambda _: [])
  monkeypatch.setattr(sharding, 'check_devices', lambda *_: None)
  monkeypatch.setattr(estimate.costs, 'read', lambda *_, **__: _compiled().costs)
  monkeypatch.setattr(estimate.program, 'compile_step', compile_step)
  monkeypatch.setattr(tempfile, 'tempdir', tempfile.tempdir)
  estimate._plan(_config(), topology.parse('v5e:2x4'), None, True, str(tmp_path))
  first, second, laid_out = capsys.readouterr().err.splitlines()
  assert first == f'trying {tried[0].flags}'
  assert second.endswith(f'; trying {tried[1].flags}')
  assert 's: it fits, in 1.00 of 16 GiB' in laid_out


def test_a_clock_that_is_a_guess_is_told():
  on = topology.parse('tpu7x:2x2x1')
  compiled = dataclasses.replace(_compiled(), topology=on)
  assert f'note: {on.chip.caveat}' in table.render(compiled)
  assert on.chip.caveat in compiled.summary


def test_the_table_says_which_times_are_by_the_schedule():
  compiled = _compiled()
  rendered = table.render(compiled)
  assert "by the compiler's cycles" in rendered
  assert 'the same by its schedule, as a check' in rendered
  on_v6e = table.render(dataclasses.replace(compiled, topology=topology.parse('v6e:4x4')))
  assert "by the compiler's schedule" in on_v6e
  assert 'the same by its cycles, which are wrong here' in on_v6e


def test_a_breakdown_has_the_step_and_its_operations():
  rendered = breakdown.render(_compiled())
  assert re.search(r'a step in its order +2,250.00 +MFU', rendered)
  assert re.search(r'step +1 +2,000.00 +2,000,000 ', rendered), 'the operation is listed'


@pytest.mark.slow
def test_a_breakdown_is_drawn(tmp_path):
  pytest.importorskip('matplotlib')
  figure = breakdown_figure.draw(_compiled())
  figure.savefig(tmp_path / 'step.png')
  axes = figure.axes[0]
  legend, ends = figure.legends[0].get_window_extent(), axes.get_window_extent()
  assert legend.y0 > ends.y1 or legend.y1 < ends.y0, 'the legend covers bars'


def test_inputs_of_layers_wait_on_the_host():
  full, offload = (_plan(train__remat=remat) for remat in ('full', 'offload'))
  assert full.memory.host == 0
  assert full.memory.temporaries - offload.memory.temporaries == offload.memory.host > 0
  assert offload.costs.flops == full.costs.flops
  assert "GiB of activations are kept in the memory of each device's host" in table.render(offload)


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
  assert 'GiB of HBM a device and may use 74.51 on gpu-h100:4' in text
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
    ('v5p', "has the shape ''; give a shape as in v5p:4x4x4"),
    ('V5P:4x4x4', "'V5P' is not a known chip; did you mean 'v5p'?"),
    ('v6e-256', "'v6e-256' is not a known chip; did you mean 'v6e'?"),
    ('gpu-4090:8', "'gpu-4090' is not a known chip; known names: gpu-a100, gpu-h100, gpu-h200"),
    ('gpu-h10:8', "'gpu-h10' is not a known chip; did you mean 'gpu-h100'?"),
    ('gpu-h100:00', "has the shape '00'; give a shape as in gpu-h100:8"),
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


def test_every_chip_has_a_published_peak():
  assert all(chip.kind in flops.PEAK_TFLOPS for chip in chips.CHIPS.values())


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
  found = chain.plan_chain(_config(train__steps=100), ['qkv=256,proj=256,ffn=512,steps=50'], on)
  assert [one.steps for one in found.stages] == [100, 50]
  assert found.scratch.steps == 150, 'as many tokens as the chain'
  assert found.stages[0].model_flops < found.stages[1].model_flops
  text = chain.render(found)
  spent, whole = (sum(one.hours[1] for one in part) for part in (found.stages, [found.scratch]))
  assert f'{spent / whole:.1%}' in text.splitlines()[-1]


def test_a_sweep_starts_with_the_config_and_ends_with_the_fastest():
  on = topology.parse('gpu-h100:4')
  config = _config(train__remat='full')
  first = next(tune.candidates(config, on))
  assert (first.train.remat, first.data.batch_size, first.mesh.fsdp) == ('full', 8, 4)
  tried = tune.search(config, on, 6)
  assert len(tried) == 6
  speeds = [one.plan.units[1] / sum(one.plan.step_seconds) for one in tried if one.plan]
  assert speeds == sorted(speeds, reverse=True)
  assert tried[0].config.train.remat != 'full', 'recomputing costs time, and everything fits'


def test_a_search_tries_what_needs_less_than_a_step_that_does_not_fit():
  on, config = topology.parse('gpu-h100:1'), _config(train__remat='full', train__layers='unrolled')
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=2**24))
  with pytest.raises(UserError) as raised:
    tune.search(config, on, 9, batches=(1,))
  tried = re.findall(r'remat=(\w+) layers=(\w+)', str(raised.value))
  assert tried == [('full', 'unrolled'), ('full', 'auto'), ('offload', 'auto')]


def test_by_default_a_plan_has_the_fastest_way_that_fits():
  few, many = (_plan(data__batch_size=rows) for rows in (2**12, 2**21))
  assert few.config.train.remat == 'everything', 'what fits is computed again'
  assert many.config.train.remat != 'everything' and many.memory.left >= 0


def test_tuning_keeps_the_batch_and_says_the_flags_and_the_gain():
  on, config = topology.parse('gpu-h100:1'), _config(train__remat='full')
  assert {one.data.batch_size for one in tune.candidates(config, on, (1,))} == {8}
  tried = tune.search(config, on, 4, batches=(1,))
  assert '--config.train.remat=everything: 1.33 times' in tune.advice(tried)
  alone = tune.search(_config(), on, 1)
  assert tune.advice(alone) == 'no candidate is faster than the config as it is'


def test_a_sweep_in_which_nothing_fits():
  with pytest.raises(UserError, match='no candidate fits on gpu-h100:4'):
    tune.search(_config(data__batch_size=2**24), topology.parse('gpu-h100:4'), 3)


def test_data_is_not_read_if_every_size_is_there():
  tokenizer = {'data__tokenizer': '/nothing/tokenizer.json', 'model__vocab_size': 512}
  assert _plan(**tokenizer).config.model.vocab_size == 512
  with pytest.raises(UserError, match=r'/nothing/tokenizer\.json'):
    _plan(data__tokenizer='/nothing/tokenizer.json')


def test_without_a_size_of_text_one_sentence_says_which():
  with pytest.raises(UserError, match=r'give --config\.model\.vocab_size=N') as raised:
    _plan(data__tokenizer='/nothing/tokenizer.json')
  assert '\n' not in str(raised.value)


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
  found = estimate.plan(
    tiny_run.vit_config(model__classes=7, **sizes), topology.parse('gpu-h100:4')
  )
  assert (found.config.model.classes, found.config.model.channels) == (7, 3)
  with pytest.raises(UserError, match=r'/nothing.*give --config\.model\.classes=N'):
    estimate.plan(tiny_run.vit_config(**sizes), topology.parse('gpu-h100:4'))


def test_images_need_no_data_either():
  sizes = {'model__classes': 1000, 'model__channels': 3, 'data__source': 'tfds:nothing'}
  found = estimate.plan(tiny_run.vit_config(**sizes), topology.parse('gpu-h100:4'))
  assert found.units == ('images', 16)
  assert found.memory.batch == 4 * (8 * 8 * 3 + 4), 'four images of bytes, and their labels'
