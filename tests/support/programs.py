"""Texts of small compiled programs, written by hand, and meshes of fake devices."""

import types

import numpy as np


def device(place: int, coords: tuple[int, ...], core: int = 0, slice_index: int = 0):
  """Return an object with the attributes of a device that a plan reads."""
  return types.SimpleNamespace(
    id=place, coords=coords, core_on_chip=core, slice_index=slice_index, platform='none'
  )


class FakeMesh:
  """A mesh with the attributes that a plan reads: devices, names of axes and size."""

  def __init__(self, devices: list, **sizes: int):
    self.devices = np.array(devices, dtype=object).reshape(list(sizes.values()))
    self.axis_names = tuple(sizes)
    self.size = self.devices.size


def grid(x: int, y: int, z: int = 1, **axes: int) -> FakeMesh:
  """Return a slice of these sides, with its devices in the order of their coordinates."""
  places = [(i, j, k) for i in range(x) for j in range(y) for k in range(z)]
  return FakeMesh([device(n, place) for n, place in enumerate(places)], **axes)


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


def with_line(line: str, *, mesh_operand: str = 'f32[256]') -> str:
  """Return a program of one instruction `%it` that reads `%a`."""
  return (
    f'HloModule one\n\nENTRY %main (a: {mesh_operand}) -> {mesh_operand} {{\n'
    f'  %a = {mesh_operand}{{0:T(256)}} parameter(0)\n  ROOT %it = {line}\n}}\n'
  )
