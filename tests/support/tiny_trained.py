"""A model of bytes with random parameters, as if it had been read from a run, and what it says."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tiny import large_params, tiny_model

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import MeshConfig
from tokenformer_jax.data.tokenizers import ByteTokenizer
from tokenformer_jax.decoding.trained import Trained
from tokenformer_jax.model.lm import Execution, define_lm
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs.checkpoint_meta import Meta

LENGTH = 48  # that it was trained with
MESHES = {1: MeshConfig(fsdp=1), 8: MeshConfig(fsdp=4, tokens=2)}


@functools.cache
def config(**changes: Any) -> config_lib.Config:
  """Of a run of sequences of `LENGTH`; `changes` are of the model."""
  sizes = {'layers': 1, 'vocab_size': 256, 'tied_head': False, 'max_length': LENGTH}
  model = tiny_model(**{**sizes, **changes})
  base = config_lib.resolve(config_lib.defaults())
  data = dataclasses.replace(base.data, tokenizer='bytes', sequence_length=LENGTH)
  return dataclasses.replace(base, model=model, data=data)


@functools.cache
def trained(devices: int = 1, **changes: Any) -> Trained:
  """The model on one device, or on 8, with the same parameters."""
  whole = config(**changes)
  execution = Execution(jnp.dtype('float32'))
  definition = define_lm(whole.model, execution)
  mesh = sharding.make_mesh(MESHES[devices], jax.devices()[:devices])
  return Trained(
    source='nowhere',
    meta=Meta(0, whole, ByteTokenizer().to_json()),
    definition=definition,
    execution=execution,
    params=jax.device_put(
      large_params(whole.model), sharding.tree_shardings(mesh, definition.axes)
    ),
    mesh=mesh,
  )


@functools.cache
def _forward(model: config_lib.ModelConfig):
  definition = define_lm(model)
  return jax.jit(lambda params, ids: definition.bind(params)(ids)[0])


def log_probs(ids: Sequence[int], pad: int = 0, **changes: Any) -> np.ndarray:
  """log p of every token at each position [T, V], by one forward pass of one row.

  Args:
    ids: the input.
    pad: length that the input is filled up to, so that one program does for many.
    **changes: of the model.
  """
  model = config(**changes).model
  padded = np.zeros((1, max(pad, len(ids))), np.int32)
  padded[0, : len(ids)] = ids
  logits = np.asarray(_forward(model)(large_params(model), padded), np.float64)[0, : len(ids)]
  largest = logits.max(axis=-1, keepdims=True)
  return logits - largest - np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))


def score(
  context: Sequence[int], continuation: Sequence[int], pad: int = 0, **changes: Any
) -> tuple[float, bool]:
  """log p of a continuation and whether it is the greedy one: what has to come out."""
  tokens = [*context, *continuation][-(LENGTH + 1) :]
  found = log_probs(tokens[:-1], pad, **changes)[len(tokens) - 1 - len(continuation) :]
  greedy = found.argmax(axis=-1).tolist() == list(continuation)
  return sum(row[token] for row, token in zip(found, continuation, strict=True)), greedy
