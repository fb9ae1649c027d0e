"""Measure the time of training steps of several configs, in turns."""

import statistics
import time
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from tokenformer_jax import tasks
from tokenformer_jax.config import Config
from tokenformer_jax.parallel import sharding
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.training import sizes

ROUNDS, STEPS = 5, 8


def measure(configs: dict[Hashable, Config]) -> dict[Hashable, dict[str, float]]:
  """Return by key the parameters, and the median seconds of a step over the rounds.

  `cpu` is the time that this process has spent on the processor. On a single core it is the time of
  a step on a free machine, also while other programs run. `wall` is the smallest time by the clock.
  """
  mesh = sharding.make_mesh(next(iter(configs.values())).mesh, sharding.find_devices())
  with jax.set_mesh(mesh):
    made = {name: _make(config, mesh) for name, config in configs.items()}
    times = {name: [] for name in configs}
    for _ in range(ROUNDS):
      for name, (step, state, batch, _) in made.items():
        clock, cpu = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
          state, figures = step(state, batch)
        jax.block_until_ready(figures)
        times[name].append((time.process_time() - cpu, time.perf_counter() - clock))
        made[name] = (step, state, *made[name][2:])
  return {
    name: {
      'parameters': made[name][3],
      'tokens': configs[name].data.batch_size * configs[name].data.sequence_length,
      'cpu': statistics.median(cpu for cpu, _ in found) / STEPS,
      'wall': min(wall for _, wall in found) / STEPS,
    }
    for name, found in times.items()
  }


def _make(config: Config, mesh: jax.sharding.Mesh) -> tuple[Any, Any, np.ndarray, int]:
  """Return the compiled step, a state after one step, a batch, and the number of parameters."""
  config = sizes.fill_in(config)
  task = tasks.make(config)
  program = step_lib.make_program(task, config)
  start = jax.jit(program.initial_state, out_shardings=program.state_shardings(mesh))
  step = step_lib.make_train_step(program, mesh)
  shape = task.abstract_batch().shape
  batch = np.random.default_rng(0).integers(0, 256, shape, dtype=np.int32)
  batch = jax.device_put(batch, sharding.batch_sharding(mesh))
  state, _ = step(start(0), batch)
  return step, state, batch, task.definition.count
