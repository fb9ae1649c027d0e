"""Extract and select the parameter tokens of a model, by its lineage or by their importance."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import GrowConfig, ModelConfig, TokenGroup, matching, token_counts
from tokenformer_jax.config.groups import (
  as_text,
  at_the_end,
  choose,
  most_groups,
  named_groups,
  without,
)
from tokenformer_jax.config.pattention import Birth, births_of
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.grow import grow_run, importance, verify
from tokenformer_jax.grow.apply import Growth, Steps
from tokenformer_jax.grow.steps import experts, remove
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Params, lookup
from tokenformer_jax.runs import checkpoint_meta
from tokenformer_jax.runs.checkpoint import Source
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Lineage, Meta
from tokenformer_jax.storage import paths
from tokenformer_jax.tasks import Batch, Task


def last_addition(meta: Meta, directory: paths.Path) -> Ancestor:
  """Return the growth or merge that added the last tokens or layers of a model."""
  last, later = checkpoint_meta.last_addition(meta.lineage)
  if last is not None and not later and _adds(last, meta.config.model):
    return last
  if later and later[-1].action == 'untie':
    run = later[-1]
    raise UserError(
      f'untie, the last action on {directory}, added nothing that could be taken out: tied layers, '
      'or the head, got copies, which training moves apart. To have them tied again, go on from '
      f'{run.source}@{run.step}'
    )
  several = most_groups(meta.config.model) > 1
  advice = f'; {arg.groups}=N,… names groups of its tokens' if several else ''
  raise UserError(
    f'nothing was added to {directory}: it is not the result of grow or merge{advice}'
  )


def _adds(last: Ancestor, after: ModelConfig) -> bool:
  """Return whether a growth or merge added neurons, or tokens, experts or layers of one width."""
  before = last.model
  if last.grow.method.kind == 'neurons' or before.width != after.width:
    return before.width == after.width
  same_layers = matching.shallow(before, after)
  return (
    before.repeats != after.repeats
    or before.tied_head != after.tied_head
    or experts.narrow(before, same_layers) != same_layers
    or token_counts(before) != token_counts(same_layers)
  )


def check_no_layers(last: Ancestor, model: ModelConfig, directory: paths.Path) -> None:
  """Check that the last growth added tokens alone."""
  if last.grow.method.kind == 'neurons':
    raise UserError(
      f'the last growth of {directory} added neurons, which are part of its matrices and cannot be '
      'extracted or merged; write the whole model (convert to-hf)'
    )
  if experts.narrow(last.model, model) != model:
    raise UserError(
      f'the last growth of {directory} added experts, which cannot be extracted or merged, because '
      'a router chooses among all of them; grow experts first, and tokens by a growth of their own'
    )
  if last.model.repeats != model.repeats:
    raise UserError(
      f'the last growth of {directory} added layers (from {last.model.pattern!r} to '
      f'{model.pattern!r}), and tokens of new layers cannot be extracted or merged; grow layers '
      'first, and tokens by a growth of their own'
    )


def added_counts(meta: Meta) -> dict[str, int]:
  """Return how many tokens a checkpoint offers: the added ones, or all of a model."""
  model = meta.config.model
  whole = meta.contents != 'added_tokens'
  return token_counts(model) if whole else _counts_behind(meta.lineage[-1].model, model)


def _counts_behind(base: ModelConfig, model: ModelConfig) -> dict[str, int]:
  """Return how many tokens of each projection a model has behind those of `base`."""
  old = token_counts(base)
  return {name: count - old.get(name, 0) for name, count in token_counts(model).items()}


def births(meta: Meta) -> list[Birth]:
  """Return where the tokens were born that a checkpoint offers: the added ones, or all."""
  named, added = named_groups(meta.config.model), added_counts(meta)
  return [birth for name, groups in named.items() for birth in last_births(groups, added[name])]


def last_births(groups: Sequence[TokenGroup], count: int) -> tuple[Birth, ...]:
  """Return the births of the last tokens of a projection."""
  total = sum(group.tokens for group in groups)
  return births_of(groups, total - count, total)


def check_smaller(before: ModelConfig, after: ModelConfig) -> None:
  """Check the counts of a shrunken model."""
  smaller = token_counts(after)
  for name, old in token_counts(before).items():
    if smaller[name] > old:
      raise UserError(
        f'{name} has {old} parameter tokens, and shrink cannot make {smaller[name]} of them'
      )
  if smaller == token_counts(before):
    raise UserError(
      f'nothing would shrink; give smaller counts by {arg.param_tokens}=qkv=N,proj=N,ffn=N'
    )


def extraction(
  meta: Meta, directory: paths.Path, numbers: Sequence[int]
) -> tuple[Lineage, ModelConfig]:
  """Return the lineage and the model of the extracted groups, or of the last growth or merge.

  The last entry of the lineage has the model without the extracted tokens. The model is the whole
  one, with the extracted tokens behind the others.
  """
  model = meta.config.model
  if not numbers:
    born = last_addition(meta, directory)
    check_no_layers(born, model, directory)
    return meta.lineage[: meta.lineage.index(born) + 1], model
  whole = dataclasses.replace(
    meta, config=dataclasses.replace(meta.config, model=choose(model, without(numbers)))
  )
  lineage = grow_run.descend(whole, directory, 'extract', GrowConfig(), groups=as_text(numbers))
  return lineage, choose(model, at_the_end(numbers))


def extract(
  params: Params, model: ModelConfig, base: ModelConfig, numbers: Sequence[int] = ()
) -> Params:
  """Return only some tokens of the parameters of a model: groups, or the tokens behind `base`'s.

  `base` is the model of the last entry of the lineage from `extraction`.
  """
  steps: Steps = (remove.TakeLastTokens(model, model, base),)
  if numbers:
    ordered = choose(model, at_the_end(numbers))
    steps = (
      remove.TakeGroups(model, ordered, at_the_end(numbers)),
      remove.TakeLastTokens(ordered, ordered, base),
    )
  growth, shapes = Growth(model, steps, GrowConfig()), _shapes(model, _counts_behind(base, model))
  return jax.jit(lambda params: growth.make_tree('', params, shapes))(params)


def _shapes(model: ModelConfig, counts: dict[str, int]) -> Params:
  """Return the shapes of the arrays of so many tokens of a model; files hold no empty arrays."""
  definition = models.define(config_lib.with_token_counts(model, counts))

  def of_tree(info: Params, abstract: Params) -> Params:
    kept = {}
    for key, shape in abstract.items():
      if isinstance(shape, dict):
        kept |= {key: inner} if (inner := of_tree(info[key], shape)) else {}
      elif info[key].token_axis is not None and shape.size:
        kept[key] = shape
    return kept

  return of_tree(definition.info, definition.abstract)


def read_added(source: Source, mesh: Mesh) -> Params:
  """Read the tokens of a checkpoint from `extract`, or all of a model."""
  shapes = _shapes(source.meta.config.model, added_counts(source.meta))
  return grow_run.read_params(source, mesh, shapes)


def shrink(params: Params, task: Task, after: ModelConfig, batch: Batch) -> Steps:
  """Return the step that keeps the tokens that matter most for a batch of the model's task."""
  definition, before = task.definition, task.config.model

  def loss(params: Params, examples: Batch) -> jax.Array:
    return verify.loss(task, params, examples)[0]

  @jax.jit
  def choose_tokens(params: Params, batch: Batch) -> Params:
    scores = importance.score_tokens(loss, params, definition.info, batch)
    return remove.most_important(scores, before, after)

  kept = choose_tokens(params, batch)
  return (remove.TakeTokens(before, after, data=functools.partial(lookup, kept)),)
