r"""Time the training steps of a run with each tracker: do trackers slow a run down?

  python benchmarks/trackers.py                                             the default run
  python benchmarks/trackers.py --config.model.width=32 --config.train.log_every=1

Needs `pip install -e ".[wandb,mlflow]"`; `--contenders` leaves trackers out. A contender is the run
itself, in a process and a temporary work directory of its own, held after every `--steps` steps.
They take turns, so that other load on the machine affects all of them. `off` fetches no figures,
`none` writes metrics.jsonl, and every other one adds its tracker, without network. A turn ends when
the device has made its last step; a tracker may still work then, in the turn of the next contender.
The first turns (compilation, start of trackers) do not count. The command prints seconds of a step
(median, least, most), and the median of the ratios to `none` in the same round with its quartiles.
`--measure=cpu` takes the seconds that all threads of the process compute, which other load on the
machine hardly changes.
"""

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from contenders import Contender

CONTENDERS = ('off', 'none', 'tensorboard', 'wandb', 'mlflow')
WARM_UP = 2


def serve(contender: str, steps: int, measure: str, changes: list[str]) -> None:
  """Run so many steps for every line of the standard input, and print the seconds of one."""
  import jax  # noqa: PLC0415 (not in the process that gives the turns)

  from tokenformer_jax import config  # noqa: PLC0415
  from tokenformer_jax.storage import paths  # noqa: PLC0415
  from tokenformer_jax.training import loop  # noqa: PLC0415

  clock = {'wall': time.perf_counter, 'cpu': time.process_time}[measure]
  values = config.defaults()
  for change in changes:
    key, _, value = change.removeprefix('--config.').partition('=')
    values.update_from_flattened_dict({key: type(config.lookup(values, key))(value)})
  trackers = () if contender in ('off', 'none') else (contender,)
  values.train.update(steps=10**6, eval_every=0, checkpoint_every=10**6, trackers=trackers)
  values.train.update(eval_batches=1, sample_tokens=0)
  if contender == 'off':
    values.train.log_every = 10**6

  said = io.StringIO()
  with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(said):
    os.chdir(folder)
    os.environ |= {'WANDB_MODE': 'offline', 'MLFLOW_TRACKING_URI': 'sqlite:///mlflow.db'}
    trainer, state, first = loop.begin(config.resolve(values), paths.parse_path(folder))
    made: list[Any] = []
    train_step, batches = trainer.train_step, trainer.batches

    def remembering(*arguments: Any) -> Any:
      state, figures = train_step(*arguments)
      made[:] = [figures]
      return state, figures

    def in_turns(*arguments: Any) -> Iterator[Any]:
      start = 0.0
      for step, batch in enumerate(batches(*arguments)):
        if step % steps == 0:
          jax.block_until_ready(made)
          if step:
            print((clock() - start) / steps, flush=True)
          if not sys.stdin.readline():
            return
          start = clock()
        yield batch

    trainer.train_step, trainer.batches = remembering, in_turns
    with jax.set_mesh(trainer.mesh), contextlib.closing(trainer.checkpoints):
      trainer.train(state, first)
  if 'left alone' in said.getvalue():
    sys.exit(said.getvalue())


def main() -> None:
  """Give the contenders turns and print a table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--steps', type=int, default=10, help='steps of a turn')
  parser.add_argument('--rounds', type=int, default=30)
  parser.add_argument('--measure', choices=('wall', 'cpu'), default='wall')
  parser.add_argument('--contenders', default=','.join(CONTENDERS), help='names, comma-separated')
  parser.add_argument('--serve', help=argparse.SUPPRESS)
  args, changes = parser.parse_known_args()
  if args.serve:
    serve(args.serve, args.steps, args.measure, changes)
    return
  arguments = [f'--steps={args.steps}', f'--measure={args.measure}', *changes]
  contenders = [Contender(__file__, name, arguments) for name in args.contenders.split(',')]
  for contender in contenders:
    for _ in range(WARM_UP):
      contender.step()
  for _ in range(args.rounds):
    for contender in contenders:
      contender.seconds.append(contender.step())
  for contender in contenders:
    contender.close()
  base = next(c for c in contenders if c.name == 'none').seconds
  print(f'{"":14}{"median s":>10}{"least":>9}{"most":>9}{"to none":>10}   quartiles')
  for contender in contenders:
    ratios = [mine / other for mine, other in zip(contender.seconds, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
      f'{contender.name:14}{statistics.median(contender.seconds):10.4f}'
      f'{min(contender.seconds):9.4f}{max(contender.seconds):9.4f}{middle:10.3f}   '
      f'{low:.3f} to {high:.3f}'
    )


if __name__ == '__main__':
  main()
