"""Parts of a model as training states: tokens added, merged, removed, and the important ones."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tokenformer_jax import models, paths
from tokenformer_jax.checkpoint import Ancestor, Checkpoints, Meta
from tokenformer_jax.config import GrowConfig, ModelConfig, TokenCounts
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import files, importance, tokens, verify
from tokenformer_jax.grow.state import KINDS, map_trees
from tokenformer_jax.params import Params
from tokenformer_jax.step import State
from tokenformer_jax.tasks import Batch, Task


def last_addition(meta: Meta, directory: paths.Path) -> Ancestor:
  """The growth or merge whose tokens are the last ones of a model.

  Raises:
    UserError: there was none.
  """
  if meta.lineage and meta.lineage[-1].action in ('grow', 'merge'):
    last = meta.lineage[-1]
    if last.model.param_tokens != meta.config.model.param_tokens:
      return last
  raise UserError(f'nothing was added to {directory}: it is not the result of grow or merge')


def added_counts(meta: Meta) -> TokenCounts:
  """How many tokens a checkpoint has to give: the added ones, or all of a model."""
  counts = meta.config.model.param_tokens
  if meta.contents != 'added_tokens':
    return counts
  old = meta.lineage[-1].model.param_tokens
  return TokenCounts(*(getattr(counts, k) - getattr(old, k) for k in KINDS))


def check_mergeable(ours: ModelConfig, theirs: ModelConfig) -> None:
  """Checks that the tokens of one model fit into the other.

  Raises:
    UserError: they do not, or there are none.
  """
  if ours.projection != 'pattention':
    raise UserError(f'a model with projection={ours.projection} has no parameter tokens to merge')
  for name in ('projection', 'width', 'layers', 'heads', 'score', 'gelu'):
    a, b = getattr(ours, name), getattr(theirs, name)
    if a != b:
      raise UserError(f'model.{name} is {a!r} in the source and {b!r} in the added one')


def check_smaller(before: ModelConfig, after: ModelConfig) -> None:
  """Checks the counts of a shrunken model.

  Raises:
    UserError: a count is larger, or none is smaller.
  """
  for kind in KINDS:
    old, new = getattr(before.param_tokens, kind), getattr(after.param_tokens, kind)
    if new > old:
      raise UserError(f'param_tokens.{kind} is {old}, and shrink cannot make {new} of it')
  if before.param_tokens == after.param_tokens:
    raise UserError(
      'nothing would shrink; give smaller counts by --param_tokens=qkv=N,proj=N,ffn=N'
    )


def extract(state: State, model: ModelConfig, last: Ancestor) -> State:
  """The added tokens of a state, and nothing else."""
  old = models.define(last.model)
  sizes = tokens.counts(old.abstract, old.axes)
  cut = jax.jit(lambda params: tokens.extract(params, models.define(model).axes, sizes))
  return {'params': cut(state['params'])}


def read_added(checkpoints: Checkpoints, meta: Meta, mesh: Mesh) -> tuple[TokenCounts, Params]:
  """The tokens of a checkpoint from `extract`, or all those of a model, and how many they are."""
  counts = added_counts(meta)
  definition = models.define(dataclasses.replace(meta.config.model, param_tokens=counts))
  none = jax.tree.map(lambda _: 0, definition.abstract)
  abstract = jax.eval_shape(
    lambda: tokens.extract(definition.init(jax.random.key(0)), definition.axes, none)
  )
  return counts, files.read_params(checkpoints, meta, mesh, abstract)


def merge(state: State, added: Params, model: ModelConfig, config: GrowConfig) -> State:
  """Appends tokens to those of a state; their moments are zero."""
  axes = models.define(model).axes

  def append(more: Params, params: Params) -> Params:
    return tokens.merge(params, more, axes)

  zero = jax.tree.map(jnp.zeros_like, added)
  return _map(state, config, functools.partial(append, added), functools.partial(append, zero))


def remove(state: State, model: ModelConfig, before: ModelConfig, config: GrowConfig) -> State:
  """Takes the tokens out that are not in `before`."""
  axes, old = models.define(model).axes, models.define(before)
  sizes = tokens.counts(old.abstract, old.axes)

  def first(params: Params) -> Params:
    return tokens.remove(params, axes, sizes)

  return _map(state, config, first, first)


def shrink(state: State, task: Task, after: ModelConfig, batch: Batch, config: GrowConfig) -> State:
  """Keeps the tokens that are most important for a batch, of the task of the old model."""
  definition, target = task.definition, models.define(after)

  def loss(params: Params, examples: Batch) -> jax.Array:
    return verify.loss(task, params, examples)[0]

  score = jax.jit(functools.partial(importance.of_tokens, loss, axes=definition.axes))
  scores = score(state['params'], batch=batch)
  sizes = tokens.counts(target.abstract, target.axes)

  def keep(params: Params) -> Params:
    return tokens.shrink(params, definition.axes, scores, sizes)

  return _map(state, config, keep, keep)


def _map(
  state: State,
  config: GrowConfig,
  of_params: Callable[[Params], Params],
  of_moments: Callable[[Params], Params],
) -> State:
  def moments(order: int, tree: Params) -> Params:
    del order
    new = of_moments(tree)
    return jax.tree.map(jnp.zeros_like, new) if config.moments == 'drop' else new

  return map_trees(state, config, jax.jit(of_params), jax.jit(moments, static_argnums=0))
