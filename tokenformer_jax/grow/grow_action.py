"""The actions that make a run larger: grow it, and merge another run into it. See `actions.py`."""

import contextlib
import dataclasses
from collections.abc import Mapping

from tokenformer_jax.config import GrowConfig, ModelConfig, OptimConfig, named_counts
from tokenformer_jax.config.groups import check_new_tokens_train
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import merging, plan, subsets, verify
from tokenformer_jax.grow.job import Job
from tokenformer_jax.grow.steps import experts as experts_lib
from tokenformer_jax.grow.steps import layers as layers_lib
from tokenformer_jax.grow.steps import tokens, widen
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.storage import paths


def grown_model(
  model: ModelConfig,
  how: GrowConfig,
  param_tokens: Mapping[str, int] | None,
  sizes: Mapping[str, int | None],
  more: experts_lib.Wanted | None,
  layers: int | None,
  pattern: str | None,
) -> ModelConfig:
  """Return the larger model that the arguments of `actions.Growable.grow` describe.

  `sizes` has the width, the heads and the feed-forward width; None: as before.
  """
  wide = {name: size for name, size in sizes.items() if size is not None}
  deeper = not (more is layers is pattern is None)
  after = _wider(model, how, param_tokens, wide, deeper=deeper)
  after = layers_lib.wanted(experts_lib.wanted(after, more) if more else after, layers, pattern)
  if after == model:
    raise UserError(
      'nothing would grow; say what is to be larger, by --param_tokens=qkv=N,proj=N,ffn=N, or by '
      '--width=N for a Transformer, or --experts=N, or --layers=N'
    )
  return after


def _wider(
  model: ModelConfig,
  how: GrowConfig,
  param_tokens: Mapping[str, int] | None,
  wide: Mapping[str, int],
  *,
  deeper: bool,
) -> ModelConfig:
  """Return the model with other sizes of its layers; `deeper`: layers or experts are added too."""
  if not how.method.adds_tokens:
    if param_tokens is not None:
      raise UserError(f'--param_tokens is not for method={how.method.kind}, which takes --width=N')
    if deeper and not wide:
      return model
    plan.check_method(model, how.method.kind)
    return widen.resized(model, **wide)
  if not deeper:
    plan.check_method(model, how.method.kind)
  if wide:
    raise UserError(
      f'--{next(iter(wide))} is for the methods that widen a Transformer; method={how.method.kind} '
      'adds parameter tokens (--param_tokens=qkv=N,proj=N,ffn=N); choose net2net, net2net_fill or '
      'hypercloning'
    )
  counts = {}
  if param_tokens is not None:
    first = how.method.kind == 'group'
    counts = named_counts(model, param_tokens, '--param_tokens', first=first)
  return tokens.grown_model(model, counts, how)


def write(job: Job, after: ModelConfig, rate: float) -> int | None:
  """Write the run with a larger model, and say whether it computes what the source does.

  `rate` is a factor on the learning rate; 0: by the size. Return the step, None after a dry run.
  """
  before, meta = job.model, job.meta
  steps = plan.check(before, after, job.config)
  plan.check_no_twins(steps, meta.lineage, meta.step)
  check_new_tokens_train(before, after)
  job.show_table(after, advice=True)
  job.check_room(after)
  reason = plan.inexact(steps)
  messages.say(
    f'not exact: the grown model will not compute what the source does, because {reason}'
    if reason
    else 'exact: the grown model computes what the source does'
  )
  if job.dry_run:
    return None
  batch, name = job.held_out(1)
  new, outputs = job.grow_and_compare(after, steps, batch)
  verify.report(*outputs, name, exact=not reason)
  optim = _grown_rate(job, after, rate)
  return job.write('grow', after, new, optim)


def _grown_rate(job: Job, after: ModelConfig, factor: float) -> OptimConfig:
  """Return the optimizer's settings with the learning rate of the larger model; report it."""
  optim = job.optim
  reason = 'as rate says'
  if not factor:
    factor = plan.rate_factor(job.model, after)
    reason = 'because a larger model needs a lower rate (--rate=1 keeps it)'
  if factor == 1:
    return optim
  rate = float(f'{optim.learning_rate * factor:.3g}')
  messages.say(
    f'optim.learning_rate is {optim.learning_rate:g} before and {rate:g} after, {reason}'
  )
  return dataclasses.replace(optim, learning_rate=rate)


def merge(job: Job, added: str) -> int | None:
  """Append the tokens of another run, or of `extract`, to the source's.

  Raises:
    UserError: the tokens do not fit the source or are in it already, or there is no room.
  """
  directory, step = paths.split_source(added)
  checkpoints, meta = checkpoint.open_source(directory, step)
  if meta.lineage and meta.lineage[-1].action == 'grow':
    subsets.check_no_layers(meta.lineage[-1], meta.config.model, directory)
  merging.check_mergeable(job.model, meta.config.model)
  merging.check_no_experts(meta, directory)
  merging.check_not_twice(job.meta, job.directory, meta, directory)
  after = merging.merged_model(job.model, meta, job.config)
  check_new_tokens_train(job.model, after)
  with contextlib.closing(checkpoints):
    new_tokens = subsets.read_added(checkpoints, meta, job.mesh)
  own = merging.own_groups(job.model, meta)
  if note := merging.other_scale(job.model, meta.config.model, own):
    messages.say(note)

  if chat := meta.tokenizer.get('chat'):  # Tokens that learned conversations bring their template.
    vocabulary = {'chat': chat, **job.meta.tokenizer}
    job = dataclasses.replace(job, meta=dataclasses.replace(job.meta, tokenizer=vocabulary))
  steps = merging.merge(job.model, after, new_tokens)
  return job.rewrite('merge', after, steps, measured=range(1))
