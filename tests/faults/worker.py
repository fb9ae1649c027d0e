"""A process that trains one tiny run after the other, each while something fails.

It is started with the shim loaded, and alone, so that neither the faults nor the clocks of a case
reach other tests. Steps are compiled once for all cases: a case then takes a second.
"""

import contextlib
import dataclasses
import functools
import gc
import multiprocessing
import os
import random
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

STEPS = 20
ATTEMPTS = 4  # of a run, while something fails and again when nothing does
FINISHED, AGAIN = 'finished', 'again'


@dataclasses.dataclass(frozen=True)
class Ended:
  """The files of a run after its last attempt.

  Attributes:
    attempts: how each ended: FINISHED, AGAIN (exit status 75), or the sentence of a user's mistake.
    checksums: of each checkpoint's arrays, by step.
    figures: of metrics.jsonl, by step: what does not depend on the time.
    damaged: the names below `damaged/`.
    said: what the process wrote to standard error, its libraries included.
  """

  attempts: list[str]
  checksums: dict[int, dict[str, int]] = dataclasses.field(repr=False)
  figures: dict[int, dict[str, float]] = dataclasses.field(repr=False)
  damaged: list[str]
  said: str = dataclasses.field(repr=False)


class Worker:
  """Runs cases in a process of its own; `Worker.run(case)` returns what the case returned."""

  def __init__(self, root: Path, library: Path, environment: dict[str, str]):
    """Start the process.

    Args:
      root: a directory for everything that it writes.
      library: the shim.
      environment: what is added to this process's.
    """
    context = multiprocessing.get_context('spawn')
    self._pipe, theirs = context.Pipe()
    added = {**environment, 'LD_PRELOAD': str(library)}
    with mock.patch.dict(os.environ, added):
      self._process = context.Process(target=_serve, args=(theirs, root, str(library)), daemon=True)
      self._process.start()
    theirs.close()

  def run(self, name: str, **arguments: Any) -> Any:
    """Have the process call one of its cases.

    Raises:
      AssertionError: it raised, with its traceback.
    """
    self._pipe.send((name, arguments))
    if not self._pipe.poll(300):
      raise AssertionError(f'{name}({arguments}) did not end within five minutes')
    failure, result = self._pipe.recv()
    assert failure is None, failure
    return result

  def close(self) -> None:
    self._process.kill()
    self._process.join()


def _serve(pipe: Any, root: Path, library: str) -> None:
  said = root.with_name(f'said_{root.name}')  # not below the directory where calls fail
  os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
  gc.set_threshold(100_000, 20, 100)  # as for_all_tests
  cases = _Cases(root, library, said)
  while True:
    name, arguments = pipe.recv()
    os.truncate(said, 0)
    try:
      pipe.send((None, getattr(cases, name)(**arguments)))
    except BaseException:
      pipe.send((traceback.format_exc(), None))


class _Cases:
  """The cases, in the process that has the shim."""

  def __init__(self, root: Path, library: str, said: Path):
    """Train the run that nothing disturbs, which the others have to equal."""
    # Imported here: only this process may have the faults, and its environment comes first.
    import bucket_server  # noqa: PLC0415
    import shim  # noqa: PLC0415
    import tiny_run  # noqa: PLC0415

    from tokenformer_jax.cli import main as cli  # noqa: PLC0415
    from tokenformer_jax.errors import TransientError, UserError  # noqa: PLC0415
    from tokenformer_jax.runs import checkpoint, metrics  # noqa: PLC0415
    from tokenformer_jax.steps import fit, step  # noqa: PLC0415
    from tokenformer_jax.storage import paths, retry  # noqa: PLC0415
    from tokenformer_jax.training import loop  # noqa: PLC0415

    self._shim = shim.Shim(library)
    cli.quiet_orbax()  # as in a command
    self._train, self._checkpoint, self._metrics = loop.train, checkpoint, metrics
    self._passing, self._mistake = TransientError, UserError
    self._root, self._said, self._path = root, said, paths.parse_path
    self._bucket = bucket_server.Server('bucket')
    threading.Thread(target=self._bucket.serve_forever, daemon=True).start()
    os.environ |= self._bucket.environment
    retry.PAUSES = (0.001, 0.002, 0.004, 0.008)
    fit.make_fitted_step = _once(fit.make_fitted_step, lambda program, mesh: program.config)
    step.make_eval_step = _once(step.make_eval_step, lambda task, mesh: task.config)
    self._source = tiny_run.write_corpus(root / 'corpus')
    self._make_config = tiny_run.config
    self._config = self._with_cache(root / 'cache')
    self._unbroken = root / 'unbroken'
    self._reference = self._until_finished(self._config, self._unbroken)

  def reference(self) -> Ended:
    """Return what the run left that nothing disturbs."""
    return self._reference

  def failing_calls(self, seed: int) -> Ended:
    """Fail file calls while a run starts, tokenizes, restores, saves and evaluates; then end it."""
    rng = random.Random(seed)
    config, workdir = self._drawn(rng, f'failing_{seed}')
    rate = {'one_in': rng.choice([20, 60, 200]), 'burst': rng.choice([1, 2, 8])}
    with self._shim.failing(self._root, seed=seed, **rate):
      attempts = self._attempts(config, workdir)
    return self._until_finished(config, workdir, attempts)

  def failing_bucket(self, seed: int) -> Ended:
    """Fail calls of an object store while a run starts, restores and saves; then end it."""
    rng = random.Random(seed)
    workdir, objects = f'gs://bucket/runs/{seed}', self._bucket.buckets['bucket']
    if rng.random() < 0.5:  # An earlier life came to step 15.
      self._attempt(self._config, workdir)
      for name in [name for name in objects if f'{seed}/checkpoints/20/' in name]:
        del objects[name]
    statuses = rng.choice([(503,), (429,), (500, 502, 504), (503, 0)])  # 0: no answer
    with self._bucket.failing(one_in=rng.choice([30, 60, 120]), statuses=statuses, seed=seed):
      attempts = self._attempts(self._config, workdir)
    return self._until_finished(self._config, workdir, attempts)

  def full_disk(self, seed: int) -> Ended:
    """Fill the disk at some byte; make room after the first attempt."""
    rng = random.Random(seed)
    config, workdir = self._drawn(rng, f'full_{seed}')
    with self._shim.failing(self._root, room=rng.choice([0, 1_000, 30_000, 300_000, 1_500_000])):
      attempts = [self._attempt(config, workdir)]
    return self._until_finished(config, workdir, attempts)

  def jumping_clock(self, seed: int) -> Ended:
    """Have the clock of the day jump by up to a day, forward and back, now and then."""
    rng = random.Random(seed)
    config, workdir = self._drawn(rng, f'clock_{seed}')
    now, one_in, ahead = time.time, rng.choice([30, 300]), 0.0

    def jumping() -> float:
      nonlocal ahead
      if rng.randrange(one_in) == 0:
        ahead = rng.uniform(-86_400, 86_400)
      return now() + ahead

    with mock.patch('time.time', jumping):
      return self._until_finished(config, workdir)

  def _with_cache(self, cache: Path) -> Any:
    return self._make_config(
      self._source, cache, train__steps=STEPS, train__keep_checkpoints=99, mesh__fsdp=1
    )

  def _drawn(self, rng: random.Random, name: str) -> tuple[Any, Path]:
    """Draw if there is a token store, and an earlier life; return config and work directory."""
    workdir, config = self._root / name, self._config
    if rng.random() < 0.5:
      config = self._with_cache(self._root / f'{name}_cache')
    if lived := rng.choice([0, 5, 15]):
      shutil.copytree(self._unbroken, workdir)
      for step in self._reference.checksums:
        if step > lived:
          shutil.rmtree(workdir / 'checkpoints' / str(step))
    return config, workdir

  def _attempt(self, config: Any, workdir: os.PathLike[str] | str) -> str:
    try:
      self._train(config, workdir)
    except self._passing:
      return AGAIN
    except self._mistake as error:
      return str(error)
    return FINISHED

  def _attempts(self, config: Any, workdir: os.PathLike[str] | str) -> list[str]:
    """Train again and again, as `launch/restart.sh` does; return how each attempt ended."""
    attempts = []
    while len(attempts) < ATTEMPTS and attempts[-1:] != [FINISHED]:
      attempts.append(self._attempt(config, workdir))
    return attempts

  def _until_finished(
    self, config: Any, workdir: os.PathLike[str] | str, attempts: Sequence[str] = ()
  ) -> Ended:
    """Train to the end, after other attempts."""
    attempts = [*attempts, *self._attempts(config, workdir)]
    return Ended(attempts, *self._left(workdir), self._said.read_text())

  def _left(self, workdir: os.PathLike[str] | str) -> tuple[Any, ...]:
    """Read checksums, figures and damaged checkpoints of a run."""
    workdir = self._path(workdir)
    checkpoints = self._checkpoint.Checkpoints(workdir)
    with contextlib.closing(checkpoints):
      checksums = {step: checkpoints.meta(step).checksums for step in checkpoints.steps()}
    lines = self._metrics.read(workdir)
    figures = {
      line['step']: {n: v for n, v in line.items() if not n.startswith('perf/')} for line in lines
    }
    damaged = workdir / 'damaged'
    return checksums, figures, [p.name for p in damaged.iterdir()] if damaged.exists() else []


def _once(make: Callable[..., Any], config_of: Callable[..., Any]) -> Callable[..., Any]:
  """Make a function of configs once for all that differ in the place of their token store."""
  made = {}

  @functools.wraps(make)
  def remembered(*arguments: Any) -> Any:
    config = config_of(*arguments)
    key = dataclasses.replace(config, data=dataclasses.replace(config.data, cache_dir=''))
    if key not in made:
      made[key] = make(*arguments)
    return made[key]

  return remembered
