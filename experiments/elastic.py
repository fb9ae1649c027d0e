"""Compare one model that serves three sizes with three models, and with `grow shrink`."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import saved_config
from tokenformer_jax.steps import elastic
from tokenformer_jax.training.loop import Trainer
from tokenformer_jax.training.prepare import prepare

RATES = (0.0, 0.25, 0.5)  # of steps that train only the first groups, in the last stage
FACTOR = 0.5  # of the small model's learning rate


def run(plan: Any, arm: Any) -> None:
  """Train chains of three groups, and measure each number of groups of the finished model.

  Args:
    plan: a `growth.Plan`.
    arm: the `growth.Arm` that grows twice.
  """
  for seed in plan.seeds:
    for rate in RATES:
      last = {'train__drop_groups': rate}
      workdir = plan.arm(f'elastic {rate:g}', arm, FACTOR, seed, last=last)
      _once(workdir / 'sizes.json', lambda workdir=workdir: losses(workdir))
      if not rate:
        _once(workdir / 'shrunk.json', lambda workdir=workdir: shrunk(workdir, plan.scale.width))


def _once(path: Path, measure: Any) -> None:
  if not path.exists():
    path.write_text(json.dumps(measure()))


def losses(workdir: Path) -> dict[str, float]:
  """Return bits per byte on held-out text by the number of first groups."""
  trainer = _trainer(workdir)
  definition = trainer.task.definition
  with jax.set_mesh(trainer.mesh):
    state, _ = trainer.first_state()
    kept = jax.jit(lambda params, count: elastic.keep_first(params, definition.info, count))
    found = {}
    for count in range(1, definition.group_count + 1):
      figures = trainer.evaluate({'params': kept(state['params'], count)})
      found[str(count)] = figures['eval/bits_per_byte']
  trainer.checkpoints.close()
  return found


def shrunk(workdir: Path, width: int) -> dict[str, float]:
  """Return bits per byte after `grow shrink` to one and two times the small model's tokens."""
  found = {}
  for size in (1, 2):
    target = workdir.parent / f'shrunk_{size}'
    counts = {'qkv': width * size, 'proj': width * size, 'ffn': 4 * width * size}
    if not target.exists():
      subprocess.run(_shrink(workdir, target, counts), check=True)
    trainer = _trainer(target)
    with jax.set_mesh(trainer.mesh):
      state, _ = trainer.first_state()
      found[str(size)] = trainer.evaluate(state)['eval/bits_per_byte']
    trainer.checkpoints.close()
  return found


def _shrink(source: Path, target: Path, counts: Mapping[str, int]) -> list[str]:
  sizes = ','.join(f'{name}={count}' for name, count in counts.items())
  command = [sys.executable, '-m', 'tokenformer_jax', 'grow', 'shrink', f'--source={source}']
  return [*command, f'--target={target}', f'--param_tokens={sizes}', '--examples=256']


def _trainer(workdir: Path) -> Trainer:
  config = saved_config.read(workdir / 'config.json', 'run the experiment again')
  return Trainer(prepare(config, workdir, sharding.find_devices()))
