"""Elastic models: some steps train the first groups of parameter tokens alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from growing import IDS, apply_steps, by_name, logits, params_of
from outcomes import paths
from tiny import tiny_model

from tokenformer_jax.config import growth
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow.steps import remove
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.steps import elastic
from tokenformer_jax.training.prepare import prepare

SMALL = tiny_model()
GROUP = growth(method='group')
MIDDLE = grown_model(SMALL, by_name(32, 48, 64), GROUP)
LARGE = grown_model(MIDDLE, by_name(48, 48, 100), GROUP)


@jax.jit
def _first(params, count):
  return elastic.keep_first(params, define_lm(LARGE).info, count)


def test_the_first_groups_compute_what_the_smaller_model_does():
  params = params_of(LARGE)
  steps = (remove.KeepFirst(LARGE, MIDDLE),)
  smaller = apply_steps({'params': params, 'opt_state': ()}, LARGE, steps)['params']
  got = logits(LARGE, _first(params, 2))
  np.testing.assert_allclose(got, logits(MIDDLE, smaller), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(('count', 'model'), [(1, SMALL), (3, LARGE), (9, LARGE)])
def test_values_of_later_groups_are_zero(count, model):
  params = params_of(LARGE)
  smaller, got = paths(params_of(model)), paths(_first(params, count))
  for path, array in paths(params).items():
    want = array.copy()
    if path.endswith('values'):
      want[:, smaller[path].shape[1] :] = 0
    np.testing.assert_array_equal(got[path], want, err_msg=path)


@pytest.mark.slow
def test_later_groups_are_left_out_as_often_as_asked():
  ones = jax.tree.map(lambda a: jnp.ones(a.shape), define_lm(LARGE).abstract)

  def counted(params, batch, key):
    del batch, key
    return jnp.sum(params['blocks']['ffn']['values'][0, :, 0])

  def count(rate):
    loss = jax.jit(elastic.with_dropped_groups(counted, define_lm(LARGE), rate))
    found = [float(loss(ones, IDS, jax.random.key(seed))) for seed in range(100)]
    return [found.count(size) for size in (48, 64, 100)]

  # The first size is that of the model before any growth.
  assert count(0.0) == [0, 0, 100] and count(1.0)[2] == 0
  few, some, all_ = count(0.5)
  assert 10 < few < 40 and 10 < some < 40 and 30 < all_ < 70


def test_a_model_with_one_group_cannot_leave_groups_out(tmp_path):
  config = tiny_run.config(
    tiny_run.write_corpus(tmp_path / 'text'), tmp_path / 'cache', train__drop_groups=0.5
  )
  with pytest.raises(UserError, match=r'drop_groups is 0\.5, and no projection of this model has'):
    prepare(config, tmp_path / 'run', jax.devices()[:1])
