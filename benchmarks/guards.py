r"""Time what the guards of a run cost: the same steps with and without them, in turns.

  python benchmarks/guards.py                    two layers on the CPU
  python benchmarks/guards.py --model=layer*12 --width=768 --batch=16

`skip` skips outliers (optim.skip_deviations), `watched` has the watch of a run with its heartbeat,
and `checked` computes every step twice (train.check_devices=1). Every round makes a block of steps
of each, so that other load on the machine affects all of them. The command prints milliseconds a
step (median, least, most) and the median of the ratios to `plain` in the same round.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from tokenformer_jax import config, tasks
from tokenformer_jax.parallel import sharding
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.runs.wall_time import WallTime
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.training import device_check
from tokenformer_jax.training.watch import Watch

Block = Callable[[int], float]  # makes so many steps, and returns the seconds of one


def plain_block(args: argparse.Namespace, *, skip: float = 0.0, checked: bool = False) -> Block:
  """Return blocks of steps of a run with these guards."""
  values = config.defaults()
  values.model.update(width=args.width, pattern=args.model, vocab_size=4096)
  values.data.batch_size = args.batch
  values.optim.skip_deviations = skip
  values.train.compiler_options = 'deterministic'
  resolved = complete(config.resolve(values))
  mesh = sharding.make_mesh(resolved.mesh)
  program = step_lib.make_program(tasks.make(resolved), resolved)
  step = step_lib.make_train_step(program, mesh)
  twice = device_check.Repeated(step, mesh)
  state = jax.jit(program.initial_state, out_shardings=program.state_shardings(mesh))(0)
  shape = (args.batch, resolved.data.sequence_length + 1)
  ids = np.random.default_rng(0).integers(0, 4096, shape, np.int32)
  batch = jax.device_put(ids, sharding.batch_sharding(mesh))

  def block(steps: int, made: Callable[[int, jax.Array], None] = lambda *_: None) -> float:
    nonlocal state
    begin = time.perf_counter()
    with jax.set_mesh(mesh):
      for number in range(1, steps + 1):
        state, figures = twice(number, state, batch) if checked else step(state, batch)
        made(number, figures['loss'])
      jax.block_until_ready(state)
    return (time.perf_counter() - begin) / steps

  return block


def watched_block(args: argparse.Namespace) -> Block:
  """Return blocks of steps of a run that is watched."""
  block = plain_block(args)

  def watched(steps: int) -> float:
    clock = WallTime()
    clock.lap('starting')
    with (
      tempfile.TemporaryDirectory() as workdir,
      Watch(Path(workdir), clock, None, first=0, steps=steps) as watch,
    ):
      return block(steps, watch.made)

  return watched


def main() -> None:
  """Run the blocks in turns and print a table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--model', default='layer*2', help='the pattern of layers')
  parser.add_argument('--width', type=int, default=128)
  parser.add_argument('--batch', type=int, default=4)
  parser.add_argument('--steps', type=int, default=10, help='of a block')
  parser.add_argument('--rounds', type=int, default=21)
  args = parser.parse_args()
  blocks = {
    'plain': plain_block(args),
    'skip': plain_block(args, skip=6.0),
    'watched': watched_block(args),
    'checked': plain_block(args, checked=True),
  }
  for block in blocks.values():
    block(2)
  seconds = {name: [] for name in blocks}
  for _ in range(args.rounds):
    for name, block in blocks.items():
      seconds[name].append(block(args.steps))
  print(f'{"":10}{"median ms":>10}{"least":>9}{"most":>9}{"of plain":>10}')
  for name, times in seconds.items():
    ratios = [a / b for a, b in zip(times, seconds['plain'], strict=True)]
    median, least, most = (1000 * f(times) for f in (statistics.median, min, max))
    print(f'{name:10}{median:10.1f}{least:9.1f}{most:9.1f}{statistics.median(ratios):10.3f}')


if __name__ == '__main__':
  main()
