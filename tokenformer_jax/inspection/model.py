"""Open a run to inspect it: the functions behind the command and `Run` in Python.

  model = load('runs/lm_stdlib')
  ids = model.tokenizer.encode('def main(')
  maps(model, ids, [0])[0]['ffn']        the weights [T, N] of its feed-forward Pattention
  measure(model, ids)[0]['ffn'].unused   which of its parameter tokens are unused, [N]

Results are numpy arrays by layer number, from 0 on. `weights.py` has functions to trace in your own
jit.
"""

from collections.abc import Sequence

import jax
import numpy as np

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import MLPConfig, TextConfig
from tokenformer_jax.data import held_out
from tokenformer_jax.decoding import trained
from tokenformer_jax.decoding.trained import Trained
from tokenformer_jax.errors import UserError
from tokenformer_jax.inspection import experts, usage
from tokenformer_jax.inspection import weights as weights_lib
from tokenformer_jax.inspection.weights import TokenArrays, compiled, pattentions
from tokenformer_jax.model.params import lookup
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.steps.entries import LastGrowth
from tokenformer_jax.steps.last_growth import last_growth
from tokenformer_jax.storage import paths


def load(source: str) -> Trained:
  """Load the model of a run, DIR or DIR@STEP, onto all devices, in the dtype of the run."""
  return trained.load(source, check=check_has_tokens)


def check_has_tokens(meta: Meta, directory: paths.Path) -> None:
  """Raise a UserError unless a checkpoint is a language model with something to look into."""
  checkpoint.check_is_language_model(meta, directory)
  model = meta.config.model
  has_mlp = any(isinstance(layer.ffn, MLPConfig) for layer in model.in_order)
  if not (has_mlp or model.experts or config_lib.pattentions(model)):
    raise UserError(
      f'{directory} has nothing to look into: no layer has parameter tokens, an MLP or experts'
    )


def old_tokens(model: Trained) -> dict[int, dict[str, int]] | None:
  """Return the tokens before the last growth by layer and Pattention, or None if it added none."""
  growth = last_growth(model.meta.lineage, model.config.model)
  if growth is None:
    return None
  layers = pattentions(model.definition)
  counts = {
    number: {name: _old(growth, tokens) for name, tokens in layer.items()}
    for number, layer in enumerate(layers)
  }
  now = [{name: tokens.tokens for name, tokens in layer.items()} for layer in layers]
  return None if list(counts.values()) == now else counts


def _old(growth: LastGrowth, tokens: TokenArrays) -> int:
  """Return the tokens of a Pattention before a growth, or the neurons of an MLP."""
  ranges = lookup(growth.old, tokens.keys).ranges
  row = tokens.layer.row
  if 'layers' in ranges and (row, row + 1) not in ranges['layers']:
    return 0
  first = ranges.get('hidden' if tokens.is_mlp else 'param_tokens')
  return first[0][1] if first else tokens.tokens


def maps(
  model: Trained, ids: np.ndarray, layers: Sequence[int] | None = None
) -> dict[int, dict[str, np.ndarray]]:
  """Return the weights of some layers for ids [T], by layer and Pattention: float32 [T, N].

  Layers are numbered from 0; None: all.
  """
  model.context_length(len(ids))
  known = pattentions(model.definition)
  layers = range(len(known)) if layers is None else layers
  for layer in layers:
    if layer not in range(len(known)):
      raise UserError(f'layers names {layer}; the model has the layers 0 to {len(known) - 1}')
  with jax.set_mesh(model.mesh):
    (batch,) = usage.batches(np.asarray(ids)[None], 1, model.mesh)
    run = compiled(weights_lib.maps, model.definition, model.mesh)
    weights = jax.device_get(run(model.params, batch))
  return {
    layer: {
      name: weights[tokens.layer.stack][name][tokens.layer.run]
      for name, tokens in known[layer].items()
    }
    for layer in layers
  }


def measure(model: Trained, ids: np.ndarray) -> dict[int, dict[str, usage.Usage]]:
  """Measure usage on a corpus of ids [P], cut into sequences as long as those of training."""
  rows = usage.as_rows(ids, model.config.data.sequence_length)
  return usage.measure(model.definition, model.params, rows, model.mesh)


def answers(model: Trained, ids: np.ndarray) -> dict[int, experts.Answers]:
  """Return the experts chosen for each token of a corpus [P], by layer with a router."""
  rows = usage.as_rows(ids, model.config.data.sequence_length)
  return experts.measure(model.definition, model.params, rows, model.mesh)


def measure_text(
  model: Trained, text: str | None, tokens: int
) -> dict[int, dict[str, usage.Usage]]:
  """Measure usage on at most `tokens` tokens of a text; None: a text that is not trained on."""
  if text is None:
    assert isinstance(model.config.data, TextConfig)
    ids, _ = held_out.held_out_tokens(model.config.data, model.tokenizer, tokens)
  else:
    ids = held_out.first_tokens([text], model.tokenizer, tokens)
  return measure(model, ids)
