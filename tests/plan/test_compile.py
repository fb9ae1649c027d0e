"""Compile the real training step for real topologies with the TPU's compiler. Needs libtpu."""

import collections
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import tiny_run

from tokenformer_jax.config import MeshConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import splash
from tokenformer_jax.parallel import rules, sharding
from tokenformer_jax.plan import costs, estimate, program, topology
from tokenformer_jax.plan.chips import CHIPS
from tokenformer_jax.steps import step as step_lib

pytest.importorskip('libtpu', reason='pip install -e ".[tpu]" brings the compiler')
pytestmark = pytest.mark.slow

SMALL = {
  'model.pattern': 'layer*2',
  'model.width': 256,
  'model.layer.mixer.heads': 4,
  # At 0.25 of heads 64 wide, libtpu 0.0.42.1 aborts on the rotation for TPU7x: docs/plan.md.
  'model.layer.mixer.positions.fraction': 1.0,
  'model.vocab_size': 512,
  'model.layer.mixer.qkv.tokens': 256,
  'model.layer.mixer.proj.tokens': 256,
  'model.layer.ffn.tokens': 512,
  'data.sequence_length': 128,
  'data.batch_size': 256,
  'data.tokenizer': 'nothing/tokenizer.json',
  'train.remat': 'full',
}
DENSE = {f'model__layer__mixer__{name}': {'kind': 'dense'} for name in ('qkv', 'proj')}


def _config(**changes):
  everything = {name.replace('.', '__'): value for name, value in SMALL.items()} | changes
  return tiny_run.config('files:/nothing/*.txt', '/nothing', **everything)


def _plan(name, slices=1, quick=False, **changes):
  on = topology.parse(name, slices)
  return estimate.plan(_config(**changes), on, quick=quick)


def _moved(plan, axis):
  """Return the bytes that a device receives along an axis, by the kind of collective."""
  moved = collections.Counter()
  for row in plan.costs.traffic:
    if row.axis == axis:
      moved[row.kind] += row.gigabytes * 1e9
  return moved


@pytest.mark.full_size
@pytest.mark.parametrize('name', ['v4:2x2x1', 'v5p:4x4x4', 'v5e:4x4', 'v6e:4x4', 'tpu7x:2x2x1'])
def test_the_step_compiles(name):
  plan = _plan(name)
  assert plan.costs.cycles > 0 and plan.costs.scheduled_seconds
  assert not plan.costs.notes, 'there is something in the program that is not understood'


def test_gradients_are_scattered_over_64_chips():
  plan = _plan('v5p:4x4x4', quick=True)
  assert plan.mesh['fsdp'] == plan.topology.devices
  assert not plan.costs.notes, 'there is something in the program that is not understood'
  assert plan.memory.temporaries > 0
  assert 1 < plan.costs.flops * plan.topology.devices / plan.model_flops < 1.5, (
    'full recomputation adds at most one of three forward passes, and attention that is masked'
  )
  moved = _moved(plan, 'fsdp')
  assert moved['all-gather'], 'weights are split, and never put together'
  # On 64 chips the parts are 4 wide, and the second step of some gradients may be an all-reduce.
  assert moved['all-reduce'] < 0.3 * moved['reduce-scatter'], 'gradients are summed whole'


def test_tokens_are_split_and_replicas_in_two_slices_speak_over_dcn():
  plan = _plan('v5e:4x4', 2, mesh__replica=2, mesh__tokens=4, model__width=1024, quick=True)
  assert [plan.mesh[axis] for axis in ('replica', 'fsdp', 'tokens')] == [2, 4, 4]
  moved = _moved(plan, 'tokens')
  assert moved['all-reduce'], 'the norms of rows are not summed'
  assert moved['reduce-scatter'], 'outputs are whole on each device before they are heads'
  between = [row for row in plan.costs.traffic if row.network == 'DCN']
  assert {row.axis for row in between} == {'replica'}
  crossing = sum(row.gigabytes for row in between) * 1e9 / plan.memory.parameters
  assert 0.5 <= crossing <= 1.1, 'each device exchanges its part of the gradients, some in bfloat16'


def test_slices_do_not_share_a_replica():
  devices = topology.devices(topology.parse('v5e:4x4', 2))
  with pytest.raises(
    UserError, match=r'config\.mesh\.replica is 1, and the devices are in 2 slice'
  ):
    sharding.make_mesh(MeshConfig(), devices)


@pytest.mark.full_size
def test_inputs_of_layers_wait_on_the_host():
  # Enough of them that what the copies need is less than what they save.
  sizes = {'model__pattern': 'layer*8', 'data__batch_size': 64, 'data__sequence_length': 1024}
  full, offload = (
    _plan('v5e:2x2', **sizes, train__remat=remat, quick=True).memory
    for remat in ('full', 'offload')
  )
  assert full.host == 0
  assert offload.host == 8 * (64 / 4) * 1024 * 256 * 2, 'not [L, B, T, D] in bfloat16'
  assert offload.temporaries < full.temporaries, 'nothing of HBM is saved'


def test_every_kernel_costs_what_its_own_window_does():
  windows, shape = (256, 0), (4, 2048, 2, 128)
  mesh = sharding.make_mesh(MeshConfig(), topology.devices(topology.parse('v5e:2x2')))
  place = jax.NamedSharding(mesh, rules.spec(('batch', None, 'heads', None)))
  x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)

  def objective(x):
    for window in windows:
      x = splash.attention(x, x, x, causal=True, window=window)
    return jnp.sum(x.astype(jnp.float32))

  with jax.set_mesh(mesh):
    lowered = jax.jit(jax.grad(objective)).lower(x)
  read = costs.read(lowered.compile().as_text(), mesh, CHIPS['v5e'])
  assert not read.notes, 'a kernel has lost its window'

  def flops(window: int) -> int:
    block = splash.block_size(shape[1], window)
    scores = shape[0] // 4 * shape[2] * splash.computed_blocks(shape[1], window, block) * block**2
    # Forward, and for the gradients of keys and values and for the query's gradient, apart or not.
    products = 2 + 5 if block == 1024 else 2 + 4 + 3
    return products * 2 * scores * shape[3]

  assert read.flops == sum(map(flops, windows))


def test_a_mixture_exchanges_its_tokens_and_never_its_experts():
  experts = {
    'kind': 'experts',
    'count': 8,
    'expert': {'kind': 'mlp', 'width': 128},
    'router': {'top_k': 2},
    'dispatch': {'kind': 'grouped', 'device_factor': 1.25},
  }
  sizes = {'model__layer__ffn': experts, 'model__pattern': 'layer', 'mesh__experts': 2}
  plan = _plan('v5p:2x2x1', quick=True, **sizes, **DENSE)
  slots = 1.25 * (256 // 4) * 128 * 2 / 2  # those of the other device
  wanted = slots * (6 * 256 * 2 + 2 * 4)  # rows there and back in three passes, numbers in two
  assert _moved(plan, 'experts')['all-to-all'] == pytest.approx(wanted, rel=1e-6)
  own = 4 * 2 * 256 * 128 * 2  # of the 4 experts of a device, in bfloat16
  gathered = _moved(plan, 'fsdp')['all-gather']
  assert gathered == pytest.approx(2 * own / 2, rel=1e-6), 'other experts are gathered'


LONG = {
  'data__sequence_length': 4096,
  'data__batch_size': 4,
  'mesh__fsdp': 2,
  'mesh__sequence': 2,
}
WINDOW = {
  'model__pattern': 'layer local',
  'model__variants__local': {'mixer': {'window': 300}},
}


@pytest.mark.parametrize(
  'changes',
  [
    WINDOW,
    {**WINDOW, 'data__documents': 'separate'},
    {'model__layer__mixer__shaped': True, 'data__documents': 'masked'},
  ],
  ids=['window', 'documents', 'shaped'],
)
def test_no_array_of_a_split_row_has_the_length_twice(changes):
  step = program.make_step(_config(**LONG, **changes))
  mesh = sharding.make_mesh(step.config.mesh, topology.devices(topology.parse('v5p:2x2x1')))
  function = step_lib.make_train_step(step, mesh)
  arguments = step.abstract_state(mesh), step.abstract_batch(mesh)
  with jax.set_mesh(mesh):  # Only lower inside: the mesh's devices cannot run anything.
    text = function.lower(*arguments).as_text()
  assert 'splash' in text, 'attention is not by the kernel'
  longest = 4096 // 2  # also of a device's part
  shapes = {
    tuple(map(int, sizes.split('x')[:-1])) for sizes in re.findall(r'tensor<([\dx]+)', text)
  }
  large = [shape for shape in shapes if sum(size >= longest for size in shape) > 1]
  assert not large, f'arrays of T × T: {large}'


def test_devices_of_a_split_row_exchange_slots_for_heads_and_nothing_else():
  plan = _plan('v5p:2x2x1', quick=True, **LONG, **DENSE, model__layer__ffn={'kind': 'mlp'})
  rows = [row for row in plan.costs.traffic if row.axis == 'sequence']
  exchanged = {row.kind: (row.count, row.gigabytes * 1e9) for row in rows}
  count, moved = exchanged['all-to-all']
  assert count == 3 * 4 * 2
  assert moved == pytest.approx(3 * 4 * 2 * 4096 * 256 * 2 / 2, rel=0.01)
  # The gradients of weights are scattered along one axis of the mesh after the other.
  assert 'all-gather' not in exchanged, f'devices gather slots: {exchanged}'
  assert sum(moved for _, moved in exchanged.values()) < 1.1 * moved, f'and more: {exchanged}'


def test_a_topology_that_libtpu_does_not_have_is_refused():
  with pytest.raises(UserError, match='libtpu cannot make topology='):
    topology.devices(topology.parse('v5e:7x9'))


MESHES = {
  'v6e:16x16': MeshConfig(replica=4, fsdp=64),
  'v5p:4x4x4': MeshConfig(fsdp=32, tokens=2),
  'tpu7x:4x4x4': MeshConfig(replica=2, fsdp=64),
}


@pytest.mark.parametrize('name', MESHES)
def test_axes_of_a_mesh_need_not_be_sides_of_the_torus(name):
  mesh = sharding.make_mesh(MESHES[name], topology.devices(topology.parse(name)))
  assert list(mesh.shape.values()) == [*dataclasses.astuple(MESHES[name])]
  assert len(set(mesh.devices.flat)) == mesh.size, 'a device is there twice'


def _run(*command):
  """Run a program in an environment without variables about devices; return its result."""
  environment = {k: v for k, v in os.environ.items() if k not in ('JAX_PLATFORMS', 'XLA_FLAGS')}
  return subprocess.run(
    [sys.executable, *map(str, command)],
    cwd=tiny_run.ROOT, env=environment, capture_output=True, text=True, check=False,
  )  # fmt: skip


def _flags(**changes):
  """Return the command for a model of few operations, whose code is generated soon."""
  sizes = {
    'model.pattern': 'layer',
    'model.width': 256,
    'model.layer.mixer.heads': 4,
    'model.layer.mixer.positions.kind': 'none',
    'model.layer.mixer.qkv.kind': 'dense',
    'model.layer.mixer.proj.kind': 'dense',
    'model.layer.ffn.kind': 'none',
    'model.vocab_size': 512,
    'data.sequence_length': 128,
    'data.batch_size': 16,
    'data.tokenizer': 'bytes',
    'train.remat': 'everything',
  }
  sizes |= {name.replace('__', '.'): value for name, value in changes.items()}
  return [
    *('-m', 'tokenformer_jax', 'plan', '--config=lm_pile:150m', '--topology=v5e:2x2'),
    *(f'--config.{name}={value}' for name, value in sizes.items()),
  ]


def test_the_command_prints_the_layout_first_and_then_the_schedule(tmp_path):
  file = tmp_path / 'plan.json'
  done = _run(*_flags(), f'--json={file}')
  assert done.returncode == 0, done.stderr
  first, program, laid_out = done.stderr.splitlines()  # No message of libtpu is among them.
  assert first.startswith('compiling for v5e:2x2')
  assert program.startswith('trying --config.train.remat=')
  assert 's: it fits, in ' in laid_out and 'schedule' in laid_out
  figures = json.loads(file.read_text())
  assert figures['has_cycles'] and figures['scheduled_seconds'] > 0
  assert figures['cycles'] > 0 and figures['memory']['left'] > 0
  assert figures['notes'] == []
  done = _run(*_flags(), f'--json={file}')
  assert 'its schedule is known from earlier plans' in done.stderr
  again = json.loads(file.read_text())
  assert again | {'compile_seconds': 0} == figures | {'compile_seconds': 0}


def test_a_plan_that_is_ended_leaves_no_file(tmp_path):
  command = [sys.executable, *_flags()]
  environment = {**os.environ, 'TMPDIR': str(tmp_path)}
  with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
    said = iter(process.stderr.readline, '')
    assert any('trying' in line for line in said), 'the compiler has not begun'
    assert any(tmp_path.iterdir())
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
  assert not any(tmp_path.iterdir())


@pytest.mark.full_size
@pytest.mark.parametrize(
  ('config', 'on', 'batch'),
  [
    ('lm_pile:1_5b', 'v5p:4x4x4', 1024),  # 16 sequences of 2,048 tokens a chip
    ('lm_openwebtext:1_4b', 'v5e:4x4', 512),  # 32 sequences of 1,024 tokens a chip
    ('vit_imagenet:l16', 'v5p:4x4x4', 4096),
  ],
)
def test_the_step_fits_at_full_size(config, on, batch, tmp_path):
  file = tmp_path / 'plan.json'
  flags = (f'--config={config}', f'--topology={on}', f'--config.data.batch_size={batch}')
  done = _run('-m', 'tokenformer_jax', 'plan', *flags, '--quick', f'--json={file}')
  assert done.returncode == 0, f'it does not compile, or not fit:\n{done.stderr}'
  assert json.loads(file.read_text())['memory']['left'] > 0


def test_other_commands_say_nothing_of_a_tpu_that_is_not_there():
  """Run training with a mesh that does not fit, which fails after JAX has looked for devices."""
  done = _run(tiny_run.ROOT / 'train.py', '--config.mesh.fsdp=1000003')
  assert done.returncode == 2, done.stderr
  assert done.stderr.startswith('error: config.mesh has replica=1, fsdp=1000003'), done.stderr
  assert done.stderr.count('\n') == 1, f'libtpu speaks to the user:\n{done.stderr}'


def test_the_command_says_what_does_not_fit():
  done = _run(*_flags(data__batch_size=2**22))
  assert done.returncode == 2, done.stderr
  last = done.stderr.splitlines()[-1]
  assert last.startswith('error: the step needs ')
  assert 'GiB of HBM a device and may use 15.75 on v5e:2x2; what may make it fit: ' in last
