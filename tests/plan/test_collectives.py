"""Test the parsing of XLA's groups of devices, and times on a torus."""

import numpy as np
import pytest
from programs import grid, with_line

from tokenformer_jax.plan import collectives, hlo
from tokenformer_jax.plan.chips import CHIPS

V5P, V5E = CHIPS['v5p'], CHIPS['v5e']


def _groups(attributes, devices=8):
  program = hlo.parse(with_line(f'f32[256] all-reduce(%a), {attributes}, to_apply=%add'))
  return collectives.parse_replica_groups(program.entry.root, devices).tolist()


@pytest.mark.parametrize(
  ('attributes', 'groups'),
  [
    ('replica_groups={{0,1,2,3},{4,5,6,7}}', [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ('replica_groups={}', [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ('replica_groups=[2,4]<=[8]', [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ('replica_groups=[4,2]<=[2,4]T(1,0)', [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    (
      "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
      [[0, 2, 4, 6], [1, 3, 5, 7]],
    ),
    ('source_target_pairs={{0,1},{1,2}}', [[0, 1], [1, 2]]),
  ],
)
def test_replica_groups_are_read_in_every_form(attributes, groups):
  assert _groups(attributes) == groups


@pytest.mark.parametrize(
  'form', ['new_form<8>', "mesh['a'=8] {'a':(2)4}", "mesh['a'=8], device_ids=(5,4) {'a'}"]
)
def test_groups_in_an_unknown_form_are_not_guessed(form):
  with pytest.raises(ValueError, match='cannot be read'):
    _groups(f'replica_groups={form}')


def _cost(kind, groups, mesh, chip=V5P, size=1000):
  return collectives.cost(kind, size, np.array(groups), mesh, chip)


@pytest.mark.parametrize(
  ('groups', 'axis'),
  [
    ([[0, 1], [2, 3]], 'tokens'),
    ([[0, 2], [1, 3]], 'fsdp'),
    ([[0, 1, 2, 3]], 'fsdp+tokens'),
  ],
)
def test_replica_groups_are_matched_to_axes_of_the_mesh(groups, axis):
  assert _cost('all-reduce', groups, grid(2, 2, fsdp=2, tokens=2)).axis == axis


def test_a_ring_carries_twice_what_a_line_does():
  ring, line = (
    _cost('all-gather', [list(range(n))], grid(n, 1, fsdp=n)).seconds / (n - 1) for n in (4, 3)
  )
  assert ring == pytest.approx(line / 2), 'sides of 4 chips of v5p are rings, of 3 they are lines'
  assert line == pytest.approx(1000 / V5P.link)
  short = _cost('all-gather', [[0, 1, 2, 3]], grid(4, 1, fsdp=4), V5E)
  assert short.seconds == pytest.approx(3 * 1000 / V5E.link), 'of v5e sides of 16 are rings'


def test_all_sides_that_a_group_spans_carry():
  one = _cost('all-gather', [list(range(4))], grid(4, 4, fsdp=4, tokens=4))
  all_of_it = _cost('all-gather', [list(range(16))], grid(4, 4, fsdp=16))
  assert all_of_it.seconds / one.seconds == pytest.approx((15 / 2) / 3)


@pytest.mark.parametrize(
  ('kind', 'moved'),
  [('all-gather', 3000), ('reduce-scatter', 750), ('all-reduce', 1500), ('all-to-all', 750)],
)
def test_bytes_that_a_device_receives(kind, moved):
  assert _cost(kind, [[0, 1, 2, 3]], grid(4, 1, fsdp=4)).moved == moved


def test_all_to_all_crosses_a_quarter_of_a_ring():
  cost = _cost('all-to-all', [[0, 1, 2, 3]], grid(4, 1, fsdp=4))
  assert cost.seconds == pytest.approx(1000 * 4 / 4 / (2 * V5P.link))


@pytest.mark.parametrize(('target', 'hops'), [(1, 1), (2, 2), (3, 1)])
def test_a_permute_goes_the_short_way_around(target, hops):
  cost = _cost('collective-permute', [[0, target]], grid(4, 1, fsdp=4))
  assert cost.seconds == pytest.approx(hops * 1000 / V5P.link)
