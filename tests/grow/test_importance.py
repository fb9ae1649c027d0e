"""The importance of a token is what the loss of a sequence changes by, to first order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from growing import IDS, params_of
from outcomes import paths
from tiny import tiny_model

from tokenformer_jax.grow import importance
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import ParamInfo, Role

MODEL = tiny_model()


def _loss(params, rows):
  scores, _ = define_lm(MODEL).bind(params)(rows[:, :-1])
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, rows[:, 1:]))


@functools.cache
def _scores():
  score_tokens = functools.partial(importance.score_tokens, _loss, info=define_lm(MODEL).info)
  return jax.jit(score_tokens)(params_of(MODEL), batch=IDS)


def test_keys_have_the_importance_of_their_values():
  scores = paths(_scores())
  for path, array in scores.items():
    if path.endswith('keys'):
      np.testing.assert_array_equal(array, scores[path.replace('keys', 'values')], err_msg=path)
  assert scores['blocks/attention/proj/keys'].shape == (2, 40)


def test_importance_is_the_gradient_against_the_value_sequence_by_sequence():
  params = params_of(MODEL)
  gradient = jax.jit(jax.grad(_loss))
  want = np.mean(
    [
      np.abs(np.sum(params['blocks']['ffn']['values'] * g['blocks']['ffn']['values'], axis=-1))
      for g in (gradient(params, IDS[i : i + 1]) for i in range(len(IDS)))
    ],
    axis=0,
  )
  got = paths(_scores())['blocks/ffn/values']
  np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6, err_msg='another importance')


def test_keys_go_with_the_values_of_their_module_whatever_the_names():
  def info(role: Role) -> ParamInfo:
    return ParamInfo(('param_tokens', 'width'), role, jax.nn.initializers.zeros)

  tree = {name: {'a': info(Role.VALUE), 'b': info(Role.KEY)} for name in ('first', 'second')}
  params = {
    name: {'a': jnp.full((3, 2), size), 'b': jnp.ones((3, 2))}
    for name, size in (('first', 2.0), ('second', 5.0))
  }

  def loss(params, row):
    return sum(jnp.sum(module['a']) * jnp.sum(row) for module in params.values())

  scores = importance.score_tokens(loss, params, tree, jnp.ones((4, 1)))
  for name, want in (('first', 4), ('second', 10)):
    for array in ('a', 'b'):
      np.testing.assert_array_equal(
        scores[name][array], [want] * 3, err_msg='keys are kept where their values are dropped'
      )
