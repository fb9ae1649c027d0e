"""What happens before the first step: checks, sizes, and the state that a run starts from."""

import contextlib
import dataclasses
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tokenformer_jax import checkpoint, cli, models, optim, paths, sharding, tasks
from tokenformer_jax import step as step_lib
from tokenformer_jax.config import Config, ModelConfig, TokenCounts
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import files, state, tokens
from tokenformer_jax.optim import LastGrowth
from tokenformer_jax.params import Definition, Params
from tokenformer_jax.step import State


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


@dataclasses.dataclass(frozen=True)
class Origin:
  """What a run starts from: its own checkpoints, another run to grow, or nothing.

  Attributes:
    model: the model of that checkpoint, or None.
    lineage: how the run's model came to be.
    source: the checkpoint of another run, or None.
  """

  model: ModelConfig | None = None
  lineage: checkpoint.Lineage = ()
  source: tuple[checkpoint.Checkpoints, checkpoint.Meta] | None = None


def find_origin(config: Config, workdir: paths.Path) -> Origin:
  """Finds it: a checkpoint in the work directory, else `config.init_from`.

  Raises:
    UserError: `config.init_from` is not a run, or cannot be read.
  """
  if (workdir / 'checkpoints').is_dir():
    checkpoints = checkpoint.Checkpoints(workdir)
    with contextlib.closing(checkpoints):
      for step in reversed(checkpoints.steps()):
        with contextlib.suppress(checkpoint.DamagedError):  # `resume` reports it.
          meta = checkpoints.meta(step)
          checkpoint.check_is_model(meta, workdir)
          return Origin(meta.config.model, meta.lineage)
  if not config.init_from:
    return Origin()
  directory, step = cli.split_source(config.init_from)
  checkpoints, meta = checkpoint.open_source(directory, step)
  checkpoint.check_is_model(meta, directory)
  lineage = files.descend(meta, directory, 'grow', config.grow)
  return Origin(meta.config.model, lineage, (checkpoints, meta))


def fill_in(config: Config, origin: Origin = Origin()) -> Config:
  """Replaces the zeros that stand for "what fits": reference counts, and what the task knows.

  Raises:
    UserError: see `tasks.fill_in`.
  """
  return with_references(tasks.fill_in(config), origin)


def with_references(config: Config, origin: Origin = Origin()) -> Config:
  """Replaces zero reference counts by those of the origin, grown if `config.grow` says so."""
  model = config.model
  fitting, given = model.param_tokens, model.reference_tokens
  if origin.model is not None and origin.model.projection == model.projection == 'pattention':
    fitting = state.grown_model(origin.model, model.param_tokens, config.grow).reference_tokens
  reference = {k: getattr(given, k) or getattr(fitting, k) for k in state.KINDS}
  if model.projection == 'dense':  # It has none, so none can differ from those of another one.
    model, reference = dataclasses.replace(model, param_tokens=TokenCounts()), {}
  model = dataclasses.replace(model, reference_tokens=TokenCounts(**reference))
  return dataclasses.replace(config, model=model)


def in_steps(config: Config, examples: int) -> Config:
  """The config with lengths in steps that were given in epochs or examples.

  Args:
    config: of the run.
    examples: of an epoch.
  """

  def steps(group: Any, prefix: str) -> int:
    epochs, count = getattr(group, f'{prefix}epochs'), getattr(group, f'{prefix}examples')
    if not (epochs or count):
      return getattr(group, f'{prefix}steps')
    return math.ceil((count or epochs * examples) / config.data.batch_size)

  train, optim = config.train, config.optim
  return dataclasses.replace(
    config,
    train=dataclasses.replace(train, steps=steps(train, ''), epochs=0.0, examples=0),
    optim=dataclasses.replace(
      optim, warmup_steps=steps(optim, 'warmup_'), warmup_epochs=0.0, warmup_examples=0
    ),
  )


def check_fits(config: Config, definition: Definition, mesh: Mesh) -> None:
  """Checks that parameters, heads and batch can be split over the mesh, and its devices do.

  Raises:
    UserError: something does not divide, or the kernel of attention is for other devices.
  """
  kernel, platform = config.train.attention, mesh.devices.flat[0].platform
  needed = {'splash': 'tpu', 'cudnn': 'gpu'}.get(kernel, platform)
  if needed != platform:
    raise UserError(
      f'config.train.attention={kernel} is for a {needed}, and the devices are {platform}; '
      'auto takes the kernel of the devices'
    )
  sharding.check_divides(mesh, definition.abstract, definition.axes)
  sharding.check_divisible(mesh, 'heads', config.model.heads, 'of config.model.heads')
  parts = config.optim.accumulation_steps
  rows = f'of config.data.batch_size / optim.accumulation_steps = {config.data.batch_size}/{parts}'
  sharding.check_divisible(mesh, 'batch', config.data.batch_size // parts, rows)


def make_writable(workdir: paths.Path) -> None:
  """Makes the work directory.

  Raises:
    UserError: it cannot be made or written.
  """
  try:
    paths.make_writable(workdir)
  except paths.errors(workdir) as error:
    reason = paths.reason(error)
    raise UserError(
      f'the work directory {workdir} cannot be written ({reason}); choose another --workdir'
    ) from error


def resume(
  checkpoints: checkpoint.Checkpoints, config: Config, abstract: State
) -> tuple[State, int] | None:
  """The newest state that can be read and its step, or None in a new work directory.

  A damaged checkpoint is named and moved to `damaged/`, and the one before it is taken.

  Args:
    checkpoints: of the work directory.
    config: with every size filled in.
    abstract: shapes and shardings of the state.

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
      restored = _restored(checkpoints, meta, config, abstract)
    except checkpoint.DamagedError as error:
      damaged[step] = error
      continue
    for bad, error in damaged.items():
      moved = checkpoints.set_aside(bad)
      cli.say(
        f'the checkpoint of step {bad} is damaged ({error}); it was moved to {moved}; going on '
        f'from step {step}'
      )
    return restored, step
  if damaged:
    reasons = '; '.join(f'step {step}: {error}' for step, error in damaged.items())
    raise UserError(
      f'no checkpoint in {checkpoints.directory} can be read ({reasons}); move that directory away '
      'to start afresh'
    )
  return None


def _restored(
  checkpoints: checkpoint.Checkpoints, meta: checkpoint.Meta, config: Config, abstract: State
) -> State:
  if 'ema' in abstract and not checkpoint.has(meta, 'ema'):
    abstract = {name: part for name, part in abstract.items() if name != 'ema'}
  return _with_average(config, checkpoints.restore(meta, abstract))


def _with_average(config: Config, state: State) -> State:
  """The state with a moving average of the parameters if the config asks for one, or without.

  An average that was not kept so far starts from the parameters.
  """
  if not config.train.ema:
    return {name: part for name, part in state.items() if name != 'ema'}
  return state if 'ema' in state else {**state, 'ema': jax.tree.map(jnp.copy, state['params'])}


def grown(config: Config, origin: Origin, mesh: Mesh) -> State:
  """The state of the run `config.init_from`, grown to this run's model.

  What the task can change on the way, such as the head for other classes, is changed first.

  Raises:
    UserError: it is damaged, or cannot be grown to that.
  """
  checkpoints, meta = origin.source
  target = config.model
  source = tasks.adapted(meta.config.model, target)
  try:
    state.check(source, target, config.grow)
  except UserError as error:
    raise UserError(f'config.init_from={config.init_from}: {error}') from error
  if reason := state.inexact(source, target, config.grow):
    cli.say(f'the grown model will not compute what {config.init_from} does: {reason}')
  if source == meta.config.model:
    grown = files.read_and_grow(checkpoints, meta, mesh, target, config.grow)
    return _with_average(config, grown)
  changed = ', '.join(checkpoint.differences(source, meta.config.model, 'model.'))
  cli.say(f'adapting {config.init_from}: {changed}')
  old, definition = files.read(checkpoints, meta, mesh), models.define(target)
  tx = optim.make_optimizer(config.optim, config.train.steps, definition.axes)
  shardings = step_lib.state_shardings(mesh, definition, tx, ema='ema' in old)

  def adapt_and_grow(old: State) -> State:
    return state.grow(_adapted(old, source, config), source, target, config.grow)

  return _with_average(config, jax.jit(adapt_and_grow, out_shardings=shardings)(old))


def _adapted(old: State, model: ModelConfig, config: Config) -> State:
  """A state whose parameters, average and moments have the shapes of the adapted model."""

  def params(tree: Params) -> Params:
    return tasks.adapt(tree, model, config.grow.seed)

  def moments(order: int, tree: Params) -> Params:
    del order
    return tasks.adapt(tree, model, None)

  return state.map_trees(old, config.grow, params, moments)


def check_old_tokens(config: Config, growth: LastGrowth | None, definition: Definition) -> None:
  """Checks that there is something old, and something new, for `optim.old_tokens` to tell apart.

  Raises:
    UserError: there is not.
  """
  if config.optim.old_tokens == 'train':
    return
  now = tokens.counts(definition.abstract, definition.axes)
  if growth is None or growth.old_tokens == now:
    raise UserError(
      f'config.optim.old_tokens is {config.optim.old_tokens!r}, but this model has no tokens newer '
      'than the others; grow it first, or set it to train'
    )


def _check_same_model(config: Config, theirs: Config, where: str) -> None:
  found = checkpoint.differences(config.model, theirs.model, 'model.')
  if not found:
    return
  advice = 'set these keys to its values, or choose another one'
  if all('_tokens.' in line for line in found):
    counts = ','.join(f'{k}={getattr(config.model.param_tokens, k)}' for k in state.KINDS)
    advice += (
      ' (to have it grow: python -m tokenformer_jax.grow --source=DIR --target=NEW_DIR '
      f'--param_tokens={counts})'
    )
  raise UserError(f'{where} is of another model: {"; ".join(found)}; {advice}')
