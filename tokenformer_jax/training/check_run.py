"""Check a resolved run, in one function that `prepare` calls twice.

The first call comes before any slow work. Lengths may be in epochs or examples, and only the
comparisons that need the data are left out. The second call knows all.
"""

import jax
from jax.sharding import Mesh

from tokenformer_jax import tasks
from tokenformer_jax.config import Config, OptimConfig, TrainConfig
from tokenformer_jax.config.check_config import check_decay
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.params import Definition
from tokenformer_jax.parallel import sharding
from tokenformer_jax.steps.entries import LastGrowth
from tokenformer_jax.steps.last_growth import frozen_base
from tokenformer_jax.training import continuation, device_check
from tokenformer_jax.training.origin import Origin
from tokenformer_jax.training.teacher import Teacher


def check_run(
  config: Config,
  mesh: Mesh,
  origin: Origin,
  teacher: Teacher | None,
  task: tasks.Task,
  growth: LastGrowth | None,
  *,
  knows_data: bool,
) -> None:
  """Check that devices, origin, teacher, model, data and lengths of a run fit together.

  The arguments are those of `PreparedRun`. Every size of `config` is filled in. If `knows_data`,
  every length is in steps and the data of `task` is open.
  """
  definition = task.definition
  if config.train.check_devices:
    device_check.check_repeats(mesh, config.train)
  continuation.check(config, origin)
  if knows_data:
    continuation.check_data(config, origin, task)
  continuation.check_decay_start(config, origin, growth)
  _check_old_tokens(config.optim, growth, definition)
  _check_groups(config.train, definition)
  _check_reference(config, growth)
  if teacher is not None:
    teacher.check_fits(config, mesh)
  sharding.check_divides(mesh, definition.abstract, definition.axes)
  check_decay(config)


def _check_old_tokens(
  optim: OptimConfig, growth: LastGrowth | None, definition: Definition
) -> None:
  """Check that the model has newer tokens, experts or layers if `optim.old_tokens` needs them."""
  if optim.old_tokens == 'train':
    return
  if growth is None or jax.tree.all(
    jax.tree.map(lambda old, array: old.are_all(array.shape), growth.old, definition.abstract)
  ):
    raise UserError(
      f'config.optim.old_tokens is {optim.old_tokens!r}, but this model has no tokens newer '
      'than the others, and no newer experts, layers or neurons; grow it first, or set it to train'
    )


def _check_reference(config: Config, growth: LastGrowth | None) -> None:
  """Check that a run on pairs by DPO has a reference."""
  needed = config.data.has_pairs and config.preference.loss == 'dpo'
  if needed and not config.distill.teacher and frozen_base(growth, config) is None:
    raise UserError(
      'config.preference.loss is dpo, which compares the model with a reference, and the run has '
      'none; grow the model by a group of parameter tokens and set config.optim.old_tokens=freeze, '
      'name a run in config.distill.teacher, or set preference.loss=orpo'
    )


def _check_groups(train: TrainConfig, definition: Definition) -> None:
  """Check that the model has the groups that `train.drop_groups` needs."""
  if train.drop_groups and definition.group_count < 2:
    raise UserError(
      f'config.train.drop_groups is {train.drop_groups}, and no projection of this model '
      'has several groups of tokens; grow it by method=group, give it groups '
      '(model.layer.ffn.groups), or set it to 0'
    )
