"""AdamW against its formula; old and new tokens after a growth."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import OLD, STEADY, make_optimizer, tiny_model

from tokenformer_jax.config import AdamWConfig, OptimConfig
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import ParamInfo, Role
from tokenformer_jax.steps.entries import LastGrowth, old_entries
from tokenformer_jax.steps.optim import decay_mask

PEAK, WARMUP, STEPS = 6e-4, 10, 110


DENSE = {
  'dense': True,
  'bias': True,
  'norm': 'affine',
  'rotary': 0,
  'position_embedding': 'learned',
}


@pytest.mark.parametrize('changes', [{'tied_head': False}, DENSE], ids=['pattention', 'dense'])
def test_matrices_decay_and_nothing_else(changes):
  leaves = jax.tree_util.tree_leaves_with_path(decay_mask(define_lm(tiny_model(**changes)).info))
  decays = {jax.tree_util.keystr(path, simple=True, separator='/'): value for path, value in leaves}
  wrong = [path for path, value in decays.items() if value == path.endswith(('scale', 'bias'))]
  assert not wrong, f'these decay and should not, or the other way round: {wrong}'


def _info(axes: tuple[str, ...], role: Role) -> ParamInfo:
  return ParamInfo(axes, role, jax.nn.initializers.zeros)


INFO = {
  'kernel': _info(('width', 'hidden'), Role.KERNEL),
  'bias': _info(('norm',), Role.BIAS),
}


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
    pytest.param({'clip_norm': 1.0, 'weight_decay': 0.1, 'epsilon': 0.1}, id='everything'),
  ],
)
def test_updates_are_those_of_adamw(changes):
  config = AdamWConfig(
    learning_rate=0.01, warmup_steps=0, schedule='constant', beta1=0.8, beta2=0.9, **changes
  )
  rng = np.random.default_rng(0)

  def draw():
    return {'kernel': rng.normal(size=(3, 4)), 'bias': rng.normal(size=4)}

  start, gradients = draw(), [draw() for _ in range(4)]
  # The last gradient is smaller than the clipping norm.
  gradients[-1] = {name: 0.1 * g for name, g in gradients[-1].items()}
  tx = make_optimizer(config, 10, INFO)
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


# After a growth


KEYS = _info(('layers', 'param_tokens', 'width'), Role.KEY)
GROWN_INFO = {'keys': dataclasses.replace(KEYS, groups=(5,)), **INFO}
GROWTH = LastGrowth(1000, old_entries(GROWN_INFO, {'keys': OLD, 'kernel': 0, 'bias': 0}))


def _normal(seed: int) -> dict:
  rng = np.random.default_rng(seed)
  shapes = {'keys': (2, 5, 3), 'kernel': (3, 4), 'bias': (4,)}
  return {name: np.float32(rng.normal(size=shape)) for name, shape in shapes.items()}


def _counted(part, updates: int):
  """Adam's part and the schedule's after so many updates, as a growth leaves them."""
  if isinstance(part, optax.ScaleByAdamState):
    mu = jax.tree.map(lambda a: np.float32(0.1) * a, _normal(7))
    mu['keys'][:, OLD:] = 0
    return optax.ScaleByAdamState(jnp.asarray(updates), mu, jax.tree.map(np.square, mu))
  if isinstance(part, optax.ScaleByScheduleState):
    return optax.ScaleByScheduleState(jnp.asarray(updates))
  return part


def _after(tx, params: dict, updates: int):
  known = (optax.ScaleByAdamState, optax.ScaleByScheduleState)
  return jax.tree.map(
    lambda part: _counted(part, updates), tx.init(params), is_leaf=lambda p: isinstance(p, known)
  )


def _updates(growth: LastGrowth | None = GROWTH, update: int = 1, **changes) -> dict:
  """The update that comes as number `update` after the growth, from the same moments."""
  tx = make_optimizer(AdamWConfig(**{**STEADY, **changes}), 10**6, GROWN_INFO, growth)

  @jax.jit
  def updates(gradient, params):
    return tx.update(gradient, _after(tx, params, GROWTH.updates + update - 1), params)[0]

  return updates(_normal(1), _normal(0))


def _first_update(tx, gradient: dict, params: dict) -> dict:
  return jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(gradient, params)


def _assert_factors(got: dict, want: dict, old: float, new: float, meaning: str) -> None:
  """`got` is `want` times one factor for what is old and another for the new tokens."""
  factors = {'keys': np.where(np.arange(5)[:, None] < OLD, old, new), 'kernel': old, 'bias': old}
  for name, factor in factors.items():
    np.testing.assert_allclose(
      got[name], factor * np.asarray(want[name]), rtol=1e-5, err_msg=f'{meaning}: {name}'
    )


def test_without_a_growth_its_settings_mean_nothing():
  settings = {'old_tokens': 'scale:0.1', 'new_token_warmup': 9, 'new_token_correction': True}
  _assert_factors(_updates(None, **settings), _updates(None), 1, 1, 'a model that never grew')


@pytest.mark.parametrize(('update', 'factor'), [(1, 1 / 5), (4, 4 / 5), (5, 1), (500, 1)])
def test_new_tokens_warm_up(update, factor):
  got = _updates(update=update, new_token_warmup=4)
  want = _updates(update=update)
  _assert_factors(got, want, 1, factor, f'update {update} of a warm-up over 4')


@pytest.mark.parametrize(
  ('of_adam', 'of_schedule', 'why'),
  [
    (0, 0, 'a converted model has made no update, so that Adam corrects everything'),
    (1000, 0, 'the steps were restarted, and Adam has its moments'),
    (5, 5, 'the model grew after five updates'),
  ],
)
def test_new_tokens_are_corrected_once_wherever_the_counts_stand(of_adam, of_schedule, why):
  """With zero moments the first update of a new token is the first one of Adam, whose size is 1."""
  growth = dataclasses.replace(GROWTH, updates=of_schedule)
  settings = {**STEADY, 'weight_decay': 0.0, 'clip_norm': 0.0, 'new_token_correction': True}
  tx = make_optimizer(AdamWConfig(**settings), 10**6, GROWN_INFO, growth)

  counts = {optax.ScaleByAdamState: of_adam, optax.ScaleByScheduleState: of_schedule}

  def at_the_growth(part):
    known = counts.get(type(part))
    return part if known is None else part._replace(count=jnp.asarray(known))

  @jax.jit
  def updates(gradient, params):
    is_leaf = lambda part: type(part) in counts  # noqa: E731
    state = jax.tree.map(at_the_growth, tx.init(params), is_leaf=is_leaf)
    return tx.update(gradient, state, params)[0]

  got = updates(_normal(1), _normal(0))
  np.testing.assert_allclose(
    np.abs(got['keys'][:, OLD:]),
    STEADY['learning_rate'],
    rtol=1e-3,
    err_msg=f'new tokens are not corrected once: {why}',
  )


@pytest.mark.parametrize(('old_tokens', 'factor'), [('freeze', 0), ('scale:0.1', 0.1)])
def test_arrays_with_an_update_of_their_own_are_old_or_new_as_well(old_tokens, factor):
  """The balance of routers: a layer is new, and in the old one the last two experts are."""
  balance = _info(('layers', 'routes'), Role.BALANCE)
  how = {'depth': (1, 2), 'own_update': lambda excess: -0.5 * excess}
  info = {'bias': dataclasses.replace(balance, **how)}
  growth = LastGrowth(0, old_entries(info, {'bias': 0}, (2,), {'bias': 3}))
  config = AdamWConfig(**STEADY, old_tokens=old_tokens)
  tx = make_optimizer(config, 10, info, growth)
  excess = {'bias': jnp.arange(1.0, 11).reshape(2, 5)}
  got, _ = jax.jit(tx.update)(excess, tx.init(excess), excess)
  factors = np.array([[factor] * 3 + [1] * 2, [1] * 5])
  np.testing.assert_allclose(got['bias'], -0.5 * factors * excess['bias'], rtol=1e-6)


def test_the_rate_of_updates_follows_the_restarted_schedule():
  changes = {'warmup_steps': 10, 'learning_rate': 0.01, 'restart_schedule': 'yes'}
  first, plain = _updates(**changes), _updates()
  _assert_factors(first, plain, 0.1, 0.1, 'the first update of a warm-up over 10')
  _assert_factors(
    _updates(**{**changes, 'restart_schedule': 'no'}), plain, 1, 1, 'a warm-up that was over'
  )


def test_layers_of_several_groups_count_as_one_trunk():
  def group(*depths: int) -> ParamInfo:
    return dataclasses.replace(_info(('layers', 'width', 'hidden'), Role.KERNEL), depth=depths)

  info = {
    'lower': group(1, 3),
    'between': group(2, 4),
    'upper': group(5),
    'embedding': dataclasses.replace(_info(('vocab', 'width'), Role.EMBEDDING), depth=0),
    'head': _info(('vocab', 'width'), Role.HEAD),
  }
  stacked = {'lower': (2, 3, 4), 'between': (2, 3, 4), 'upper': (1, 3, 4)}
  shapes = {**stacked, 'embedding': (5, 3), 'head': (5, 3)}
  params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
  plain, decayed = (
    make_optimizer(AdamWConfig(layer_decay=decay), STEPS, info) for decay in (1.0, 0.5)
  )
  want, got = (_first_update(tx, params, params) for tx in (plain, decayed))
  factors = {name: np.asarray(got[name]) / np.asarray(want[name]) for name in shapes}
  for name, wanted in {
    'embedding': [2**-6] * 5,
    'lower': [2**-5, 2**-3],
    'between': [2**-4, 2**-2],
    'upper': [2**-1],
    'head': [1] * 5,
  }.items():
    rows = factors[name].reshape(len(factors[name]), -1)
    np.testing.assert_allclose(
      rows, np.broadcast_to(np.array(wanted)[:, None], rows.shape), rtol=1e-5, err_msg=f'of {name}'
    )
