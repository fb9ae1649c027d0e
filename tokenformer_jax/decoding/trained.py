"""Load a trained model for use from the run that `DIR` or `DIR@STEP` names."""

import dataclasses
import functools

import jax
from jax.sharding import Mesh

from tokenformer_jax.config import Config, MeshConfig, ModelConfig
from tokenformer_jax.config.groups import choose, first, most_groups
from tokenformer_jax.data import tokenizers
from tokenformer_jax.decoding import length as lengths
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import group_trees, models
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.params import Definition, Params
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Meta


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
  """The content of a checkpoint, on a mesh of all devices."""

  source: str  # as the caller names it
  meta: Meta
  definition: Definition
  execution: Execution
  params: Params
  mesh: Mesh

  @property
  def config(self) -> Config:
    """The config of the run, with every size filled in."""
    return self.meta.config

  @functools.cached_property
  def tokenizer(self) -> tokenizers.Tokenizer:
    """The tokenizer of a language model."""
    return tokenizers.from_json(self.meta.tokenizer)

  def context_length(self, asked: int | None = None) -> int:
    """Return the most tokens of input: `asked`, or for None the sequence length of the training."""
    if asked is not None and asked < 1:
      raise UserError(f'max_length is {asked}; it must be at least 1')
    model, length = self.config.model, asked or self.config.data.sequence_length
    if model.position_embedding == 'learned' and length > model.max_length:
      raise UserError(
        f'max_length is {length}, but this model has learned positions for {model.max_length} '
        'tokens; ask for at most that'
      )
    return length

  def with_clip(self, clip: int) -> 'Trained':
    """Return the same parameters as a model with `positions.clip`: see `length.with_clip`."""
    meta = _clipped(self.meta, clip)
    definition = models.define(meta.config.model, self.execution)
    return dataclasses.replace(self, meta=meta, definition=definition)


def load(
  source: str,
  token_shards: int = 1,
  *,
  check: checkpoint.Check = checkpoint.check_is_language_model,
  clip_positions: int | None = None,
  groups: int | None = None,
) -> Trained:
  """Load a checkpoint onto all devices.

  Args:
    source: `DIR`, or `DIR@STEP`.
    token_shards: the number of devices that split parameter tokens, heads and vocabulary; the
      remaining mesh splits width and batch. Every device has a full copy of the arrays that cannot
      be divided, which is refused if tokens are to be split.
    check: raises a UserError for a checkpoint of the wrong task, before its arrays are read.
    clip_positions: see `length.with_clip`; None: the model's own.
    groups: use only the first groups of parameter tokens of each projection; None: all.
  """
  mesh = sharding.make_mesh(MeshConfig(tokens=token_shards), sharding.find_devices())
  opened = checkpoint.open_source(source, check)
  meta = opened.meta
  if clip_positions is not None:
    meta = _clipped(meta, clip_positions)
  whole = models.define(meta.config.model)
  if groups is not None:
    meta = _first_groups(meta, groups)
  model, execution = meta.config.model, Execution.for_trained(meta.config)
  definition = models.define(model, execution)
  if token_shards > 1:
    sharding.check_divides(mesh, definition.abstract, definition.axes)
    for heads in model.heads:
      sharding.check_divisible(mesh, 'heads', heads, 'heads of a layer of the model')
  shardings = sharding.tree_shardings(mesh, definition.axes)
  abstract = {'params': sharding.with_even_shardings(whole.abstract, shardings)}
  params = opened.restore(abstract)['params']
  if groups is not None:
    params = _cut(params, whole, definition, groups, shardings)
  return Trained(source, meta, definition, execution, params, mesh)


def _first_groups(meta: Meta, count: int) -> Meta:
  """Return the metadata of a model with its first groups of parameter tokens."""
  model = meta.config.model
  most = most_groups(model)
  if not most:
    raise UserError(f'--groups is {count}, and this model is a Transformer, which has no groups')
  if not 1 <= count <= most:
    raise UserError(
      f'--groups is {count}; it must be from 1 to {most}, the most groups of parameter tokens that '
      'a projection has'
    )
  return _with_model(meta, choose(model, first(count)))


def _cut(
  params: Params, whole: Definition, definition: Definition, groups: int, shardings: Params
) -> Params:
  """Return the first groups of each array of parameter tokens, with the definition's shardings."""
  abstract = sharding.with_even_shardings(definition.abstract, shardings)
  cut = jax.jit(
    lambda params: group_trees.take(params, whole.info, first(groups)),
    out_shardings=jax.tree.map(lambda a: a.sharding, abstract),
  )
  return cut(params)


def _clipped(meta: Meta, clip: int) -> Meta:
  return _with_model(meta, lengths.with_clip(meta.config.model, clip))


def _with_model(meta: Meta, model: ModelConfig) -> Meta:
  return dataclasses.replace(meta, config=dataclasses.replace(meta.config, model=model))
