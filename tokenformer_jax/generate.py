r"""Writes text with a trained language model.

python -m tokenformer_jax.generate --source=runs/lm_stdlib --prompt='def main('
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from tokenformer_jax import checkpoint, cli, sharding
from tokenformer_jax.attention import Cache, init_cache
from tokenformer_jax.config import MeshConfig, ModelConfig
from tokenformer_jax.data import tokenizers
from tokenformer_jax.errors import UserError
from tokenformer_jax.lm import Compute, define_lm
from tokenformer_jax.params import Definition, Params

_PROMPT_BUCKET = 64  # prompts are padded to a multiple of this, so that few lengths are compiled


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How the next token is drawn from the logits.

  Attributes:
    temperature: divides the logits; 0 takes the likeliest token.
    top_k: only the k likeliest tokens may be drawn; 0: all.
    top_p: only the likeliest tokens whose probabilities just reach p together; 1: all.
    seed: of the draws. The same seed gives the same text.
  """

  temperature: float = 0.8
  top_k: int = 0
  top_p: float = 0.95
  seed: int = 0

  def __post_init__(self):
    if self.temperature < 0:
      raise UserError(f'temperature is {self.temperature}; it must not be negative')
    if self.top_k < 0:
      raise UserError(f'top_k is {self.top_k}; it must not be negative')
    if not 0 < self.top_p <= 1:
      raise UserError(f'top_p is {self.top_p}; it must lie between 0 (excluded) and 1')


def sample(logits_BxV: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
  """Draws one token id for each row; returns [B]."""
  if sampling.temperature == 0:
    return jnp.argmax(logits_BxV, axis=-1)
  logits_BxV = logits_BxV / sampling.temperature
  if sampling.top_k:
    kept = min(sampling.top_k, logits_BxV.shape[-1])
    lowest = jax.lax.top_k(logits_BxV, kept)[0][:, -1:]
    logits_BxV = jnp.where(logits_BxV < lowest, -jnp.inf, logits_BxV)
  if sampling.top_p < 1:
    ordered = jnp.sort(logits_BxV, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    # A token stays if those before it do not reach p yet; so the likeliest one always does.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    lowest = jnp.min(jnp.where(before < sampling.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
    logits_BxV = jnp.where(logits_BxV < lowest, -jnp.inf, logits_BxV)
  return jax.random.categorical(key, logits_BxV, axis=-1)


class Generator:
  """Token by token generation for one prompt, compiled once for each bucket of lengths."""

  def __init__(self, definition: Definition, model: ModelConfig, dtype: jnp.dtype):
    self._model, self._dtype = model, dtype

    @functools.partial(jax.jit, static_argnames='length')
    def prefill(params: Params, ids_BxT: jax.Array, length: int) -> tuple[jax.Array, Cache]:
      cache = init_cache(model, ids_BxT.shape[0], length, dtype)
      return definition.bind(params)(ids_BxT, 0, cache)

    @functools.partial(jax.jit, static_argnames='sampling', donate_argnames='cache')
    def step(params, cache, logits_BxV, position, sampling):
      key = jax.random.fold_in(jax.random.key(sampling.seed), position)
      # One draw for all copies of the prompt, so that every host stops at the same token.
      ids_B = jnp.broadcast_to(sample(logits_BxV[:1], key, sampling), logits_BxV.shape[:1])
      logits_Bx1xV, cache = definition.bind(params)(ids_B[:, None], position, cache)
      return ids_B, logits_Bx1xV[:, 0], cache

    self._prefill, self._step = prefill, step

  def __call__(
    self, params: Params, prompt: np.ndarray, *, length: int, sampling: Sampling
  ) -> Iterator[int]:
    """Yields `length` token ids that follow the prompt [T ≥ 1].

    Raises:
      UserError: the model has learned positions that do not reach so far.
    """
    total = len(prompt) + length
    if self._model.positions == 'learned' and total > self._model.max_length:
      raise UserError(
        f'the prompt and the text to write are {total} tokens; this model has learned positions '
        f'for {self._model.max_length}; ask for fewer'
      )
    # Positions after the prompt are padding. They are overwritten before anything attends to them.
    padded = -(-len(prompt) // _PROMPT_BUCKET) * _PROMPT_BUCKET
    space = -(-max(total, padded) // _PROMPT_BUCKET) * _PROMPT_BUCKET
    if self._model.positions == 'learned':
      padded, space = min(padded, self._model.max_length), min(space, self._model.max_length)
    ids_BxT = np.zeros((_batch_multiple(), padded), np.int32)
    ids_BxT[:, : len(prompt)] = prompt
    logits_BxTxV, cache = self._prefill(params, ids_BxT, length=space)
    logits_BxV = logits_BxTxV[:, len(prompt) - 1]
    for position in range(len(prompt), total):
      ids_B, logits_BxV, cache = self._step(
        params, cache, logits_BxV, jnp.int32(position), sampling=sampling
      )
      yield int(np.asarray(ids_B.addressable_data(0))[0])


def _batch_multiple() -> int:
  """The least number of sequences that the mesh in force can split: copies of the one prompt."""
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty else mesh.shape['replica'] * mesh.shape['fsdp']


def stream_text(tokenizer: Any, ids: Iterator[int]) -> Iterator[str]:
  """Pieces of text as tokens come, cut where no character is split; ends at an end of document."""
  seen, written = [], ''
  for token in ids:
    if token == tokenizer.end_of_document:
      break
    seen.append(token)
    text = tokenizer.decode(np.array(seen))
    if text.endswith('\N{REPLACEMENT CHARACTER}'):
      continue  # the rest of the character has not come yet
    yield text[len(written) :]
    written = text
  yield tokenizer.decode(np.array(seen, np.int32))[len(written) :]


def _define_flags() -> None:
  flags.DEFINE_string('source', None, 'A run: DIR, or DIR@STEP.', required=True)
  flags.DEFINE_string('prompt', '', 'The text to go on from; empty: a new document.')
  flags.DEFINE_integer('length', 256, 'Tokens to write.', lower_bound=1)
  flags.DEFINE_float('temperature', 0.8, '0 takes the likeliest token.')
  flags.DEFINE_integer('top_k', 0, 'Draw from the k likeliest tokens; 0: from all.')
  flags.DEFINE_float('top_p', 0.95, 'Draw from the likeliest tokens that reach p together; 1: all.')
  flags.DEFINE_integer('seed', 0, 'Seed of the draws.')


def main(argv: Sequence[str]) -> None:
  """Prints the prompt and what follows it, as it is drawn."""
  del argv
  values = flags.FLAGS
  sampling = Sampling(values.temperature, values.top_k, values.top_p, values.seed)
  directory, step = cli.split_source(values.source)
  checkpoints, meta = checkpoint.open_source(directory, step)
  checkpoint.check_is_model(meta, directory)
  model, compute = meta.config.model, Compute.of(meta.config)
  definition = define_lm(model, compute)
  mesh = sharding.make_mesh(MeshConfig())
  shardings = sharding.of_axes(mesh, definition.axes)
  abstract = {'params': sharding.with_shardings(definition.abstract, shardings)}
  params = checkpoint.restore_source(checkpoints, meta, abstract)['params']
  tokenizer = tokenizers.from_json(meta.tokenizer)
  ids = np.append(tokenizer.end_of_document, tokenizer.encode(values.prompt)).astype(np.int32)
  sys.stdout.write(values.prompt)
  with jax.set_mesh(mesh):
    generator = Generator(definition, model, compute.dtype)
    tokens = generator(params, ids, length=values.length, sampling=sampling)
    for text in stream_text(tokenizer, tokens):
      sys.stdout.write(text)
      sys.stdout.flush()
  print()


if __name__ == '__main__':
  _define_flags()
  cli.run(main)
