"""Append the parameter tokens of another run, or of `extract`, to a model."""

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence

import jax

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import (
  GrowConfig,
  ModelConfig,
  PattentionConfig,
  TokenGroup,
  from_groups,
  grown_model,
  growth,
  matching,
  matrices,
  pattentions,
  token_counts,
)
from tokenformer_jax.config.groups import check_new_tokens_train, most_groups, named_groups
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.grow.apply import Steps
from tokenformer_jax.grow.steps import tokens
from tokenformer_jax.grow.subsets import added_counts, births, check_no_layers, last_births
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Params, Role, lookup
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs.checkpoint import Source
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.storage import paths

# The keys that change what parameter tokens compute. Embeddings, final norm and head are the
# source's.
_READ_BY_TOKENS = (
  *('model.kind', 'model.pattern', 'model.width', 'model.norm_epsilon'),
  *('model.layer.', 'model.variants'),
)


def check(source: Source, added: Source, grow: GrowConfig) -> ModelConfig:
  """Return the model after a merge that can be made; warn if tokens get another scale."""
  ours, theirs, lineage = source.meta.config.model, added.meta.config.model, added.meta.lineage
  if lineage and lineage[-1].adds:
    check_no_layers(lineage[-1], theirs, added.directory)
  check_mergeable(ours, theirs)
  if added.meta.contents != 'added_tokens' and theirs.experts:
    raise UserError(
      f'{added.directory} is a whole model with experts, and no router would choose among those of '
      'both models; merge the tokens that a growth added to it (grow extract)'
    )
  check_not_twice(source.meta, source.directory, added.meta, added.directory)
  after = merged_model(ours, added.meta, grow)
  check_new_tokens_train(ours, after)
  if note := other_scale(ours, theirs, own_groups(ours, added.meta)):
    messages.say(note)
  return after


def check_mergeable(ours: ModelConfig, theirs: ModelConfig) -> None:
  """Check that the tokens of `theirs` compute the same in `ours`."""
  ours, theirs = (
    matching.with_first_tokens(one, other) for one, other in ((ours, theirs), (theirs, ours))
  )
  if not pattentions(ours):
    raise UserError('this model is a Transformer, which has no parameter tokens to merge')
  of_groups = ('.tokens', '.reference', '.groups')  # and the scores, which groups keep
  for path, a, b in config_lib.differences(ours, theirs, 'model.'):
    kept = path.endswith(of_groups) or '.score.' in path
    if path.startswith(_READ_BY_TOKENS) and not kept:
      raise UserError(
        f'{path} is {a!r} in the source and {b!r} in the added one, whose tokens would not '
        'compute the same here; merge runs that agree in it'
      )


def own_groups(ours: ModelConfig, added: Meta) -> dict[str, tuple[TokenGroup, ...]]:
  """Return the groups that a merge appends to each projection; none where tokens join the last one.

  Tokens that had groups of their own keep them. Extracted tokens from inside a group join the last
  group of a model with as many groups as the one that they were added to. Whole models of one group
  each share a norm after the merge; if either has several, the added tokens become groups.
  """
  here, there, counts = named_groups(ours), named_groups(added.config.model), added_counts(added)
  if added.contents != 'added_tokens':
    several = max(most_groups(ours), most_groups(added.config.model)) > 1
    several = several or pattentions(ours).keys() != there.keys()
    return {name: theirs if several else () for name, theirs in there.items()}
  appended, bases = {}, named_groups(added.lineage[-1].model)
  for name, theirs in there.items():
    base = bases.get(name, ())
    appended[name] = theirs[len(base) :]
    inside = sum(group.tokens for group in appended[name]) != counts[name]
    if inside and len(here[name]) != len(base):
      born = last_births(theirs, counts[name])
      appended[name] = (dataclasses.replace(theirs[-1], tokens=counts[name], born=born),)
  return appended


def merged_model(ours: ModelConfig, added: Meta, config: GrowConfig) -> ModelConfig:
  """Return the model after a merge with another run, or with the tokens from `extract`."""
  counts, own = added_counts(added), own_groups(ours, added)
  own = {
    name: [dataclasses.replace(group, frozen=False) for group in groups]
    for name, groups in own.items()
  }
  if config.method.scale == 'resize' and any(own.values()):
    raise UserError(
      f'{arg.scale}=resize is for tokens that join a group, and these come in groups of their '
      'own, which keep their reference counts; leave it out'
    )
  joining = {
    name: count + counts.get(name, 0)
    for name, count in token_counts(ours).items()
    if not own.get(name)
  }
  _check_same_scores(ours, added.config.model, [name for name in joining if counts.get(name)])
  joined = grown_model(ours, joining, growth('zero_keys', scale=config.method.scale))
  theirs = named_groups(added.config.model)

  def with_added(name: str, groups: tuple[TokenGroup, ...]) -> PattentionConfig:
    *others, last = groups
    born = last_births(theirs.get(name, ()), last.unborn)
    last = dataclasses.replace(last, born=(*last.born, *born))
    return from_groups([*others, last, *own.get(name, ())])

  appended = {name: with_added(name, groups) for name, groups in named_groups(joined).items()}
  appended |= {name: from_groups(own[name]) for name in matrices(ours) if own.get(name)}
  return config_lib.with_pattentions(joined, appended)


def _check_same_scores(ours: ModelConfig, theirs: ModelConfig, names: Sequence[str]) -> None:
  """Check that tokens that join a group have its score."""
  here, there = named_groups(ours), named_groups(theirs)
  for name in names:
    one, other = (PattentionConfig(score=groups[name][-1].score) for groups in (here, there))
    for path, a, b in config_lib.differences(one, other):
      raise UserError(
        f'tokens of {name} have {path}={a} in the source and {b} in the added run, and would join '
        'one group; merge tokens that grew as groups of their own'
      )


def other_scale(
  ours: ModelConfig,
  theirs: ModelConfig,
  own: Mapping[str, Sequence[TokenGroup]] = types.MappingProxyType({}),
) -> str:
  """Return a warning if tokens that join a group get another scale than in training, or ''.

  `ours` is the model to append to, `theirs` the one that the tokens were trained in, and `own` the
  appended groups, from `own_groups`.
  """
  there = named_groups(theirs)
  differing = [
    f'{name} {there[name][-1].reference} there and {here[-1].reference} here'
    for name, here in named_groups(ours).items()
    if name in there and not own.get(name) and there[name][-1].reference != here[-1].reference
  ]
  if not differing:
    return ''
  return (
    f'the added tokens were trained with other reference counts ({", ".join(differing)}); they get '
    'the scale of the source, which changes their weights'
  )


def check_not_twice(
  source: Meta, directory: paths.Path, added: Meta, added_directory: paths.Path
) -> None:
  """Check that the source has none of the tokens to append."""
  known, theirs = {birth.run for birth in births(source)}, births(added)
  common = [birth for birth in theirs if birth.run in known]
  if not common and not _same_arrays(source, added):
    return
  if added.contents == 'added_tokens':
    last = added.lineage[-1]
    example = '' if last.action == 'extract' else f', such as {last.source}'
    advice = f'merge them into a run without them{example}'
  elif common and added.run not in known and any(birth.run == added.run for birth in theirs):
    advice = (
      'append only what was added to it: tokenformer grow extract '
      f'--source={added_directory} --target=NEW_DIR, then merge with --added=NEW_DIR'
    )
  else:
    advice = 'merge a run that shares no tokens with it, or tokens from extract'
  raise UserError(
    f'{added_directory} has parameter tokens of {common[0].path if common else directory}, which '
    f'{directory} has already; merged, they would count twice; {advice}'
  )


def _same_arrays(ours: Meta, theirs: Meta) -> bool:
  """Return whether two checkpoints of whole models have keys that are equal bit for bit."""
  infos = jax.tree_util.tree_leaves_with_path({'params': models.define(ours.config.model).info})
  names = (
    jax.tree_util.keystr(path, simple=True, separator='/')
    for path, info in infos
    if info.role is Role.KEY
  )
  return any(
    name in ours.checksums and ours.checksums[name] == theirs.checksums.get(name) for name in names
  )


def merge(ours: ModelConfig, after: ModelConfig, added: Params) -> Steps:
  """Return the step that appends tokens to a model; `after` is from `merged_model`."""
  return (tokens.AppendTokens(ours, after, data=functools.partial(lookup, added)),)
