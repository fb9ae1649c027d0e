"""Train small models on even pairs, and test them on longer strings.

A text is a start token, a string of `a` and `b`, and `=`. The answer is whether the string has an
even number of pairs of unequal neighbours, which is whether its first letter is its last one. The
loss is that of the answer alone. Training strings have 1 to 31 letters of equal probability, and
every length is equally likely.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.loss import logits
from tokenformer_jax.model.params import Params
from tokenformer_jax.steps import optim

LONGEST, TESTS, ROWS = 31, (31, 64, 128, 256, 512), 256
STEPS, BATCH, LOG_EVERY = 800, 32, 25
LENGTH = LONGEST + 2  # with the start and `=`
ANSWERS, EQUALS, START = 2, 2, 3  # the ids of the answers and letters are 0 and 1

WINDOW = {'mixer': {'window': 8}}  # three layers reach 22 of 0.75 · 33 positions
FREE = {'mixer': {'positions': {'kind': 'none'}, 'length_scale': {'kind': 'position'}}}
HWFA = {'local': WINDOW, 'full': FREE}
# Name → pattern, variants of the layer, and the largest part of the length that windows may reach.
ARMS: dict[str, tuple[str, dict[str, Any], float]] = {
  'HWFA': ('local*3 full', HWFA, 0.75),
  'no length scale': (
    'local*3 full',
    {'local': WINDOW, 'full': {'mixer': {'positions': {'kind': 'none'}}}},
    0.75,
  ),
  'full RoPE': ('layer*4', {}, 0.75),
  'no RoPE in windows': (
    'local*3 full',
    {'local': {'mixer': {'window': 8, 'positions': {'kind': 'none'}}}, 'full': FREE},
    0.75,
  ),
  'RoPE on the last layer': (
    'local*3 full',
    {'local': WINDOW, 'full': {'mixer': {'length_scale': {'kind': 'position'}}}},
    0.75,
  ),
  'windows only': ('local*4', {'local': WINDOW}, 0.75),
  'two full layers': ('local*2 full*2', HWFA, 0.75),
  'window 16': ('local*3 full', {'local': {'mixer': {'window': 16}}, 'full': FREE}, 0.0),
}


def make_config(name: str, seed: int, steps: int) -> Config:
  """Return the config of an arm."""
  pattern, variants, share = ARMS[name]
  values = config_lib.defaults()
  model = values.model
  model.pattern, model.width, model.layer.mixer.heads = pattern, 64, 4
  model.layer.mixer.qkv = model.layer.mixer.proj = {'kind': 'dense'}
  model.layer.mixer.positions.fraction = 1.0
  model.layer.ffn = {'kind': 'mlp'}
  for variant, changes in variants.items():
    model.variants[variant] = changes
  model.vocab_size, model.init.std = 4, 0.1
  values.data.sequence_length = LENGTH
  values.optim.update(learning_rate=3e-3, warmup_steps=steps // 20, final_fraction=0.1)
  values.train.update(seed=seed, steps=steps, receptive_field=share)
  return config_lib.resolve(values)


def draw(rng: np.random.Generator, lengths: Sequence[int]) -> tuple[np.ndarray, ...]:
  """Return the ids of texts [B, T], the index of each `=`, and the answers [B]."""
  lengths = np.asarray(lengths)
  letters = rng.integers(0, 2, (len(lengths), lengths.max()), dtype=np.int32)
  ids = np.pad(letters, ((0, 0), (1, 1)), constant_values=START)
  rows = np.arange(len(lengths))
  ids[rows, lengths + 1] = EQUALS
  answers = (letters[:, 0] == letters[rows, lengths - 1]).astype(np.int32)
  return ids, lengths + 1, answers


def train_and_test(name: str, seed: int, steps: int) -> dict[str, Any]:
  """Return the accuracy by length of string, and the loss of the training."""
  config = make_config(name, seed, steps)
  definition = define_lm(config.model.with_scale_length(LENGTH))
  tx = optim.make_optimizer(config.optim, steps, definition.info)

  def scores(params: Params, ids_BxT: jax.Array, ends_B: jax.Array) -> jax.Array:
    model = definition.bind(params)
    hidden_BxTxD, _, _ = model.hidden(ids_BxT)
    at_end_Bx1xD = jnp.take_along_axis(hidden_BxTxD, ends_B[:, None, None], axis=1)
    return logits(at_end_Bx1xD, model.output_embedding)[:, 0, :ANSWERS]

  def loss(params: Params, ids: jax.Array, ends: jax.Array, answers: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(scores(params, ids, ends), answers)
    return jnp.mean(losses)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params: Params, state: Any, *batch: jax.Array) -> tuple[Params, Any, jax.Array]:
    value, gradient = jax.value_and_grad(loss)(params, *batch)
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value

  params = jax.jit(definition.init)(jax.random.key(seed))
  state, losses = jax.jit(tx.init)(params), []
  rng = np.random.default_rng(seed)
  for number in range(steps):
    # A text of the greatest length keeps the shape of batches equal.
    lengths = np.append(rng.integers(1, LONGEST + 1, BATCH - 1), LONGEST)
    params, state, value = step(params, state, *draw(rng, lengths))
    if number % LOG_EVERY == LOG_EVERY - 1:
      losses.append((number + 1, float(value)))
  # Every arm and seed has the same tests.
  rng, guess, found = np.random.default_rng(1234), jax.jit(scores), {}
  for length in TESTS:
    right = 0
    for _ in range(4):
      ids, ends, answers = draw(rng, [length] * (ROWS // 4))
      right += int(np.sum(np.argmax(guess(params, ids, ends), axis=-1) == answers))
    found[str(length)] = right / ROWS
  return {'accuracy': found, 'losses': losses}
