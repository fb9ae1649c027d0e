"""Measure a trained language model on texts that are longer than those of its training."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax import tasks
from tokenformer_jax.config import LayerConfig, map_parts
from tokenformer_jax.config.mixers import RotaryConfig
from tokenformer_jax.decoding import trained
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.loss import loss_sums

TIMES = (1, 2, 4, 8)  # lengths, in units of the length of the training
ROWS, BATCHES = 16, 4  # texts of the greatest length


def measure(run: Path, clip: int = 0) -> dict[str, dict[str, dict[str, float]]]:
  """Return loss and accuracy by kind of text and by length, over all positions of a text.

  The kinds are `text`, where all lengths have the same tokens, cut at other places, and `repeats`,
  the first tokens of each text again and again.

  Args:
    run: the work directory.
    clip: the largest distance that counts (ReRoPE); 0: as in training.
  """
  loaded = trained.load(str(run))
  model = loaded.config.model.map_layers(lambda _, layer: _clipped(layer, clip))
  definition, short = define_lm(model, loaded.execution), loaded.config.data.sequence_length

  @jax.jit
  def sums(params: Any, batch: jax.Array) -> Any:
    bound = definition.bind(params)
    hidden_BxTxD, _, _ = bound.hidden(jnp.maximum(batch[:, :-1], 0))
    return loss_sums(hidden_BxTxD, bound.output_embedding, batch[:, 1:], chunk=short)

  results = {'text': {}, 'repeats': {}}
  with jax.set_mesh(loaded.mesh):
    batches = list(_texts(loaded, short * TIMES[-1]))
    for times in TIMES:
      length = short * times
      for kind, by_length in results.items():
        made = _cut if kind == 'text' else _repeated
        parts = [sums(loaded.params, made(batch, short, length)) for batch in batches]
        total = jax.tree.map(lambda *xs: float(sum(xs)), *parts)
        by_length[str(length)] = {
          'loss': total.nats / total.tokens,
          'accuracy': total.correct / total.tokens,
        }
  return results


def _texts(loaded: trained.Trained, length: int) -> Iterator[np.ndarray]:
  """Yield batches [B, T + 1] of held-out text."""
  data = dataclasses.replace(loaded.config.data, sequence_length=length, batch_size=ROWS)
  train = dataclasses.replace(loaded.config.train, eval_batches=BATCHES)
  task = tasks.make(
    dataclasses.replace(loaded.config, data=data, train=train), loaded.meta.tokenizer
  )
  task.prepare()
  yield from task.validation_parts(range(ROWS))['']


def _cut(batch: np.ndarray, short: int, length: int) -> np.ndarray:
  """Return the texts in parts of a length, [B · parts, length + 1]."""
  del short
  return np.concatenate(
    [batch[:, first : first + length + 1] for first in range(0, batch.shape[1] - 1, length)]
  )


def _repeated(batch: np.ndarray, short: int, length: int) -> np.ndarray:
  """Return the first tokens of each text, repeated to a length, [B, length + 1]."""
  return np.resize(batch[:, :short].T, (length + 1, len(batch))).T


def _clipped(layer: LayerConfig, clip: int) -> LayerConfig:
  def change(path: str, part: Any) -> Any:
    del path
    return dataclasses.replace(part, clip=clip) if isinstance(part, RotaryConfig) else part

  return map_parts(layer, change)
