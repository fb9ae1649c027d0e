"""The actions of growth, from whose signatures `Run` makes its methods and the command its flags.

An action checks all it can before it reads an array, and writes its target whole or not at all. It
returns the name of the run that it wrote.
"""

from __future__ import annotations  # so that help() shows the names of types

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from tokenformer_jax.config import (
  GrowConfig,
  ModelConfig,
  OptimConfig,
  arguments,
  growth,
  named_counts,
)
from tokenformer_jax.config import groups as choices
from tokenformer_jax.config.arguments import FILLED, Count, Natural, Path
from tokenformer_jax.config.groups import Choice, as_text
from tokenformer_jax.config.growth import (
  MethodName,
  Moments,
  NewKeys,
  NewScore,
  NewValues,
  Place,
  Scale,
  StepNumber,
)
from tokenformer_jax.config.projections import grown_model, pattentions
from tokenformer_jax.config.section import Bool, Float, Str
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.parallel import messages

if TYPE_CHECKING:
  from tokenformer_jax.grow.apply import Steps
  from tokenformer_jax.grow.derivation import Derivation, Made, Parent
  from tokenformer_jax.model.params import Params
  from tokenformer_jax.tasks import Batch

Counts = Mapping[str, Count]  # by the name of a projection or layer
Numbers = Sequence[Count]  # of groups or experts, from 1 on
Text = Annotated[Str, FILLED]


def grow(
  parent: Parent,
  target: Path,
  param_tokens: Counts | None = None,
  *,
  layers: Count | None = None,
  pattern: Text | None = None,
  place: Place = 'copies',
  width: Count | None = None,
  heads: Count | None = None,
  ffn_width: Count | None = None,
  experts: Count | Counts | None = None,
  expert_tokens: Count | None = None,
  top_k: Count | None = None,
  method: MethodName = 'group',
  scale: Scale | None = None,
  new_keys: NewKeys | None = None,
  new_values: NewValues | None = None,
  new_score: NewScore | None = None,
  noise: Annotated[Float, Field(ge=0)] | None = None,
  moments: Moments = 'pad',
  step: StepNumber = 'keep',
  seed: Natural = 0,
  rate: Annotated[Float, Field(ge=0, le=100)] = 0.0,
  dry_run: Bool = False,
) -> Made:
  """Make a larger model in a new work directory, and say whether it is exact.

    grown = run.grow('runs/grown', {'qkv': 128, 'proj': 128, 'ffn': 512})

  Args:
    target: The new work directory.
    param_tokens: New counts: qkv=N,proj=N,ffn=N; NAME.ffn=N for one kind of layer.
    layers: The total number of layers after growth.
    pattern: The new pattern of layers, such as 'local*10 full'.
    place: Of new layers: copies of the layer before that add nothing yet; stacked_copies of all old
      layers, in their order behind them; drawn between or behind them. Whole copies are not exact.
    width: For a Transformer: the new width.
    heads: For a Transformer: the new number of heads.
    ffn_width: For a Transformer: the new feed-forward width; method=neurons adds zero at first.
    experts: The new number of experts of all layers, or NAME=N by layer.
    expert_tokens: Tokens of each new expert; default: as the Pattention has.
    top_k: Experts per token. Default: unchanged; 1 beside a Pattention, 2 after upcycling.
    method: How new weights are made: the first four add tokens, the others widen a Transformer.
    scale: Reference counts, for zero_keys, duplicate and random.
    new_keys: The keys of new tokens, for group and random.
    new_values: The values of new tokens, for group and random.
    new_score: The score of a new group; default: the projection's.
    noise: Noise on copies, in units of RMS.
    moments: The optimizer's moments.
    step: The number of steps made.
    seed: Seed of the draws.
    rate: Factor on the learning rate; 0: by size.
    dry_run: Print what changes and whether it pays, and stop.

  Returns:
    The larger run, at the same step; with dry_run this run.

  Raises:
    UserError: the target exists, a size is not allowed, or a growth that must be exact changes
      the outputs. Nothing is written then.
  """
  from tokenformer_jax.grow import payoff, plan
  from tokenformer_jax.grow.steps import experts as experts_lib

  keys = {
    'scale': scale,
    'new_keys': new_keys,
    'new_values': new_values,
    'new_score': new_score,
    'noise': noise,
  }
  given = {key: value for key, value in keys.items() if value is not None}
  config = growth(method, moments=moments, step=step, seed=seed, place=place, **given)
  if experts is None and (expert_tokens or top_k):
    name = 'expert_tokens' if expert_tokens else 'top_k'
    raise UserError(f'{arg[name]} has an effect only with {arg.experts}=N; leave it out')
  new = dataclasses.replace(parent, dry_run=parent.dry_run or dry_run).derive(target, config)
  more = None
  if experts is not None:
    counts = experts_lib.named_counts(new.before, experts, arg.experts)
    more = experts_lib.Wanted(counts, expert_tokens, top_k)
  sizes = {'width': width, 'heads': heads, 'ffn_width': ffn_width}
  after = plan.larger_model(new.before, config, param_tokens, sizes, more, layers, pattern)
  steps = plan.check(new.before, after, config)
  plan.check_no_duplicated_layers(steps, new.meta.lineage, new.meta.step)
  reason, one = plan.inexact(steps), range(1)
  if reason:
    messages.say(
      f'not exact: the grown model will not compute what the source does, because {reason}'
    )
  optim = functools.partial(_with_rate, before=new.before, after=after, factor=rate)
  made = new.write('grow', after, steps, measured=one, exact=not reason, optim=optim)
  if new.dry_run:
    new.show(f'\n{payoff.of_growth(new.meta, after, steps, config)}\n')
  if not reason:
    messages.say('exact: the grown model computes what the source does')
  return made


def merge(
  parent: Parent,
  added: Path,
  target: Path,
  *,
  scale: Scale = 'keep',
  moments: Moments = 'pad',
  step: StepNumber = 'keep',
) -> Made:
  """Append the tokens of another run, or of a directory from `extract`, to this run's.

    both = code.merge('runs/law_tokens', 'runs/both')

  Args:
    added: The run whose tokens are appended, DIR[@STEP].
    target: The new work directory.
    scale: Reference counts of groups that tokens join.
    moments: The optimizer's moments.
    step: The number of steps made.
  """
  from tokenformer_jax.grow import merging, subsets
  from tokenformer_jax.runs import checkpoint

  new = parent.derive(target, growth('zero_keys', scale=scale, moments=moments, step=step))
  origin = checkpoint.open_source(os.fspath(added), check=None)
  after = merging.check(new.source, origin, new.config)
  new_tokens = subsets.read_added(origin, new.mesh)
  if chat := origin.meta.tokenizer.get('chat'):  # the template of what the tokens learned
    own = dataclasses.replace(new.meta, tokenizer={'chat': chat, **new.meta.tokenizer})
    new = dataclasses.replace(new, source=new.source._replace(meta=own))
  steps = merging.merge(new.before, after, new_tokens)
  return new.write('merge', after, steps, measured=range(1))


def extract(parent: Parent, target: Path, groups: Numbers | None = None) -> Made:
  """Write only the tokens of some groups, or those that the last growth or merge added.

    run.extract('runs/law_tokens', [2])

  Args:
    target: The new directory, for `merge`.
    groups: The groups, as 2,3, counted from 1; default: what was added last.

  Returns:
    This run.
  """
  from tokenformer_jax.grow import grow_run, subsets
  from tokenformer_jax.runs.checkpoint_meta import Meta

  new = parent.derive(target, GrowConfig())
  meta = new.meta
  numbers = () if groups is None else group_numbers(new.before, groups)
  lineage, model = subsets.extraction(meta, new.source.directory, numbers)
  if new.dry_run:
    return None
  params = grow_run.read(new.source, new.mesh)['params']
  extracted = subsets.extract(params, new.before, lineage[-1].model, numbers)
  config = new.new_config(model, meta.config.grow)
  made = Meta(meta.step, config, meta.tokenizer, lineage, 'added_tokens')
  grow_run.write(new.target, made, {'params': extracted})
  which = f'groups {as_text(numbers)}' if numbers else 'the added tokens'
  messages.say(f'wrote {new.target}: {which} of {new.source.directory}')
  return None


def remove(
  parent: Parent,
  target: Path,
  groups: Numbers | None = None,
  *,
  experts: Numbers | None = None,
  moments: Moments = 'pad',
  step: StepNumber = 'keep',
) -> Made:
  """Take out groups, experts, or what the last growth or merge added; the others move up.

    run.remove('runs/without', [2, 3])

  Args:
    target: The new work directory.
    groups: The groups, as 2,3, counted from 1.
    experts: Instead, the experts, as 2,3, counted from 1.
    moments: The optimizer's moments.
    step: The number of steps made.
  """
  if groups is not None and experts is not None:
    raise UserError(f'{arg.groups} and {arg.experts} both say what to take out; give one of them')
  new = parent.derive(target, growth(moments=moments, step=step))
  if groups is not None:
    numbers = group_numbers(new.before, groups)
    return _choose(new, 'remove', choices.without(numbers), numbers)
  if experts is not None:
    return _remove_experts(new, experts)
  return _remove_last(new)


def slice(
  parent: Parent,
  target: Path,
  groups: Count,
  *,
  moments: Moments = 'pad',
  step: StepNumber = 'keep',
) -> Made:
  """Keep the first groups of each projection.

    run.slice('runs/small', 1)

  Args:
    target: The new work directory.
    groups: How many groups to keep.
    moments: The optimizer's moments.
    step: The number of steps made.
  """
  new = parent.derive(target, growth(moments=moments, step=step))
  _check_has_tokens(new.before)
  most = choices.most_groups(new.before)
  if most == 1:
    raise UserError('every projection of this model has one group; there is nothing to remove')
  if groups >= most:
    raise UserError(
      f'{arg.groups} is {groups}, the number of groups to keep; it must be from 1 to {most - 1}'
    )
  gone = range(groups + 1, most + 1)
  return _choose(new, 'slice', choices.first(groups), gone)


def shrink(
  parent: Parent,
  target: Path,
  param_tokens: Counts | None = None,
  *,
  experts: Count | Counts | None = None,
  examples: Annotated[Count, Field(le=2**16)] = 16,
  scale: Scale | None = None,
  moments: Moments = 'pad',
  step: StepNumber = 'keep',
) -> Made:
  """Keep the tokens that matter most for held-out examples, or the most used experts.

    run.shrink('runs/less', {'ffn': 256})

  Args:
    target: The new work directory.
    param_tokens: The counts to keep: qkv=N,proj=N,ffn=N; others stay.
    experts: Instead, the number of experts to keep, N or NAME=N.
    examples: Held-out sequences or images to measure importance on.
    scale: Reference counts; default: keep. For tokens alone.
    moments: The optimizer's moments.
    step: The number of steps made.
  """
  if (param_tokens is None) == (experts is None):
    raise UserError(f'shrink needs either {arg.param_tokens} or {arg.experts}, the numbers to keep')
  if experts is not None and scale:
    arguments.needs_value('param_tokens=NAME=N', False, scale=scale)
  config = growth('zero_keys', scale=scale or 'keep', moments=moments, step=step)
  new = parent.derive(target, config)
  if experts is not None:
    return _shrink_experts(new, experts, examples)
  return _shrink_tokens(new, param_tokens or {}, examples)


def scale(parent: Parent, target: Path, groups: Numbers, factor: Float) -> Made:
  """Multiply the values of groups, and so what they add to each output; moments stay.

    run.scale('runs/half', [2], 0.5)

  Args:
    target: The new work directory.
    groups: The groups, as 2,3, counted from 1.
    factor: The factor of the values.
  """
  from tokenformer_jax.grow.steps.remove import ScaleGroups

  new = parent.derive(target, GrowConfig())
  model = new.before
  numbers = group_numbers(model, groups)
  steps, text = (ScaleGroups(model, model, numbers, factor),), as_text(numbers)
  return new.write('scale', model, steps, groups=text, factor=factor)


def freeze(parent: Parent, target: Path, groups: Numbers) -> Made:
  """Write a run that trains all groups of parameter tokens but these.

    run.freeze('runs/tuned', [1]).train(1500)

  Args:
    target: The new work directory.
    groups: The groups, as 1,2, counted from 1; none: train all.
  """
  new = parent.derive(target, GrowConfig())
  model = new.before
  _check_has_tokens(model)
  numbers = group_numbers(model, groups) if groups else ()
  after, none = choices.with_frozen(model, numbers), range(0)
  return new.write('freeze', after, (), measured=none, groups=as_text(numbers))


def as_tokens(parent: Parent, target: Path, matrices: Text | None = None) -> Made:
  """Turn matrices of a Transformer into parameter tokens; the same up to rounding.

    run.as_tokens('runs/tokens', 'qkv,ffn')

  Args:
    target: The new work directory.
    matrices: Names, as qkv,ffn; default: all without biases and gates.
  """
  from tokenformer_jax.grow.steps import matrices as matrices_lib

  new = parent.derive(target, GrowConfig())
  model = new.before
  after = matrices_lib.wanted(model, matrices)
  messages.say(
    'the same up to rounding: GELU(z) − GELU(−z) = z makes two tokens of each input of a '
    "matrix, and a neuron of an MLP is a token; the optimizer's moments of the pairs start at "
    'zero'
  )
  steps = (matrices_lib.MatricesToTokens(model, after),)
  return new.write('as_tokens', after, steps)


def untie(parent: Parent, target: Path, what: Literal['layers', 'head']) -> Made:
  """Give tied layers, or a head that is the embedding, their own arrays; no output changes.

    run.untie('runs/untied', 'layers')

  Args:
    target: The new work directory.
    what: layers: those of the pattern's ^N; or head.
  """
  from tokenformer_jax.grow import plan
  from tokenformer_jax.grow.steps import untie as untie_lib

  new = parent.derive(target, GrowConfig())
  after = untie_lib.wanted(new.before, what)
  return new.write('untie', after, plan.check(new.before, after, new.config), exact=True)


def group_table(parent: Parent) -> str:
  """Return a table of the groups of parameter tokens and of where they come from."""
  from tokenformer_jax.grow import groups as groups_lib
  from tokenformer_jax.runs import checkpoint

  meta = checkpoint.open_source(parent.source).meta
  _check_has_tokens(meta.config.model)
  return groups_lib.render(meta)


# The actions by their words in the command.
ACTIONS: dict[str, Callable[..., Any]] = {
  'grow': grow,
  'merge': merge,
  'extract': extract,
  'remove': remove,
  'slice': slice,
  'shrink': shrink,
  'scale': scale,
  'freeze': freeze,
  'as_tokens': as_tokens,
  'untie': untie,
  'groups': group_table,
}


def _with_rate(
  optim: OptimConfig, before: ModelConfig, after: ModelConfig, factor: float
) -> OptimConfig:
  """Return the optimizer's settings with the learning rate of the larger model; report it.

  `factor` multiplies the rate; 0: by the size.
  """
  from tokenformer_jax.grow import plan

  reason = 'as rate says'
  if not factor:
    factor = plan.rate_factor(before, after)
    reason = f'because a larger model needs a lower rate ({arg.rate}=1 keeps it)'
  if factor == 1:
    return optim
  rate = float(f'{optim.learning_rate * factor:.3g}')
  messages.say(
    f'optim.learning_rate is {optim.learning_rate:g} before and {rate:g} after, {reason}'
  )
  return dataclasses.replace(optim, learning_rate=rate)


def _remove_last(new: Derivation) -> Made:
  """Take out what the last growth or merge added."""
  from tokenformer_jax.grow import plan, subsets

  last = subsets.last_addition(new.meta, new.source.directory)
  after = choices.with_records_of(last.model, new.before)  # as they are frozen now
  return new.write('remove', after, plan.plan_removal(last, new.before))


def _remove_experts(new: Derivation, experts: Numbers) -> Made:
  from tokenformer_jax.grow.steps import experts as experts_lib
  from tokenformer_jax.model.params import lookup

  numbers = choices.in_order(experts, arg.experts, 'experts')
  after = experts_lib.without(new.before, numbers, arg.experts)
  kept = functools.partial(lookup, experts_lib.all_but(new.before, numbers))
  steps = (experts_lib.TakeExperts(new.before, after, data=kept),)
  return new.write('remove', after, steps, experts=as_text(numbers))


def _choose(new: Derivation, action: str, choice: Choice, gone: Sequence[int]) -> Made:
  """Write the run with a choice of its groups; `gone` are the numbers of the others."""
  from tokenformer_jax.grow.steps.remove import TakeGroups

  model = new.before
  after = choices.choose(model, choice)
  steps = (TakeGroups(model, after, choice),)
  return new.write(action, after, steps, groups=as_text(gone))


def _shrink_tokens(new: Derivation, param_tokens: Counts, examples: int) -> Made:
  """Keep the parameter tokens that matter most."""
  from tokenformer_jax.grow import subsets, verify

  model = new.before
  after = grown_model(model, named_counts(model, param_tokens, arg.param_tokens), new.config)
  subsets.check_smaller(model, after)

  def steps(params: Params) -> Steps:
    batch, name = new.held_out(examples)
    task = verify.exact_task(new.meta.config, model)
    messages.say(f'importance of a token: mean over examples of |⟨value, ∂loss/∂value⟩|, on {name}')
    return subsets.shrink(params, task, after, batch)

  others = range(examples, 2 * examples)
  return new.write('shrink', after, steps, measured=others)


def _shrink_experts(new: Derivation, experts: int | Counts, examples: int) -> Made:
  from tokenformer_jax.grow.steps import experts as experts_lib
  from tokenformer_jax.model.params import lookup

  counts = experts_lib.named_counts(new.before, experts, arg.experts, dense=False)
  after = experts_lib.smaller(new.before, counts, f'{arg.experts}=N')

  def steps(params: Params) -> Steps:
    batch, name = new.held_out(examples)
    kept = _most_used(new, after, params, batch, name)
    return (experts_lib.TakeExperts(new.before, after, data=functools.partial(lookup, kept)),)

  others = range(examples, examples + 1)
  return new.write('shrink', after, steps, measured=others)


def _most_used(
  new: Derivation, after: ModelConfig, params: Params, batch: Batch, name: str
) -> Params:
  """Return the experts to keep; report how often tokens choose the others."""
  import jax
  import jax.numpy as jnp

  from tokenformer_jax.grow import verify
  from tokenformer_jax.grow.steps import experts as experts_lib
  from tokenformer_jax.model import models

  info = models.define(new.before).info
  task = verify.exact_task(new.meta.config, experts_lib.balanced_by_bias(new.before))
  loads = jax.jit(lambda params, batch: experts_lib.loads(task, params, batch))(params, batch)
  kept = experts_lib.most_used(loads, info, models.define(after).abstract)
  shares = [
    jnp.sum(jnp.take_along_axis(load, numbers, axis=-1), axis=-1)
    for load, numbers in zip(jax.tree.leaves(loads), jax.tree.leaves(kept), strict=True)
    if load.ndim
  ]
  lost = 1 - float(jnp.mean(jnp.concatenate(shares)))
  messages.say(f'the experts that go have {lost:.1%} of the choices of {name}')
  return kept


def group_numbers(model: ModelConfig, groups: Numbers) -> tuple[int, ...]:
  """Return numbers of groups of a model, at least one, in rising order."""
  _check_has_tokens(model)
  numbers, most = choices.in_order(groups, arg.groups), choices.most_groups(model)
  if numbers[-1] > most:
    known = 'one group' if most == 1 else f'the groups 1 to {most}'
    raise UserError(f'{arg.groups} names group {numbers[-1]}; each projection has {known} at most')
  return numbers


def _check_has_tokens(model: ModelConfig) -> None:
  if not pattentions(model):
    raise UserError('this model is a Transformer, which has no groups of parameter tokens')
