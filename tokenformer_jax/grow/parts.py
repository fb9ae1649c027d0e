"""Extract, merge, remove and select the parameter tokens of a training state."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import GrowConfig, ModelConfig, pattentions, token_counts
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import depth, files, importance, tokens, verify
from tokenformer_jax.grow.state import map_trees
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Params, Role
from tokenformer_jax.runs.checkpoint import Checkpoints
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Meta
from tokenformer_jax.steps.step import State
from tokenformer_jax.storage import paths
from tokenformer_jax.tasks import Batch, Task


def last_addition(meta: Meta, directory: paths.Path) -> Ancestor:
  """Return the growth or merge that added the last tokens or layers of a model.

  Raises:
    UserError: there was none.
  """
  if meta.lineage and meta.lineage[-1].action in ('grow', 'merge'):
    last = meta.lineage[-1]
    if _adds(last.model, meta.config.model):
      return last
  raise UserError(f'nothing was added to {directory}: it is not the result of grow or merge')


def _adds(before: ModelConfig, after: ModelConfig) -> bool:
  """Return whether a model has tokens or layers that another has not, and is no wider."""
  same_layers = depth.shallow(before, after)
  return before.width == after.width and (
    before.groups != after.groups or token_counts(before) != token_counts(same_layers)
  )


def check_no_layers(last: Ancestor, model: ModelConfig, directory: paths.Path) -> None:
  """Check that the last growth added tokens alone.

  Raises:
    UserError: it added layers.
  """
  if last.model.groups != model.groups:
    raise UserError(
      f'the last growth of {directory} added layers (from {last.model.pattern!r} to '
      f'{model.pattern!r}), and tokens of new layers cannot be extracted or merged; grow layers '
      'first, and tokens by a growth of their own'
    )


def added_counts(meta: Meta) -> dict[str, int]:
  """Return how many tokens a checkpoint offers: the added ones, or all of a model."""
  counts = token_counts(meta.config.model)
  if meta.contents != 'added_tokens':
    return counts
  old = token_counts(meta.lineage[-1].model)
  return {name: count - old[name] for name, count in counts.items()}


# Keys, besides those of the layers, that change what parameter tokens compute. Embeddings, final
# norm and head are the source's.
_OF_TOKENS = ('model.kind', 'model.pattern', 'model.width', 'model.norm_epsilon')
_OF_LAYERS = ('model.layer.', 'model.variants')


def check_mergeable(ours: ModelConfig, theirs: ModelConfig) -> None:
  """Check that the tokens of `theirs` compute the same in `ours`.

  Raises:
    UserError: they do not, or `ours` has no parameter tokens.
  """
  if not pattentions(ours):
    raise UserError('this model is a Transformer, which has no parameter tokens to merge')
  for path, a, b in config_lib.differences(ours, theirs, 'model.'):
    of_tokens = path in _OF_TOKENS or path.startswith(_OF_LAYERS)
    if of_tokens and not path.endswith(('.tokens', '.reference', '.groups')):
      raise UserError(
        f'{path} is {a!r} in the source and {b!r} in the added one, whose tokens would not '
        'compute the same here; merge runs that agree in it'
      )


def other_scale(ours: ModelConfig, theirs: ModelConfig) -> str | None:
  """Return a warning if the added tokens get another scale than in training, or None."""
  there = pattentions(theirs)
  differing = [
    f'{name} {there[name].reference} there and {here.reference} here'
    for name, here in pattentions(ours).items()
    if there[name].reference != here.reference
  ]
  if not differing:
    return None
  return (
    f'the added tokens were trained with other reference counts ({", ".join(differing)}); they get '
    'the scale of the source, which changes their weights'
  )


def additions(meta: Meta, directory: paths.Path) -> list[list[str]]:
  """Return the runs in which the parameter tokens of a checkpoint were first trained.

  Returns:
    A list of runs for the first tokens, and for each later growth or merge that was not removed
    again. A list is empty where an older version did not record the runs.
  """
  if meta.contents == 'added_tokens':
    return [meta.lineage[-1].tokens_of.splitlines()]
  after = [(a.source, a.model) for a in meta.lineage[1:]]
  after.append((str(paths.absolute(directory)), meta.config.model))
  found = [[meta.lineage[0].source if meta.lineage else after[-1][0]]]
  for ancestor, (run, model) in zip(meta.lineage, after, strict=False):
    if ancestor.action == 'merge':
      found.append(ancestor.tokens_of.splitlines())
    elif ancestor.action == 'grow' and _adds(ancestor.model, model):
      found.append([run])
    elif ancestor.action == 'remove' and len(found) > 1:
      found.pop()
  return found


def as_lines(found: list[list[str]]) -> str:
  """Join runs of `additions` to the form of `Ancestor.tokens_of`."""
  return '\n'.join(run for runs in found for run in runs)


def check_not_twice(
  source: Meta, directory: paths.Path, added: Meta, added_directory: paths.Path
) -> None:
  """Check that the source has none of the tokens to append.

  Raises:
    UserError: it has some, which would count twice.
  """
  ours, theirs = additions(source, directory), additions(added, added_directory)
  known = {run for runs in ours for run in runs}
  common = [run for runs in theirs for run in runs if run in known]
  if not common and not _same_arrays(source, added):
    return
  if added.contents == 'added_tokens':
    advice = f'merge them into a run without them, such as {added.lineage[-1].source}'
  elif len(theirs) > 1 and theirs[-1] and not known.intersection(theirs[-1]):
    advice = (
      'append only what was added to it: python -m tokenformer_jax.grow extract '
      f'--source={added_directory} --target=NEW_DIR, then merge with --added=NEW_DIR'
    )
  else:
    advice = 'merge a run that shares no tokens with it, or tokens from extract'
  raise UserError(
    f'{added_directory} has parameter tokens of {common[0] if common else directory}, which '
    f'{directory} has already; merged, they would count twice; {advice}'
  )


def _same_arrays(ours: Meta, theirs: Meta) -> bool:
  """Return whether two checkpoints of whole models have keys that are equal bit for bit."""
  info = jax.tree_util.tree_leaves_with_path({'params': models.define(ours.config.model).info})
  paths_of_keys = (
    jax.tree_util.keystr(path, simple=True, separator='/')
    for path, one in info
    if one.role is Role.KEY
  )
  return any(
    path in ours.checksums and ours.checksums[path] == theirs.checksums.get(path)
    for path in paths_of_keys
  )


def check_smaller(before: ModelConfig, after: ModelConfig) -> None:
  """Check the counts of a shrunken model.

  Raises:
    UserError: there are no counts, one is larger, or none is smaller.
  """
  smaller = token_counts(after)
  for name, old in token_counts(before).items():
    if smaller[name] > old:
      raise UserError(
        f'{name} has {old} parameter tokens, and shrink cannot make {smaller[name]} of them'
      )
  if smaller == token_counts(before):
    raise UserError(
      'nothing would shrink; give smaller counts by --param_tokens=qkv=N,proj=N,ffn=N'
    )


def extract(state: State, model: ModelConfig, last: Ancestor) -> State:
  """Return only the added tokens of a state."""
  sizes = tokens.counts(models.define(last.model))
  cut = jax.jit(lambda params: tokens.extract(params, models.define(model).axes, sizes))
  return {'params': cut(state['params'])}


def read_added(checkpoints: Checkpoints, meta: Meta, mesh: Mesh) -> tuple[dict[str, int], Params]:
  """Read the tokens of a checkpoint from `extract`, or all of a model; return counts and tokens."""
  counts = added_counts(meta)
  definition = models.define(config_lib.with_token_counts(meta.config.model, counts))
  none = jax.tree.map(lambda _: 0, definition.abstract)
  abstract = jax.eval_shape(
    lambda: tokens.extract(definition.init(jax.random.key(0)), definition.axes, none)
  )
  return counts, files.read_params(checkpoints, meta, mesh, abstract)


def merge(state: State, added: Params, model: ModelConfig, config: GrowConfig) -> State:
  """Append tokens to those of a state; their moments are zero."""
  axes = models.define(model).axes

  def append(more: Params, params: Params) -> Params:
    return tokens.merge(params, more, axes)

  zero = jax.tree.map(jnp.zeros_like, added)
  return _map(state, config, functools.partial(append, added), functools.partial(append, zero))


def remove(
  state: State, model: ModelConfig, before: ModelConfig, config: GrowConfig, place: str = 'between'
) -> State:
  """Remove the layers and tokens that are not in `before`; `place` is that of the growth."""
  definition = models.define(before)
  axes, sizes = definition.axes, tokens.counts(definition)

  def first(params: Params) -> Params:
    old_layers = depth.remove(params, model, before, place)
    return tokens.remove(old_layers, axes, sizes)

  return _map(state, config, first, first)


def shrink(state: State, task: Task, after: ModelConfig, batch: Batch, config: GrowConfig) -> State:
  """Keep the tokens that are most important for a batch of the old model's task."""
  definition, target = task.definition, models.define(after)

  def loss(params: Params, examples: Batch) -> jax.Array:
    return verify.loss(task, params, examples)[0]

  score = jax.jit(functools.partial(importance.score_tokens, loss, info=definition.info))
  scores = score(state['params'], batch=batch)

  def keep(params: Params) -> Params:
    return tokens.shrink(params, definition.info, scores, target.info)

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
