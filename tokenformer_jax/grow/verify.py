"""Whether two models compute the same: the same held-out batch through both."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from tokenformer_jax import sharding
from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.data import store, text, tokenizers
from tokenformer_jax.errors import UserError
from tokenformer_jax.lm import Compute, define_lm
from tokenformer_jax.params import Params

# Of the largest logit; what float32 sums of another order may come to over many layers.
TOLERANCE = 1e-5
_LONGEST = 64  # tokens of a sequence


@dataclasses.dataclass(frozen=True)
class Outputs:
  """What a model makes of a batch: float32 logits [B, T, V] and the mean loss in nats a token."""

  logits: jax.Array
  loss: float


def held_out(
  config: Config, tokenizer: tokenizers.Tokenizer, sequences: int, first: int = 0
) -> tuple[np.ndarray, str]:
  """Sequences that the model was not trained on, if its text is here, and a name for the text.

  Args:
    config: of the run. Its token store is used if there is one on this machine.
    tokenizer: of the run, for other text if there is not.
    sequences: how many, B.
    first: how many to leave out at the start.

  Returns:
    int32 [B, T + 1]; a text that is too short is repeated.
  """
  length = min(config.data.sequence_length, _LONGEST) + 1
  needed = (first + sequences) * length
  tokens, name = held_out_tokens(config, tokenizer, needed)
  rows = np.resize(tokens, needed).reshape(-1, length)
  return rows[first:], name


def held_out_tokens(
  config: Config, tokenizer: tokenizers.Tokenizer, needed: int
) -> tuple[np.ndarray, str]:
  """As `held_out`, but the text as it is: int32 [at most `needed`], and its name."""
  try:
    existing = store.find(config.data)
  except UserError:  # The text itself is not here.
    existing = None
  if existing is not None:
    return np.asarray(existing.validation[:needed], np.int32), 'held-out text of the run'
  documents = text.open_source('stdlib', '').documents()
  return first_tokens(documents, tokenizer, needed), 'text of the Python standard library'


def first_tokens(
  documents: Iterable[str], tokenizer: tokenizers.Tokenizer, needed: int
) -> np.ndarray:
  """The first tokens of documents, int32 [at most `needed`]; what comes later is not read."""
  pieces, count = [np.zeros(0, np.int32)], 0
  for document in documents:
    pieces.append(np.append(tokenizer.encode(document), np.int32(tokenizer.end_of_document)))
    count += len(pieces[-1])
    if count >= needed:
      break
  return np.concatenate(pieces)[:needed]


def outputs(model: ModelConfig, params: Params, batch: np.ndarray, mesh: Mesh) -> Outputs:
  """Runs a batch [B, T + 1] through the model in float32, products in full precision."""
  definition = define_lm(model, Compute(jnp.dtype('float32'), attention='xla'))

  @jax.jit
  def run(params: Params, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits, _ = definition.bind(params)(batch[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return logits, jnp.mean(losses)

  with jax.set_mesh(mesh), jax.default_matmul_precision('highest'):
    logits, loss = run(params, jax.device_put(batch, sharding.of_batch(mesh)))
    return Outputs(logits, float(loss))


def largest_difference(before: Outputs, after: Outputs) -> tuple[float, float]:
  """The largest difference of two logits, and what it may be if the function is the same."""
  different, size = jax.jit(
    lambda a, b: (jnp.max(jnp.abs(a - b)), jnp.maximum(1.0, jnp.max(jnp.abs(a))))
  )(before.logits, after.logits)
  return float(different), TOLERANCE * float(size)
