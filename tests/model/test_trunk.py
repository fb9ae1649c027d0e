"""Layers of one or several kinds run as their pattern says, in every way in which they can run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import third_architecture as third
from flax import nnx
from jax.extend import core
from outcomes import paths
from tiny import large_params

from tokenformer_jax.config import MeshConfig
from tokenformer_jax.config.pattern import Repeat
from tokenformer_jax.model import lm, trunk
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import (
  EMPTY_AUX,
  FROM_START,
  NO_INPUTS,
  Aux,
  LayerInputs,
  layer_means,
)
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Definition, Params, Role, param
from tokenformer_jax.parallel import sharding

IDS = np.random.default_rng(0).integers(0, 64, (4, 13), np.int32)


@pytest.fixture(autouse=True, scope='module')
def third_architecture():
  with third.named():
    yield


def _definition(**how) -> Definition:
  return define_lm(third.MODEL, Execution(**how))


def _params() -> Params:
  return large_params(third.MODEL)


# Where parameters are


def test_every_stack_has_its_name_and_an_axis_of_layers():
  shapes = {path: a.shape for path, a in paths(_params()).items() if path.endswith('query/keys')}
  assert shapes == {
    'blocks/local_0/attention/query/keys': (2, 24, 32),
    'blocks/recurrent_1/attention/query/keys': (2, 24, 32),
    'blocks/recurrent_2/attention/query/keys': (1, 24, 32),
  }, 'checkpoints have other paths'
  axes = _definition().axes['blocks']['recurrent_2']['attention']['query']['keys']
  assert axes == ('layers', 'param_tokens', 'width'), 'the new axis has no name'


class _Scale(nnx.Module):
  """x · scale · factor, a layer that says what it is given to say."""

  def __init__(
    self, scale: float, says: tuple[str, ...] = (), *, execution: Execution, rngs: nnx.Rngs
  ):
    del execution
    self.scale, self.says = (
      param(rngs, nnx.initializers.constant(scale), (), (), role=Role.VECTOR),
      says,
    )

  def __call__(self, x, context=FROM_START, cache=None, inputs=NO_INPUTS):
    del context
    x = x * self.scale[...] + inputs.branch_scales_Bx2
    if not self.says:
      return x, cache, EMPTY_AUX
    return x, cache, Aux({'tokens': jnp.sum(x)}, {name: jnp.sum(x) for name in self.says})


def _scales(repeats: list[Repeat], layers: str, **says: tuple[str, ...]) -> tuple[float, Aux]:
  """x ← x · scale + input of every layer, with the inputs 1, 2, …: what depends on the order."""
  makers = {
    name: functools.partial(_Scale, scale, says.get(name, ()))
    for name, scale in {'a': 2.0, 'b': 3.0}.items()
  }
  architecture, execution = trunk.Architecture(tuple(repeats), makers), Execution(layers=layers)

  def run() -> tuple[jax.Array, Aux]:
    blocks = trunk.make(architecture, execution=execution, rngs=nnx.Rngs(0))
    inputs = LayerInputs(
      branch_scales_Bx2=jnp.arange(1.0, 1 + sum(repeat.size for repeat in repeats))
    )
    x, _, aux = trunk.run(
      blocks, architecture.repeats, jnp.float32(1), inputs=inputs, execution=execution
    )
    return x, aux

  x, aux = jax.jit(run)()
  return float(x), aux


EACH_WAY = pytest.mark.parametrize('layers', ['scan', 'unrolled', 'list'])


@EACH_WAY
def test_layers_run_in_order_each_with_its_own_input(layers):
  repeats, want = [Repeat(('b',), 1), Repeat(('a', 'b'), 2), Repeat(('a',), 2, tied=True)], 1.0
  names = [name for repeat in repeats for name in repeat.layers * repeat.count]
  for i, name in enumerate(names, start=1):
    want = want * {'a': 2, 'b': 3}[name] + i
  got, aux = _scales(repeats, layers)
  assert got == want, 'layers run in another order, or have the input of another layer'
  assert jax.tree.leaves(aux) == [], 'layers that say nothing have a part in the program'


@EACH_WAY
def test_losses_of_layers_add_up_and_figures_are_their_means(layers):
  # After each layer x is 1 · 3 + 1, then 4 · 2 + 2, 10 · 3 + 3, 33 · 2 + 4.
  repeats = [Repeat(('b', 'a'), 2)]
  _, aux = _scales(repeats, layers, a=('size',), b=('size', 'of_b'))
  assert float(aux.losses['tokens']) == 4 + 10 + 33 + 70, 'the loss of a layer is lost'
  figures = {name: float(value) for name, value in layer_means(aux.figures).items()}
  assert figures == {'size': (4 + 10 + 33 + 70) / 4, 'of_b': (4 + 33) / 2}, (
    'a figure is not the mean over the layers that have it'
  )


def _are_kept_apart(jaxpr) -> bool:
  """Whether anything in a program may not be merged with what is computed again."""
  return any(
    eqn.params.get('prevent_cse', False)
    or any(_are_kept_apart(inner) for inner in core.jaxprs_in_params(eqn.params))
    for eqn in jaxpr.eqns
  )


@pytest.mark.parametrize('remat', ['score_inputs', 'full'])
def test_recomputation_in_a_group_that_runs_once_is_not_merged(remat):
  """XLA takes a loop of one round apart, and could then keep what is to be computed again."""
  definition = _definition(remat=remat)
  program = jax.make_jaxpr(lambda p: definition.bind(p)(IDS)[0])(_params())
  apart = {
    eqn.params['length']: _are_kept_apart(eqn.params['jaxpr'].jaxpr)
    for eqn in program.eqns
    if eqn.primitive.name == 'scan'
  }
  assert apart == {2: False, 1: True}, 'XLA may keep what is to be computed again'


# Decoding


def test_each_layer_has_its_own_cache():
  module = _definition(layers='list').bind(lm.unstack(_params(), third.MODEL))
  shapes = [jax.tree.map(jnp.shape, cache) for cache in module.init_caches(2, 64)]
  ring, state = ((2, 4, third.WINDOW, 8),) * 2, ((2, 4, 8, 8),)
  assert [tuple(shape) for shape in shapes] == [ring, state, ring, state, state], (
    'a window keeps more slots than it sees, or layers are in another order'
  )


def test_caches_are_split_as_their_layers_say():
  mesh = sharding.make_mesh(MeshConfig(fsdp=4, tokens=2))
  params = lm.unstack(_params(), third.MODEL)
  with jax.set_mesh(mesh):
    caches = jax.jit(lambda: _definition(layers='list').bind(params).init_caches(4, 64))()
  parts = [[a.addressable_shards[0].data.shape[:2] for a in cache] for cache in caches]
  assert all(part == (1, 2) for cache in parts for part in cache), (
    'devices hold more of the caches than their heads and rows'
  )


def test_caches_need_layers_from_a_list():
  with pytest.raises(ValueError, match='list'):
    _definition().bind(_params()).hidden(IDS, caches=())
