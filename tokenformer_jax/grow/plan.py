"""Plan a growth: the steps from one model to a larger one, and those that take them back."""

import math
from collections.abc import Sequence

import jax

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import GrowConfig, ModelConfig, matching, matrices, pattentions
from tokenformer_jax.config.sections import check_used
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow.apply import Steps
from tokenformer_jax.grow.steps import experts, layers, tokens, widen
from tokenformer_jax.grow.steps.step import Step
from tokenformer_jax.model import models
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Lineage

# The methods that copy tokens or units. Without noise the copies differ only in what they add.
_COPYING = ('duplicate', 'net2net', 'hypercloning')
# The changes that `check_used` names, by the kinds of steps that make them.
_CHANGES: dict[type[Step], str] = {
  tokens.AddTokens: 'more_tokens',
  tokens.DuplicateTokens: 'more_tokens',
  widen.CopyUnits: 'wider',
  widen.FillBlocks: 'wider',
  experts.AddExperts: 'more_experts',
  layers.AddLayers: 'deeper',
}


def plan_growth(source: ModelConfig, target: ModelConfig, how: GrowConfig) -> Steps:
  """Return the steps from a model to a larger one, which `check` checks.

  Tokens are added first, then experts, then layers.
  """
  shallow = matching.shallow(source, target)
  narrow = experts.narrow(source, shallow)
  zero_values = how.new_values == 'zero' or (how.method == 'group' and not how.new_values)
  steps: list[Step] = []
  if narrow != source:
    pair = source, narrow
    if how.method == 'duplicate':
      steps.append(tokens.DuplicateTokens(*pair, how.noise))
    elif how.method in tokens.METHODS:
      steps.append(tokens.AddTokens(*pair, how.method, how.new_keys, zero_values, how.noise))
    elif how.method == 'net2net_fill':
      steps.append(widen.FillBlocks(*pair))
    else:
      steps.append(widen.CopyUnits(*pair, how.method, how.noise, how.seed))
  if shallow != narrow:
    steps.append(experts.AddExperts(narrow, shallow))
  if source.repeats != target.repeats:
    base = matching.routed(matching.with_first_tokens(source, narrow), shallow)
    steps.append(layers.AddLayers(shallow, target, how.place, base))
  return tuple(steps)


def check(source: ModelConfig, target: ModelConfig, how: GrowConfig) -> Steps:
  """Return the steps of a growth that can be made.

  Raises:
    UserError: the method is for other models, a count becomes smaller, the method cannot change a
      key that differs, a key of `how` has no effect, or new tokens could never learn.
  """
  steps = plan_growth(source, target, how)
  if steps and _CHANGES[type(steps[0])] in ('more_tokens', 'wider'):
    resized = steps[0].after
    seeded = matching.with_first_tokens(source, resized)
    check_method(seeded, how.method)
    if seeded != source:
      _check_first_tokens(source, seeded, how, others=seeded != resized)
    by_tokens = how.method in tokens.METHODS
    keys = ('tokens', 'reference', 'groups') if by_tokens else ('width', 'heads', 'kv_heads')
    for path, new, old in config_lib.differences(resized, seeded, 'model.'):
      if path.rpartition('.')[2] not in keys:
        raise UserError(
          f'{path} is {old!r} in the source and {new!r} in the target; growth by {how.method} '
          f'changes {", ".join(keys[:-1])} and {keys[-1]}, and adds experts and layers, only'
        )
  _check_keys(how, {_CHANGES[type(step)] for step in steps})
  for step in steps:
    step.check()
  return steps


def _check_keys(how: GrowConfig, changes: set[str]) -> None:
  """Check that the keys of a growth with these changes go together."""
  if 'deeper' not in changes and how.place not in ('copies', 'between'):  # defaults, now and before
    raise UserError(f'grow.place={how.place} is for new layers, and none is added; leave it out')
  resizes = 'more_tokens' in changes or 'wider' in changes
  if how.method in _COPYING and how.place == 'copies' and resizes and 'deeper' in changes:
    raise UserError(
      f'{how.method} makes copies that differ only in what they add, which place=copies sets to '
      'zero in new layers, so that they would stay equal for ever; use place=between or behind, or '
      'train the grown model before you add the layers'
    )
  if not 0 <= how.noise < math.inf:
    raise UserError(f'noise is {how.noise}; it must be a finite number and not negative')
  if how.scale == 'resize' and how.method == 'group':
    raise UserError(
      'scale=resize is for tokens that join others in one norm, and group gives them a norm and a '
      'reference count of their own; leave it out'
    )
  check_used(how, changes)
  if how.method == 'zero_keys' and how.new_values == 'zero':
    raise UserError(
      'new tokens whose keys and values are both zero are dead: both gradients are zero for ever, '
      'so they would never learn; use new_values=init'
    )


def _check_first_tokens(
  source: ModelConfig, seeded: ModelConfig, how: GrowConfig, *, others: bool
) -> None:
  """Check the method and the keys of a growth that adds the first tokens of matrices.

  `others` says whether it adds tokens to others as well.
  """
  if how.method != 'group':
    name = next(name for name in matrices(source) if name in pattentions(seeded))
    raise UserError(
      f'{name} has no parameter tokens in the source, and method={how.method} adds tokens to '
      'those that are there; use method=group, which adds a first group beside its matrix'
    )
  for key in () if others else ('new_keys', 'scale'):
    if getattr(how, key) != getattr(GrowConfig(), key):
      raise UserError(
        f'{key}={getattr(how, key)} is for new tokens of a projection that has some, and these '
        'are the first ones beside matrices; leave it out'
      )


def check_method(model: ModelConfig, method: str) -> None:
  """Check that a method is for models with parameter tokens, or without, like this one.

  Raises:
    UserError: it is not.
  """
  if method in tokens.METHODS:
    if not (pattentions(model) or (method == 'group' and matrices(model))):
      raise UserError(
        f'method {method} adds parameter tokens to others, and this model has none; choose group, '
        'which adds them beside its matrices, or net2net, net2net_fill or hypercloning'
      )
  elif pattentions(model):
    raise UserError(
      f'method {method} is for Transformers, and this model has parameter tokens; choose '
      f'{", ".join(tokens.METHODS)}'
    )


def check_no_twins(steps: Steps, lineage: Lineage, step: int) -> None:
  """Check that copies of layers do not hold tokens or units that would stay equal for ever.

  Copies of tokens differ only in what they add until they are trained, and `place=copies` sets that
  to zero in the new layers. `lineage` and `step` are those of the source.

  Raises:
    UserError: an earlier growth copied tokens or units, and no training followed.
  """
  if not any(isinstance(one, layers.AddLayers) and one.place == 'copies' for one in steps):
    return
  for ancestor in reversed(lineage):
    if ancestor.first_step != step:
      return
    how, step = ancestor.grow, ancestor.step
    copies = how.method in _COPYING or how.new_keys == 'copies'
    if ancestor.action == 'grow' and copies and not how.noise:
      raise UserError(
        f'the growth of {ancestor.source} made copies that differ only in what they add, which '
        'place=copies sets to zero in new layers, so that they could stay equal for ever; train '
        'the model before you add layers, or use place=between or behind'
      )


def inexact(steps: Sequence[Step]) -> str:
  """Return why the model after the steps will not compute what the one before does, or ''."""
  return next(filter(None, (step.inexact() for step in reversed(steps))), '')


def plan_removal(last: Ancestor, model: ModelConfig) -> Steps:
  """Return the steps that take out what a growth or merge added, if `model` is the one after it.

  Raises:
    UserError: nothing gives the old model back.
  """
  inverses = []
  for step in reversed(plan_growth(last.model, model, last.grow)):
    inverse = step.inverse()
    if inverse is None:
      raise UserError(
        'the last growth duplicated the tokens and divided the values of the old ones among the '
        'copies; taking the copies out would not give back what was there'
      )
    inverses.append(inverse)
  return tuple(inverses)


def rate_factor(source: ModelConfig, target: ModelConfig) -> float:
  """Return the factor on the learning rate for a larger model: r^−¾, rounded.

  r is the factor by which the layers' parameters grow that one token uses; of experts, this is a
  share. The exponent is a fit to the best rates of docs/growth.md.
  """

  def active(model: ModelConfig) -> float:
    definition = models.define(model)
    pairs = zip(jax.tree.leaves(definition.info), jax.tree.leaves(definition.abstract), strict=True)
    return sum(array.size * info.active for info, array in pairs if info.in_layers)

  return round((active(target) / active(source)) ** -0.75, 3)
