"""Restore the state of a run, and check its settings for older and newer parts."""

import jax
import jax.numpy as jnp

from tokenformer_jax.config import Config
from tokenformer_jax.config.groups import check_numbers, frozen_groups
from tokenformer_jax.config.model import layer_path, used_layers
from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.model.params import Definition
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.steps import schedules
from tokenformer_jax.steps.last_growth import LastGrowth
from tokenformer_jax.steps.step import State
from tokenformer_jax.storage import paths
from tokenformer_jax.training.origin import Damaged


def make_writable(workdir: paths.Path) -> None:
  """Make the work directory.

  Raises:
    UserError: it cannot be made or written.
  """
  try:
    paths.make_writable(workdir)
  except TransientError:
    raise
  except paths.errors(workdir) as error:
    reason = paths.reason(error)
    raise UserError(
      f'the work directory {workdir} cannot be written ({reason}); choose another --workdir'
    ) from error


def resumed(
  checkpoints: checkpoint.Checkpoints, meta: Meta, config: Config, abstract: State
) -> State:
  """Return the state in a checkpoint of the run; `abstract` has its shapes and shardings.

  Raises:
    DamagedError: the checkpoint cannot be read.
  """
  if 'ema' in abstract and not checkpoint.has(meta, 'ema'):
    abstract = {name: part for name, part in abstract.items() if name != 'ema'}
  return with_average(config, checkpoints.restore(meta, abstract))


def with_average(config: Config, state: State) -> State:
  """Add or remove the moving average as `train.ema` says; a new one starts from the parameters."""
  if not config.train.ema:
    return {name: part for name, part in state.items() if name != 'ema'}
  return state if 'ema' in state else {**state, 'ema': jax.tree.map(jnp.copy, state['params'])}


def set_aside(checkpoints: checkpoint.Checkpoints, damaged: Damaged, step: int) -> None:
  """Move damaged checkpoints to `damaged/`; report them and the older `step` that was read."""
  for bad, error in damaged.items():
    moved = checkpoints.set_aside(bad)
    messages.say(
      f'the checkpoint of step {bad} is damaged ({error}); it was moved to {moved}; going on '
      f'from step {step}'
    )


def check_old_tokens(config: Config, growth: LastGrowth | None, definition: Definition) -> None:
  """Check that the model has newer parts if `optim.old_tokens` does not train all.

  Raises:
    UserError: it has none.
  """
  if config.optim.old_tokens == 'train':
    return
  now = definition.token_counts
  adds = growth and (growth.old_tokens != now or growth.new_layers or growth.old_experts)
  if not adds:
    raise UserError(
      f'config.optim.old_tokens is {config.optim.old_tokens!r}, but this model has no tokens newer '
      'than the others, and no newer experts or layers; grow it first, or set it to train'
    )


def check_frozen_groups(config: Config) -> None:
  """Check that the model has the groups that `optim.frozen_groups` names.

  Raises:
    UserError: it lacks one.
  """
  check_numbers(config.model, frozen_groups(config.optim), 'config.optim.frozen_groups')


def check_drop_groups(config: Config, definition: Definition) -> None:
  """Check that the model has groups to leave out if `train.drop_groups` says so.

  Raises:
    UserError: it has no two groups.
  """
  if config.train.drop_groups:
    from tokenformer_jax.steps import elastic  # noqa: PLC0415 (only for elastic models)

    elastic.check(config.train.drop_groups, definition.info)


def doubts(config: Config, growth: LastGrowth | None, *, drawn: bool) -> list[str]:
  """Return sentences about allowed settings that are probably a mistake.

  `config` has every length in steps; `drawn` says that all arrays of the model are new.
  """
  found = []
  if drawn and frozen_groups(config.optim):
    found.append(
      f'config.optim.frozen_groups={config.optim.frozen_groups!r} freezes tokens of a new model, '
      "which keep the values that they are drawn with; '' trains all tokens"
    )
  length = config.data.sequence_length
  for name, layer in used_layers(config.model).items():
    clip = getattr(getattr(layer.mixer, 'positions', None), 'clip', 0)
    if config.model.kind == 'lm' and clip >= length:
      found.append(
        f'config.{layer_path(name)}.mixer.positions.clip={clip} limits no distance in texts of '
        f'config.data.sequence_length={length}; take less than {length}, or 0 and '
        f'--clip_positions={clip} when longer texts are written'
      )
  steps, warmup = config.train.steps, config.optim.warmup_steps
  begin = schedules.first_update(config.optim, growth)
  if begin + warmup > steps:
    after = f' after the last growth, at update {begin},' if begin else ''
    found.append(
      f'the warm-up of config.optim.warmup_steps={warmup}{after} is longer than the run of '
      f'config.train.steps={steps}, so the rate never reaches config.optim.learning_rate; set '
      f'it to {max(0, steps - begin) // 10}, or train longer'
    )
  return found
