"""Checkpoints by Orbax: asynchronous, complete in themselves, checked bit by bit when read.

A checkpoint holds three items: `state` (a nested dict of arrays), `meta` (JSON: format version,
step, the whole config, package versions, a checksum of every array) and `tokenizer` (JSON; of a
classifier the names of its classes). Nothing else is needed to resume, grow, evaluate or generate.
What knows Orbax is in this file, and, for checkpoints that are not ours, in released_tpu.py.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging as std_logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import checkpoint_managers

from tokenformer_jax import checksum, hosts, paths
from tokenformer_jax import config as config_lib
from tokenformer_jax.errors import UserError

FORMAT = 1
# Arrays are stored in pieces, so that neither writing nor reading needs much more memory than they.
_SAVE_ARGS = ocp.SaveArgs(chunk_byte_size=64 * 2**20)
_FILE_BYTES = 64 * 2**20  # of a file of pieces, which is in memory until it is full
_RESTORE_GB = 1  # read at a time
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'tokenformer_jax')


class DamagedError(Exception):
  """A checkpoint that cannot be read, or whose contents are not those that were written."""


@dataclasses.dataclass(frozen=True)
class Ancestor:
  """What a model was made of, other than by training: one entry of a lineage."""

  action: str  # grow, shrink, merge or remove
  source: str  # its work directory
  step: int  # of the source
  model: config_lib.ModelConfig  # the source's
  grow: config_lib.GrowConfig  # how
  updates: int  # the new model's count of optimizer updates at birth


Lineage = tuple[Ancestor, ...]  # the oldest first


@dataclasses.dataclass(frozen=True)
class Meta:
  """What a checkpoint says of itself."""

  step: int
  updates: int  # made by the optimizer: `step` less those that were skipped
  config: config_lib.Config  # of the run that wrote it, with every size filled in
  lineage: Lineage
  # `model`; `params`, a model whose training has not begun, so that the rest of its state is zero;
  # or `added_tokens` if it holds nothing but those of the last growth.
  contents: str
  checksums: dict[str, int]  # by path in the state
  tokenizer: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Deferred:
  """An array of a state to save that is made when it is written, so that one is there at a time."""

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[], np.ndarray]  # gives the same array each time

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    return self.size * self.dtype.itemsize


class _OneByOne(ocp.type_handlers.NumpyHandler):
  """Writes deferred arrays one after the other, each as an array of numpy."""

  async def serialize(
    self, values: Sequence[Deferred], infos: Sequence[Any], args: Sequence[Any] | None = None
  ) -> Sequence[ocp.future.Future]:
    write = super().serialize

    async def one_by_one() -> None:
      for value, info, arg in zip(values, infos, args, strict=True):
        for written in await write([value.read()], [info], [arg]):
          written.result()

    return [ocp.future.CommitFutureAwaitingContractedSignals(one_by_one(), name='one_by_one')]


class _ToldElsewhere(std_logging.Filter):
  """Drops tracebacks of Orbax and its tasks, which `Checkpoints` raises, too, and what we know."""

  def filter(self, record: std_logging.LogRecord) -> bool:
    of_orbax = 'orbax' in record.pathname or record.name == 'asyncio'
    known = ('read only', 'preemption')
    return not (of_orbax and (record.exc_info or any(k in record.getMessage() for k in known)))


_TOLD_ELSEWHERE = _ToldElsewhere()  # one object: a logger takes it once, however often given


class Checkpoints:
  """The checkpoints of one work directory, `WORKDIR/checkpoints/STEP`."""

  def __init__(
    self, workdir: str | os.PathLike[str], *, keep: int | None = None, save_gb: int | None = None
  ):
    """Opens the directory for reading or, with `keep`, for writing.

    Args:
      workdir: the run's work directory.
      keep: how many of the newest checkpoints stay; the one of the lowest loss stays besides.
      save_gb: how much of a state is copied for writing at a time. The state must then stay as it
        is until `wait` returns. None: all of it, before `save` returns.
    """
    for logger in (logging.get_absl_logger(), std_logging.getLogger('asyncio')):
      logger.addFilter(_TOLD_ELSEWHERE)
    self.directory = paths.absolute(paths.of(workdir)) / 'checkpoints'
    policies = checkpoint_managers.AnyPreservationPolicy(
      [
        checkpoint_managers.LatestN(keep),
        checkpoint_managers.BestN(
          get_metric_fn=lambda metrics: metrics['loss'],
          reverse=True,  # the last in the order is the best
          n=1,
          keep_checkpoints_without_metrics=False,
        ),
      ]
    )
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    kinds = ocp.type_handlers.create_type_handler_registry(
      (jax.Array, ocp.type_handlers.get_type_handler(jax.Array)),
      (Deferred, _OneByOne(deepcopy_host_arrays=False)),
    )
    arrays = ocp.PyTreeCheckpointHandler(
      type_handler_registry=kinds,
      restore_concurrent_gb=_RESTORE_GB,
      save_device_host_concurrent_gb=save_gb,
      # Arrays that are not to be copied at once, before `save` returns.
      is_prioritized_key_fn=None if save_gb is None else lambda path: False,
    )
    strict = ocp.StandardCheckpointHandler(restore_concurrent_gb=_RESTORE_GB)
    handlers.add('state', ocp.args.PyTreeSave, arrays)
    handlers.add('state', ocp.args.PyTreeRestore, arrays)
    handlers.add('state', ocp.args.StandardRestore, strict)
    for item in ('meta', 'tokenizer'):
      handlers.add(item, ocp.args.JsonSave, ocp.JsonCheckpointHandler)
      handlers.add(item, ocp.args.JsonRestore, ocp.JsonCheckpointHandler)
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policies,
        create=keep is not None,
        read_only=keep is None,
        save_interval_steps=0 if keep is None else 1,
        cleanup_tmp_directories=keep is not None,
      ),
      handler_registry=handlers,
    )

  def steps(self) -> list[int]:
    """The steps of all complete checkpoints, ascending."""
    return sorted(self._manager.all_steps())

  def save(
    self,
    step: int,
    state: Any,
    config: config_lib.Config,
    tokenizer: dict[str, Any],
    loss: float | None = None,
    *,
    lineage: Lineage = (),
    contents: str = 'model',
  ) -> None:
    """Starts to write a checkpoint; `state` may be donated when this returns.

    Args:
      step: its name.
      state: as in `step.initial_state`; for `contents` other than `model` any nested dict. Its
        arrays may be `Deferred`.
      config: of the run, with every size filled in.
      tokenizer: what the model's ids stand for, from `Task.vocabulary`.
      loss: on the validation split, if it was measured.
      lineage: how the model came to be.
      contents: see `Meta`.

    Raises:
      UserError: an earlier checkpoint could not be written.
    """
    meta = {
      'format': FORMAT,
      'step': step,
      'updates': step - int(state.get('skipped', 0)),
      'config': dataclasses.asdict(config),
      'lineage': [dataclasses.asdict(ancestor) for ancestor in lineage],
      'contents': contents,
      'packages': package_versions(),
      'checksums': {path: int(value) for path, value in _flat(_checksums(state))},
    }
    args = ocp.args.Composite(
      state=ocp.args.PyTreeSave(
        state,
        save_args=jax.tree.map(lambda _: _SAVE_ARGS, state),
        ocdbt_target_data_file_size=_FILE_BYTES,
      ),
      meta=ocp.args.JsonSave({**meta, 'digest': _digest(meta)}),
      tokenizer=ocp.args.JsonSave({**tokenizer, 'digest': _digest(tokenizer)}),
    )
    metrics = None if loss is None else {'loss': loss}
    self._guarded(functools.partial(self._manager.save, step, args=args, metrics=metrics))

  def wait(self) -> None:
    """Waits until what `save` started is on disk.

    Raises:
      UserError: it could not be written.
    """
    self._guarded(self._manager.wait_until_finished)

  def check(self) -> None:
    """Raises what went wrong in the background so far, without waiting."""
    self._guarded(self._manager.check_for_errors)

  def close(self) -> None:
    """Ends the background threads; errors have been reported by `wait`."""
    self._manager.close()

  def meta(self, step: int) -> Meta:
    """What the checkpoint says of itself.

    Raises:
      DamagedError: it cannot be read.
      UserError: it was written by a later version of this package.
    """
    args = ocp.args.Composite(meta=ocp.args.JsonRestore(), tokenizer=ocp.args.JsonRestore())
    restored = self._read(step, args)
    try:
      meta, tokenizer = _checked(restored['meta']), _checked(restored['tokenizer'])
      if meta['format'] > FORMAT:
        raise UserError(
          f'{self.directory / str(step)} has the format {meta["format"]}, which this version of '
          f'tokenformer_jax (format {FORMAT}) does not know; install a newer one'
        )
      return Meta(
        step=meta['step'],
        updates=meta['updates'],
        config=config_lib.from_dict(config_lib.Config, meta['config']),
        lineage=tuple(config_lib.from_dict(Ancestor, entry) for entry in meta['lineage']),
        contents=meta['contents'],
        checksums=meta['checksums'],
        tokenizer=tokenizer,
      )
    except UserError:
      raise
    except Exception as error:
      raise DamagedError(one_line(error)) from error

  def restore(self, meta: Meta, abstract: Any) -> Any:
    """Reads the state, or a part of it, straight into the shardings of `abstract`.

    Args:
      meta: of the checkpoint to read, from `Checkpoints.meta`.
      abstract: `jax.ShapeDtypeStruct`s with shardings: the whole state, or some of its entries.

    Returns:
      Arrays in the structure of `abstract`.

    Raises:
      DamagedError: it cannot be read, or an array differs from what was written.
    """
    fresh = {}
    if meta.contents == 'params':
      fresh = {name: part for name, part in abstract.items() if name != 'params'}
      abstract = {'params': abstract['params']}
    for path, _ in _flat(abstract):
      if path not in meta.checksums:
        raise DamagedError(f'the array {path} is not in it')
    whole = len(_flat(abstract)) == len(meta.checksums)
    if whole:
      args = ocp.args.StandardRestore(abstract)
    else:
      restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
      args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)
    state = self._read(meta.step, ocp.args.Composite(state=args))['state']
    for path, value in _flat(_checksums(state)):
      if meta.checksums[path] != int(value):
        raise DamagedError(f'the array {path} is not the one that was written')
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), fresh)
    return {**state, **zeros}

  def _read(self, step: int, args: ocp.args.Composite) -> Any:
    """Items of a checkpoint, or a DamagedError in all processes if one cannot read them."""
    read, failure = None, None
    try:
      read = self._manager.restore(step, args=args)
    except Exception as error:
      if hosts.is_loss(error):
        raise
      failure = error
    if hosts.in_any(failure is not None):
      raise DamagedError(
        one_line(failure) if failure else 'another process could not read it'
      ) from failure
    return read

  def set_aside(self, step: int) -> paths.Path:
    """Moves a damaged checkpoint out of the way, to `WORKDIR/damaged/STEP`."""
    target = self.directory.parent / 'damaged' / str(step)
    while target.exists():
      target = target.with_name(f'{target.name}_again')
    if hosts.is_first():
      target.parent.mkdir(exist_ok=True)
      paths.rename(self.directory / str(step), target)
    hosts.meet('the damaged checkpoint is out of the way')
    self._manager.reload()
    return target

  def _guarded(self, action: Any) -> None:
    """Runs a part of saving; what fails in it becomes a sentence."""
    try:
      action()
    except Exception as error:
      if hosts.is_loss(error):
        raise
      complete = [s for s in self.steps() if (self.directory / str(s) / 'meta').exists()]
      last = f'the last good checkpoint is step {complete[-1]}' if complete else 'none is saved yet'
      raise UserError(
        f'a checkpoint could not be written to {self.directory} ({one_line(error)}); {last}; '
        'make room or choose another --workdir, then run the same command to go on from there'
      ) from error


def open_source(directory: paths.Path, step: int | None) -> tuple[Checkpoints, Meta]:
  """The checkpoint that `DIR@STEP` names (None: the newest that can be read).

  Raises:
    UserError: there is none, or the one that was asked for is damaged.
  """
  if not (directory / 'checkpoints').is_dir():
    raise UserError(f'{directory} is not the work directory of a run: it has no checkpoints/')
  checkpoints = Checkpoints(directory)
  steps = checkpoints.steps()
  if step is not None and step not in steps:
    raise UserError(f'{directory} has no checkpoint of step {step}; it has {_listed(steps)}')
  for candidate in [step] if step is not None else reversed(steps):
    try:
      return checkpoints, checkpoints.meta(candidate)
    except DamagedError as error:
      logging.warning('checkpoint %s of %s is damaged: %s', candidate, directory, error)
  raise UserError(f'no checkpoint of {directory} can be read; it has {_listed(steps)}')


def restore_source(checkpoints: Checkpoints, meta: Meta, abstract: Any) -> Any:
  """`Checkpoints.restore` for what `open_source` found, where damage is for the user to mend.

  Raises:
    UserError: the checkpoint is damaged.
  """
  try:
    return checkpoints.restore(meta, abstract)
  except DamagedError as error:
    raise UserError(
      f'the checkpoint of step {meta.step} in {checkpoints.directory.parent} is damaged ({error}); '
      'name an earlier one as DIR@STEP'
    ) from error


def has(meta: Meta, entry: str) -> bool:
  """Whether the state in a checkpoint has an entry such as `params`."""
  return any(path.startswith(f'{entry}/') for path in meta.checksums)


def check_is_model(meta: Meta, directory: paths.Path) -> None:
  """Checks that a checkpoint can be run.

  Raises:
    UserError: it holds something else than a model.
  """
  if meta.contents not in ('model', 'params'):
    raise UserError(
      f'{directory} holds added tokens only; put them into a model first '
      '(python -m tokenformer_jax.grow merge)'
    )


def check_is_language_model(meta: Meta, directory: paths.Path) -> None:
  """Checks that a checkpoint can be run on text.

  Raises:
    UserError: it holds something else than a language model.
  """
  check_is_model(meta, directory)
  if meta.config.model.kind != 'lm':
    raise UserError(f'{directory} is no language model: its model.kind is {meta.config.model.kind}')


def differences(ours: Any, theirs: Any, prefix: str = '') -> list[str]:
  """What differs between two configs, as `name: theirs, not ours`."""
  found = []
  for field in dataclasses.fields(ours):
    a, b, name = getattr(ours, field.name), getattr(theirs, field.name), f'{prefix}{field.name}'
    if dataclasses.is_dataclass(a):
      found += differences(a, b, f'{name}.')
    elif a != b:
      found.append(f'{name} is {b!r} there and {a!r} in the config')
  return found


def _listed(steps: list[int]) -> str:
  return f'the steps {", ".join(map(str, steps))}' if steps else 'none'


def _checksums(state: Any) -> Any:
  """Of one array after the other, which takes less memory than all in one program.

  Each is waited for: programs that run at once can wait for each other's sums for ever on a CPU.
  """

  def of(array: Any) -> Any:
    if isinstance(array, Deferred):
      return checksum.on_host(array.read())
    return jax.block_until_ready(checksum.on_devices(array))

  return jax.tree.map(of, state)


def _flat(tree: Any) -> list[tuple[str, Any]]:
  """Leaves with paths such as `params/blocks/ffn/keys`."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return [(jax.tree_util.keystr(path, simple=True, separator='/'), leaf) for path, leaf in leaves]


def _digest(content: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _checked(content: dict[str, Any]) -> dict[str, Any]:
  content = dict(content)
  if content.pop('digest', None) != _digest(content):
    raise DamagedError('its description is not the one that was written')
  return content


def package_versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
  """The installed version of each package, or `not installed`."""
  versions = {}
  for package in packages:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      versions[package] = 'not installed'
  return versions


def one_line(error: BaseException) -> str:
  """The type and the first line of what an exception says."""
  lines = str(error).strip().splitlines() or ['']
  text = f'{type(error).__name__}: {lines[0]}'
  return text if len(text) <= 300 else f'{text[:300]}…'
