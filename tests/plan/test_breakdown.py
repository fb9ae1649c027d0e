"""Test where a step goes: rows of operations, waits for collectives, and their picture."""

import dataclasses

import numpy as np
import pytest
from programs import grid

from tokenformer_jax.plan import breakdown, costs, overlap
from tokenformer_jax.plan.chips import CHIPS
from tokenformer_jax.plan.operations import Operation
from tokenformer_jax.plan.schedule import Bundles

V6E = CHIPS['v6e']

# A loop of 3 layers. Its weights are gathered beside one product, and its gradients while the
# device waits.
STEP = """HloModule jit_step, is_scheduled=true

%scored (x: bf16[64,32], w: bf16[32,128]) -> bf16[64,128] {
  %x = bf16[64,32]{1,0} parameter(0)
  %w = bf16[32,128]{1,0} parameter(1)
  %c = bf16[64,128]{1,0} convolution(%x, %w), dim_labels=bf_io->bf, \
metadata={op_name="jit(step)/jvp()/while/body/IO/dot_general"}
  ROOT %e = bf16[64,128]{1,0} erf(%c), metadata={op_name="jit(step)/jvp()/while/body/erf"}
}

%normed (x.1: bf16[64,32]) -> bf16[64,32] {
  %x.1 = bf16[64,32]{1,0} parameter(0)
  ROOT %m = bf16[64,32]{1,0} multiply(%x.1, %x.1), \
metadata={op_name="jit(step)/jvp()/while/body/norm/mul"}
}

%condition (p: (s32[], bf16[64,32])) -> pred[] {
  %p = (s32[], bf16[64,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (p.1: (s32[], bf16[64,32])) -> (s32[], bf16[64,32]) {
  %p.1 = (s32[], bf16[64,32]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %x.2 = bf16[64,32]{1,0} get-tuple-element(%p.1), index=1
  %part = bf16[32,32]{1,0} constant({...})
  %gather = (bf16[32,32]{1,0}, bf16[32,128]{1,0}) all-gather-start(%part), \
replica_groups={{0,1,2,3}}, dimensions={1}
  %norm = bf16[64,32]{1,0} fusion(%x.2), kind=kLoop, calls=%normed, \
metadata={op_name="jit(step)/jvp()/while/body/norm/mul"}
  %whole = bf16[32,128]{1,0} all-gather-done(%gather)
  %score = bf16[64,128]{1,0} fusion(%norm, %whole), kind=kOutput, calls=%scored, \
metadata={op_name="jit(step)/jvp()/while/body/IO/dot_general"}
  %sum = bf16[64,128]{1,0} all-reduce(%score), replica_groups={{0,1,2,3}}, to_apply=%add
  %one = s32[] constant(1)
  %next = s32[] add(%i.1, %one), metadata={op_name="jit(step)/jvp()/while/body/add"}
  ROOT %t = (s32[], bf16[64,32]{1,0}) tuple(%next, %x.2)
}

ENTRY %main (x.3: bf16[64,32]) -> bf16[64,32] {
  %x.3 = bf16[64,32]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %state = (s32[], bf16[64,32]{1,0}) tuple(%zero, %x.3)
  %loop = (s32[], bf16[64,32]{1,0}) while(%state), condition=%condition, body=%body
  %out = bf16[64,32]{1,0} get-tuple-element(%loop), index=1
  ROOT %new = bf16[64,32]{1,0} copy(%out), metadata={op_name="jit(step)/adam/mul"}
}
"""
# Bundles of a microsecond are 1750.
BUNDLES = {
  'norm': Bundles(17500, 0.0, 8000.0),
  'score': Bundles(35000, 16.0, 30000.0),
  'new': Bundles(1750, 0.0, 0.0),
}


@pytest.fixture
def step(monkeypatch):
  monkeypatch.setattr('tokenformer_jax.plan.operations._PLAUSIBLE', (0.0, np.inf))
  return costs.read(STEP, grid(2, 2, fsdp=4), V6E, BUNDLES)


def test_rows_sum_to_the_step(step):
  rows = breakdown.shares(step)
  assert sum(row.seconds for row in rows) == pytest.approx(step.ordered_seconds)
  assert sum(row.seconds for row in rows[:-1]) == pytest.approx(step.compute_seconds)


def test_operations_are_in_rows_by_their_scopes_and_contents(step):
  rows = {row.name: row for row in breakdown.shares(step)}
  assert rows['norms'].seconds == pytest.approx(3 * 10e-6)
  assert rows['scores, forward: products with GELU'].seconds == pytest.approx(3 * 20e-6)
  assert rows['scores, forward: products with GELU'].limit == 'vector'
  assert rows['norms'].limit == 'order (vector)', '8,000 of 17,500 bundles have vector work'
  assert rows['optimizer'].seconds == pytest.approx(1e-6), 'what no gradient belongs to'


def test_a_collective_is_exposed_by_what_no_work_runs_beside(step):
  gathered, summed = step.collectives
  assert (gathered.kind, gathered.beside) == ('all-gather', ('norm',))
  assert gathered.between == pytest.approx(10e-6)
  assert gathered.exposed == 0
  assert summed.synchronous
  assert summed.exposed == pytest.approx(summed.seconds), 'the device waits for all of it'
  waits = breakdown.shares(step)[-1]
  assert waits.seconds == pytest.approx(3 * (gathered.exposed + summed.exposed))


def test_transfers_over_one_network_wait_for_each_other(step):
  cost = dataclasses.replace(step.collectives[0].cost, seconds=30e-6)
  program = costs.parse(STEP)
  starts = {'gather': ('all-gather', cost), 'sum': ('all-reduce', cost)}
  seconds, (gathered, _) = overlap.follow(program, step.operations, starts)
  assert gathered.exposed == pytest.approx(20e-6), '10 of 30 µs run beside the norm'
  assert seconds == pytest.approx(step.compute_seconds + 3 * 50e-6)


@pytest.mark.parametrize(
  ('products', 'holds', 'row'),
  [
    (('jit(step)/transpose(jvp())/IO/dot_general',), {'erf', 'exponential'}, 'slope of GELU'),
    (('jit(step)/transpose(jvp())/IO/dot_general',), {'erf'}, 'products with GELU'),
    (('jit(step)/transpose(jvp())/rematted_computation/IO',), {'erf', 'exponential'}, 'with GELU'),
    (('jit(step)/jvp()/IO/dot_general',), {'multiply'}, 'other products'),
    (('jit(step)/jvp(head_and_loss)/VD/dot_general',), {'exponential'}, 'head and loss'),
    (('jit(step)/jvp()/while/body/rotary/KL/dot_general',), {'multiply'}, 'rotary positions'),
  ],
)
def test_rows_of_products(products, holds, row):
  one = Operation(
    'fusion', 'fusion', 1, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, products, products, frozenset(holds)
  )
  assert row in breakdown.row_of(one)
