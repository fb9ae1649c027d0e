"""The learning rate and AdamW against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_model

from tokenformer_jax.config import OptimConfig
from tokenformer_jax.lm import define_lm
from tokenformer_jax.optim import decay_mask, learning_rate, make_optimizer

PEAK, WARMUP, STEPS = 6e-4, 10, 110


def _rate(update: int, **changes) -> float:
  config = OptimConfig(learning_rate=PEAK, warmup_steps=WARMUP, **changes)
  return float(learning_rate(config, STEPS)(update))


@pytest.mark.parametrize(
  ('update', 'rate', 'meaning'),
  [
    (0, PEAK / WARMUP, 'the first update is not 1/W of the peak'),
    (4, PEAK / 2, 'the warm-up is not linear'),
    (WARMUP - 1, PEAK, 'the last update of the warm-up has not the peak'),
    (WARMUP, PEAK, 'the decay does not start at the peak'),
    (60, 0.55 * PEAK, 'the middle of a cosine is not the mean of peak and floor'),
    (35, (0.1 + 0.9 * (1 + np.cos(np.pi / 4)) / 2) * PEAK, 'the decay is not a cosine'),
    (STEPS, 0.1 * PEAK, 'the decay does not end at the floor'),
    (STEPS + 50, 0.1 * PEAK, 'the rate leaves the floor after the end'),
  ],
)
def test_cosine(update, rate, meaning):
  np.testing.assert_allclose(_rate(update, final_fraction=0.1), rate, rtol=1e-5, err_msg=meaning)


def test_cosine_to_zero():
  assert abs(_rate(STEPS, final_fraction=0.0)) < 1e-9, 'a floor of 0 is not reached'


@pytest.mark.parametrize(('update', 'rate'), [(0, PEAK / WARMUP), (WARMUP, PEAK), (STEPS, PEAK)])
def test_constant(update, rate):
  got = _rate(update, schedule='constant')
  np.testing.assert_allclose(got, rate, rtol=1e-5, err_msg='not constant after the warm-up')


@pytest.mark.parametrize('schedule', ['cosine', 'constant'])
@pytest.mark.parametrize('warmup', [0, 1])
def test_without_a_warmup_the_first_update_has_the_peak(schedule, warmup):
  config = OptimConfig(learning_rate=PEAK, warmup_steps=warmup, schedule=schedule)
  got = float(learning_rate(config, STEPS)(0))
  np.testing.assert_allclose(got, PEAK, rtol=1e-5, err_msg='something is warmed up')


@pytest.mark.parametrize('steps', [1, WARMUP])
def test_a_run_that_ends_in_its_warmup(steps):
  config = OptimConfig(learning_rate=PEAK, warmup_steps=WARMUP)
  got = float(learning_rate(config, steps)(steps - 1))
  np.testing.assert_allclose(
    got, steps / WARMUP * PEAK, rtol=1e-5, err_msg='the warm-up depends on the end of the run'
  )


DENSE = {'projection': 'dense', 'bias': True, 'block_norm': 'affine', 'positions': 'learned'}


@pytest.mark.parametrize('changes', [{'tied_head': False}, DENSE], ids=['pattention', 'dense'])
def test_matrices_decay_and_nothing_else(changes):
  leaves = jax.tree_util.tree_leaves_with_path(decay_mask(define_lm(tiny_model(**changes)).axes))
  decays = {jax.tree_util.keystr(path, simple=True, separator='/'): value for path, value in leaves}
  wrong = [path for path, value in decays.items() if value == path.endswith(('scale', 'bias'))]
  assert not wrong, f'these decay and should not, or the other way round: {wrong}'


AXES = {'kernel': ('width', 'hidden'), 'bias': ('norm',)}


def _adamw(config: OptimConfig, params: dict, gradients: list[dict]) -> dict:
  """AdamW in float64 (Loshchilov & Hutter 2019, algorithm 2), after clipping by the global norm."""
  b1, b2 = config.beta1, config.beta2
  m = {name: 0.0 for name in params}
  v = {name: 0.0 for name in params}
  for t, gradient in enumerate(gradients, start=1):
    norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
    factor = min(1, config.clip_norm / norm) if config.clip_norm else 1
    for name, g in gradient.items():
      m[name] = b1 * m[name] + (1 - b1) * factor * g
      v[name] = b2 * v[name] + (1 - b2) * (factor * g) ** 2
      m_hat, v_hat = m[name] / (1 - b1**t), v[name] / (1 - b2**t)
      decay = config.weight_decay * params[name] if name == 'kernel' else 0
      update = m_hat / (np.sqrt(v_hat) + config.epsilon) + decay
      params = {**params, name: params[name] - config.learning_rate * update}
  return params


@pytest.mark.parametrize(
  'changes',
  [
    pytest.param({'clip_norm': 0.0, 'weight_decay': 0.0}, id='adam'),
    pytest.param({'clip_norm': 0.0, 'weight_decay': 0.1}, id='decay'),
    pytest.param({'clip_norm': 1.0, 'weight_decay': 0.0}, id='clipping'),
    pytest.param({'clip_norm': 100.0, 'weight_decay': 0.0}, id='clipping that is not needed'),
    pytest.param({'clip_norm': 1.0, 'weight_decay': 0.1, 'epsilon': 0.1}, id='everything'),
  ],
)
def test_updates_are_those_of_adamw(changes):
  config = OptimConfig(
    learning_rate=0.01, warmup_steps=0, schedule='constant', beta1=0.8, beta2=0.9, **changes
  )
  rng = np.random.default_rng(0)

  def draw():
    return {'kernel': rng.normal(size=(3, 4)), 'bias': rng.normal(size=4)}

  start, gradients = draw(), [draw() for _ in range(4)]
  # The last gradient is smaller than the clipping norm.
  gradients[-1] = {name: 0.1 * g for name, g in gradients[-1].items()}
  tx = make_optimizer(config, 10, AXES)
  params = jax.tree.map(jnp.float32, start)
  state, update = tx.init(params), jax.jit(tx.update)
  for gradient in gradients:
    updates, state = update(jax.tree.map(jnp.float32, gradient), state, params)
    params = jax.tree.map(jnp.add, params, updates)
  want = _adamw(config, start, gradients)
  for name, value in want.items():
    np.testing.assert_allclose(
      params[name], value, rtol=1e-5, atol=1e-6, err_msg=f'{name} is not updated as by AdamW'
    )
