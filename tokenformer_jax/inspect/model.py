"""A run opened to look into it: the library behind the command, for notebooks and scripts.

  model = load('runs/lm_stdlib')
  ids = model.tokenizer.encode('def main(')
  maps(model, ids, [0])[0]['ffn']     the weights [T, N] of the feed-forward Pattention of layer 0
  measure(model, ids)['ffn'].unused   which of its parameter tokens are unused, [L, N]

The results are numpy; `weights.py` has the functions to trace in a jit of one's own.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from tokenformer_jax import checkpoint, paths, sharding, start
from tokenformer_jax.config import MeshConfig
from tokenformer_jax.data import tokenizers
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import last_growth
from tokenformer_jax.inspect import usage
from tokenformer_jax.inspect.weights import KINDS, compiled_maps, of_kind
from tokenformer_jax.lm import Compute, define_lm
from tokenformer_jax.params import Definition, Params


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
  """A model to look into, and where it came from."""

  source: str
  meta: checkpoint.Meta
  definition: Definition
  params: Params
  mesh: Mesh

  @functools.cached_property
  def tokenizer(self) -> tokenizers.Tokenizer:
    return tokenizers.from_json(self.meta.tokenizer)

  @property
  def old(self) -> dict[str, int] | None:
    """How many parameter tokens of each kind the last growth found, or None if it added none."""
    model = self.meta.config.model
    growth = last_growth(self.meta.lineage, model)
    if growth is None:
      return None
    counts = {kind: of_kind(growth.old_tokens['blocks'], kind)['keys'] for kind in KINDS}
    now = {kind: of_kind(self.params['blocks'], kind)['keys'].shape[1] for kind in KINDS}
    return None if counts == now else counts


def load(source: str) -> Model:
  """Reads a model of parameter tokens, over all devices, in the dtype of its run.

  Args:
    source: DIR or DIR@STEP.

  Raises:
    UserError: that is no run, it is damaged, or the model has no parameter tokens.
  """
  directory, step = paths.split_source(source)
  mesh = sharding.make_mesh(MeshConfig(), start.devices())
  checkpoints, meta = checkpoint.open_source(directory, step)
  with contextlib.closing(checkpoints):
    checkpoint.check_is_language_model(meta, directory)
    if meta.config.model.projection != 'pattention':
      raise UserError(
        f'{directory} is a Transformer (model.projection=dense): it has no parameter tokens to '
        'look into'
      )
    definition = define_lm(meta.config.model, Compute.of_trained(meta.config))
    shardings = sharding.of_axes(mesh, definition.axes)
    abstract = {'params': sharding.with_even_shardings(definition.abstract, shardings)}
    params = checkpoint.restore_source(checkpoints, meta, abstract)['params']
  return Model(source, meta, definition, params, mesh)


def maps(model: Model, ids: np.ndarray, layers: Sequence[int]) -> dict[int, dict[str, np.ndarray]]:
  """The weights of some layers for a text of ids [T], by layer and kind: float32 [T, N]."""
  run = compiled_maps(model.definition, model.mesh)
  with jax.set_mesh(model.mesh):
    (batch,) = usage.batches(np.asarray(ids)[None], 1, model.mesh)
    found = {layer: run(model.params, batch, layer) for layer in layers}
  return {
    layer: {kind: np.asarray(of_layer[kind]) for kind in KINDS} for layer, of_layer in found.items()
  }


def measure(model: Model, ids: np.ndarray) -> dict[str, usage.Usage]:
  """The usage on a corpus of ids [P], cut into sequences as long as those of training."""
  config = model.meta.config
  rows = usage.as_rows(ids, config.data.sequence_length)
  return usage.measure(model.definition, config.model, model.params, rows, model.mesh)
