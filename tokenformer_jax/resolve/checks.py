"""Check that the facts of a run fit together: the rules before data is read and afterwards.

Each rule raises a `UserError` whose sentence names the key and what to do.
"""

import jax

from tokenformer_jax.data import tokenizers
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import sharding
from tokenformer_jax.resolve import continuation
from tokenformer_jax.resolve.facts import Facts
from tokenformer_jax.resolve.lengths import Lengths


def check_before_data(facts: Facts) -> None:
  """Check all that needs no data. Lengths may be in epochs or examples."""
  _check_repeats(facts)
  continuation.check_growth_used(facts)
  continuation.check_same_model(facts)
  continuation.check_steps_left(facts, facts.config)
  continuation.check_same_optimizer(facts)
  continuation.check_order(facts)
  continuation.check_new_order_used(facts)
  continuation.check_finished_data(facts, facts.config)
  _check_tokenizer(facts)
  continuation.check_decay(facts, facts.config)
  _check_old_tokens(facts)
  _check_groups(facts)
  _check_reference(facts)
  if facts.teacher is not None:
    facts.teacher.check_fits(facts.config, facts.mesh)
  definition = facts.task.definition
  sharding.check_divides(facts.mesh, definition.abstract, definition.axes)


def check_after_data(facts: Facts, lengths: Lengths) -> None:
  """Check what the data decides: numbers of steps, the order of samples, the meaning of labels."""
  continuation.check_steps_left(facts, lengths.config)
  continuation.check_finished_data(facts, lengths.config)
  continuation.check_meaning(facts)
  continuation.check_order(facts, lengths.order_changes)
  continuation.check_decay(facts, lengths.config)


def _check_repeats(facts: Facts) -> None:
  """Check that healthy devices repeat their bits if `train.check_devices` compares them."""
  train, platform = facts.config.train, facts.mesh.devices.flat[0].platform
  if train.check_devices and platform == 'gpu' and train.compiler_options != 'deterministic':
    raise UserError(
      'config.train.check_devices compares the bits of two computations, which differ on a healthy '
      f'GPU with config.train.compiler_options={train.compiler_options}; set that to deterministic'
    )


def _check_tokenizer(facts: Facts) -> None:
  """Check that a run keeps the tokenizer of its checkpoint.

  The meaning of labels is known only with the images: `continuation.check_meaning`.
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
  """Check that the model has the groups that `train.drop_groups` needs."""
  drop_groups = facts.config.train.drop_groups
  if drop_groups and facts.task.definition.group_count < 2:
    raise UserError(
      f'config.train.drop_groups is {drop_groups}, and no projection of this model '
      'has several groups of tokens; grow it by method=group, give it groups '
      '(model.layer.ffn.groups), or set it to 0'
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
