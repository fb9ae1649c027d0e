"""Train a model: from a config to a work directory with checkpoints and figures."""

import contextlib
import functools
import os
from collections.abc import Callable, Generator
from typing import Any

import jax

from tokenformer_jax import tasks
from tokenformer_jax.config import Config, profile_range
from tokenformer_jax.errors import TransientError, UserError, arg
from tokenformer_jax.model import flops
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import hosts, messages, sharding
from tokenformer_jax.resolve import checks, origin
from tokenformer_jax.runs import batches as batches_lib
from tokenformer_jax.runs import checkpoint, saved_config
from tokenformer_jax.runs import claim as claim_lib
from tokenformer_jax.runs.checkpoint_meta import Meta, Seen
from tokenformer_jax.runs.metrics import Metrics, Window, Work
from tokenformer_jax.runs.wall_time import WallTime
from tokenformer_jax.steps import fit
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.steps.step import State
from tokenformer_jax.storage import paths
from tokenformer_jax.tasks import validation
from tokenformer_jax.trackers import feed
from tokenformer_jax.training import device_check, notices, start, tracked
from tokenformer_jax.training.prepare import PreparedRun, RunStage, prepare
from tokenformer_jax.training.watch import Watch

_EVALUATED = {'': 'params', 'ema_': 'ema'}  # prefix of the figures → entry of the state


def train(config: Config, workdir: str | os.PathLike[str]) -> State:
  """Train to `config.train.steps`, from the newest checkpoint in `workdir` if there is one.

  `config` is from `config.resolve`. The directory is made if it does not exist.

  Returns:
    The last state: see `step.initial_state`.
  """
  return train_or_stop(config, workdir, ends_process=False)[0]


def train_or_stop(
  config: Config, workdir: str | os.PathLike[str], *, ends_process: bool = True
) -> tuple[State, bool]:
  """Train as `train` does; also return whether a signal stopped it early.

  With `ends_process`, for commands, this process ends at once with status 2 if another one has
  taken over the work directory.
  """
  workdir = paths.parse_path(workdir)
  if config.train.compilation_cache:  # JAX reads it once, before the first program.
    jax.config.update('jax_compilation_cache_dir', config.train.compilation_cache)
  wall_time = WallTime()
  sharding.find_devices()  # Report missing devices before the work directory is touched.
  if config.train.trackers:
    hosts.by_first(lambda: feed.check_installed(config.train.trackers))
  with claim_lib.hold(
    workdir / 'claim',
    f'the work directory {workdir}',
    f'choose another {arg.workdir}',
    together=True,
    ends_process=ends_process,
  ) as claim:
    trainer, state, first = begin(config, workdir, claim, wall_time)
    with jax.set_mesh(trainer.mesh), contextlib.closing(trainer.checkpoints):
      state = trainer.train(state, first)
    return state, int(state['step']) < trainer.config.train.steps


def begin(
  config: Config,
  workdir: paths.Path,
  claim: claim_lib.Claim | None = None,
  wall_time: WallTime | None = None,
) -> tuple['Trainer', State, int]:
  """Prepare a run and make its first state.

  If the newest checkpoint cannot be read, prepare the run from the one before it. `config` is from
  `config.resolve`; for `claim` and `wall_time` see `Trainer`.

  Returns:
    The trainer, the state, and the number of steps that it has made.
  """
  damaged: dict[int, checkpoint.DamagedError] = {}
  while True:
    run = prepare(config, workdir, sharding.find_devices(), damaged)
    trainer = Trainer(run, claim, wall_time)
    try:
      with jax.set_mesh(run.mesh):
        return trainer, *trainer.first_state()
    except checkpoint.DamagedError as error:
      if run.origin.own is None:
        raise
      damaged[run.origin.own.step] = error
      trainer.checkpoints.close()


class Trainer:
  """One process of a run: its state and compiled steps, evaluation, saves, and the loop."""

  def __init__(
    self,
    run: PreparedRun,
    claim: claim_lib.Claim | None = None,
    wall_time: WallTime | None = None,
  ):
    """Define the compiled steps of a run from `prepare`.

    `claim` is the claim on the work directory, which is checked before every write; None: no other
    process writes there. `wall_time` has run since the start of this process's work; None: it
    starts here.
    """
    self.run, self.claim, self.wall_time = run, claim, wall_time or WallTime()
    self.config, self.mesh, self.task = run.config, run.mesh, run.task
    self.train_step = fit.make_fitted_step(run.program, run.mesh)
    self.eval_step = step_lib.make_eval_step(run.task, run.mesh)
    self.rows = local_rows(sharding.batch_sharding(run.mesh), run.config.data.batch_size)

  def train(self, state: State, first: int) -> State:
    """Train from a state that has made `first` steps, and return the last state."""
    run, steps = self.run, self.config.train.steps
    if first >= steps:
      checks.check_finished(self.config, run.origin)
      messages.say(
        f'{run.workdir} is trained to step {first} already; raise {arg.config}.train.steps to go on'
      )
      return state
    notices.say_changes(run)
    for warning in notices.warnings_for(self.config, run.program.growth):
      messages.say(warning)
    self._check_claim()
    _make_writable(run.workdir)
    written = saved_config.to_text(self.config)
    hosts.by_first(lambda: paths.write(run.workdir / 'config.json', written))
    metrics = Metrics(
      run.workdir,
      first_step=first,
      steps=steps,
      trackers=(trackers := self.config.train.trackers),
      about=tracked.about(run) if trackers else None,
      has_figures=self._has_figures(first),
    )
    with contextlib.closing(metrics), hosts.StopRequest() as stop:
      metrics.say(self._description(first))
      if run.teacher is not None:
        metrics.say(run.teacher.description(run.stages[0].task.config))
      if self._is_new_born(first):
        self._evaluate(state, first, metrics)
      return self._loop(state, first, metrics, stop)

  def first_state(self) -> tuple[State, int]:
    """Return the state to start from, and the number of steps it has made: see `start`."""
    return start.first_state(self.run, lambda: self.checkpoints)

  @functools.cached_property
  def checkpoints(self) -> checkpoint.Checkpoints:
    """The checkpoints of the run; to open them makes their directory, so refusals come before."""
    return checkpoint.Checkpoints(self.run.workdir, keep=self.config.train.keep_checkpoints)

  @functools.cached_property
  def _fixed(self) -> tuple[Params, ...]:
    """The fixed arguments of every step: the parameters of its teacher, if any."""
    teacher = self.run.teacher if self.task.teacher else None
    return () if teacher is None else (teacher.read(self.mesh),)

  @functools.cached_property
  def _checked_step(self) -> Callable[..., tuple[State, dict[str, jax.Array]]]:
    """The training step that also looks for faulty devices; its first argument is the number."""
    return device_check.Repeated(lambda *arguments: self.train_step(*arguments), self.mesh)

  def _is_new_born(self, first: int) -> bool:
    """Return whether the model was made from another one and has not been trained since."""
    lineage = self.run.origin.lineage
    return bool(lineage) and first == lineage[-1].first_step

  def _has_figures(self, first: int) -> bool:
    """Return whether the run itself has trained long enough to have written figures."""
    origin = self.run.origin
    if origin.own is None or origin.own.contents != 'model':
      return False
    born = max(self.config.train.decay_from, *(action.first_step for action in origin.lineage), 0)
    return first - born >= origin.own.config.train.log_every

  def evaluate(self, state: State) -> dict[str, float]:
    """Return the task's figures on the validation split, under names such as `eval/loss`.

    If the run keeps an average of the parameters, its figures have names such as `eval/ema_loss`.
    """
    versions = {prefix: state[name] for prefix, name in _EVALUATED.items() if name in state}

    def sums(params: Params, batch: tasks.Batch) -> Any:
      return self.eval_step(params, batch, *self._fixed)

    figures = validation.figures(self.task, sums, versions, self.rows, self.mesh)
    return {f'eval/{name}': value for name, value in figures.items()}

  def _loop(self, state: State, first: int, metrics: Metrics, stop: hosts.StopRequest) -> State:
    config, steps = self.config.train, self.config.train.steps
    profile = _Profile(self.run.workdir, profile_range(config))
    window, fixed, wall_time = self._window(), self._fixed, self.wall_time
    devices = f'{self.mesh.size} × {self.mesh.devices.flat[0].device_kind}'
    metrics.times(first, {'devices': devices, **wall_time.lap('starting')})
    with (
      contextlib.closing(self.batches(first, metrics.say)) as batches,
      Watch(self.run.workdir, wall_time, self.claim, first=first, steps=steps) as watch,
    ):
      for step, (stage, work, batch) in enumerate(wall_time.reading(batches), start=first + 1):
        profile.before(step)
        if _due(step, config.check_devices):
          state, figures = self._checked_step(step, state, batch, *fixed)
        else:
          state, figures = self.train_step(state, batch, *fixed)
        window.add(figures, work)
        watch.made(step, figures['loss'])
        profile.after(step, figures)
        stopping = stop.after(step)  # Ask once; a later signal waits for the next step.
        last, save_again = step == steps or stopping, False
        if step % config.log_every == 0 or last:
          self._check_claim()
          of_data = stage.task.data_figures(step, stage.position)
          metrics.write(step, window.figures() | of_data)
          metrics.times(step, {**wall_time.lap(device_seconds=window.device_seconds)})
          save_again = self.checkpoints.failed()
          self._stop_if_diverged(step, window.skipped_in_a_row)
        loss = None
        if step == steps or (_due(step, config.eval_every) and not stopping):
          loss = self._evaluate(state, step, metrics)
          window.restart_clock()
        if _due(step, config.checkpoint_every) or last or save_again:
          self._check_claim()
          metrics.publish()
          with wall_time.spent_on('saving'):
            self._save(step, state, loss, stage, window, wait=last)
          window.restart_clock()
        if stopping and step < steps:
          metrics.say(f'asked to stop: saving step {step}')
          break
    profile.close()
    with wall_time.spent_on('saving'):
      self.checkpoints.wait()
    last = int(state['step'])
    metrics.times(last, {**wall_time.lap()})
    metrics.say(f'saved {self.run.workdir}/checkpoints/{last}')
    return state

  def batches(
    self, first: int, say: Callable[[str], None]
  ) -> Generator[tuple[RunStage, Work, tasks.Batch], None, None]:
    """Yield the batch of each step after `first` on the devices, with its stage and its work.

    `say` prints a line where batches of another size begin.
    """
    shards, compiled = sharding.batch_sharding(self.mesh), set()
    for stage in self.run.stages:
      config, size, begin = stage.task.config, stage.batch_size, max(first, stage.position.step)
      if self.config.data.has_stages:
        shape = f'{size:,} rows, {config.data.units_per_step:,} {config.data.unit}'
        new = '' if shape in compiled else '; compiling the step for them'
        say(f'from step {begin + 1:,} on, batches are {shape}{new}')
        compiled.add(shape)
      work = Work(config.data.units_per_step, flops.step_flops(config))
      rows = local_rows(shards, size)
      batches = stage.task.train_batches(rows, begin, stage.end, stage.position)
      with contextlib.closing(batches):
        for local in batches:
          yield stage, work, validation.to_devices(local, size, rows, self.mesh)

  def _save(
    self,
    step: int,
    state: State,
    loss: float | None,
    stage: RunStage,
    window: Window,
    *,
    wait: bool,
  ) -> None:
    run = self.run.origin
    batches = batches_lib.until(origin.batches(self.config, run), step)
    meta = Meta(
      step,
      self.config,
      self.task.vocabulary(),
      lineage=run.lineage,
      seen=Seen(stage.seen(step), self.task.digests[0], batches),
      teacher=self.run.teacher and self.run.teacher.record,
      losses=tuple(window.losses()),
      run=run.run,
      family=run.meta.family if run.meta else '',
    )
    self.checkpoints.save(meta, state, loss, wait=wait)

  def _evaluate(self, state: State, step: int, metrics: Metrics) -> float:
    with metrics.pause(), self.wall_time.spent_on('evaluation'):
      figures = self.evaluate(state)
      self._check_claim()
      metrics.write(step, figures)
      if sample := self.task.sample(state['params']):
        metrics.text(step, 'sample', sample)
    return figures['eval/loss']

  def _stop_if_diverged(self, step: int, in_a_row: int) -> None:
    if in_a_row < self.config.train.max_skipped_steps:
      return
    self.checkpoints.wait()
    saved = self.checkpoints.steps()
    last = f'the last checkpoint is step {saved[-1]}' if saved else 'no checkpoint is saved yet'
    large = ' or too large (optim.skip_deviations)' if self.run.program.window else ''
    raise UserError(
      f'the loss or its gradient was not finite{large} in {in_a_row} steps in a row, from step '
      f'{step - in_a_row + 1}; {last}; lower config.optim.learning_rate or lengthen '
      'config.optim.warmup_steps and run again'
    )

  def _check_claim(self) -> None:
    if self.claim:
      self.claim.check()

  def _window(self) -> Window:
    peak, origin = flops.peak_flops(self.mesh.devices.flat[0]), self.run.origin
    return Window(
      unit=self.config.data.unit,
      peak_flops=peak and peak * self.mesh.size,
      derived=self.task.train_figures,
      losses=origin.own.losses if origin.own else (),
    )

  def _description(self, first: int) -> str:
    on = self.mesh.devices.flat[0].device_kind
    if self.mesh.size > 1:
      on = f'{" × ".join(f"{size} {axis}" for axis, size in self.mesh.shape.items())} of {on}'
    return (
      f'{f"going on after step {first}" if first else "training"} in {self.run.workdir}: '
      f'{self.task.definition.counts}, {self.task.describe_data()}, on {on}'
    )


def _make_writable(workdir: paths.Path) -> None:
  """Make the work directory."""
  try:
    paths.make_writable(workdir)
  except TransientError:
    raise
  except paths.errors(workdir) as error:
    reason = paths.reason(error)
    raise UserError(
      f'the work directory {workdir} cannot be written ({reason}); choose another {arg.workdir}'
    ) from error


def local_rows(batches: jax.sharding.NamedSharding, batch_size: int) -> list[int]:
  """Return the rows of a global batch that this process's devices hold, ascending."""
  rows: set[int] = set()
  for index in batches.addressable_devices_indices_map((batch_size,)).values():
    rows.update(range(batch_size)[index[0]] if index else ())
  return sorted(rows)


def _due(step: int, every: int) -> bool:
  return every > 0 and step % every == 0


class _Profile:
  """A profiler of a range of steps. It writes to the work directory for TensorBoard and xprof."""

  def __init__(self, workdir: paths.Path, steps: tuple[int, int] | None):
    self._workdir = workdir
    self._first, self._last = steps or (0, -1)
    self._files: paths.Growing | None = None  # while it runs

  def before(self, step: int) -> None:
    if self._files is None and self._first <= step <= self._last:
      self._files = paths.Growing(self._workdir)
      jax.profiler.start_trace(str(self._files.directory / 'profile'))

  def after(self, step: int, figures: dict[str, jax.Array]) -> None:
    if self._files is not None and step >= self._last:
      jax.block_until_ready(figures)
      self.close()

  def close(self) -> None:
    if self._files is not None:
      jax.profiler.stop_trace()
      self._files.close()
      self._files = None
