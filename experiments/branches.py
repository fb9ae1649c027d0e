"""Train runs that share trunks, in one process, with one compiled step for each model.

A step is that of `train.py`, with its learning rate as an argument: runs of all rates, seeds and
lengths share a program. A point of a run is a file with the state, from which other runs go on. A
killed process loses a few minutes; the same command goes on.
"""

import dataclasses
import functools
import io
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tokenformer_jax.config import (
  Config,
  ConstantSchedule,
  GrowConfig,
  ModelConfig,
  WSDSchedule,
  with_references,
)
from tokenformer_jax.config.groups import with_records_of
from tokenformer_jax.grow import apply, plan
from tokenformer_jax.parallel import sharding
from tokenformer_jax.resolve import sizes
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.steps import optim, schedules, step
from tokenformer_jax.steps.last_growth import growth_from
from tokenformer_jax.tasks import validation
from tokenformer_jax.training.prepare import PreparedRun, prepare

CHUNK = 32  # steps of one call; a run begins and ends at a multiple of it
CURVE = 256  # steps of a point of a curve
_SAVE_SECONDS = 240  # between the states of a run that goes on


@dataclasses.dataclass(frozen=True)
class Point:
  """A step of a run: the file of its state, the run's config, and the point before its growth."""

  path: Path
  config: Config
  step: int
  grown: 'Point | None' = None


@dataclasses.dataclass(frozen=True)
class Ended:
  """What a run has measured, in bits a byte, and seconds of the processor for a step.

  Attributes:
    loss: on held-out text; NaN for a run that decays no rate.
    curve: the mean training loss of `CURVE` steps, by the last one of them.
    step_seconds: of this process alone; other work on the machine makes it longer.
  """

  loss: float
  curve: dict[int, float]
  step_seconds: float


class Programs:
  """The compiled functions of one model on one text: steps, evaluation, and growth to it.

  Args:
    config: any config of the complete model and the text; rate, seed and steps have no meaning.
    before: the model before the last growth, or None.
    rows: of a batch of an evaluation.
  """

  def __init__(self, config: Config, before: ModelConfig | None, rows: int):
    self.config, self.before, self.run = config, before, _prepared(config, 0)
    self._runs = functools.cache(lambda seed: _prepared(self.config, seed))
    self._eval = _prepared(self.config, 0, rows)
    self._eval_step = step.make_eval_step(self._eval.task, self._eval.mesh)

  @functools.cached_property
  def advance(self) -> Any:
    """Make steps: `(state, batches, rates, the step of the growth) → (state, losses)`."""
    config, task, before, mesh = self.run.config, self.run.task, self.before, self.run.mesh
    growth = before and growth_from(before, config.model, self.config.grow.place)

    def advance(state: Any, batches: Any, rates: Any, grown_at: Any) -> Any:
      last = growth and dataclasses.replace(growth, updates=grown_at)

      def one(state: Any, given: Any) -> Any:
        batch, rate = given
        tx = optim.make_optimizer(config.optim, lambda count: rate, task.definition.info, last)
        program = step.Program(config, task, last, lambda count: rate, tx)
        state, figures = step.make_train_step(program, mesh)(state, batch)
        return state, figures['loss']

      return jax.lax.scan(one, state, (batches, rates))

    return jax.jit(advance, donate_argnums=0)

  def first_state(self, seed: int) -> Any:
    """Return a new state."""
    return step.make_first_state(self.run.program, self.run.mesh)(seed)

  def grow(self, state: Any) -> Any:
    """Return a state of the model before, grown to this one."""
    before, grow = self.before, self.config.grow
    steps = plan.check(before, self.run.config.model, grow)
    return jax.jit(lambda state: apply.grow_state(state, before, steps, grow))(state)

  def batches(self, seed: int, first: int, last: int) -> Iterator[np.ndarray]:
    """Yield the batches of `CHUNK` steps at a time."""
    run = self._runs(seed)
    rows = list(range(run.config.data.batch_size))
    one_by_one = run.task.train_batches(rows, first, last, run.position)
    for _ in range(first, last, CHUNK):
      yield np.stack([next(one_by_one) for _ in range(CHUNK)])
    one_by_one.close()

  def bits(self, state: Any) -> float:
    """Return the loss on the held-out text of `train.eval_batches`, in bits a byte."""
    task, rows = self._eval.task, list(range(self._eval.config.data.batch_size))
    params = {'': state['params']}
    return validation.figures(task, self._eval_step, params, rows, self._eval.mesh)['bits_per_byte']


def completed(config: Config, start: Point | None) -> Config:
  """Return a config whose model has all sizes, as a run from a point has them."""
  if start is None:
    return complete(config)
  source = start.config.model
  model = with_references(sizes.of_text(config, source, read=True), source, config.grow)
  return dataclasses.replace(config, model=with_records_of(model, source))


def _prepared(config: Config, seed: int, rows: int = 0) -> PreparedRun:
  data = dataclasses.replace(config.data, batch_size=rows or config.data.batch_size)
  train = dataclasses.replace(config.train, seed=seed, steps=1)
  config = dataclasses.replace(config, data=data, train=train, grow=GrowConfig())
  return prepare(config, Path('no_checkpoint'), sharding.find_devices())


class Runs:
  """Runs in a folder: made once, and continued where a killed process left them."""

  def __init__(self, out: Path, rows: int = 64):
    """Keep runs below `out`; a batch of an evaluation has so many rows."""
    self.out, self.rows = out, rows
    self._programs: dict[str, Programs] = {}

  def train(
    self,
    name: str,
    config: Config,
    start: Point | None = None,
    *,
    ends: Sequence[int],
    decay_from: int | None = None,
  ) -> tuple[Ended, dict[int, Point]]:
    """Train to the last of `ends`.

    Args:
      name: the folder of the run.
      config: `train.seed`, `optim.learning_rate` and the model are the run's. If the model is
        larger than that of `start`, it is grown as `grow` says.
      start: where the run begins; None: at step 0.
      ends: the steps whose states are kept.
      decay_from: where the rate begins to decay to zero; None: it stays.

    Returns:
      The figures, and the points at `ends`.
    """
    config = completed(config, start)
    grown = start and (start if start.config.model != config.model else start.grown)
    end = max(ends)
    folder = self.out / name
    points = {at: Point(folder / f'{at}.npz', config, at, grown) for at in ends}
    done = folder / 'done.json'
    if done.exists():
      read = json.loads(done.read_text())
      return Ended(**read | {'curve': {int(k): x for k, x in read['curve'].items()}}), points
    folder.mkdir(parents=True, exist_ok=True)
    programs = self._of(config, grown)
    state, first, curve = self._begin(programs, folder, config, start, grown)
    print(f'== {name}: steps {first:,} to {end:,}', flush=True)
    kind = ConstantSchedule() if decay_from is None else WSDSchedule(final_fraction=0.0)
    optimizer = dataclasses.replace(config.optim, schedule=kind)
    rate = schedules.learning_rate(optimizer, end, 0, decay_from or 0)
    losses, spent, saved, made = [], 0.0, time.monotonic(), 0
    for batches in programs.batches(config.train.seed, first, end):
      begin = time.process_time()
      rates = np.asarray(jax.vmap(rate)(np.arange(first, first + CHUNK)), np.float32)
      state, new = programs.advance(state, batches, rates, grown.step if grown else 0)
      losses += np.asarray(new).tolist()
      first += CHUNK
      if made:  # The first call compiles.
        spent += time.process_time() - begin
      made += 1
      if first % CURVE == 0 or first == end:
        curve[first], losses = float(np.mean(losses) / math.log(2)), []
      if first in points:
        _write(points[first].path, state, {})
      if time.monotonic() > saved + _SAVE_SECONDS and not losses:
        _write(folder / 'going.npz', state, curve)
        saved = time.monotonic()
    loss = math.nan if decay_from is None else programs.bits(state)
    ended = Ended(loss, curve, spent / max(1, made - 1) / CHUNK)
    _replace(done, json.dumps(dataclasses.asdict(ended)).encode())
    (folder / 'going.npz').unlink(missing_ok=True)
    return ended, points

  def _of(self, config: Config, grown: Point | None) -> Programs:
    """Return the programs of a model, which all its rates, seeds and lengths share."""
    optimizer = dataclasses.replace(config.optim, learning_rate=1.0)
    before = grown and grown.config.model
    key = repr((config.model, config.data, optimizer, config.grow, before))
    if key not in self._programs:
      self._programs[key] = Programs(config, before, self.rows)
    return self._programs[key]

  def _begin(
    self,
    programs: Programs,
    folder: Path,
    config: Config,
    start: Point | None,
    grown: Point | None,
  ) -> tuple[Any, int, dict[int, float]]:
    """Return the state to begin with, its step, and the curve so far."""
    if (folder / 'going.npz').exists():
      state, curve = _read(folder / 'going.npz', programs)
      return state, max(curve), curve
    if start is None:
      return programs.first_state(config.train.seed), 0, {}
    if grown is not start:
      return _read(start.path, programs)[0], start.step, {}
    state, _ = _read(start.path, self._of(start.config, start.grown))
    return programs.grow(state), start.step, {}


def _write(path: Path, state: Any, curve: dict[int, float]) -> None:
  buffer = io.BytesIO()
  leaves = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
  np.savez(buffer, curve=json.dumps(curve), **leaves)
  _replace(path, buffer.getvalue())


def _read(path: Path, programs: Programs) -> tuple[Any, dict[int, float]]:
  """Return the state in a file, of the shape that the programs have, and the curve with it."""
  run = programs.run
  shapes = run.program.abstract_state(run.mesh)
  with np.load(path) as file:
    leaves = [file[str(i)] for i in range(len(file.files) - 1)]
    curve = {int(at): x for at, x in json.loads(str(file['curve'])).items()}
  state = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
  return jax.device_put(state, run.program.state_shardings(run.mesh)), curve


def _replace(path: Path, content: bytes) -> None:
  """Write a file as a whole."""
  temporary = path.with_suffix('.new')
  temporary.write_bytes(content)
  os.replace(temporary, path)
