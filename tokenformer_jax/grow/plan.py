"""Plan a growth: the steps from one model to a larger one, and those that take them back."""

from collections.abc import Mapping, Sequence

import jax

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import (
  TOKEN_METHODS,
  GrowConfig,
  ModelConfig,
  grown_model,
  matching,
  matrices,
  named_counts,
  pattentions,
)
from tokenformer_jax.config.groups import check_new_tokens_train
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.grow.apply import Steps
from tokenformer_jax.grow.steps import experts, layers, tokens, untie, widen
from tokenformer_jax.grow.steps.step import Step
from tokenformer_jax.model import models
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Lineage

# The changes that `_check_keys` names, by the kinds of steps that make them.
_CHANGES: dict[type[Step], str] = {
  tokens.AddTokens: 'more_tokens',
  tokens.DuplicateTokens: 'more_tokens',
  widen.CopyUnits: 'wider',
  widen.FillBlocks: 'wider',
  widen.AddNeurons: 'wider',
  experts.AddExperts: 'more_experts',
  untie.Untie: 'untied',
  layers.AddLayers: 'deeper',
}


def larger_model(
  model: ModelConfig,
  grow: GrowConfig,
  param_tokens: Mapping[str, int] | None,
  sizes: Mapping[str, int | None],
  more: experts.Wanted | None,
  layer_count: int | None,
  pattern: str | None,
) -> ModelConfig:
  """Return the larger model that the arguments of `actions.grow` describe.

  `sizes` has the width, the heads and the feed-forward width; None: as before.
  """
  wide = {name: size for name, size in sizes.items() if size is not None}
  deeper = not (more is layer_count is pattern is None)
  after = _wider(model, grow, param_tokens, wide, deeper=deeper)
  after = layers.wanted(experts.wanted(after, more) if more else after, layer_count, pattern)
  if after == model:
    kind = grow.method.kind
    needs = f'say what is to be larger, by {arg.param_tokens}=qkv=N,proj=N,ffn=N'
    if not grow.method.adds_tokens:
      size = 'ffn_width' if kind == 'neurons' else 'width'
      needs = f'method={kind} needs {arg[size]}=N'
    raise UserError(
      f'nothing would grow; {needs}; other growths have {arg.experts}=N, {arg.layers}=N, or, '
      f'for a Transformer, {arg.width}=N'
    )
  return after


def _wider(
  model: ModelConfig,
  grow: GrowConfig,
  param_tokens: Mapping[str, int] | None,
  wide: Mapping[str, int],
  *,
  deeper: bool,
) -> ModelConfig:
  """Return the model with other sizes of its layers; `deeper`: layers or experts are added too."""
  if not grow.method.adds_tokens:
    if param_tokens is not None:
      raise UserError(
        f'{arg.param_tokens} is not for method={grow.method.kind}, which takes {arg.width}=N'
      )
    if deeper and not wide:
      return model
    check_method(model, grow.method.kind)
    return widen.resized(model, **wide)
  if not deeper:
    check_method(model, grow.method.kind)
  if wide:
    raise UserError(
      f'{arg[next(iter(wide))]} is for the methods that widen a Transformer; method='
      f'{grow.method.kind} adds parameter tokens ({arg.param_tokens}=qkv=N,proj=N,ffn=N); choose '
      f'neurons for {arg.ffn_width}, or net2net, net2net_fill or hypercloning'
    )
  counts = {}
  if param_tokens is not None:
    first = grow.method.kind == 'group'
    counts = named_counts(model, param_tokens, arg.param_tokens, first=first)
  return grown_model(model, counts, grow)


def plan_growth(source: ModelConfig, target: ModelConfig, grow: GrowConfig) -> Steps:
  """Return the steps from a model to a larger one, which `check` checks.

  Tokens are added first, then experts; then tied arrays are untied, and layers added.
  """
  shallow = matching.shallow(source, target)
  narrow = experts.narrow(source, shallow)
  method = grow.method
  steps: list[Step] = []
  if narrow != source:
    pair = source, narrow
    if method.kind == 'duplicate':
      steps.append(tokens.DuplicateTokens(*pair, method.noise))
    elif method.adds_tokens:
      zero_values = method.new_values == 'zero'
      added = method.kind, method.new_keys, zero_values, method.noise
      steps.append(tokens.AddTokens(*pair, *added))
    elif method.kind == 'neurons':
      steps.append(widen.AddNeurons(*pair))
    elif method.kind == 'net2net_fill':
      steps.append(widen.FillBlocks(*pair))
    else:
      steps.append(widen.CopyUnits(*pair, method.kind, method.noise, grow.seed))
  if shallow != narrow:
    steps.append(experts.AddExperts(narrow, shallow))
  own = matching.untied(shallow, target)
  if own != shallow:
    steps.append(untie.Untie(shallow, own))
  if own.repeats != target.repeats:
    base = matching.routed(matching.with_first_tokens(source, narrow), shallow)
    steps.append(layers.AddLayers(own, target, grow.place, base))
  return tuple(steps)


def check(source: ModelConfig, target: ModelConfig, grow: GrowConfig) -> Steps:
  """Return the steps of a growth that can be made."""
  steps = plan_growth(source, target, grow)
  check_new_tokens_train(source, target)
  if steps and _CHANGES[type(steps[0])] in ('more_tokens', 'wider'):
    resized = steps[0].after
    seeded = matching.with_first_tokens(source, resized)
    check_method(seeded, grow.method.kind)
    if seeded != source:
      _check_first_tokens(source, seeded, grow, others=seeded != resized)
    by_tokens = grow.method.adds_tokens
    keys = ('tokens', 'reference', 'groups') if by_tokens else ('width', 'heads', 'kv_heads')
    for path, new, old in config_lib.differences(resized, seeded, 'model.'):
      if path.rpartition('.')[2] not in keys:
        raise UserError(
          f'{path} is {old!r} in the source and {new!r} in the target; growth by '
          f'{grow.method.kind} changes {", ".join(keys[:-1])} and {keys[-1]}, and '
          'adds experts and layers, only'
        )
  _check_keys(grow, {_CHANGES[type(step)] for step in steps})
  for step in steps:
    step.check()
  return steps


def _check_keys(grow: GrowConfig, changes: set[str]) -> None:
  """Check that the keys of a growth with these changes go together."""
  method, resizes = grow.method, 'more_tokens' in changes or 'wider' in changes
  if method.copies and grow.place in layers.EXACT_COPIES and resizes and 'deeper' in changes:
    raise UserError(
      f'{method.kind} makes copies that differ only in what they add, which place={grow.place} '
      'sets to zero in new layers, so that they would stay equal for ever; use place=between or '
      'behind, or train the grown model before you add the layers'
    )
  if method.noise and not (method.copies or method.new_keys == 'copies'):
    raise UserError(f'noise={method.noise} is for copies; use new_keys=copies, or leave it out')
  used = {
    'method': (resizes, 'new tokens or a larger width'),
    'place': ('deeper' in changes, 'new layers'),
  }
  for path, value, _ in config_lib.differences(grow, GrowConfig()):
    section, _, key = path.partition('.')
    is_used, made = used.get(section, (True, ''))
    if not is_used:
      name = section if key in ('', 'kind') else key
      raise UserError(f'{name}={value} is for {made}, and this growth has none; leave it out')


def _check_first_tokens(
  source: ModelConfig, seeded: ModelConfig, grow: GrowConfig, *, others: bool
) -> None:
  """Check the method and the keys of a growth that adds the first tokens of matrices.

  `others` says whether it adds tokens to others as well.
  """
  if grow.method.kind != 'group':
    name = next(name for name in matrices(source) if name in pattentions(seeded))
    raise UserError(
      f'{name} has no parameter tokens in the source, and method={grow.method.kind} adds tokens to '
      'those that are there; use method=group, which adds a first group beside its matrix'
    )
  if not others and grow.method.new_keys != 'init':
    raise UserError(
      f'new_keys={grow.method.new_keys} is for new tokens of a projection that has some, and these '
      'are the first ones beside matrices; leave it out'
    )


def check_method(model: ModelConfig, method: str) -> None:
  """Check that a method is for models with parameter tokens, or without, like this one."""
  if method in TOKEN_METHODS:
    if not (pattentions(model) or (method == 'group' and matrices(model))):
      raise UserError(
        f'method {method} adds parameter tokens to others, and this model has none; choose group, '
        'which adds them beside its matrices, or net2net, net2net_fill or hypercloning'
      )
  elif pattentions(model):
    raise UserError(
      f'method {method} is for Transformers, and this model has parameter tokens; choose '
      f'{", ".join(TOKEN_METHODS)}'
    )


def check_no_duplicated_layers(steps: Steps, lineage: Lineage, step: int) -> None:
  """Check that copies of layers do not hold tokens or units that would stay equal for ever.

  Copies of tokens differ only in what they add until they are trained, and exact copies of layers
  have zero there. `lineage` and `step` are those of the source.
  """
  places = {one.place for one in steps if isinstance(one, layers.AddLayers)}
  if not places.intersection(layers.EXACT_COPIES):
    return
  for ancestor in reversed(lineage):
    if ancestor.first_step != step:
      return
    grow, step = ancestor.grow, ancestor.step
    copies = grow.method.copies or grow.method.new_keys == 'copies'
    if copies and not grow.method.noise:
      raise UserError(
        f'the growth of {ancestor.source} made copies that differ only in what they add, which '
        'copies of layers have as zero, so that they could stay equal for ever; train '
        'the model before you add layers, or use place=between or behind'
      )


def inexact(steps: Sequence[Step]) -> str:
  """Return why the model after the steps will not compute what the one before does, or ''."""
  return next(filter(None, (step.inexact() for step in reversed(steps))), '')


def plan_removal(last: Ancestor, model: ModelConfig) -> Steps:
  """Return the steps that take out what a growth or merge added, if `model` is the one after it."""
  inverses = []
  for step in reversed(plan_growth(last.model, model, last.grow)):
    inverse = step.inverse()
    if inverse is None:
      raise UserError(f'{step.permanent}; go on from {last.source}@{last.step}')
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
    return sum(array.size * info.active * info.runs for info, array in pairs if info.in_layers)

  return round((active(target) / active(source)) ** -0.75, 3)
