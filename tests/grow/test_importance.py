"""The importance of a token is what the loss of a sequence changes by, to first order."""

import jax
import jax.numpy as jnp
import numpy as np
from outcomes import paths
from tiny import normal_params, tiny_model

from tokenformer_jax.grow import importance
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import ParamInfo, Role


def test_importance_is_the_gradient_against_the_value_sequence_by_sequence():
  """The loss is x/2 times the sum of squares, whose gradient for an array is x times the array."""
  definition = define_lm(tiny_model())
  params = normal_params(definition)
  batch = np.float32([-1, 3])

  def loss(params, example):
    squares = jax.tree.map(lambda array: jnp.sum(array**2) / 2, params)
    return jnp.sum(example) * sum(jax.tree.leaves(squares))

  scores = jax.jit(lambda params: importance.score_tokens(loss, params, definition.info, batch))
  scores = paths(scores(params))
  for path, array in paths(params).items():
    if path.endswith('values'):
      want = 2 * np.sum(array**2, axis=-1)  # 2: the mean of 1 and 3
      for of in (path, path.replace('values', 'keys')):
        np.testing.assert_allclose(scores[of], want, rtol=1e-5, err_msg=of)
    elif not path.endswith('keys'):
      assert scores[path] == 0
  assert scores['blocks/attention/proj/keys'].shape == (2, 40)


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
