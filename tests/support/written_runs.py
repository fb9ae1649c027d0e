"""Work directories and checkpoints as runs leave them, without a step computed; and their harm."""

import contextlib
import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax import tasks
from tokenformer_jax.config import Config, LMConfig, TextConfig, TrainConfig
from tokenformer_jax.grow import grow_run
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import sharding
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.runs import checkpoint, saved_config
from tokenformer_jax.runs.checkpoint_meta import Lineage, Meta, Seen

CONFIG = Config(
  model=LMConfig(vocab_size=4096),
  data=TextConfig(batch_size=16, sequence_length=256),
  train=TrainConfig(steps=100),
)
BYTES = {'kind': 'bytes'}
EIO = OSError(errno.EIO, 'Input/output error')
FULL = OSError(errno.ENOSPC, 'No space left on device')


def write(path: Path, lines: Iterable[dict[str, Any]], config: Config | None = CONFIG) -> Path:
  """Writes a config and figures; returns the directory."""
  path.mkdir(parents=True)
  if config:
    (path / 'config.json').write_text(saved_config.to_text(config))
  add(path / 'metrics.jsonl', lines)
  return path


def write_params(
  path: Path,
  config: Config,
  params: Params,
  step: int = 0,
  *,
  vocabulary: dict[str, Any] = BYTES,
  lineage: Lineage = (),
) -> Path:
  """Writes a run of parameters alone, as `convert` does; returns the directory."""
  meta = Meta(step, config, vocabulary, lineage, contents='params')
  grow_run.write(path, meta, {'params': jax.device_put(params)})
  return path


def finish(path: Path, config: Config, loss: float, seen: Seen) -> Path:
  """Writes a finished run, with a checkpoint of its step alone; returns the directory."""
  filled, step = complete(config), config.train.steps
  write(path, [{'step': step, 'eval/loss': loss}], filled)
  with contextlib.closing(checkpoint.Checkpoints(path, keep=1)) as checkpoints:
    meta = Meta(step, filled, BYTES, seen=seen)
    checkpoints.save(meta, {'step': jnp.asarray(step)}, loss, wait=True)
  return path


def add(path: Path, lines: Iterable[dict[str, Any]]) -> None:
  """Appends lines of JSON to a file."""
  with path.open('a') as file:
    file.writelines(f'{json.dumps(line)}\n' for line in lines)


def falling(steps: int, every: int = 10) -> list[dict[str, float]]:
  """The figures of a run whose loss falls, with an evaluation at every fifth log point."""
  lines: list[dict[str, float]] = []
  for i, step in enumerate(range(every, steps + 1, every), start=1):
    speed = {'perf/tokens_per_second': 1000.0 + i % 7, 'perf/step_seconds': 0.5}
    lines.append({'step': step, 'train/loss': 3 + 9 / step, 'train/grad_norm': 1.0, **speed})
    if i % 5 == 0:
      lines.append({'step': step, 'eval/loss': 3.1 + 9 / step})
  return lines


def hourly(steps: int, every: int = 10) -> list[dict[str, Any]]:
  """The times of a run that logs once an hour and evaluates a tenth of it."""
  start = {'step': 0, 'devices': '4 × TPU v5p', 'time': 1e9, 'starting': 600.0, 'compiling': 120.0}
  laps = [
    {'step': step, 'time': 1e9 + 3600 * i, 'training': 3240.0, 'evaluation': 360.0}
    for i, step in enumerate(range(every, steps + 1, every), start=1)
  ]
  return [start, *laps]


def state(step):
  return {'params': {'keys': jnp.arange(24.0).reshape(4, 6) + step}, 'step': jnp.asarray(step)}


def meta(step):
  return Meta(step, Config(), BYTES)


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
  config = complete(config)
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
