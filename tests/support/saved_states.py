"""Small states in checkpoints, errors of a file system, and harm to files."""

import contextlib
import errno
import os

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax import tasks
from tokenformer_jax.config import Config
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Meta, Seen
from tokenformer_jax.training import sizes

EIO = OSError(errno.EIO, 'Input/output error')
FULL = OSError(errno.ENOSPC, 'No space left on device')


def state(step):
  return {'params': {'keys': jnp.arange(24.0).reshape(4, 6) + step}, 'step': jnp.asarray(step)}


def meta(step):
  return Meta(step, Config(), {'kind': 'bytes'})


def save(workdir, losses, keep=10):
  """Saves steps 1, 2, … with these losses on the validation split."""
  with contextlib.closing(checkpoint.Checkpoints(workdir, keep=keep)) as checkpoints:
    for step, loss in enumerate(losses, start=1):
      checkpoints.save(meta(step), state(step), loss)
      checkpoints.wait()


def save_run(config, workdir, step=10, *, seen=None, state=None):
  """Writes a checkpoint as a run leaves it; returns what it says of itself.

  Args:
    config: of the run.
    workdir: of the run.
    step: of the checkpoint.
    seen: None: what its steps have seen with the batch size of the config.
    state: an array alone unless given.
  """
  config = sizes.fill_in(config)
  task = tasks.make(config)
  task.prepare()
  seen = seen or Seen(step * config.data.batch_size, task.digests[0])
  state = state or {'params': {'x': jnp.zeros(1)}}
  with contextlib.closing(checkpoint.Checkpoints(workdir, keep=9)) as checkpoints:
    described = Meta(step, config, task.vocabulary(), seen=seen)
    checkpoints.save(described, state, wait=True)
    return checkpoints.meta(step)


def restore(workdir, step):
  checkpoints = checkpoint.Checkpoints(workdir)
  single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  abstract = sharding.with_shardings(state(0), jax.tree.map(lambda _: single, state(0)))
  return checkpoints.restore(checkpoints.meta(step), abstract)


def assert_intact(workdir, step):
  for got, want in zip(
    jax.tree.leaves(restore(workdir, step)), jax.tree.leaves(state(step)), strict=True
  ):
    np.testing.assert_array_equal(got, want, err_msg=f'the checkpoint of step {step} is lost')


def flip(path):
  content = bytearray(path.read_bytes())
  for position in range(len(content) // 3, len(content), 997):
    content[position] ^= 16
  path.write_bytes(content)


HARM = {
  'truncated': lambda path: os.truncate(path, path.stat().st_size // 2),
  'emptied': lambda path: os.truncate(path, 0),
  'deleted': lambda path: path.unlink(),
  'flipped': flip,
}
