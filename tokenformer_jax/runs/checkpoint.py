"""Checkpoints by Orbax: asynchronous, self-contained, checked bit by bit when read.

A checkpoint holds three items: `state` (a nested dict of arrays), `meta` (JSON: format version,
step, the whole config, package versions, a checksum of every array) and `tokenizer` (JSON; for a
classifier, the names of its classes). These items suffice to resume, grow, evaluate and generate.

A checkpoint is damaged if a checksum, a digest or a format in it is wrong. A read error does not
mean damage: reading is tried again, and the checkpoint stays where it is.
"""

import contextlib
import dataclasses
import errno
import importlib.metadata
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging

from tokenformer_jax.errors import TransientError, UserError, arg
from tokenformer_jax.parallel import hosts
from tokenformer_jax.runs import checkpoint_meta, checksum, orbax_setup
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.runs.checkpoint_reader import (
  FORMAT_ERRORS,
  DamagedError,
  read_together,
  with_paths,
)
from tokenformer_jax.runs.orbax_setup import Deferred
from tokenformer_jax.storage import paths, retry
from tokenformer_jax.storage.retry import one_line

_T = TypeVar('_T')
Check = Callable[[Meta, paths.Path], object]  # raises a UserError for other contents
# Arrays are stored in chunks, so that writing and reading need little memory besides the arrays.
_SAVE_ARGS = ocp.SaveArgs(chunk_byte_size=64 * 2**20)
# An array that is written layer by layer has no chunk with numbers of two layers.
_BY_LAYER = dataclasses.replace(_SAVE_ARGS, shard_axes=(0,))
_FILE_BYTES = 64 * 2**20  # size of a file of chunks, which stays in memory until it is full
# The messages of TensorStore and of Orbax about files that were there.
_GONE = ('NOT_FOUND', 'Checkpoint directory does not exist')
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'tokenformer_jax')


class Checkpoints:
  """The checkpoints of one work directory, `WORKDIR/checkpoints/STEP`."""

  def __init__(self, workdir: paths.Path, *, keep: int | None = None):
    """Open the directory for reading or, with `keep`, for writing.

    The `keep` newest checkpoints stay, and the one with the lowest loss.
    """
    self.workdir, self.directory = workdir, paths.absolute(workdir) / 'checkpoints'
    self._reader = orbax_setup.make_reader()
    self._manager = None if keep is None else self._reach(lambda: self._open(keep))
    self._pending = False  # whether the outcome of the last save is unknown
    self._unwritten: int | None = None  # the step of the last save, unless it succeeded
    self._failures, self._again_at = 0, 0.0  # failed saves in a row, and the time to try again

  def _open(self, keep: int) -> ocp.CheckpointManager:
    self.directory.mkdir(parents=True, exist_ok=True)
    try:
      manager = orbax_setup.make_manager(self.directory, keep)
    except FORMAT_ERRORS as error:
      if retry.is_transient(error):
        raise
      logging.warning('the best checkpoint cannot be determined: %s', one_line(error))
      manager = orbax_setup.make_manager(self.directory, keep, metrics=False)
    # Orbax treats an unreadable directory as absent.
    if hidden := set(paths.steps(self.directory)) - set(manager.all_steps()):
      raise OSError(errno.EIO, f'the checkpoints {sorted(hidden)} could not be read')
    return manager

  @property
  def _writer(self) -> ocp.CheckpointManager:
    assert self._manager is not None, 'the directory is open for reading only'
    return self._manager

  def _reach(self, action: Callable[[], _T]) -> _T:
    """Return the result of an action on the directory, with retries."""
    try:
      return retry.retried(action, f'reading {self.directory}')
    except Exception as error:
      if not retry.is_for_user(error):
        raise
      raise UserError(
        f'{self.directory} cannot be opened ({one_line(error)}); check its permissions and your '
        'account'
      ) from error

  def steps(self) -> list[int]:
    """Return the steps of all complete checkpoints, ascending."""
    if self._manager is not None:
      return sorted(self._manager.all_steps())
    return sorted(self._reach(lambda: paths.steps(self.directory)))

  def common_steps(self) -> list[int]:
    """Return the `steps` that the first process sees. All processes must call this method."""
    return json.loads(hosts.from_first(lambda: json.dumps(self.steps())))

  def save(self, meta: Meta, state: Any, loss: float | None = None, *, wait: bool = False) -> None:
    """Start to write a checkpoint. The state is copied, so it may be donated afterwards.

    In one process, writing is retried after a transient error: by this method, or, if the error
    occurs in the background, by the caller (`failed`). Several processes cannot retry: after a
    failure of one, the others wait for it inside Orbax.

    Args:
      meta: the description; its counts of updates and its checksums are computed here.
      state: a state of `step.initial_state`; for `contents` other than `model` any nested dict. Its
        arrays may be `Deferred`.
      loss: the loss on the validation split, if it was measured.
      wait: whether to wait until the checkpoint is on disk, and to retry until it is.
    """
    meta = dataclasses.replace(
      meta,
      run=meta.run or checkpoint_meta.new_run_id(),
      updates=meta.step - int(state.get('skipped', 0)),
      checksums={path: int(value) for path, value in with_paths(_checksums(state))},
    )
    meta = checkpoint_meta.with_births(meta, self.directory.parent)
    args = _save_args(meta, state)
    # Without a finite loss, a checkpoint must not count as the best.
    metrics = None
    if loss is not None and math.isfinite(loss):
      metrics = {'loss': loss, 'digest': checksum.digest(loss)}

    def write() -> None:
      self._start_write(meta.step, args, metrics)
      if wait:
        self._settle()

    pauses = () if jax.process_count() > 1 else retry.PAUSES
    try:
      retry.retried(write, f'writing the checkpoint of step {meta.step}', pauses)
    except Exception as error:
      self._raise_unwritten(error)

  def _start_write(self, step: int, args: ocp.args.Composite, metrics: Any) -> None:
    """Start to write a checkpoint, unless an earlier try wrote it."""
    self._settle()
    if self._failures:
      self._writer.reload()
      if step in self.steps():
        return
    self._pending, self._unwritten = True, step
    try:
      self._writer.save(step, args=args, metrics=metrics)
    except Exception as error:
      self._fail(error)

  def wait(self) -> None:
    """Wait until the checkpoint that `save` started is on disk."""
    try:
      self._settle()
    except Exception as error:
      self._raise_unwritten(error)

  def failed(self) -> bool:
    """Return, without waiting, whether the last save failed and it is time to save again."""
    if self._pending and not self._writer.is_saving_in_progress():
      try:
        self._settle()
      except Exception as error:
        too_often = jax.process_count() > 1 or self._failures > len(retry.PAUSES)
        if too_often or not retry.is_transient(error):
          self._raise_unwritten(error)
        pause = retry.PAUSES[self._failures - 1]
        self._again_at = time.monotonic() + pause
        retry.announce('writing a checkpoint', pause, error)
    return bool(self._failures) and not self._pending and time.monotonic() >= self._again_at

  def _settle(self) -> None:
    """Wait for the end of the previous save, and raise its error, if any."""
    try:
      self._writer.wait_until_finished()
    except Exception as error:
      self._fail(error)
    if self._pending:
      self._pending, self._unwritten, self._failures = False, None, 0

  def _fail(self, error: Exception) -> NoReturn:
    """Count a failed save, and raise its error."""
    self._pending, self._failures = False, self._failures + 1
    if not hosts.is_loss(error):
      with contextlib.suppress(Exception):  # The error of the save itself matters more.
        self._writer.reload()  # Orbax lists a step as soon as it starts to write it.
    # Something else removed the files: a try that Orbax abandoned, which writes on for a moment, or
    # a process that this one replaced and that was suspended in the middle of the same checkpoint.
    if isinstance(error, (FileNotFoundError, FileExistsError)) or str(error).startswith(_GONE):
      raise OSError(errno.ESTALE, str(error)) from error
    raise error

  def _raise_unwritten(self, error: Exception) -> NoReturn:
    """Raise the error of a save as a sentence for the user."""
    # A TimeoutError is a failure of storage, not the loss of another process.
    if hosts.is_loss(error) and not isinstance(error, TimeoutError):
      raise error
    cause = (error.__cause__ if isinstance(error, TransientError) else None) or error
    complete = [s for s in self.steps() if s != self._unwritten]
    last = f'the last good checkpoint is step {complete[-1]}' if complete else 'none is saved yet'
    failure = f'a checkpoint could not be written to {self.directory} ({one_line(cause)}); {last}; '
    if retry.is_transient(cause):
      raise TransientError(
        f'{failure}this may pass by itself: run the same command again to continue from there'
      ) from cause
    raise UserError(
      f'{failure}free space or choose another {arg.workdir}, then run the same command to '
      'continue from there'
    ) from cause

  def close(self) -> None:
    """Wait for writes in progress, and end the background threads; for reading there are none.

    An error is only logged: `wait` has raised it already, or another error ends the run.
    """
    try:
      if self._manager is not None:
        self._manager.close()
    except Exception as error:
      logging.warning('a checkpoint was not written: %s', one_line(error))

  def meta(self, step: int) -> Meta:
    """Return the description in a checkpoint."""
    args = ocp.args.Composite(meta=ocp.args.JsonRestore(), tokenizer=ocp.args.JsonRestore())
    directory = self.directory / str(step)

    def read() -> Meta:
      restored = self._reader.restore(directory, args=args)
      meta, tokenizer = _checked(restored['meta']), _checked(restored['tokenizer'])
      return checkpoint_meta.from_json(meta, tokenizer, str(directory))

    return read_together(directory, read)

  def restore(self, meta: Meta, abstract: Any, *, partial: bool = False) -> Any:
    """Read entries of the state directly into the shardings of `abstract`.

    `abstract` holds `jax.ShapeDtypeStruct`s with shardings: all arrays of each entry, such as
    `params`, or some of them if `partial`.
    """
    fresh = {}
    if meta.contents == 'params':
      fresh = {name: entry for name, entry in abstract.items() if name != 'params'}
      abstract = {'params': abstract['params']}
    wanted = {path for path, _ in with_paths(abstract)}
    stored = {path for path in meta.checksums if path.partition('/')[0] in abstract}
    if missing := sorted(wanted - stored):
      raise DamagedError(f'the array {missing[0]} is missing')
    if not partial and (unknown := sorted(stored - wanted)):
      raise DamagedError(f'the array {unknown[0]} is not one of the model')
    directory = self.directory / str(meta.step)
    state = read_together(
      directory, lambda: orbax_setup.read_arrays(self._reader, directory, abstract)
    )
    for path, value in with_paths(_checksums(state)):
      if meta.checksums[path] != int(value):
        raise DamagedError(f'the array {path} has changed since it was written')
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), fresh)
    return {**state, **zeros}

  def set_aside(self, step: int) -> paths.Path:
    """Move a damaged checkpoint to `WORKDIR/damaged/STEP`."""

    def move() -> str:
      target = self.directory.parent / 'damaged' / str(step)
      while paths.exists(target):
        target = target.with_name(f'{target.name}_again')
      target.parent.mkdir(exist_ok=True)
      paths.rename(self.directory / str(step), target)
      return os.fspath(target)

    moved = paths.parse_path(hosts.from_first(move))
    retry.retried(self._writer.reload, f'reading {self.directory}')
    return moved


class Source(NamedTuple):
  """A checkpoint to read: the checkpoints of its work directory, and its own description."""

  checkpoints: Checkpoints
  meta: Meta

  @property
  def directory(self) -> paths.Path:
    """The work directory."""
    return self.checkpoints.workdir

  def restore(self, abstract: Any, *, partial: bool = False) -> Any:
    """Read the arrays (see `Checkpoints.restore`), and report damage to the user."""
    try:
      return self.checkpoints.restore(self.meta, abstract, partial=partial)
    except DamagedError as error:
      raise UserError(
        f'the checkpoint of step {self.meta.step} in {self.directory} is damaged ({error}); name '
        'an earlier one as DIR@STEP'
      ) from error


def check_is_model(meta: Meta, directory: paths.Path) -> None:
  """Check that a checkpoint holds a model."""
  if meta.contents not in ('model', 'params'):
    raise UserError(
      f'{directory} holds added tokens only; merge them into a model first (tokenformer grow merge)'
    )


def check_is_language_model(meta: Meta, directory: paths.Path) -> None:
  """Check that a checkpoint holds a language model."""
  check_is_model(meta, directory)
  if meta.config.model.kind != 'lm':
    raise UserError(
      f'{directory} is not a language model: its model.kind is {meta.config.model.kind}; name the '
      'work directory of a language model'
    )


def open_source(source: str | paths.Path, check: Check | None = check_is_model) -> Source:
  """Open the checkpoint that `DIR` (the newest one) or `DIR@STEP` names, and check its contents."""
  opened = open_directory(*paths.split_source(source))
  if check is not None:
    check(opened.meta, opened.directory)
  return opened


def open_directory(directory: paths.Path, step: int | None = None) -> Source:
  """Open the checkpoint of a step (None: the newest one that can be read)."""
  if not paths.exists(directory / 'checkpoints'):
    raise UserError(
      f'{directory} is not the work directory of a run: it has no checkpoints/{_advice(directory)}'
    )
  checkpoints = Checkpoints(directory)
  steps = checkpoints.common_steps()
  if step is not None and step not in steps:
    raise UserError(f'{directory} has no checkpoint of step {step}; it has {_listed(steps)}')
  for candidate in [step] if step is not None else reversed(steps):
    try:
      return Source(checkpoints, checkpoints.meta(candidate))
    except DamagedError as error:
      logging.warning('checkpoint %s of %s is damaged: %s', candidate, directory, error)
  raise UserError(f'no checkpoint of {directory} can be read; it has {_listed(steps)}')


def _advice(directory: paths.Path) -> str:
  """Return how to make a run of the weights in a folder or file; '': it has none."""
  names = [directory.name]
  with contextlib.suppress(paths.errors(directory)):
    names += paths.listed(directory)
  if not any(name.endswith(('.safetensors', '.bin')) for name in names):
    return ''
  return f'; `tokenformer convert to-jax --source={directory} --target=RUN` makes a run of weights'


def _save_args(meta: Meta, state: Any) -> ocp.args.Composite:
  """Return the three items of a checkpoint, with the digests of the JSON ones."""
  state_args = ocp.args.PyTreeSave(
    state,
    save_args=jax.tree.map(
      lambda a: _BY_LAYER if isinstance(a, Deferred) and a.stacked else _SAVE_ARGS, state
    ),
    ocdbt_target_data_file_size=_FILE_BYTES,
  )
  described = {**checkpoint_meta.to_json(meta), 'packages': package_versions()}
  return ocp.args.Composite(
    state=state_args, meta=_with_digest(described), tokenizer=_with_digest(meta.tokenizer)
  )


def _with_digest(content: dict[str, Any]) -> ocp.args.JsonSave:
  return ocp.args.JsonSave({**content, 'digest': checksum.digest(content)})


def _listed(steps: list[int]) -> str:
  return f'the steps {", ".join(map(str, steps))}' if steps else 'none'


def _checksums(state: Any) -> Any:
  """Return the checksums of a state, computed one array at a time to save memory.

  Wait for each checksum: on a CPU, programs that run at once can deadlock in their collectives.
  """

  def compute(array: Any) -> Any:
    if isinstance(array, Deferred):
      return checksum.of_chunks(chunk for _, chunk in array.chunks())
    return jax.block_until_ready(checksum.on_devices(array))

  return jax.tree.map(compute, state)


def _checked(content: dict[str, Any]) -> dict[str, Any]:
  content = dict(content)
  if content.pop('digest', None) != checksum.digest(content):
    raise DamagedError('its description has changed since it was written')
  return content


def package_versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
  """Return the installed version of each package, or `not installed`."""
  versions = {}
  for package in packages:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      versions[package] = 'not installed'
  return versions
