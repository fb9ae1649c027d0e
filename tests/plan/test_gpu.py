"""Compile for GPUs with their compiler, which needs none; skip the tests where it is absent."""

import importlib

import jax
import jax.numpy as jnp
import pytest
import tiny_run

from tokenformer_jax.errors import UserError
from tokenformer_jax.plan import breakdown, costs, estimate, gpu, table, topology
from tokenformer_jax.plan.chips import CHIPS
from tokenformer_jax.plan.gpu_times import Product
from tokenformer_jax.plan.hlo import parse
from tokenformer_jax.plan.memory_traffic import hbm_bytes
from tokenformer_jax.steps.fit import DoesNotFitError

needs_compiler = pytest.mark.skipif(
  not gpu.folder().is_dir(), reason=f'no compiler for GPUs in ${gpu.FOLDER}'
)
H200 = CHIPS['h200']


def test_without_the_compiler_one_sentence_has_the_command(monkeypatch, tmp_path):
  monkeypatch.setenv(gpu.FOLDER, str(tmp_path / 'nothing'))
  with pytest.raises(
    UserError, match=f'pip install --no-deps --target {tmp_path}/nothing jax-cuda'
  ):
    gpu.check_compiler()


def test_jax_asks_for_the_version_of_cudnn_by_the_name_that_is_replaced():
  module = importlib.import_module(gpu.CUDNN_MODULE)
  assert callable(getattr(module, gpu.CUDNN_VERSION)), 'the name of a private function changed'


def _attention_in_a_loop(mesh, trips):
  shape = jax.ShapeDtypeStruct(
    (2, 256, 4, 64), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P())
  )

  def step(_, x):
    return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation='cudnn')

  return jax.jit(lambda x: jax.lax.fori_loop(0, trips, step, x)).lower(shape)


@pytest.mark.slow
@needs_compiler
def test_kernels_count_as_often_as_a_loop_runs():
  once, thrice = (
    gpu.count_kernels(gpu.compile_text(_attention_in_a_loop, trips, on='h200')) for trips in (2, 4)
  )
  assert (once['attention'], thrice['attention']) == (2, 4)


@pytest.mark.parametrize(
  ('name', 'slices', 'says'),
  [
    ('h200:9', 1, "has the shape '9'; give a shape as in h200:8"),
    ('h200', 1, 'give a shape as in h200:8'),
    ('h200:8', 2, 'slices=2 is for TPUs; GPUs are planned on one host'),
  ],
)
def test_gpus_are_those_of_one_host(name, slices, says):
  with pytest.raises(UserError, match=says):
    topology.parse(name, slices)


def test_a_plan_for_gpus_has_one_phase():
  with pytest.raises(UserError, match=r'quick leaves out the generation of code'):
    estimate.plan(_config(), topology.parse('h200:8'), quick=True)


def test_a_step_gets_what_jax_gives(monkeypatch):
  for name in ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'):
    monkeypatch.delenv(name, raising=False)
  assert estimate.capacity(topology.parse('h200:8')) == pytest.approx(0.97 * 0.75 * H200.hbm)
  monkeypatch.setenv('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.9')
  assert estimate.capacity(topology.parse('h200:8')) == pytest.approx(0.97 * 0.9 * H200.hbm)


def test_a_product_that_fills_the_cores_is_faster():
  full, one_tile_more = (Product(128 * rows, 256, 2**16, 1) for rows in (132, 133))
  assert one_tile_more.seconds(H200) > 1.4 * full.seconds(H200), 'a second wave costs nothing'
  short = Product(128 * 132, 256, 256, 1)
  assert full.flops / full.seconds(H200) > 1.9 * short.flops / short.seconds(H200)
  split = Product(768, 768, 2**15, 1)
  assert split.flops / split.seconds(H200) > 0.4 * H200.peak, 'few tiles leave the cores empty'


PROGRAM = """
HloModule step, is_scheduled=true

%fused (p: bf16[1024,768]) -> bf16[1024,768] {
  %p = bf16[1024,768]{1,0} parameter(0)
  ROOT %twice = bf16[1024,768]{1,0} add(%p, %p)
}

ENTRY %main (x: bf16[1024,512], w: bf16[512,768], q: bf16[2,256,4,64]) -> bf16[1024,768] {
  %x = bf16[1024,512]{1,0} parameter(0)
  %w = bf16[512,768]{1,0} parameter(1)
  %q = bf16[2,256,4,64]{3,2,1,0} parameter(2)
  %matmul = (bf16[1024,768]{1,0}, s8[33554432]{0}) custom-call(%x, %w), \
custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(step)/dot"}, backend_config=\
{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  %y = bf16[1024,768]{1,0} get-tuple-element(%matmul), index=0
  %mixed = (bf16[2,4,256,64]{3,1,2,0}, f32[2,4,256]{2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"mask_type": "CAUSAL"}
  ROOT %fusion = bf16[1024,768]{1,0} fusion(%y), kind=kLoop, calls=%fused
}
"""


def test_every_kernel_has_its_kind_its_flops_and_its_bytes():
  read = costs.read(PROGRAM, None, H200, has_cycles=False)
  product, attention, other = read.operations
  assert [one.opcode for one in read.operations] == ['product', 'attention', 'fusion']
  assert product.flops == 2 * 1024 * 512 * 768
  assert attention.flops == 2 * 2 * 2 * 4 * 256 * 256 * 64 / 2, 'a causal mask leaves half'
  assert other.memory * H200.hbm_rate == pytest.approx(2 * 1024 * 768 * 2)
  assert read.rough_seconds == sum(one.seconds for one in read.operations)
  assert gpu.count_kernels(PROGRAM) == {'product': 1, 'attention': 1, 'fusion': 1}


def _config(**changes):
  sizes = {
    'model__pattern': 'layer*2',
    'model__width': 256,
    'model__layer__mixer__heads': 4,
    'model__vocab_size': 512,
    'data__sequence_length': 128,
    'data__batch_size': 256,
    'data__tokenizer': 'nothing/tokenizer.json',
  }
  return tiny_run.config('files:/nothing/*.txt', '/nothing', **(sizes | changes))


@pytest.mark.slow
@needs_compiler
def test_a_step_is_planned_for_the_gpus_of_a_host():
  plan = estimate.plan(_config(), topology.parse('h200:2'))
  assert not plan.costs.notes, 'there is something in the program that is not understood'
  assert (plan.mesh['fsdp'], plan.topology.chips) == (2, 2)
  assert plan.memory.temporaries > 0 and plan.memory.left > 0
  moved = {row.kind: row.network for row in plan.costs.traffic}
  assert {'all-gather', 'reduce-scatter'} <= set(moved) and set(moved.values()) == {'NVLink'}
  assert plan.costs.flops * 2 == pytest.approx(plan.model_flops, rel=0.1), 'products are missing'
  text = table.render(plan)
  assert 'attention, by its published rates' in text and '4 kernels' in text
  assert 'attention' in breakdown.render(plan)


@pytest.mark.slow
@needs_compiler
def test_a_step_that_is_too_large_for_a_gpu_is_refused(monkeypatch):
  monkeypatch.setenv('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.0001')
  with pytest.raises(DoesNotFitError) as raised:
    estimate.plan(_config(train__remat='everything'), topology.parse('h100:1'))
  assert raised.value.needed > raised.value.capacity == pytest.approx(79.65 * 0.97e-4, rel=1e-3)


CONVERTS = """\
HloModule a_layer_of_a_stack

%fused (p: f32[40,8,8]) -> bf16[1,8,8] {
  %p = f32[40,8,8]{2,1,0} parameter(0)
  %c = bf16[40,8,8]{2,1,0} convert(%p)
  ROOT %s = bf16[1,8,8]{2,1,0} slice(%c), slice={[3:4], [0:8], [0:8]}
}

ENTRY %main (a: f32[40,8,8]) -> bf16[1,8,8] {
  %a = f32[40,8,8]{2,1,0} parameter(0)
  ROOT %f = bf16[1,8,8]{2,1,0} fusion(%a), kind=kLoop, calls=%fused
}
"""


def test_a_gpu_converts_only_the_slice_that_it_reads():
  program = parse(CONVERTS)
  bytes_moved = hbm_bytes(program, program.entry, program.entry.root, converts=True)
  assert bytes_moved == 64 * (4 + 2)
