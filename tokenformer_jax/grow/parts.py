"""Extract, remove and select the parameter tokens of a training state."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import (
  GrowConfig,
  ModelConfig,
  NoProjectionConfig,
  matching,
  matrices,
  pattentions,
  token_counts,
)
from tokenformer_jax.config.groups import (
  Choice,
  as_text,
  at_the_end,
  check_numbers,
  choose,
  most_groups,
  without,
)
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import (
  depth,
  expert_arrays,
  experts,
  files,
  groups,
  importance,
  tokens,
  verify,
)
from tokenformer_jax.grow.state import (
  map_trees,
  run_stages,
  without_tokens,
)
from tokenformer_jax.model import group_trees, models
from tokenformer_jax.model.params import Params
from tokenformer_jax.runs.checkpoint import Checkpoints
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Lineage, Meta, RunName
from tokenformer_jax.steps.last_growth import changes_of_tokens
from tokenformer_jax.steps.step import State
from tokenformer_jax.storage import paths
from tokenformer_jax.tasks import Batch, Task


def last_addition(meta: Meta, directory: paths.Path) -> Ancestor:
  """Return the growth or merge that added the last tokens or layers of a model.

  Raises:
    UserError: there was none.
  """
  changes = changes_of_tokens(meta.lineage)
  if changes and changes[-1].action in ('grow', 'merge'):
    last = changes[-1]
    if _adds(last.model, meta.config.model):
      return last
  advice = '; --groups=N,… names groups of its tokens' if most_groups(meta.config.model) > 1 else ''
  raise UserError(
    f'nothing was added to {directory}: it is not the result of grow or merge{advice}'
  )


def _adds(before: ModelConfig, after: ModelConfig) -> bool:
  """Return whether `after` has more tokens, experts or layers, and the same width."""
  same_layers = matching.shallow(before, after)
  return before.width == after.width and (
    before.repeats != after.repeats
    or experts.narrow(before, same_layers) != same_layers
    or token_counts(before) != token_counts(same_layers)
  )


def check_no_layers(last: Ancestor, model: ModelConfig, directory: paths.Path) -> None:
  """Check that the last growth added tokens alone.

  Raises:
    UserError: it added experts or layers.
  """
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
  counts = token_counts(meta.config.model)
  if meta.contents != 'added_tokens':
    return counts
  old = token_counts(meta.lineage[-1].model)
  return {name: count - old.get(name, 0) for name, count in counts.items()}


def additions(meta: Meta, directory: paths.Path) -> list[list[RunName]]:
  """Return the runs in which the parameter tokens of a checkpoint were first trained.

  There is a list of runs for the first tokens, and for each later growth or merge of which the
  model still has tokens.
  """
  if meta.contents == 'added_tokens':
    return [list(meta.lineage[-1].token_runs)]
  found = groups.additions(groups.history(meta, directory))
  return [list(addition.runs) for addition in found]


def as_lines(found: list[list[RunName]]) -> str:
  """Join runs of `additions` to the form of `Ancestor.tokens_of`."""
  return '\n'.join(dict.fromkeys(run.to_line() for runs in found for run in runs))


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


def extraction(
  meta: Meta, directory: paths.Path, numbers: Sequence[int]
) -> tuple[Lineage, ModelConfig]:
  """Return the lineage and the model of the extracted groups, or of the last growth or merge.

  The last entry of the lineage has the model without the extracted tokens. The model is the whole
  one, with the extracted tokens behind the others.

  Raises:
    UserError: nothing was added, there is no such group, or a projection has no other group.
  """
  model = meta.config.model
  if not numbers:
    born = last_addition(meta, directory)
    check_no_layers(born, model, directory)
    tokens_of = as_lines(additions(meta, directory)[-1:])
    before = meta.lineage[: meta.lineage.index(born)]
    return (*before, dataclasses.replace(born, tokens_of=tokens_of)), model
  check_numbers(most_groups(model), numbers, '--groups')
  found = groups.additions(groups.history(meta, directory), numbers)
  whole = dataclasses.replace(
    meta, config=dataclasses.replace(meta.config, model=choose(model, without(numbers)))
  )
  lineage = files.descend(
    whole,
    directory,
    'extract',
    GrowConfig(),
    tokens_of=as_lines([list(addition.runs) for addition in found]),
    groups=as_text(numbers),
  )
  return lineage, choose(model, at_the_end(numbers))


def extract(state: State, model: ModelConfig, last: Ancestor, numbers: Sequence[int] = ()) -> State:
  """Return only some tokens of the state of a model: groups, or the tokens behind `last.model`'s.

  `last` is the last entry of the lineage from `extraction`.
  """
  definition = models.define(model)
  sizes = definition.counts_in(models.define(last.model))

  def cut(params: Params) -> Params:
    ordered = group_trees.take(params, definition.info, at_the_end(numbers))
    return tokens.extract(ordered, definition.axes, sizes)

  return {'params': jax.jit(cut)(state['params'])}


def read_added(checkpoints: Checkpoints, meta: Meta, mesh: Mesh) -> Params:
  """Read the tokens of a checkpoint from `extract`, or all of a model."""
  counts = added_counts(meta)
  definition = models.define(config_lib.with_token_counts(meta.config.model, counts))
  none = jax.tree.map(lambda _: 0, definition.abstract)
  abstract = jax.eval_shape(
    lambda: tokens.extract(definition.init(jax.random.key(0)), definition.axes, none)
  )
  return files.read_params(checkpoints, meta, mesh, abstract)


def remove(
  state: State, model: ModelConfig, before: ModelConfig, config: GrowConfig, place: str = 'between'
) -> State:
  """Remove layers, experts and tokens that are not in `before`; `place` is that of the growth."""
  narrow = experts.narrow(before, model)
  if narrow != model:
    more = expert_arrays.MoreExperts(narrow, model, config)
    state, model = run_stages(state, model, narrow, [more.inverse()], config), narrow
  fewer = matching.without_first_tokens(before, model)
  state, model = without_tokens(state, model, fewer, config), fewer
  definition = models.define(before)
  axes, sizes = definition.axes, definition.token_counts

  def first(params: Params) -> Params:
    old_layers = depth.remove(params, model, before, place)
    return tokens.remove(old_layers, axes, sizes)

  return map_state(state, config, first, first)


def choose_groups(state: State, model: ModelConfig, choice: Choice, config: GrowConfig) -> State:
  """Return a state with the chosen groups of each projection, and their moments."""
  fewer = choose(model, choice)
  kept = {*pattentions(model)} & {*matrices(fewer)}
  fewer = config_lib.with_pattentions(model, dict.fromkeys(kept, NoProjectionConfig()))
  state, info = without_tokens(state, model, fewer, config), models.define(fewer).info

  def chosen(params: Params) -> Params:
    return group_trees.take(params, info, choice)

  return map_state(state, config, chosen, chosen)


def take_experts(state: State, model: ModelConfig, numbers: Params, config: GrowConfig) -> State:
  """Return a state with some experts of each layer: see `expert_arrays.take`."""
  info = models.define(model).info

  def taken(params: Params) -> Params:
    return expert_arrays.take(params, info, numbers)

  return map_state(state, config, taken, taken)


def scale_groups(state: State, model: ModelConfig, numbers: Sequence[int], factor: float) -> State:
  """Multiply the values of some groups, in the parameters and in their average; keep the rest."""
  info = models.define(model).info
  scaled = jax.jit(lambda params: group_trees.scale(params, info, numbers, factor))
  return {
    **state,
    **{name: scaled(state[name]) for name in ('params', 'ema') if name in state},
  }


def shrink(state: State, task: Task, after: ModelConfig, batch: Batch, config: GrowConfig) -> State:
  """Keep the tokens that are most important for a batch of the larger model's task."""
  definition, target = task.definition, models.define(after)

  def loss(params: Params, examples: Batch) -> jax.Array:
    return verify.loss(task, params, examples)[0]

  score = jax.jit(functools.partial(importance.score_tokens, loss, info=definition.info))
  scores = score(state['params'], batch=batch)

  def keep(params: Params) -> Params:
    return tokens.shrink(params, definition.info, scores, target.info)

  return map_state(state, config, keep, keep)


def map_state(
  state: State,
  config: GrowConfig,
  map_params: Callable[[Params], Params],
  map_moments: Callable[[Params], Params],
) -> State:
  """Map the parameters and the moments of a state, which `config.moments=drop` sets to zero."""

  def moments(order: int, tree: Params) -> Params:
    del order
    new = map_moments(tree)
    return jax.tree.map(jnp.zeros_like, new) if config.moments == 'drop' else new

  return map_trees(state, config, jax.jit(map_params), jax.jit(moments, static_argnums=0))
