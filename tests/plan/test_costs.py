"""Test the costs of programs written by hand and of compiled programs with known counts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from programs import grid, with_line

from tokenformer_jax.plan import costs, hlo, kernel_costs
from tokenformer_jax.plan.chips import CHIPS

V5P = CHIPS['v5p']
NESTED = """\
HloModule jit_step, is_scheduled=true

%inner_cond (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[]{:T(128)}, f32[8]{0:T(1024)}) parameter(0)
  %c = s32[]{:T(128)} constant(4)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %c), direction=LT
}

%inner_body (p.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[]{:T(128)}, f32[8]{0:T(1024)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %x.1 = f32[8]{0:T(1024)S(1)} get-tuple-element(%p.1), index=1
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i.1, %one)
  %deep = f32[8]{0:T(1024)} fusion(%x.1), kind=kLoop, calls=%fused, backend_config={"window_config":{"estimated_cycles":"7"}}
  ROOT %t.1 = (s32[]{:T(128)}, f32[8]{0:T(1024)}) tuple(%next, %deep)
}

%fused (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0:T(1024)} parameter(0)
  ROOT %n = f32[8]{0:T(1024)} negate(%p.2), backend_config={"window_config":{"estimated_cycles":"99999"}}
}

%outer_cond (p.3: (f32[8], s32[])) -> pred[] {
  %p.3 = (f32[8]{0:T(1024)}, s32[]{:T(128)}) parameter(0)
  %c.3 = s32[]{:T(128)} constant(17)
  %i.3 = s32[]{:T(128)} get-tuple-element(%p.3), index=1
  ROOT %lt.3 = pred[]{:T(512)} compare(%i.3, %c.3), direction=LT
}

%outer_body (p.4: (f32[8], s32[])) -> (f32[8], s32[]) {
  %p.4 = (f32[8]{0:T(1024)}, s32[]{:T(128)}) parameter(0)
  %x.4 = f32[8]{0:T(1024)} get-tuple-element(%p.4), index=0
  %i.4 = s32[]{:T(128)} get-tuple-element(%p.4), index=1
  %two = s32[]{:T(128)} constant(2)
  %middle = s32[]{:T(128)} add(%i.4, %two)
  %next.4 = s32[]{:T(128)} add(%middle, %two)
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, /*index=1*/f32[8]{0:T(1024)}) tuple(%zero, %x.4)
  %loop = (s32[]{:T(128)}, f32[8]{0:T(1024)}) while(%start), condition=%inner_cond, body=%inner_body
  %y = f32[8]{0:T(1024)} get-tuple-element(%loop), index=1
  ROOT %t.4 = (f32[8]{0:T(1024)}, s32[]{:T(128)}) tuple(%y, %next.4)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0:T(1024)} parameter(0)
  %first = s32[]{:T(128)} constant(5)
  %once = f32[8]{0:T(1024)} copy(%a), backend_config={"window_config":{"estimated_cycles":"100"}}
  %begin = (f32[8]{0:T(1024)}, s32[]{:T(128)}) tuple(%once, %first)
  %outer = (f32[8]{0:T(1024)}, s32[]{:T(128)}) while(%begin), condition=%outer_cond, body=%outer_body
  ROOT %r = f32[8]{0:T(1024)} get-tuple-element(%outer), index=0
}
"""  # noqa: E501, lines of a compiler

ASYNC = """\
HloModule spread_over_fusions

%begin (p: bf16[4,8]) -> bf16[16,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %gather.1 = bf16[16,8]{1,0} all-gather(%p), channel_id=3, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %s = bf16[16,8]{1,0} custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%middle (p.1: bf16[4,8]) -> bf16[16,8] {
  %p.1 = bf16[4,8]{1,0} parameter(0)
  ROOT %gather.2 = bf16[16,8]{1,0} all-gather(%p.1), channel_id=3, replica_groups=[1,4]<=[4], dimensions={0}
}

%alone (p.2: bf16[4,8]) -> bf16[16,8] {
  %p.2 = bf16[4,8]{1,0} parameter(0)
  ROOT %gather.3 = bf16[16,8]{1,0} all-gather(%p.2), channel_id=4, replica_groups=[1,4]<=[4], dimensions={0}
}

ENTRY %main (a: bf16[4,8]) -> bf16[16,8] {
  %a = bf16[4,8]{1,0} parameter(0)
  %f.1 = bf16[16,8]{1,0} fusion(%a), kind=kCustom, calls=%begin
  %f.2 = bf16[16,8]{1,0} fusion(%a), kind=kOutput, calls=%middle
  ROOT %f.3 = bf16[16,8]{1,0} fusion(%a), kind=kCustom, calls=%alone
}
"""  # noqa: E501

SCATTER = """\
HloModule fused_scatter

%all-reduce-scatter (p: bf16[14,8]) -> bf16[4,8] {
  %p = bf16[14,8]{1,0} parameter(0)
  %zero = bf16[] constant(0)
  %filled = bf16[16,8]{1,0} pad(%p, %zero), padding=0_2x0_0
  %sum = bf16[16,8]{1,0} all-reduce(%filled), channel_id=5, replica_groups=[1,4]<=[4], to_apply=%add
  %at = u32[] constant(4)
  %none = u32[] constant(0)
  ROOT %slice = bf16[4,8]{1,0} dynamic-slice(%sum, %at, %none), dynamic_slice_sizes={4,8}
}

ENTRY %main (a: bf16[14,8]) -> bf16[4,8] {
  %a = bf16[14,8]{1,0} parameter(0)
  ROOT %f = bf16[4,8]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter
}
"""


def _read(text, mesh=None):
  return costs.read(text, mesh or grid(2, 2, fsdp=4), V5P)


def test_cycles_of_nested_loops_are_multiplied_by_their_trips():
  # From 5 to 17 by 2 · 2 makes 3 trips with 4 inner trips each. A fusion's 7 cycles include those
  # of the operations inside it.
  assert _read(NESTED).cycles == 100 + 3 * 4 * 7, 'a loop is not multiplied by what it runs'


def test_a_loop_whose_length_is_unknown_is_told():
  text = NESTED.replace('constant(17)', 'parameter(1)')
  counted = _read(text)
  assert counted.cycles == 100 + 4 * 7, 'the body of a loop of unknown length counts once'
  assert '1 loops of unknown length are counted once: outer' in counted.notes[0]


def test_loops_of_a_compiled_program():
  def step(x, _):
    return jax.lax.scan(lambda y, _: (jnp.tanh(y @ w), None), x, None, length=3)[0], None

  w = jnp.ones((16, 16))
  program = jax.jit(lambda x: jax.lax.scan(step, x, None, length=5)[0])
  counted = _read(program.lower(jnp.ones((8, 16))).compile().as_text())
  assert not counted.notes
  assert counted.flops == 15 * 2 * 8 * 16 * 16, 'the product runs 3 · 5 times'


def test_the_rough_time_has_products_and_what_is_computed_element_by_element():
  def step(x, _):
    return jnp.sum(x * jax.lax.erf(x), axis=0)[None] + x, None

  program = jax.jit(lambda x, w: jax.lax.scan(step, x, None, length=100)[0] @ w)
  text = program.lower(jnp.ones((8, 16)), jnp.ones((16, 32))).compile().as_text()
  chip = dataclasses.replace(V5P, hbm_rate=1e30)
  counted = costs.read(text, grid(2, 2, fsdp=4), chip, has_cycles=False)
  elements = 100 * 8 * 16 * (1 + 25 + 1 + 1)  # without the loop's counter
  products = 2 * 8 * 16 * 32
  expected = products / V5P.peak + elements / V5P.vector_peak
  assert counted.rough_seconds == pytest.approx(expected, rel=0.01)
  assert counted.ordered_seconds == counted.rough_seconds, 'before there are cycles'


def test_memory_bounds_the_rough_time():
  program = jax.jit(lambda x: x + 1)
  counted = _read(program.lower(jnp.ones((1024, 1024))).compile().as_text())
  assert counted.rough_seconds == pytest.approx(2 * 4 * 1024**2 / V5P.hbm_rate)


@pytest.mark.parametrize(('axis', 'size'), [('fsdp', 4), ('tokens', 2)])
def test_collectives_of_a_compiled_program(axis, size):
  mesh = jax.make_mesh((4, 2), ('fsdp', 'tokens'), (AxisType.Auto,) * 2)

  def total(x):
    def body(y, _):
      return jax.lax.psum(y, axis) / size, None

    return jax.lax.scan(body, x, None, length=7)[0]

  program = jax.jit(
    jax.shard_map(total, mesh=mesh, in_specs=P(axis), out_specs=P(axis), check_vma=False)
  )
  text = program.lower(jnp.ones((64 * size, 256))).compile().as_text()
  (row,) = _read(text, grid(4, 2, fsdp=4, tokens=2)).traffic
  assert (row.axis, row.kind, row.count) == (axis, 'all-reduce', 7)
  moved = 7 * 2 * 64 * 256 * 4 * (size - 1) / size
  assert row.gigabytes == pytest.approx(moved / 1e9), 'a ring moves 2 (n − 1)/n of the array'


def test_one_collective_in_several_fusions_counts_once():
  (row,) = _read(ASYNC).traffic
  assert row.count == 2, 'channel 3 is spread over two fusions, channel 4 is in one'
  assert row.gigabytes == pytest.approx(2 * 3 * 64 / 1e9), 'three of four parts of 64 bytes come'


def test_a_fusion_that_keeps_a_slice_of_a_sum_is_a_reduce_scatter():
  (row,) = _read(SCATTER).traffic
  assert row.kind == 'reduce-scatter'
  assert row.gigabytes == pytest.approx(3 / 4 * 256 / 1e9), 'three of four parts of 16 × 8 come'


def test_a_collective_of_several_arrays_is_counted():
  text = SCATTER.replace(
    'bf16[16,8]{1,0} all-reduce(%filled)', '(bf16[16,8], bf16[16,8]) all-reduce(%filled, %filled)'
  ).replace('dynamic-slice(%sum', 'dynamic-slice(%first')
  text = text.replace('  %at', '  %first = bf16[16,8]{1,0} get-tuple-element(%sum), index=0\n  %at')
  (row,) = _read(text).traffic
  assert row.kind == 'reduce-scatter'
  assert row.gigabytes == pytest.approx(2 * 3 / 4 * 256 / 1e9)


def test_a_sum_of_which_all_is_used_is_an_all_reduce():
  text = SCATTER.replace('ROOT %slice', '%slice').replace(
    'dynamic_slice_sizes={4,8}',
    'dynamic_slice_sizes={4,8}\n  ROOT %all = (bf16[4,8], bf16[16,8]) tuple(%slice, %sum)',
  )
  (row,) = _read(text).traffic
  assert row.kind == 'all-reduce'


def test_the_work_of_a_sparse_core_is_traffic_without_cycles():
  text = ASYNC.replace('fusion(%a), kind=kCustom, calls=%alone', 'call-start(%a), to_apply=%alone')
  text = text.replace('channel_id=4', 'channel_id=4, "estimated_cycles":"50"')
  counted = _read(text)
  assert counted.traffic[0].count == 2
  assert counted.cycles == 0, 'the matrix unit does not wait for it'


def test_collectives_that_nothing_calls_are_told():
  text = ASYNC.replace('kind=kCustom, calls=%alone', 'kind=kCustom, sleeps=%alone')
  text = text.replace('%f.3 = bf16[16,8]{1,0} fusion', '%f.3 = bf16[16,8]{1,0} new-kind')
  assert '1 collectives are in computations without a known caller' in _read(text).notes[0]


def test_a_collective_between_slices_goes_over_dcn():
  line = (
    '(f32[256], u32[], token[]) send(%a, %t), channel_id=2, is_host_transfer=true, '
    'frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}'
  )
  mesh = grid(2, 2, replica=2, fsdp=2)
  for device in mesh.devices[1]:
    device.slice_index = 1
  (row,) = _read(with_line(line), mesh).traffic
  assert (row.axis, row.kind, row.network) == ('replica', 'all-reduce', 'DCN')
  assert row.seconds == pytest.approx(1024 / V5P.dcn), 'two slices: half out and half back'


def test_kernels_cost_what_they_say():
  line = (
    'f32[256] custom-call(%a), custom_call_target="tpu_custom_call", backend_config='
    '{"custom_call_config":{"cost_estimate":{"flops":"4590000000","transcendentals":"0",'
    '"bytes_accessed":"10"}}}'
  )
  counted = _read(with_line(line))
  assert counted.flops == 4.59e9
  assert counted.kernel_seconds == pytest.approx(1e-5), '4.59 GFLOP at 459 TFLOP/s'


def _splash_cost(name, *operands, results=()):
  scope = 'jit(f)/splash_window_0/splash_mha/pallas_call'
  return kernel_costs.splash_cost(name, operands, results, side=128, scope=scope)


def test_the_cost_counts_the_blocks_that_are_computed():
  queries = ('bf16', (3, 2, 2048, 96))
  dense = _splash_cost('splash_mha_fwd_residuals.3', queries)
  causal = _splash_cost('splash_mha_fwd_residuals.3', ('s8', (1, 2, 2)), queries)
  assert dense[0] == 2 * 2 * 3 * 2 * 2048**2 * 96, 'two products'
  assert dense[1] == dense[0] * 128 / 96, 'heads are filled up to 128'
  assert causal[0] == dense[0] * 3 / 4, 'of 2 × 2 blocks one is all masked'
  row = ('f32', (2, 2048, 96))
  assert 3 * _splash_cost('splash_mha_fwd_residuals.3', row)[0] == dense[0], 'of 3 rows'
  table = ('s8', (1, 4, 4))
  partial = ('bf16', (3, 2, 2, 2048, 96)), queries, queries
  four, five, two = (
    _splash_cost(f'splash_mha_{name}.3', table, queries, results=results)[0]
    for name, results in (('dkv', partial[1:]), ('dkv', partial), ('fwd', ()))
  )
  assert (four / two, five / two) == (4 / 2, 5 / 2), 'one kernel computes all gradients'
  assert _splash_cost('gmm.1', queries) is None


def test_a_mask_of_which_the_program_says_nothing_has_no_splash_cost():
  queries, table = ('bf16', (3, 2, 2048, 96)), ('s8', (1, 4, 4))
  cost = kernel_costs.splash_cost(
    'splash_mha_dkv.3', [table, queries], side=128, scope='jit(f)/pallas_call'
  )
  assert cost is None, 'a window is made up'


def test_kernels_that_say_nothing_are_told():
  line = 'f32[256] custom-call(%a), custom_call_target="tpu_custom_call"'
  assert '1 kernels carry no cost estimate' in _read(with_line(line)).notes[0]


@pytest.mark.parametrize(
  ('attributes', 'left', 'right', 'out', 'flops'),
  [
    ('dim_labels=bf_io->bf', '8,16', '16,32', '8,32', 2 * 8 * 16 * 32),
    # A batch of 4 products as one convolution: every output reads one entry of the kernel.
    (
      'window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf',
      *('4,8,16', '4,16,32', '4,8,32'),
      4 * 2 * 8 * 16 * 32,
    ),
    # A dilated convolution: each of 4 output positions reads one kernel position.
    (
      'window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=bf0_0oi->0fb',
      *('8,16,1', '4,32,16', '4,32,8'),
      4 * 2 * 8 * 16 * 32,
    ),
  ],
  ids=['one', 'a batch', 'spread'],
)
def test_flops_of_the_convolutions_that_products_become(attributes, left, right, out, flops):
  text = (
    f'ENTRY %main (a: f32[{left}], b: f32[{right}]) -> f32[{out}] {{\n'
    f'  %a = f32[{left}]{{1,0}} parameter(0)\n  %b = f32[{right}]{{1,0}} parameter(1)\n'
    f'  ROOT %c = f32[{out}]{{1,0}} convolution(%a, %b), {attributes}\n}}\n'
  )
  assert _read(text).flops == flops


def test_the_bytes_of_a_shape_are_read():
  shape = '(bf16[4,2048]{1,0:T(8,128)(2,1)S(1)}, s4[3], pred[], token[])'
  assert hlo.shape_bytes(shape) == 2 * 4 * 2048 + 2 + 1
