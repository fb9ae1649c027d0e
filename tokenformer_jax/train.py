"""A training run: from a config to a work directory with checkpoints and figures."""

import contextlib
import dataclasses
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax
from absl import logging
from jax.sharding import Mesh, NamedSharding

from tokenformer_jax import checkpoint, cli, flops, generate, optim, sharding
from tokenformer_jax import step as step_lib
from tokenformer_jax.config import Config, profile_range
from tokenformer_jax.data import order, store, tokenizers
from tokenformer_jax.errors import UserError
from tokenformer_jax.lm import Compute, define_lm
from tokenformer_jax.metrics import Metrics, memory_figures
from tokenformer_jax.params import Definition


def train(config: Config, workdir: str | os.PathLike[str]) -> step_lib.State:
  """Trains to `config.train.steps`, from the newest checkpoint in `workdir` if there is one.

  Args:
    config: from `config.resolve`.
    workdir: where checkpoints and figures go; made if it does not exist.

  Returns:
    The last state.

  Raises:
    UserError: anything that the user can put right: see the message.
  """
  run = Run(config, Path(workdir))
  with jax.set_mesh(run.mesh):
    return run.train()


def fill_in(config: Config) -> Config:
  """Replaces the zeros that stand for "what fits": vocabulary, reference counts, positions.

  Raises:
    UserError: the tokenizer has more ids than the vocabulary.
  """
  model, ids = config.model, tokenizers.size_of(config.data.tokenizer)
  vocab_size = model.vocab_size or -(-ids // 128) * 128
  if vocab_size < ids:
    raise UserError(
      f'config.model.vocab_size is {vocab_size}, but the tokenizer {config.data.tokenizer!r} has '
      f'{ids} token ids; make it at least that, or 0 to have it fit'
    )
  counts = dataclasses.asdict(model.param_tokens)
  given = dataclasses.asdict(model.reference_tokens)
  reference = {kind: given[kind] or counts[kind] for kind in counts}
  model = dataclasses.replace(
    model,
    vocab_size=vocab_size,
    reference_tokens=dataclasses.replace(model.reference_tokens, **reference),
    max_length=model.max_length or config.data.sequence_length,
  )
  return dataclasses.replace(config, model=model)


def devices() -> list[jax.Device]:
  """All devices.

  Raises:
    UserError: there are none of the kind that JAX_PLATFORMS asks for.
  """
  try:
    return jax.devices()
  except RuntimeError as error:
    asked = os.environ.get('JAX_PLATFORMS', '')
    raise UserError(
      f'no device of the kind JAX_PLATFORMS={asked!r} was found ({str(error).splitlines()[0]}); '
      'unset it, or install jax for that device (pip install -e ".[tpu]" or ".[cuda]")'
    ) from error


class Run:
  """One process of a run: what is built once, and the loop over it."""

  def __init__(self, config: Config, workdir: Path):
    """Validates everything, then prepares the text, the work directory and the compiled steps."""
    if config.train.compilation_cache:
      jax.config.update('jax_compilation_cache_dir', config.train.compilation_cache)
    all_devices = devices()
    self.mesh = sharding.make_mesh(config.mesh, all_devices)
    self.config = config = fill_in(config)
    self.definition = define_lm(config.model, Compute.of(config))
    check_fits(config, self.definition, self.mesh)
    self.workdir = workdir
    _make_writable(workdir)
    self.store = _prepare_text(config)
    self.tx = optim.make_optimizer(config.optim, config.train.steps, self.definition.axes)
    self.batches = sharding.of_batch(self.mesh)
    self.rows = local_rows(self.batches, config.data.batch_size)
    self.train_step = step_lib.make_train_step(self.definition, self.tx, config, self.mesh)
    self.eval_step = step_lib.make_eval_step(self.definition, config, self.mesh)
    self.generator = generate.Generator(self.definition, config.model, Compute.of(config).dtype)
    self.checkpoints = checkpoint.Checkpoints(workdir, keep=config.train.keep_checkpoints)

  def train(self) -> step_lib.State:
    """Trains and returns the last state."""
    state, first = self.start()
    steps = self.config.train.steps
    if first >= steps:
      logging.info(
        '%s is trained to step %d already; raise train.steps to go on', self.workdir, first
      )
      print(
        f'{self.workdir} is trained to step {first} already; raise --config.train.steps to go on',
        file=sys.stderr,
      )
      return state
    _write_atomically(
      self.workdir / 'config.json', json.dumps(dataclasses.asdict(self.config), indent=2)
    )
    metrics = Metrics(
      self.workdir, first_step=first, steps=steps, tensorboard=self.config.train.tensorboard
    )
    self._describe(metrics, first)
    with contextlib.closing(metrics), _StopSignals() as stop:
      return self._loop(state, first, metrics, stop)

  def start(self) -> tuple[step_lib.State, int]:
    """The state to go on from, and the number of steps it has made."""
    shardings = step_lib.state_shardings(self.mesh, self.definition, self.tx)

    def new(seed: jax.Array) -> step_lib.State:
      return step_lib.initial_state(self.definition, self.tx, seed)

    abstract = sharding.with_shardings(jax.eval_shape(new, 0), shardings)
    resumed = resume(self.checkpoints, self.config, abstract)
    if resumed is not None:
      return resumed
    # The parameters' source takes the place of new ones; the optimizer starts afresh.
    state = jax.jit(new, out_shardings=shardings)(self.config.train.seed)
    if self.config.init_from:
      del state['params']
      state['params'] = load_params(self.config, abstract['params'])
    return state, 0

  def _loop(
    self, state: step_lib.State, first: int, metrics: Metrics, stop: '_StopSignals'
  ) -> step_lib.State:
    config, steps = self.config.train, self.config.train.steps
    profile = _Profile(self.workdir, profile_range(config))
    window = _Window(self)
    batches = order.train_batches(
      self.store, self.config.data, config.seed, self.rows, first, steps
    )
    with contextlib.closing(batches):
      for step, rows in enumerate(batches, start=first + 1):
        profile.before(step)
        state, figures = self.train_step(state, self.to_devices(rows))
        window.add(figures)
        profile.after(step, figures)
        last = step == steps or stop.requested
        if step % config.log_every == 0 or last:
          metrics.write(step, window.figures())
          self.checkpoints.check()
          window.stop_if_diverged(step, self)
        loss = None
        evaluates = config.eval_every and step % config.eval_every == 0
        if (evaluates or step == steps) and not (stop.requested and step != steps):
          loss = self._evaluate(state, step, metrics)
        if step % config.checkpoint_every == 0 or last:
          self.checkpoints.save(step, state, self.config, self.store.tokenizer.to_json(), loss)
        if loss is not None or step % config.checkpoint_every == 0:
          window.restart_clock()
        if stop.requested and step != steps:
          metrics.say(f'stopping after step {step}: saving …')
          break
    self.checkpoints.wait()
    if step == steps:
      metrics.say(f'finished: {self.workdir}/checkpoints/{step}')
    else:
      metrics.say(f'saved {self.workdir}/checkpoints/{step}; to go on: {resume_command()}')
    self.checkpoints.close()
    return state

  def to_devices(self, local: np.ndarray) -> jax.Array:
    """The global batch [B, T + 1], from the rows that this process holds."""
    position = {row: i for i, row in enumerate(self.rows)}
    shape = (self.config.data.batch_size, local.shape[1])

    def part(index: tuple[slice, ...]) -> np.ndarray:
      start, stop, _ = index[0].indices(shape[0])
      return local[position[start] : position[stop - 1] + 1]

    return jax.make_array_from_callback(shape, self.batches, part)

  def _evaluate(self, state: step_lib.State, step: int, metrics: Metrics) -> float:
    figures = self.evaluate(state)
    metrics.write(step, figures)
    if self.config.train.sample_tokens:
      metrics.text(step, 'sample', self.sample_text(state))
    return figures['eval/loss']

  def evaluate(self, state: step_lib.State) -> dict[str, float]:
    """Loss on the validation split in nats a token, and what follows from it."""
    parts = [
      self.eval_step(state['params'], self.to_devices(rows))
      for rows in order.validation_batches(
        self.store, self.config.data, self.rows, self.config.train.eval_batches
      )
    ]
    sums = jax.tree.map(
      lambda *values: np.sum(np.asarray(values, np.float64)), *jax.device_get(parts)
    )
    loss = float(sums.nats / sums.tokens)
    return {
      'eval/loss': loss,
      'eval/perplexity': _exp(loss),
      'eval/bits_per_byte': loss / math.log(2) / self.store.bytes_per_token('validation'),
      'eval/accuracy': float(sums.correct / sums.tokens),
    }

  def sample_text(self, state: step_lib.State) -> str:
    """What the model writes after `config.train.sample_prompt`."""
    config, tokenizer = self.config.train, self.store.tokenizer
    prompt = np.append(tokenizer.end_of_document, tokenizer.encode(config.sample_prompt))
    length = config.sample_tokens
    if self.config.model.positions == 'learned':
      length = max(1, min(length, self.config.model.max_length - len(prompt)))
    sampling = generate.Sampling(seed=config.seed)
    ids = self.generator(state['params'], prompt, length=length, sampling=sampling)
    return config.sample_prompt + ''.join(generate.stream_text(tokenizer, ids))

  def _describe(self, metrics: Metrics, first: int) -> None:
    mesh = ' × '.join(f'{size} {axis}' for axis, size in self.mesh.shape.items())
    device = self.mesh.devices.flat[0].device_kind
    verb = f'resuming at step {first}' if first else 'training'
    metrics.say(
      f'{verb}: {self.definition.count:,} parameters, {len(self.store.train):,} training tokens '
      f'({self.store.bytes_per_token("train"):.2f} bytes each), mesh {mesh} of {device}, '
      f'in {self.workdir}'
    )


class _Window:
  """The figures since the last log point, left on the device until they are asked for."""

  def __init__(self, run: Run):
    self._run = run
    self._pending: list[dict[str, jax.Array]] = []
    self._clock, self._timed_steps = time.monotonic(), 0
    self._last: dict[str, float] = {}

  def add(self, figures: dict[str, jax.Array]) -> None:
    self._pending.append(figures)
    self._timed_steps += 1

  def restart_clock(self) -> None:
    """Leaves out of the speed what was not training."""
    self._clock, self._timed_steps = time.monotonic(), 0

  def figures(self) -> dict[str, float]:
    """Waits for the device; the loss is the mean over the window, the rest that of its last step."""
    fetched = jax.device_get(self._pending)
    timed, seconds = self._timed_steps, time.monotonic() - self._clock
    self._pending = []
    self.restart_clock()
    self._last = {name: float(value) for name, value in fetched[-1].items()}
    losses = [step['loss'] for step in fetched if np.isfinite(step['loss'])]
    loss = float(np.mean(losses)) if losses else math.nan
    figures = {f'train/{name}': value for name, value in self._last.items()}
    figures['train/loss'] = loss
    figures['train/perplexity'] = _exp(loss)
    bytes_per_token = self._run.store.bytes_per_token('train')
    figures['train/bits_per_byte'] = loss / math.log(2) / bytes_per_token
    return {**figures, **self._speed(seconds / timed), **memory_figures()}

  def _speed(self, step_seconds: float) -> dict[str, float]:
    config, mesh = self._run.config, self._run.mesh
    tokens = config.data.batch_size * config.data.sequence_length
    step_flops = tokens * flops.train_flops(config.model, config.data.sequence_length)
    figures = {
      'perf/step_seconds': step_seconds,
      'perf/tokens_per_second': tokens / step_seconds,
      'perf/model_tflops_per_second': step_flops / step_seconds / 1e12,
    }
    if peak := flops.peak_flops(mesh.devices.flat[0]):
      figures['perf/mfu'] = step_flops / step_seconds / (peak * mesh.size)
    return figures

  def stop_if_diverged(self, step: int, run: Run) -> None:
    """Raises if too many steps in a row had no finite gradient."""
    in_a_row = int(self._last['skipped_in_a_row'])
    if in_a_row >= run.config.train.max_skipped_steps:
      run.checkpoints.wait()
      saved = run.checkpoints.steps()
      last = f'the last checkpoint is step {saved[-1]}' if saved else 'no checkpoint is saved yet'
      raise UserError(
        f'the loss or its gradient was not finite in {in_a_row} steps in a row, from step '
        f'{step - in_a_row + 1}; {last}; lower optim.learning_rate or lengthen optim.warmup_steps '
        'and run again'
      )


def _exp(loss: float) -> float:
  """exp, without overflow for the loss of a run that diverges."""
  return math.exp(min(loss, 700.0)) if not math.isnan(loss) else math.nan


def check_fits(config: Config, definition: Definition, mesh: Mesh) -> None:
  """Checks that parameters, heads and batch can be split over the mesh.

  Raises:
    UserError: something does not divide; the message says what.
  """
  sharding.check_divides(mesh, definition.abstract, definition.axes)
  sharding.check_divisible(mesh, 'heads', config.model.heads, 'of config.model.heads')
  parts = config.optim.accumulation_steps
  rows = f'of config.data.batch_size / optim.accumulation_steps = {config.data.batch_size}/{parts}'
  sharding.check_divisible(mesh, 'batch', config.data.batch_size // parts, rows)


def local_rows(batches: NamedSharding, batch_size: int) -> list[int]:
  """The rows of a global batch that this process's devices hold, ascending."""
  rows: set[int] = set()
  for index in batches.addressable_devices_indices_map((batch_size,)).values():
    rows.update(range(*index[0].indices(batch_size)))
  return sorted(rows)


def resume(
  checkpoints: checkpoint.Checkpoints, config: Config, abstract: step_lib.State
) -> tuple[step_lib.State, int] | None:
  """The newest state that can be read and its step, or None in a new work directory.

  A damaged checkpoint is named and moved to `damaged/`, and the one before it is taken.

  Raises:
    UserError: the checkpoint is of another model, or all of them are damaged.
  """
  damaged = {}
  for step in reversed(checkpoints.steps()):
    try:
      meta = checkpoints.meta(step)
      _check_same_model(
        config, meta.config, f'the checkpoint of step {step} in this work directory'
      )
      state = checkpoints.restore(meta, abstract)
    except checkpoint.DamagedError as error:
      logging.warning('the checkpoint of step %d is damaged: %s', step, error)
      damaged[step] = error
      continue
    for bad, error in damaged.items():
      moved = checkpoints.set_aside(bad)
      print(
        f'the checkpoint of step {bad} is damaged ({error}); moved to {moved}; going on from '
        f'step {step}',
        file=sys.stderr,
      )
    return state, step
  if damaged:
    reasons = '; '.join(f'step {step}: {error}' for step, error in damaged.items())
    raise UserError(
      f'no checkpoint in {checkpoints.directory} can be read ({reasons}); move that directory away '
      'to start afresh'
    )
  return None


def load_params(config: Config, abstract: step_lib.State) -> step_lib.State:
  """The parameters of the run `config.init_from`.

  Raises:
    UserError: there is no such run, or its model is another one.
  """
  directory, step = cli.split_source(config.init_from)
  checkpoints, meta = checkpoint.open_source(directory, step)
  _check_same_model(config, meta.config, f'config.init_from={config.init_from}')
  try:
    return checkpoints.restore(meta, {'params': abstract})['params']
  except checkpoint.DamagedError as error:
    raise UserError(
      f'the checkpoint config.init_from={config.init_from} is damaged: {error}'
    ) from error


def _check_same_model(config: Config, theirs: Config, where: str) -> None:
  found = checkpoint.differences(config.model, theirs.model, 'model.')
  if found:
    raise UserError(
      f'{where} is of another model: {"; ".join(found)}; set these keys to its values, or choose '
      'another --workdir'
    )


def resume_command() -> str:
  """The command line of this process, which goes on where it stopped."""
  return shlex.join(['python', *sys.argv])


def _prepare_text(config: Config) -> store.Store:
  """The token store: made by the first process, then by those that do not share its disk."""
  if jax.process_count() == 1:
    text = store.prepare(config.data)
  else:
    from jax.experimental import multihost_utils  # noqa: PLC0415

    text = store.prepare(config.data) if jax.process_index() == 0 else None
    multihost_utils.sync_global_devices('token store')
    text = text or store.prepare(config.data)
  # Raises if a split is too short for one sequence, before anything is compiled.
  next(order.validation_batches(text, config.data, [0], 1))
  return text


def _make_writable(workdir: Path) -> None:
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    probe = workdir / f'.probe-{os.getpid()}'
    probe.touch()
    probe.unlink()
  except OSError as error:
    raise UserError(
      f'the work directory {workdir} cannot be written ({error.strerror}); choose another --workdir'
    ) from error


def _write_atomically(path: Path, text: str) -> None:
  if jax.process_index() == 0:
    temporary = path.with_suffix('.tmp')
    temporary.write_text(text + '\n')
    os.replace(temporary, path)


class _StopSignals:
  """SIGTERM and Ctrl-C ask the loop to stop after the step at hand; a second Ctrl-C stops at once."""

  def __init__(self):
    self.requested = False
    self._before = {}

  def __enter__(self) -> '_StopSignals':
    for number in (signal.SIGTERM, signal.SIGINT):
      with contextlib.suppress(ValueError):  # not the main thread
        self._before[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *exception: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _handle(self, number: int, frame: object) -> None:
    del frame
    if self.requested and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.requested = True


class _Profile:
  """A profile of some steps, in the work directory, for TensorBoard and xprof."""

  def __init__(self, workdir: Path, steps: tuple[int, int] | None):
    self._directory = str(workdir / 'profile')
    self._steps = steps
    self._running = False

  def before(self, step: int) -> None:
    if self._steps and not self._running and self._steps[0] <= step <= self._steps[1]:
      jax.profiler.start_trace(self._directory)
      self._running = True

  def after(self, step: int, figures: dict[str, jax.Array]) -> None:
    if self._running and step >= self._steps[1]:
      jax.block_until_ready(figures)
      jax.profiler.stop_trace()
      self._running = False
