"""Check that the facts of a run fit together: the rules before data is read and afterwards.

Each rule raises a `UserError` whose sentence names the key and what to do.
"""

import operator
from collections.abc import Sequence

import jax

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, DataConfig, GrowConfig, check_config, names
from tokenformer_jax.data import tokenizers
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.parallel import sharding
from tokenformer_jax.resolve.facts import Facts
from tokenformer_jax.resolve.lengths import Lengths, order_changes
from tokenformer_jax.resolve.origin import Origin, begins_anew
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.steps import schedules
from tokenformer_jax.steps.last_growth import last_growth


def check_before_data(facts: Facts) -> None:
  """Check all that needs no data. Lengths may be in epochs or examples."""
  _check_repeats(facts)
  _check_growth_used(facts)
  _check_same_model(facts)
  _check_steps_left(facts, facts.config)
  _check_same_optimizer(facts)
  _check_order(facts)
  _check_new_order_used(facts)
  _check_finished_data(facts, facts.config)
  _check_tokenizer(facts)
  _check_decay(facts, facts.config)
  _check_old_tokens(facts)
  _check_groups(facts)
  _check_reference(facts)
  if facts.teacher is not None:
    facts.teacher.check_fits(facts.config, facts.mesh)
  definition = facts.task.definition
  sharding.check_divides(facts.mesh, definition.abstract, definition.axes)


def check_after_data(facts: Facts, lengths: Lengths) -> None:
  """Check what the data decides: numbers of steps, the order of samples, the meaning of labels."""
  _check_steps_left(facts, lengths.config)
  _check_finished_data(facts, lengths.config)
  _check_meaning(facts)
  _check_order(facts, lengths.order_changes)
  _check_decay(facts, lengths.config)


def _check_repeats(facts: Facts) -> None:
  """Check that healthy devices repeat their bits if `train.check_devices` compares them."""
  train, platform = facts.config.train, facts.mesh.devices.flat[0].platform
  if train.check_devices and platform == 'gpu' and train.compiler_options != 'deterministic':
    raise UserError(
      'config.train.check_devices compares the bits of two computations, which differ on a healthy '
      f'GPU with config.train.compiler_options={train.compiler_options}; set that to deterministic'
    )


def _check_growth_used(facts: Facts) -> None:
  """Check that a run grows if keys of the group `grow` are set, or has grown by these values."""
  grow, origin = facts.config.grow, facts.origin
  if origin.other is not None:
    return
  known = origin.own.config.grow if origin.own else GrowConfig()
  for one in config_lib.differences(grow, known, 'grow.'):
    if one.ours != operator.attrgetter(one.path)(Config()):
      raise UserError(
        f'config.{one.path} is {one.ours!r}, which has an effect only where a run begins from '
        f'config.init_from, and this one {origin.begins}; leave it out'
      )


def _check_same_model(facts: Facts) -> None:
  """Check that a resumed run has the model of its checkpoint."""
  model, origin = facts.config.model, facts.origin
  if origin.own is None:
    return
  differences = list(config_lib.differences(model, origin.own.config.model, 'model.'))
  if not differences:
    return
  advice = 'set these keys to its values, or choose another one'
  keys = [one.path for one in differences]
  if all(key.endswith(('.tokens', '.reference', '.groups', 'model.pattern')) for key in keys):
    counts = config_lib.counts_as_text(config_lib.token_counts(model))
    sizes = [f'--param_tokens={counts}'] if keys != ['model.pattern'] else []
    sizes += [f"--pattern='{model.pattern}'"] if 'model.pattern' in keys else []
    advice += (
      f' (to have it grow: tokenformer grow --source=DIR --target=NEW_DIR {" ".join(sizes)})'
    )
  differing = [f'{key} is {old!r} there and {new!r} in the config' for key, new, old in differences]
  raise UserError(f'{origin.where} is of another model: {"; ".join(differing)}; {advice}')


def _check_steps_left(facts: Facts, config: Config) -> None:
  """Check that a run has a step to make after those of `init_from`, unless it counts from 0.

  A length in epochs or examples is not checked: it has no number of steps before the data is read.
  """
  origin, train = facts.origin, config.train
  if origin.other is None or begins_anew(config, origin) or train.epochs or train.examples:
    return
  if origin.other.meta.step >= train.steps:
    raise UserError(
      f'{origin.where} is at step {origin.other.meta.step}, where the run would go on, and '
      f'config.train.steps is {train.steps}; raise it, or set config.grow.step=restart'
    )


def _check_same_optimizer(facts: Facts) -> None:
  """Check that a checkpoint has the statistics of the run's optimizer, if the run keeps them."""
  config, meta, resumes = facts.config, facts.origin.meta, facts.origin.own is not None
  if meta is None:
    return
  ours, theirs = config.optim.kind, meta.config.optim.kind
  if ours == theirs or meta.contents != 'model' or (not resumes and config.grow.moments == 'drop'):
    return
  advice = 'set config.grow.moments=drop, with which the new one begins with empty statistics'
  if resumes:
    advice = (
      f'start another run from it with the new one ({arg.workdir}=NEW_DIR '
      f'{arg.config}.init_from=DIR {arg.config}.grow.moments=drop)'
    )
  raise UserError(
    f'config.optim.kind is {ours}, but {facts.origin.where} was trained with {theirs}, whose '
    f'statistics mean nothing to {ours}; set it to {theirs}, or {advice}'
  )


def _check_order(facts: Facts, changes: Sequence[str] | None = None) -> None:
  """Check that a resumed run keeps the order of its data, or that the user asked for another order.

  Only another `data.source`, other sources of a mixture, or `init_from` count as asking for other
  data. `changes` are those of `Lengths`; None: the data is not read yet.
  """
  config, own = facts.config, facts.origin.own
  if own is None or not own.seen.samples or config.data.new_order_at == own.step:
    return
  if _sources(config.data) != _sources(own.config.data):
    return
  if changes is None:
    changes = order_changes(config, own)
  if changes:
    raise UserError(
      f'{" and ".join(changes)}, so the data would come in another order than the one in which '
      f'{facts.origin.where} has seen {own.seen.samples:,} samples; put that back, choose another '
      f'{arg.workdir}, or set config.data.new_order_at={own.step}, which begins the new order with '
      'its first sample'
    )


def _sources(data: DataConfig) -> set[str]:
  """Return the sources that a run trains on or evaluates."""
  return {one.source for one in data.mixture.values()} or {data.source}


def _check_new_order_used(facts: Facts) -> None:
  """Check that `data.new_order_at` is the step where this run goes on, or went on earlier."""
  config, origin = facts.config, facts.origin
  order_at, own, other = config.data.new_order_at, origin.own, origin.other
  kept = own is not None and order_at <= own.step  # A smaller one was used before.
  follows = other is not None and config.grow.step == 'keep' and order_at == other.meta.step
  if order_at and not kept and not follows:
    raise UserError(
      f'config.data.new_order_at is {order_at}, which has an effect only where a run goes on from '
      f'the checkpoint of step {order_at}, and this one {origin.begins}; leave it out'
    )


def _check_finished_data(facts: Facts, config: Config) -> None:
  """Check that a finished run has its own data, if the length is known."""
  train, optim, own = config.train, config.optim, facts.origin.own
  open_lengths = (train.epochs, train.examples, optim.warmup_epochs)
  if own is not None and not any(open_lengths) and own.step >= train.steps:
    check_finished(config, facts.origin, 'data.')


def _check_meaning(facts: Facts) -> None:
  """Check that the labels of a resumed run's data mean what they did."""
  origin = facts.origin
  if origin.own is not None and (reason := facts.task.other_meaning):
    raise UserError(
      f'{origin.where} does not fit config.data.source={facts.config.data.source}: {reason}; '
      'choose the images that it was trained on, or start another run from it, with a new head '
      f'({arg.workdir}=NEW_DIR {arg.config}.init_from=DIR)'
    )


def _check_decay(facts: Facts, config: Config) -> None:
  """Check that the decay of `train.decay_from` fits the run, and the checkpoint of its origin.

  A warm-up in epochs is not compared: its number of steps is not known yet.
  """
  check_config.check_decay(config)
  origin, meta, begin = facts.origin, facts.origin.meta, config.train.decay_from
  if not begin:
    return
  restarted = schedules.first_update(config.optim, facts.growth)
  warm = restarted + (0 if config.optim.warmup_epochs else config.optim.warmup_steps)
  if restarted and begin < warm:
    raise UserError(
      f'config.train.decay_from is {begin}, which is inside the warm-up after the last growth, to '
      f'update {warm}; set it to that or more, or set config.optim.restart_schedule=no'
    )
  if meta is None or begins_anew(config, origin):
    return
  if origin.own is not None and meta.config.train.decay_from == begin:
    return
  if meta.updates > begin:
    raise UserError(
      f'config.train.decay_from is {begin}, but {origin.where} has made {meta.updates} updates, so '
      'the decay would have begun in the past; set it to that number or more, or start from an '
      f'earlier checkpoint ({arg.workdir}=NEW_DIR {arg.config}.init_from=DIR@STEP)'
    )
  if _is_decaying(meta):
    theirs = meta.config
    raise UserError(
      f'config.train.decay_from is {begin}, but the rate of {origin.where} has begun to decay '
      f'already (optim.schedule={theirs.optim.schedule.kind} of {theirs.train.steps} steps); start '
      f'from an earlier checkpoint ({arg.config}.init_from=DIR@STEP), or from a run with '
      'optim.schedule=wsd or constant'
    )


def _is_decaying(meta: Meta) -> bool:
  """Return whether the rate of a checkpoint's last update was below the peak after its warm-up."""
  optim, train = meta.config.optim, meta.config.train
  growth = last_growth(meta.lineage, meta.config.model)
  if meta.updates - schedules.first_update(optim, growth) <= optim.warmup_steps:
    return False
  rate = schedules.schedule(optim, train.steps, growth, train.decay_from)
  return schedules.fraction_of_peak(rate, optim, meta.updates - 1) < 1 - 1e-6


def check_finished(config: Config, origin: Origin, section: str = '') -> None:
  """Check that a run whose checkpoint has made all steps has no other settings than it.

  The number of steps, the mesh and the remat plan may differ: none asks for another model. `config`
  has every size and length filled in. With `section`, such as 'data.', only keys of this section
  are compared.
  """
  changed = [
    change
    for change in changed_settings(config, origin)
    if not change.startswith(('train.steps:', 'train.remat:', 'train.layers:', 'mesh.'))
    and change.startswith(section)
  ]
  if changed:
    raise UserError(
      f'{origin.where} has made config.train.steps={config.train.steps} steps already, so none '
      f'would be made with what differs from its settings ({"; ".join(changed)}); choose '
      f'{arg.workdir}=NEW_DIR to train a new run, or raise config.train.steps to go on with '
      'this one'
    )


def changed_settings(config: Config, origin: Origin) -> list[str]:
  """Return the changed settings of a resumed run as `key: old -> new`, and the ignored ones."""
  # A converted model has no earlier settings to compare with.
  if origin.own is None or origin.own.contents != 'model':
    return []
  theirs = origin.own.config
  # The keys of `grow` have no more effect.
  changed = [
    f'{path}: {old!r} -> {new!r}'
    for path, new, old in config_lib.differences(config, theirs)
    if path != 'init_from'
    and not path.startswith('grow.')
    and not ((key := names.find(path)) and key.quiet)
  ]
  if config.init_from and config.init_from != theirs.init_from:
    changed.append(f'init_from={config.init_from} is ignored, because there is a checkpoint')
  return changed


def _check_tokenizer(facts: Facts) -> None:
  """Check that a run keeps the tokenizer of its checkpoint.

  The meaning of labels is known only with the images: `_check_meaning`.
  """
  trained, origin = facts.origin.tokenizer, facts.origin
  if trained is not None and origin.meta is not None:
    spec = origin.meta.config.data.tokenizer
    tokenizers.check_same(facts.config.data.tokenizer, spec, trained, origin.where)


def _check_old_tokens(facts: Facts) -> None:
  """Check that the model has newer tokens, experts or layers if `optim.old_tokens` needs them."""
  optim, growth, arrays = facts.config.optim, facts.growth, facts.task.definition.abstract
  if optim.old_tokens == 'train':
    return
  if growth is None or jax.tree.all(
    jax.tree.map(lambda old, array: old.are_all(array.shape), growth.old, arrays)
  ):
    raise UserError(
      f'config.optim.old_tokens is {optim.old_tokens!r}, but this model has no tokens newer '
      'than the others, and no newer experts, layers or neurons; grow it first, or set it to train'
    )


def _check_groups(facts: Facts) -> None:
  """Check that the model has the groups that `train.nested_rows` needs."""
  every, count = facts.config.train.nested_rows, facts.task.definition.group_count
  if every and count < 2:
    raise UserError(
      f'config.train.nested_rows is {every}, and no projection of this model has several groups of '
      'tokens; grow it by method=group, give it groups (model.layer.ffn.groups), or set it to 0'
    )
  if 0 < every < count:
    raise UserError(
      f'config.train.nested_rows is {every}, and the model has {count - 1} numbers of first groups '
      f'besides all {count}, so that no row would train it whole; take at least {count}'
    )


def _check_reference(facts: Facts) -> None:
  """Check that a run on pairs by DPO has a reference."""
  config = facts.config
  needed = config.data.has_pairs and config.preference.loss == 'dpo'
  if needed and not config.distill.teacher and facts.base is None:
    raise UserError(
      'config.preference.loss is dpo, which compares the model with a reference, and the run has '
      'none; grow the model by a group of parameter tokens and set config.optim.old_tokens=freeze, '
      'name a run in config.distill.teacher, or set preference.loss=orpo'
    )
