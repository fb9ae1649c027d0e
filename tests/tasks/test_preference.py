"""Losses and gradients of pairs are those of the papers; the reference is the base to the bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from outcomes import assert_close, assert_same
from tiny import normal_params

from tokenformer_jax import tasks
from tokenformer_jax.config import GrowConfig
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.data import marks
from tokenformer_jax.errors import UserError
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.steps.last_growth import frozen_base, growth_from
from tokenformer_jax.training.prepare import prepare

BETA = 0.5
KEY = jax.random.key(0)
_SLOW = pytest.mark.slow


@functools.cache
def _config(loss: str = 'dpo', **changes):
  """A model of a layer with two groups of tokens, and the model before the second one."""
  changes = {'model__pattern': 'layer', 'data__rows': 'preference', **changes}
  config = complete(tiny_run.config('files:x.jsonl', '/none', train__loss_chunk=13, **changes))
  before = config.model
  model = grown_model(before, {'qkv': 40, 'proj': 40, 'ffn': 80}, GrowConfig())
  preference = dataclasses.replace(config.preference, loss=loss, beta=BETA)
  return dataclasses.replace(config, model=model, preference=preference), before


def _batch(pairs: int = 4, length: int = 32) -> np.ndarray:
  """Answers of several lengths after their prompts, and padding."""
  rng = np.random.default_rng(1)
  answers = marks.flip(rng.integers(0, 256, (2 * pairs, length + 1), np.int32))
  for row in answers:
    first, last = rng.integers(2, 9), rng.integers(9, length)
    row[first:last], row[last:] = marks.flip(row[first:last]), marks.NO_TOKEN
  return answers.reshape(pairs, -1)


@functools.cache
def _params():
  config, before = _config()
  params = normal_params(tasks.make(config).definition, 0.2)
  old = tasks.make(dataclasses.replace(config, model=before)).definition.abstract
  return params, jax.tree.map(lambda one, like: one[tuple(map(slice, like.shape))], params, old)


def _log_probs(model, params, batch) -> tuple[jax.Array, jax.Array]:
  """Σ log p of each answer by all logits at once, and the number of its tokens [pairs, 2]."""
  task = tasks.make(dataclasses.replace(_config()[0], model=model))
  sums = []
  for row in np.split(batch, 2, axis=1):
    logits = task.definition.bind(params)(np.maximum(marks.plain(row), 0)[:, :-1])[0]
    at_target = jnp.take_along_axis(
      jax.nn.log_softmax(logits), jnp.maximum(row, 0)[:, 1:, None], axis=-1
    )
    learned = row[:, 1:] >= 0
    sums.append((jnp.sum(at_target[..., 0] * learned, axis=1), learned.sum(axis=1)))
  return tuple(jnp.stack(one, axis=1) for one in zip(*sums, strict=True))


def _dpo(params, batch) -> tuple[jax.Array, dict]:
  """Equation 7 of arXiv 2305.18290, as TRL computes it with `loss_type='sigmoid'`."""
  config, before = _config()
  policy = _log_probs(config.model, params, batch)[0]
  rewards = BETA * (policy - _log_probs(before, _params()[1], batch)[0])
  margins = rewards[:, 0] - rewards[:, 1]
  return jnp.mean(jnp.log1p(jnp.exp(-margins))), {
    'accuracy': jnp.mean(margins > 0),
    'reward_margin': jnp.mean(margins),
    'chosen_log_prob': jnp.mean(policy[:, 0]),
    'rejected_log_prob': jnp.mean(policy[:, 1]),
  }


def _orpo(params, batch) -> tuple[jax.Array, dict]:
  """Equations 6 and 7 of arXiv 2403.07691, with the mean log-probability as log P(y|x)."""
  log_probs, tokens = _log_probs(_config()[0].model, params, batch)
  chosen, rejected = (log_probs / tokens).T
  odds = [jnp.exp(one) / (1 - jnp.exp(one)) for one in (chosen, rejected)]
  ratio = jnp.log(jax.nn.sigmoid(jnp.log(odds[0] / odds[1])))
  return jnp.mean(-chosen - BETA * ratio), {}


@functools.cache
def _of_formula(formula):
  """The loss and the figures by a formula, and the gradient."""
  run = jax.value_and_grad(lambda params: formula(params, _batch()), has_aux=True)
  return jax.device_get(jax.jit(run)(_params()[0]))


@functools.cache
def _of_task(loss: str, parts: int):
  """The gradient and the figures of a batch of the task."""
  config, before = _config(loss)
  task = tasks.make(config, before=before)
  run = step_lib._gradient(task.loss, parts, task.counts)
  return jax.device_get(jax.jit(run)(_params()[0], _batch(), KEY))


@_SLOW
@pytest.mark.parametrize(('formula', 'parts'), [(_dpo, 1), (_orpo, 2)])
def test_losses_and_gradients_are_those_of_the_papers(formula, parts):
  gradient, figures = _of_task(formula.__name__.strip('_'), parts)
  (expected, others), slope = _of_formula(formula)
  assert_close({name: figures[name] for name in others}, others, 'a figure is not the mean')
  np.testing.assert_allclose(figures['loss'], expected, rtol=1e-5)
  for own, one in zip(jax.tree.leaves(gradient), jax.tree.leaves(slope), strict=True):
    assert np.linalg.norm(own - one) <= 1e-5 * np.linalg.norm(one)


@_SLOW
def test_the_reference_is_a_copy_of_the_base_to_the_bit():
  config, before = _config()
  params, copy = _params()
  distill = dataclasses.replace(config.distill, teacher='base')
  inside = tasks.make(config, before=before)
  outside = tasks.make(dataclasses.replace(config, distill=distill), teacher=before)
  batch = _batch()
  found = jax.jit(step_lib._gradient(outside.loss, 1, outside.counts))(params, batch, KEY, copy)
  assert_same(_of_task('dpo', 1), found, 'the group is not off')
  padded = np.concatenate([batch, np.full_like(batch[:2], -1)])  # of the last batch
  sums = jax.device_get(jax.jit(inside.sums)(params, padded))
  assert_same(sums, jax.jit(outside.sums)(params, padded, copy), 'the group is not off')
  (_, expected), _ = _of_formula(_dpo)
  assert 0 < expected['accuracy'] < 1
  figures = inside.eval_figures(sums)
  assert_close({name: figures[name] for name in expected}, expected, 'a figure is not the mean')


def test_only_frozen_models_that_got_groups_are_references():
  config, before = _config()
  frozen = dataclasses.replace(config, optim=dataclasses.replace(config.optim, old_tokens='freeze'))
  zero_keys = grown_model(before, {'ffn': 80}, GrowConfig(method='zero_keys'))
  assert frozen_base(growth_from(before, config.model), frozen) == before
  assert frozen_base(growth_from(before, config.model), config) is None
  assert frozen_base(growth_from(config.model, config.model), frozen) is None
  joined = dataclasses.replace(frozen, model=zero_keys)
  assert frozen_base(growth_from(before, zero_keys), joined) is None


def test_a_run_without_a_reference_is_refused_before_its_data_is_read(tmp_path):
  with pytest.raises(UserError, match=r'loss is dpo, which compares .* and the run has none; grow'):
    prepare(_config()[0], tmp_path, jax.devices()[:1])


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    ({'data__rows': 'chat', 'preference__beta': 1.0}, 'no effect with data.rows=chat'),
    ({'data__documents': 'separate'}, 'no effect with data.rows=preference'),
    ({'data__sequence_length_by_step': '0:16 5:32'}, 'no effect with data.rows=preference'),
    ({'data__packing': 'best_fit'}, 'no effect with data.rows=preference'),
    ({'optim__z_loss': 0.1}, 'no effect with data.rows=preference'),
    ({'train__nested_rows': 2}, 'no effect with data.rows=preference'),
    ({'preference__loss': 'orpo', 'distill__teacher': 'x'}, 'loss=orpo, which has no reference'),
  ],
)
def test_keys_that_pairs_do_not_use_are_refused(changes, sentence):
  with pytest.raises(UserError, match=sentence):
    tiny_run.config('files:x.jsonl', '/none', **{'data__rows': 'preference', **changes})
