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


def with_line(line: str) -> str:
  """Return a program of one instruction `%it` that reads `%a`."""
  return (
    'HloModule one\n\nENTRY %main (a: f32[256]) -> f32[256] {\n'
    f'  %a = f32[256]{{0:T(256)}} parameter(0)\n  ROOT %it = {line}\n}}\n'
  )
