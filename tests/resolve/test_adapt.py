"""A trained vision transformer is adapted to other images."""

import dataclasses
import functools

import jax
import numpy as np
from outcomes import assert_same
from tiny import tiny_vit

from tokenformer_jax.model import models
from tokenformer_jax.model.params import lookup
from tokenformer_jax.resolve.adapt import Adapt, adapted


def test_a_model_is_adapted_to_other_classes_and_another_resolution():
  source = tiny_vit(position_embedding='learned')
  target = dataclasses.replace(source, classes=17, max_length=16)
  assert adapted(source, target) == target
  old, step = models.define(source), Adapt(source, target, seed=0)
  params = jax.tree.map(lambda p: np.full(p.shape, 2.0, p.dtype), old.abstract)

  def made(array, params):
    read = functools.partial(lookup, params)
    return jax.tree.map_with_path(lambda path, _: array(path, read), models.define(target).abstract)

  param, moment = functools.partial(step.param, keys=None), functools.partial(step.moment, order=1)
  new, moments = jax.jit(lambda params: (made(param, params), made(moment, params)))(params)
  for tree in (new, moments):
    assert jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, models.define(target).abstract)
  np.testing.assert_allclose(new['positions'], 2, rtol=1e-5)
  assert np.std(new['head']['kernel']) > 0, 'the new head is not drawn'
  assert not moments['head']['kernel'].any() and not moments['positions'].any()
  assert_same(new['blocks'], params['blocks'], 'another array is not the old one')
