"""Check, before any array is read, that a grown model fits into memory and on the target's disk.

The checks compare the free bytes with a lower bound of the bytes needed, so they never refuse a
model that fits.
"""

import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from tokenformer_jax.config import ModelConfig, OptimConfig
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.model import models
from tokenformer_jax.parallel import hosts
from tokenformer_jax.runs.checkpoint import Source
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.storage import paths

_REUSED = 0.9  # Arrays take at least this part of their bytes in the source in the target again.
# Files with a container's limit in bytes, one for each version of control groups; `max` is none.
_LIMITS = ('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes')


def check_memory(
  mesh: Mesh, known: Sequence[ModelConfig], config: OptimConfig, *, ema: bool
) -> None:
  """Check that the state of each model in `known` fits into the memory of the mesh by itself.

  An action frees each old array once the arrays made from it exist, so it holds the larger of two
  states and at most two more arrays.
  """
  needed = max(
    sum(step_lib.bytes_on_a_device(mesh, models.define(model), config, ema=ema)) for model in known
  )
  mine = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
  if mine[0].platform == 'cpu':
    needed, free, where = needed * len(mine), free_host_memory(), 'of this host'
  else:
    free, where = _free_device_memory(mine), f'of every {mine[0].device_kind}'
  if hosts.in_any(free is not None and needed > free):
    raise UserError(
      f'the result and its moments take {_gib(needed)} of the memory {where}, where '
      f'{_gib(free) if free is not None else "an unknown amount"} is free'
      f'{"" if free is None or needed > free else " (too little on another host)"}; ask for fewer '
      'tokens or a smaller width, or use more devices or a host with more memory'
    )


def check_disk(target: paths.Path, source: Source, after: ModelConfig, moments: str) -> None:
  """Check that the target's disk has room for the arrays that are copied from the source.

  A bucket always has room. Moments that are dropped are zeros, which take no room in files: then
  nothing is checked.
  """
  if paths.in_bucket(target) or paths.in_bucket(source.directory) or moments == 'drop':
    return
  before = source.meta.config.model
  kept = min(1.0, models.define(after).count / models.define(before).count)
  files = pathlib.Path(source.checkpoints.directory, str(source.meta.step)).rglob('*')
  needed = int(_REUSED * kept * sum(path.stat().st_size for path in files if path.is_file()))
  parents = pathlib.Path(target).absolute().parents
  parent = next(parent for parent in parents if os.path.lexists(parent))
  free = shutil.disk_usage(parent).free
  if hosts.in_any(hosts.is_first() and needed > free):
    raise UserError(
      f'{target} takes at least {_gib(needed)}, and {_gib(free)} is free on the disk of {parent}; '
      f'make room or choose another {arg.target}'
    )


def free_host_memory() -> int:
  """Return the bytes that this process can still allocate, with swap and a container's limit."""
  try:
    lines = pathlib.Path('/proc/meminfo').read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(':') for line in lines)}
    free = (kib['MemAvailable'] + kib['SwapFree']) * 1024
  except (OSError, KeyError):  # Systems without /proc/meminfo: count all installed memory.
    free = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  for file in map(pathlib.Path, _LIMITS):
    text = file.read_text().strip() if file.is_file() else 'max'
    free = min(free, int(text)) if text.isdecimal() else free
  return free


def _free_device_memory(devices: Sequence[Any]) -> int | None:
  """Return the fewest free bytes among some accelerators, or None if they do not report it."""
  stats = [device.memory_stats() or {} for device in devices]
  if not all('bytes_limit' in device for device in stats):
    return None
  return min(device['bytes_limit'] - device.get('bytes_in_use', 0) for device in stats)


def _gib(size: int) -> str:
  return f'{size / 2**30:,.1f} GiB' if size >= 2**30 else f'{size / 2**20:,.1f} MiB'
