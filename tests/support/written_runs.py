"""Work directories as runs leave them, without a step computed."""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from tokenformer_jax.config import Config, LMConfig, TextConfig, TrainConfig
from tokenformer_jax.runs import checkpoint, saved_config
from tokenformer_jax.runs.checkpoint_meta import Meta, Seen
from tokenformer_jax.training import sizes

CONFIG = Config(
  model=LMConfig(vocab_size=4096),
  data=TextConfig(batch_size=16, sequence_length=256),
  train=TrainConfig(steps=100),
)


def write(path: Path, lines: Iterable[dict[str, Any]], config: Config | None = CONFIG) -> Path:
  """Writes a config and figures; returns the directory."""
  path.mkdir(parents=True)
  if config:
    (path / 'config.json').write_text(saved_config.to_text(config))
  add(path / 'metrics.jsonl', lines)
  return path


def finish(path: Path, config: Config, loss: float, seen: Seen) -> Path:
  """Writes a finished run, with a checkpoint of its step alone; returns the directory."""
  filled, step = sizes.fill_in(config), config.train.steps
  write(path, [{'step': step, 'eval/loss': loss}], filled)
  with contextlib.closing(checkpoint.Checkpoints(path, keep=1)) as checkpoints:
    meta = Meta(step, filled, {'kind': 'bytes'}, seen=seen)
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
