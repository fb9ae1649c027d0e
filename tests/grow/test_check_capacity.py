"""A growth that does not fit is refused before anything is read, and one that fits is not."""

import collections
import shutil
import types

import pytest
from growing import STEP, UPDATES, mesh_of
from tiny import tiny_model

from tokenformer_jax.config import AdamWConfig, Config
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import check_capacity
from tokenformer_jax.model import models
from tokenformer_jax.runs.checkpoint import Source
from tokenformer_jax.runs.checkpoint_meta import Meta

MODEL = tiny_model()
NEEDED = 3 * 4 * models.define(MODEL).count  # parameters and two moments, in float32


def _fits(monkeypatch, free, mesh, held=(MODEL,), *, ema=False):
  monkeypatch.setattr(check_capacity, 'free_host_memory', lambda: free)
  try:
    check_capacity.check_memory(mesh, held, AdamWConfig(), ema=ema)
  except UserError as error:
    assert '\n' not in str(error)
    return False
  return True


@pytest.mark.parametrize(
  ('held', 'ema', 'needed'),
  [
    ((MODEL,), False, NEEDED),
    ((MODEL,), True, NEEDED * 4 // 3),
    ((tiny_model(layers=1), MODEL), False, NEEDED),
  ],
  ids=['a state', 'with an average', 'the larger of two states'],
)
def test_a_state_that_fits_to_the_byte_is_grown_and_a_larger_one_refused(
  monkeypatch, held, ema, needed
):
  assert _fits(monkeypatch, needed, mesh_of(), held, ema=ema), 'refused though it fits'
  assert not _fits(monkeypatch, needed - 1, mesh_of(), held, ema=ema), 'taken without room for it'


def test_devices_of_one_host_share_its_memory(monkeypatch):
  """Eight devices hold an eighth each of what is split, and all of what is not."""
  mesh = mesh_of(fsdp=4, tokens=2)
  assert _fits(monkeypatch, NEEDED * 6 // 5, mesh), 'each device is taken to hold the whole state'
  assert not _fits(monkeypatch, NEEDED, mesh), 'what every device has of norms is not counted'
  assert not _fits(monkeypatch, NEEDED // 4, mesh), 'the memory of the host counts for each device'


class _Device:
  """An accelerator that says how much memory it has."""

  platform, device_kind, process_index = 'tpu', 'TPU v9', 0

  def __init__(self, free):
    self._free = free

  def memory_stats(self):
    return self._free and {'bytes_limit': self._free + 100, 'bytes_in_use': 100}


@pytest.mark.parametrize(
  ('free', 'least'), [((7, 5, 9), 5), ((7, None), None)], ids=['all tell', 'one does not']
)
def test_the_fullest_accelerator_counts(free, least):
  assert check_capacity._free_device_memory([_Device(n) for n in free]) == least


def test_a_containers_limit_counts(monkeypatch, tmp_path):
  for name, text in (('none', 'max\n'), ('some', '12345\n')):
    (tmp_path / name).write_text(text)
  monkeypatch.setattr(check_capacity, '_LIMITS', (tmp_path / 'none', tmp_path / 'not there'))
  assert check_capacity.free_host_memory() > 12345, 'no limit was taken for one'
  monkeypatch.setattr(check_capacity, '_LIMITS', (tmp_path / 'none', tmp_path / 'some'))
  assert check_capacity.free_host_memory() == 12345, 'more than the container may have'


@pytest.mark.parametrize(
  ('layers', 'moments', 'needed'), [(2, 'pad', 9000), (4, 'pad', 9000), (2, 'drop', 0)]
)
def test_the_disk_must_have_room_for_what_is_copied(monkeypatch, tmp_path, layers, moments, needed):
  directory = tmp_path / 'run/checkpoints'
  (directory / str(STEP) / 'state').mkdir(parents=True)
  (directory / str(STEP) / 'state/data').write_bytes(bytes(10_000))
  checkpoints = types.SimpleNamespace(workdir=tmp_path / 'run', directory=directory)
  source = Source(checkpoints, Meta(STEP, Config(model=MODEL), {}, updates=UPDATES))
  usage = collections.namedtuple('usage', 'free')
  arguments = tmp_path / 'not/yet/there', source, tiny_model(layers=layers), moments
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage(needed + 1))
  check_capacity.check_disk(*arguments)
  if needed:
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage(needed - 2))
    with pytest.raises(UserError, match=r'takes at least 0\.0 MiB, and 0\.0 MiB is free on the d'):
      check_capacity.check_disk(*arguments)
  assert not (tmp_path / 'not').exists(), 'a directory was made to look at its disk'
