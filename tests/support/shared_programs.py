"""Programs that the tests of a process share: equal runs trace and compile once.

Checksums, which take a program for each shape of an array, are computed without one.
"""

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator

import jax
import numpy as np
import pytest

from tokenformer_jax.config import Sources, TextConfig
from tokenformer_jax.runs import checkpoint, checksum
from tokenformer_jax.steps import fit
from tokenformer_jax.steps import step as step_lib

# Keys of a config that no program depends on.
_DATA = {'source': '', 'cache_dir': '', 'new_order_at': 0}
_TRAIN = {
  'check_devices': 0,
  'log_every': 1,
  'eval_every': 0,
  'eval_batches': 1,
  'checkpoint_every': 1,
  'keep_checkpoints': 1,
  'trackers': (),
  'sample_tokens': 0,
}


def _key(task, config, mesh, *more) -> Hashable | None:
  """Return what a program of a run depends on; None: it is not shared."""
  if task.teacher is not None or not isinstance(mesh, jax.sharding.Mesh):
    return None
  data = dataclasses.replace(config.data, **_DATA)
  if isinstance(data, TextConfig):
    data = dataclasses.replace(data, mixture=Sources())
  train = dataclasses.replace(config.train, **_TRAIN)
  end = getattr(task, '_boundary', 0)
  config = dataclasses.replace(config, data=data, train=train, init_from='')
  return repr(config), type(task), end, mesh, more


@contextlib.contextmanager
def shared() -> Iterator[None]:
  """Give equal runs the same jitted functions."""
  made = {}
  make_step, make_eval = fit.make_train_step, step_lib.make_eval_step
  make_first, of_arrays = step_lib.make_first_state, checkpoint._checksums

  def share(key, make):
    if key is None:
      return make()
    if key not in made:
      made[key] = make()
    return made[key]

  def train_step(program, mesh):
    key = _key(program.task, program.config, mesh, 'step', repr(program.growth))
    return share(key, lambda: make_step(program, mesh))

  def eval_step(task, mesh):
    return share(_key(task, task.config, mesh, 'eval'), lambda: make_eval(task, mesh))

  def first_state(program, mesh):
    key = _key(program.task, program.config, mesh, 'first', repr(program.growth))
    return share(key, lambda: make_first(program, mesh))

  def checksum_of(array):
    if not getattr(array, 'is_fully_addressable', False):
      return of_arrays(array)
    numbers = np.asarray(array).reshape(-1)  # In parts, because tests measure memory.
    return checksum.of_chunks(np.array_split(numbers, 1 + numbers.size // 2**14))

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(fit, 'make_train_step', train_step)
    patch.setattr(step_lib, 'make_eval_step', eval_step)
    patch.setattr(step_lib, 'make_first_state', first_state)
    patch.setattr(checkpoint, '_checksums', lambda state: jax.tree.map(checksum_of, state))
    yield
