"""Plans of rows whose slots are split over devices: what is exchanged, and no array of T × T."""

import re

import jax
import pytest
import tiny_run

from tokenformer_jax.parallel import sharding
from tokenformer_jax.plan import estimate, program, topology
from tokenformer_jax.steps import step as step_lib

LENGTH, LAYERS = 4096, 2
SPLIT = {'mesh__fsdp': 2, 'mesh__sequence': 2}
SMALL = {
  'model__pattern': f'layer*{LAYERS}',
  'model__width': 256,
  'model__vocab_size': 512,
  'model__layer__mixer__heads': 4,
  'model__layer__mixer__positions__fraction': 1.0,
  'model__layer__mixer__qkv__tokens': 256,
  'model__layer__mixer__proj__tokens': 256,
  'model__layer__ffn__tokens': 512,
  'data__sequence_length': LENGTH,
  'data__batch_size': 4,
  'data__tokenizer': 'nothing/tokenizer.json',
  'train__remat': 'full',
}
WINDOW = {
  'model__pattern': 'layer local',
  'model__variants__local': {'mixer': {'window': 300}},
}
ROWS = 2 * LENGTH // 2  # slots of a device


def _config(**changes):
  return tiny_run.config('files:/nothing/*.txt', '/nothing', **{**SMALL, **changes})


def _exchanged(plan):
  """Return the number and the bytes of the collectives along `sequence`, by kind."""
  rows = [row for row in plan.costs.traffic if row.axis == 'sequence']
  return {row.kind: (row.count, row.gigabytes * 1e9) for row in rows}


def _lowered(**changes):
  """Return the step for TPUs as it is before the compiler."""
  step = program.make_step(_config(**SPLIT, **changes))
  mesh = sharding.make_mesh(step.config.mesh, topology.devices(topology.parse('v5p:2x2x1')))
  sharding.check_devices(step.config, mesh)
  function = step_lib.make_train_step(step, mesh)
  arguments = step.abstract_state(mesh), step.abstract_batch(mesh)
  with jax.set_mesh(mesh):  # Only lower inside: the mesh's devices cannot run anything.
    return function.lower(*arguments).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
  'changes',
  [
    WINDOW,
    {**WINDOW, 'data__documents': 'separate'},
    {'model__layer__mixer__shaped': True, 'data__documents': 'masked'},
  ],
  ids=['window', 'documents', 'shaped'],
)
def test_no_array_has_the_length_twice(changes):
  pytest.importorskip('libtpu', reason='pip install -e ".[tpu]" brings the compiler')
  text = _lowered(**changes)
  assert 'splash' in text, 'attention is not by the kernel'
  longest = LENGTH // 2  # also of a device's part
  shapes = {
    tuple(map(int, sizes.split('x')[:-1])) for sizes in re.findall(r'tensor<([\dx]+)', text)
  }
  large = [shape for shape in shapes if sum(size >= longest for size in shape) > 1]
  assert not large, f'arrays of T × T: {large}'


@pytest.mark.slow
def test_the_compiler_exchanges_slots_for_heads_and_nothing_else():
  pytest.importorskip('libtpu', reason='pip install -e ".[tpu]" brings the compiler')
  on = topology.parse('v5p:2x2x1')
  exchanged = _exchanged(estimate.plan(_config(**SPLIT), on, quick=True))
  count, moved = exchanged['all-to-all']
  assert count == 3 * 4 * LAYERS
  assert moved == pytest.approx(3 * 4 * LAYERS * ROWS * 256 * 2 / 2, rel=0.01)
  # The gradients of weights are scattered along one axis of the mesh after the other.
  assert 'all-gather' not in exchanged, f'devices gather slots: {exchanged}'
  assert sum(moved for _, moved in exchanged.values()) < 1.1 * moved, f'and more: {exchanged}'
