"""Test how the schedule of operations is read, with excerpts of files that libtpu wrote."""

import dataclasses
import json
import os
import time

import pytest

from tokenformer_jax.plan import costs, hlo, kept_schedules, schedule
from tokenformer_jax.plan.chips import CHIPS
from tokenformer_jax.plan.schedule import Bundles

V6E, V5P = CHIPS['v6e'], CHIPS['v5p']

# The first and the last lines of a file for v6e, with the compiler's spelling.
HEAD = """== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    2     2     4     2     1     3     3     2     2     2
== UTILIZATION:
"""
LINES = '2 0 3 1 0 2 0 0 0 0\n2 0 1 1 0 1 0 1 1 0\n0 0 0 0 0 1 0 0 0 0\n'

# A product 32768 × 1536 × 6144 as libtpu 0.0.42.1 compiles it for v6e. Its dump has 12,729 bundles
# for each of 2 · 48 steps, and 24,554 slots of the matrix units.
PRODUCT = """HloModule jit_product, is_scheduled=true

%inside (x: bf16[32768,1536], w: bf16[1536,6144]) -> bf16[32768,6144] {
  %x = bf16[32768,1536]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[1536,6144]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %convolution.1 = bf16[32768,6144]{1,0:T(8,128)(2,1)} convolution(%x, %w), \
dim_labels=bf_io->bf, metadata={op_name="jit(f)/dot_general"}
}

ENTRY %main (x: bf16[32768,1536], w: bf16[1536,6144]) -> bf16[32768,6144] {
  %x.1 = bf16[32768,1536]{1,0:T(8,128)(2,1)} parameter(0)
  %w.1 = bf16[1536,6144]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %fusion = bf16[32768,6144]{1,0:T(8,128)(2,1)} fusion(%x.1, %w.1), kind=kOutput, \
calls=%inside, metadata={op_name="jit(f)/dot_general"}, backend_config={"window_config":\
{"estimated_cycles":"1847584","iteration_bounds":["2","48","1"]}}
}
"""
BUNDLES = Bundles(12729, 12277.0, 4000.0)


def read(chip, bundles, text=PRODUCT):
  step = costs.read(text, None, chip, {'fusion': bundles})
  (operation,) = step.operations
  return step, operation


def test_the_bundles_of_a_file_are_counted():
  assert schedule.parse(HEAD + LINES) == Bundles(3, 4 / 2, 4 / 4)
  assert schedule.parse(HEAD) is None


@pytest.fixture
def kept(monkeypatch, tmp_path):
  """Makes the kept schedules of a chip, in a cache that is empty at first."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setattr(kept_schedules.metadata, 'version', lambda name: '0.0.1')
  return lambda chip='v6e', **options: kept_schedules.Schedules(chip, options)


LAID_OUT = PRODUCT[: PRODUCT.index(', backend_config=')] + '\n}\n'


def test_a_program_of_known_operations_has_the_costs_of_one_that_is_generated(kept):
  laid_out, memory = hlo.parse(LAID_OUT), {'peak': 3.0, 'code': 1.0}
  assert kept().restore(laid_out) is None
  kept().keep(LAID_OUT, laid_out, hlo.parse(PRODUCT), {'fusion': BUNDLES}, memory)
  program, bundles = kept().restore(laid_out)
  assert costs.read(program, None, V6E, bundles) == read(V6E, BUNDLES)[0]
  assert kept().memory(LAID_OUT) == memory and kept().memory(PRODUCT) is None
  assert kept().memory(LAID_OUT.replace('jit(f)/', 'jit(g)/')) == memory, (
    'another line of the source'
  )
  wider = hlo.parse(LAID_OUT.replace('6144', '6400'))
  assert kept().restore(wider) is None, 'another operation counts as known'
  assert kept('v5e').restore(laid_out) is kept(vmem='1').restore(laid_out) is None
  elsewhere = hlo.parse(LAID_OUT.replace('%fusion', '%fusion.9'))
  assert set(kept().restore(elsewhere)[1]) == {'fusion.9'}, 'it is known by its name'


@pytest.mark.parametrize(
  'damage',
  [
    lambda text: '',
    lambda text: text[: len(text) // 2],
    lambda text: '[1]',
    lambda text: json.dumps({key: 1 for key in json.loads(text)}),
    lambda text: json.dumps({key: ['', [1]] for key in json.loads(text)}),
    lambda text: json.dumps({key: {'height': 1.0} for key in json.loads(text)}),
  ],
  ids=['empty', 'half', 'list', 'numbers', 'no_bundles', 'other_memory'],
)
def test_a_broken_cache_is_an_empty_one(kept, tmp_path, damage):
  laid_out, generated, memory = hlo.parse(LAID_OUT), hlo.parse(PRODUCT), {'peak': 3.0}
  kept().keep(LAID_OUT, laid_out, generated, {'fusion': BUNDLES}, memory)
  (file,) = tmp_path.rglob('*.json')
  whole = file.read_text()
  file.write_text(damage(whole))
  assert kept().restore(laid_out) is kept().memory(LAID_OUT) is None
  kept().keep(LAID_OUT, laid_out, generated, {'fusion': BUNDLES}, memory)
  assert file.read_text() == whole and not list(tmp_path.rglob('*.[0-9]*[0-9]'))


def test_a_cache_that_cannot_be_written_breaks_no_plan(kept, tmp_path):
  (tmp_path / 'tokenformer_jax').write_text('a file in place of the folder')
  laid_out = hlo.parse(LAID_OUT)
  kept().keep(LAID_OUT, laid_out, hlo.parse(PRODUCT), {'fusion': BUNDLES}, {})
  assert kept().restore(laid_out) is None


def test_the_oldest_operations_leave_a_full_cache(kept, monkeypatch):
  monkeypatch.setattr(kept_schedules, '_MOST', 4)  # two programs and the operation of each

  def keep(width):
    programs = (text.replace('6144', width) for text in (LAID_OUT, PRODUCT))
    laid_out, generated = map(hlo.parse, programs)
    kept().keep(LAID_OUT.replace('6144', width), laid_out, generated, {'fusion': BUNDLES}, {})
    return laid_out

  first, second = keep('6144'), keep('6400')
  keep('6144')
  third = keep('6656')
  assert kept().restore(first) and kept().restore(third) and kept().restore(second) is None


def test_files_are_read_when_they_are_complete_and_deleted(tmp_path):
  first, second = (
    tmp_path / f'{number}-fusion.7-00-final_hlo-static-per-bundle-utilization.txt'
    for number in (17, 18)
  )
  first.write_text(HEAD + LINES)
  (tmp_path / '17-TLP-hlo.txt').write_text('HloModule')
  reader = schedule.Reader(str(tmp_path))
  reader.read()
  assert len(list(tmp_path.iterdir())) == 2, 'the compiler may still write to these files'
  os.utime(first, (time.time() - 60,) * 2)
  reader.read()
  assert reader.bundles['fusion.7'].count == 3
  second.write_text(HEAD + LINES + LINES)
  reader.read(complete=True)
  assert reader.bundles['fusion.7'].count == 6, 'the last schedule of an operation is the one'
  assert not list(tmp_path.iterdir())


def test_a_product_takes_the_cycles_of_its_bundles_where_the_estimate_is_wrong():
  step, operation = read(V6E, BUNDLES)
  assert operation.seconds == pytest.approx(12729 * 96 / V6E.clock)
  assert 1.0 < operation.seconds / operation.matrix < 1.05, '1.03 by the schedule, 1.57 by cycles'
  assert operation.vector == pytest.approx(4000 * 96 / V6E.clock)
  assert step.compute_seconds == step.scheduled_seconds == operation.seconds
  assert operation.rough == pytest.approx(operation.matrix), 'no vector work is beside it'
  assert step.cycles == 1847584, 'the estimate is there for comparison'


def test_where_the_estimate_holds_the_schedule_is_a_check():
  bundles = Bundles(14201, 13960.0, 4000.0)  # of the same product on v5p, in 256 steps
  step, operation = read(V5P, bundles, PRODUCT.replace('["2","48","1"]', '["2","128","1"]'))
  assert operation.seconds == pytest.approx(1847584 / V5P.clock)
  assert operation.scheduled == operation.matrix, 'bundles do not wait for the matrix units'
  assert step.scheduled_seconds == operation.scheduled


def test_memory_bounds_an_operation_whose_bundles_do_not_wait_for_it():
  text = PRODUCT.replace('S(1)', '').replace('1536', '16')
  _, operation = read(V6E, Bundles(100, 96.0, 0.0), text)
  moved = 2 * (32768 * 16 + 16 * 6144 + 32768 * 6144)
  assert operation.memory == pytest.approx(moved / V6E.hbm_rate)
  assert operation.seconds == operation.memory


def test_a_schedule_with_too_few_products_is_not_that_of_the_operation():
  _, operation = read(V6E, Bundles(12729, 100.0, 0.0))
  assert operation.scheduled is None
  assert operation.seconds == pytest.approx(1847584 / V6E.clock), 'the estimate remains'


def test_a_narrow_product_fills_whole_squares_of_a_matrix_unit():
  text = PRODUCT.replace('1536', '128').replace('6144', '128').replace('["2","48"', '["8","1"')
  need = 2 * 32768 * 128 * 128 / V6E.peak
  bundles = Bundles(2000, 4 * need * V6E.clock / 8, 1000.0)  # as of the swap of rotary positions
  _, operation = read(V6E, bundles, text)
  assert operation.matrix == pytest.approx(need)
  assert operation.scheduled is not None, 'a quarter of the cells of a unit has entries'
  _, operation = read(V6E, dataclasses.replace(bundles, matrix=3 * bundles.matrix), text)
  assert operation.scheduled is None, 'these bundles are those of another operation'


def test_an_operation_that_equals_another_has_its_schedule():
  text = PRODUCT.replace('ROOT %fusion = ', '%fusion = ')
  line = next(line for line in text.splitlines() if '%fusion = ' in line)
  text = text.replace(line, f'{line}\n  ROOT {line.strip().replace("%fusion", "%again", 1)}')
  text = text.replace('calls=%inside, metadata={op_name="jit(f)/dot_general"}', 'calls=%inside', 1)
  step = costs.read(text, None, V6E, {'fusion': BUNDLES})
  first, second = step.operations
  assert (first.name, second.name) == ('fusion', 'again')
  assert second.scheduled == first.scheduled is not None


SLICED = """HloModule jit_layers, is_scheduled=true

%one (all: f32[40,64,128], i: s32[], new: f32[1,64,128]) -> (f32[1,64,128], f32[40,64,128]) {
  %all = f32[40,64,128]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %new = f32[1,64,128]{2,1,0} parameter(2)
  %at = f32[1,64,128]{2,1,0} dynamic-slice(%all, %i, %i, %i), dynamic_slice_sizes={1,64,128}
  %put = f32[40,64,128]{2,1,0} dynamic-update-slice(%all, %new, %i, %i, %i)
  ROOT %both = (f32[1,64,128]{2,1,0}, f32[40,64,128]{2,1,0}) tuple(%at, %put)
}

ENTRY %main (all: f32[40,64,128], i: s32[], new: f32[1,64,128]) -> (f32[1,64,128], f32[40,64,128]) {
  %all.1 = f32[40,64,128]{2,1,0} parameter(0)
  %i.1 = s32[]{:S(4)} parameter(1)
  %new.1 = f32[1,64,128]{2,1,0:S(1)} parameter(2)
  ROOT %fusion = (f32[1,64,128]{2,1,0}, f32[40,64,128]{2,1,0}) fusion(%all.1, %i.1, %new.1), \
kind=kLoop, calls=%one
}
"""


def test_a_layer_of_a_stacked_array_counts_as_the_layer():
  _, operation = read(V6E, Bundles(10, 0.0, 0.0), SLICED)
  assert operation.memory * V6E.hbm_rate == pytest.approx(3 * 4 * 64 * 128), (
    'one layer is read, one is returned and one is updated; the new one is in VMEM'
  )


def test_a_layer_counts_as_the_layer_also_through_other_tiles():
  tiles = """%tiles (old: f32[40,64,128]) -> f32[40,64,128] {
  %old = f32[40,64,128]{2,1,0:T(16,128)} parameter(0)
  ROOT %copied = f32[40,64,128]{2,1,0:T(8,128)} copy(%old)
}

"""
  text = SLICED.replace('%one (', f'{tiles}%one (', 1)
  text = text.replace(
    '  %at =', '  %tiled = f32[40,64,128]{2,1,0} fusion(%all), kind=kLoop, calls=%tiles\n  %at ='
  )
  text = text.replace('slice(%all,', 'slice(%tiled,')
  bundles = Bundles(10, 0.0, 0.0)
  assert read(V6E, bundles, text)[1].memory == read(V6E, bundles, SLICED)[1].memory
