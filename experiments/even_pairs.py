"""Train small models on even pairs, and test them on longer strings.

A text is a start token and a string of `a` and `b`. The answer at each letter is whether the string
up to it has an even number of pairs of unequal neighbours, which is whether its first letter is its
last one. So a training text of 31 letters has the answers of all strings of 1 to 31 letters. Tests
count the answer at the last letter of longer strings.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, LengthScaleConfig, ModelConfig, map_parts
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.loss import logits
from tokenformer_jax.model.params import Definition, Params
from tokenformer_jax.steps import optim
from tokenformer_jax.steps.schedules import schedule

LONGEST, TESTS, ROWS = 31, (31, 64, 128, 256, 512), 256
STEPS, BATCH, LOG_EVERY = 400, 32, 25
LENGTH = LONGEST + 1  # with the start
ANSWERS, START = 2, 2  # the ids of the answers and letters are 0 and 1

WINDOW = {'mixer': {'window': 8}}  # three layers reach 22 of 32 positions
FREE = {'mixer': {'positions': {'kind': 'none'}, 'length_scale': {'kind': 'position'}}}
HWFA = {'local': WINDOW, 'full': FREE}
# Name → pattern and variants of the layer.
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
  'HWFA': ('local*3 full', HWFA),
  'full RoPE': ('layer*4', {}),
  'no RoPE in windows': (
    'local*3 full',
    {'local': {'mixer': {'window': 8, 'positions': {'kind': 'none'}}}, 'full': FREE},
  ),
  'RoPE on the last layer': (
    'local*3 full',
    {'local': WINDOW, 'full': {'mixer': {'length_scale': {'kind': 'position'}}}},
  ),
  'windows only': ('local*4', {'local': WINDOW}),
  'two full layers': ('local*2 full*2', HWFA),
  'window 16': ('local*3 full', {'local': {'mixer': {'window': 16}}, 'full': FREE}),
}


def make_config(name: str, seed: int, steps: int) -> Config:
  """Return the config of an arm."""
  pattern, variants = ARMS[name]
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
  values.optim.update(learning_rate=3e-3, warmup_steps=steps // 20)
  values.train.update(seed=seed, steps=steps)
  return config_lib.resolve(values)


def without_scale(model: ModelConfig) -> ModelConfig:
  """Return the model without the factors of scores that grow with the length."""

  def change(path: str, part: Any) -> Any:
    del path
    return LengthScaleConfig() if isinstance(part, LengthScaleConfig) else part

  return model.map_layers(lambda _, layer: map_parts(layer, change))


def draw(rng: np.random.Generator, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
  """Return the ids of texts [B, 1 + length] and the answer at each letter [B, length]."""
  letters = rng.integers(0, 2, (rows, length), dtype=np.int32)
  ids = np.pad(letters, ((0, 0), (1, 0)), constant_values=START)
  answers = (letters[:, :1] == letters).astype(np.int32)
  return ids, answers


def scores(definition: Definition, params: Params, ids: jax.Array) -> jax.Array:
  """Return the scores of both answers at each letter of texts [B, 1 + T], [B, T, 2]."""
  model = definition.bind(params)
  hidden_BxTxD, _, _ = model.hidden(ids)
  return logits(hidden_BxTxD[:, 1:], model.output_embedding)[..., :ANSWERS]


def train_and_test(name: str, seed: int, steps: int) -> dict[str, Any]:
  """Return the accuracy by length of string, and the loss of the training.

  The length scale has a factor of 1 on training texts, so one training serves both: `unscaled` is
  the accuracy of the same parameters without it.
  """
  config = make_config(name, seed, steps)
  model = config.model.with_scale_length(LENGTH)
  definition = define_lm(model)
  params, losses = train(definition, config)
  results = {'accuracy': test(definition, params), 'losses': losses}
  if name == 'HWFA':
    results['unscaled'] = test(define_lm(without_scale(model)), params)
  return results


def train(definition: Definition, config: Config) -> tuple[Params, list[tuple[int, float]]]:
  """Return trained parameters, and the mean loss of each LOG_EVERY steps."""
  steps = config.train.steps
  tx = optim.make_optimizer(config.optim, schedule(config.optim, steps), definition.info)

  def loss(params: Params, ids: jax.Array, answers: jax.Array) -> jax.Array:
    logits = scores(definition, params, ids)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, answers))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params: Params, state: Any, *batch: jax.Array) -> tuple[Params, Any, jax.Array]:
    value, gradient = jax.value_and_grad(loss)(params, *batch)
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value

  params = jax.jit(definition.init)(jax.random.key(config.train.seed))
  state, recent, losses = jax.jit(tx.init)(params), [], []
  rng = np.random.default_rng(config.train.seed)
  for number in range(1, steps + 1):
    params, state, value = step(params, state, *draw(rng, BATCH, LONGEST))
    recent.append(value)
    if number % LOG_EVERY == 0:
      losses.append((number, float(np.mean(recent))))
      recent = []
  return params, losses


def test(definition: Definition, params: Params) -> dict[str, float]:
  """Return the accuracy by length of string; every model has the same strings."""
  rng, accuracy = np.random.default_rng(1234), {}
  guess = jax.jit(functools.partial(scores, definition))
  for length in TESTS:
    right = 0
    for _ in range(4):
      ids, answers = draw(rng, ROWS // 4, length)
      right += int(np.sum(np.argmax(guess(params, ids), axis=-1)[:, -1] == answers[:, -1]))
    accuracy[str(length)] = right / ROWS
  return accuracy
