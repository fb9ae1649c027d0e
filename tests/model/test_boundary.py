"""The boundary operator: Norm(h) + α e at the start of a layer, e from the first such layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from growing import DOUBLE, IDS, difference, grow, inexact, logits, params_of
from tiny import tiny_model

from tokenformer_jax.config import GrowConfig, Layers, growth
from tokenformer_jax.config.layer import BoundaryConfig
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.convert import hub_folder
from tokenformer_jax.decoding.decode import Decoder
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import plan
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.lm import define_lm, unstack
from tokenformer_jax.model.norm import apply_norm

SLOW = pytest.mark.slow  # because of what is compiled
ALPHA = 0.707
PLAIN = tiny_model()
CORE = dataclasses.replace(PLAIN.layer, wiring=BoundaryConfig(ALPHA))
MODEL = dataclasses.replace(
  PLAIN, pattern='layer core*2 coda', variants=Layers({'core': CORE, 'coda': CORE})
)


def _as_plain(model):
  """The model without its boundaries, whose parameters have the same shapes."""
  return dataclasses.replace(
    model, variants=Layers(dict.fromkeys(model.variants, dataclasses.replace(PLAIN.layer)))
  )


def test_a_boundary_has_no_parameters():
  assert define_lm(MODEL).abstract.keys() == define_lm(_as_plain(MODEL)).abstract.keys()
  assert define_lm(MODEL).count == define_lm(_as_plain(MODEL)).count


def test_a_boundary_behind_another_layer_of_a_parenthesis_is_refused():
  with pytest.raises(UserError, match='such a layer stands first in one'):
    define_lm(dataclasses.replace(MODEL, pattern='(layer core)*2 coda'))


def test_a_boundary_is_not_written_as_pre_norm_for_transformers():
  layer = dataclasses.replace(PLAIN.layer, wiring=BoundaryConfig())
  with pytest.raises(UserError, match=r"model\.layer\.wiring\.kind is 'boundary'"):
    hub_folder.check_can_load(dataclasses.replace(PLAIN, layer=layer))


def test_only_whole_copies_of_layers_with_a_boundary_can_be_added():
  more = dataclasses.replace(MODEL, pattern='layer core*4 coda')
  with pytest.raises(UserError, match=r'wiring\.kind=boundary it is normalized again; only whole'):
    plan.check(MODEL, more, GrowConfig())
  whole = GrowConfig(place='whole_copies')
  plan.check(MODEL, more, whole)
  assert 'the copies of layers add once more' in inexact(MODEL, more, whole)
  before = dataclasses.replace(MODEL, pattern='layer*2 core*2 coda')
  plan.check(MODEL, before, GrowConfig())
  assert inexact(MODEL, before, GrowConfig()) == ''


@SLOW
@pytest.mark.parametrize('pattern', ['layer core*2 coda', 'layer core^2 coda'])
def test_layers_begin_at_the_normalized_state_and_the_embedded_input(pattern):
  model = dataclasses.replace(MODEL, pattern=pattern)
  params = params_of(model)
  listed = define_lm(_as_plain(model), Execution(layers='list'))

  @jax.jit
  def want(params):
    module = listed.bind(params)
    first, *rest = module.blocks
    x, _, _ = first(module.embed(IDS[:, :-1]))
    embedding, x = x, jnp.zeros_like(x)
    for layer in rest:
      x = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + model.norm_epsilon)
      x, _, _ = layer(x + ALPHA * embedding)
    return apply_norm(module.final_norm, x) @ module.output_embedding.T

  got = logits(model, params)
  assert difference(got, np.asarray(want(unstack(params, model)))) < 1e-5
  decoder = Decoder(model, Execution())
  assert decoder.prepare(params)['blocks'].keys() == {0, 1, 2, 3}


@SLOW
def test_a_model_with_boundaries_grows_by_tokens_and_layers_before_them_exactly():
  group = growth('group')
  larger = dataclasses.replace(grown_model(MODEL, DOUBLE, group), pattern='layer*2 core*2 coda')
  params = params_of(MODEL)
  new = grow({'params': params, 'opt_state': ()}, MODEL, larger, group)['params']
  assert difference(logits(larger, new), logits(MODEL, params)) < 1e-5
