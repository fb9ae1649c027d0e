"""Where arrays live: the mesh, the rules, and the optimizer's state beside its parameters."""

import ast
import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh
from mixtures import KINDS as MIXTURES
from mixtures import mixture
from tiny import tiny_model

from tokenformer_jax import tasks
from tokenformer_jax.config import Config, MeshConfig, TrainConfig
from tokenformer_jax.config.section import Int, section
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.parallel import rules, sharding
from tokenformer_jax.parallel.rules import is_axes
from tokenformer_jax.steps import step as step_lib

DENSE = {
  'dense': True,
  'bias': True,
  'norm': 'affine',
  'rotary': 0,
  'position_embedding': 'learned',
}
EACH_PROJECTION = pytest.mark.parametrize(
  'changes',
  [{'tied_head': False}, DENSE, *({'layer': mixture(name).layer} for name in MIXTURES)],
  ids=['pattention', 'dense', *MIXTURES],
)


@EACH_PROJECTION
def test_no_array_is_split_twice_over_the_same_devices(changes):
  for names in jax.tree.leaves(define_lm(tiny_model(**changes)).axes, is_leaf=is_axes):
    split = [axis for name in names for axis in rules.mesh_axes(name)]
    assert len(split) == len(set(split)), f'two axes of {names} are split over {split}'


@pytest.mark.parametrize(
  ('config', 'shape'),
  [
    (MeshConfig(), (1, 8, 1, 1, 1)),
    (MeshConfig(replica=2, fsdp=-1, tokens=2), (2, 2, 1, 1, 2)),
    (MeshConfig(replica=-1, fsdp=4, tokens=2), (1, 4, 1, 1, 2)),
    (MeshConfig(replica=1, fsdp=1, tokens=-1), (1, 1, 1, 1, 8)),
    (MeshConfig(experts=4), (1, 2, 4, 1, 1)),
    (MeshConfig(sequence=4), (1, 2, 1, 4, 1)),
    (MeshConfig(replica=2, fsdp=4, tokens=1), (2, 4, 1, 1, 1)),
  ],
)
def test_mesh_sizes(config, shape):
  mesh = sharding.make_mesh(config)
  assert mesh.devices.shape == shape, '-1 is not what the other sizes leave'


def test_an_impossible_mesh_is_refused():
  with pytest.raises(
    UserError, match=r'has replica=-1, fsdp=-1, .*; sizes are positive, and at mo'
  ):
    sharding.make_mesh(MeshConfig(replica=-1, fsdp=-1, tokens=2))
  with pytest.raises(UserError, match=r'fsdp=3, .*must be the number of devices, 8'):
    sharding.make_mesh(MeshConfig(replica=1, fsdp=3, tokens=2))


ON_EIGHT = MeshConfig(fsdp=4, tokens=2)


def _mesh() -> Mesh:
  return sharding.make_mesh(ON_EIGHT)


@functools.cache
def _states(remat: str = 'score_inputs', on: MeshConfig = ON_EIGHT) -> dict[str, step_lib.State]:
  """The state of a run on 4 × 2 devices, or others, before and after a step."""
  config = Config(model=tiny_model(layers=1), train=TrainConfig(steps=10, remat=remat))
  mesh, task = sharding.make_mesh(on), tasks.make(config)
  program = step_lib.make_program(task, config)
  rows = np.random.default_rng(0).integers(0, 64, (8, 13), np.int32)
  with jax.set_mesh(mesh):
    new = jax.jit(program.initial_state, out_shardings=program.state_shardings(mesh))
    step = step_lib.make_train_step(program, mesh)
    before = new(0)
    after, _ = step(
      jax.tree.map(jnp.copy, before), jax.device_put(rows, sharding.batch_sharding(mesh))
    )
  return {'before': before, 'after': after}


@pytest.mark.slow
@pytest.mark.parametrize('when', ['before', 'after'])
def test_parameters_and_their_moments_live_where_the_rules_say(when):
  state = _states()[when]

  def is_adam(part):
    return isinstance(part, optax.ScaleByAdamState)

  (adam,) = filter(is_adam, jax.tree.leaves(state['opt_state'], is_leaf=is_adam))
  want = sharding.tree_shardings(_mesh(), define_lm(tiny_model(layers=1)).axes)
  for name, arrays in {'parameters': state['params'], 'mu': adam.mu, 'nu': adam.nu}.items():
    right = jax.tree.map(lambda p, s: p.sharding.is_equivalent_to(s, p.ndim), arrays, want)
    assert all(jax.tree.leaves(right)), f'{name} are not where the rules put them: {right}'


@pytest.mark.parametrize(
  ('path', 'shape'),
  [
    ('embedding', (64 // 4, 32 // 2)),
    ('final_norm/scale', (32,)),
    ('blocks/ffn/keys', (2, 48 // 4, 32 // 2)),
    ('blocks/ffn/values', (2, 48 // 4, 32 // 2)),
  ],
)
def test_a_device_holds_its_part_only(path, shape):
  mesh, definition = sharding.make_mesh(MeshConfig(fsdp=2, tokens=4)), define_lm(tiny_model())
  leaf, names = definition.abstract, definition.axes
  for key in path.split('/'):
    leaf, names = leaf[key], names[key]
  # Not NamedSharding.shard_shape, but what a device is given in fact.
  array = jax.device_put(np.zeros(leaf.shape), sharding.tree_shardings(mesh, {'x': names})['x'])
  shapes = {shard.data.shape for shard in array.addressable_shards}
  assert shapes == {shape}, f'{path} is not split over 2 fsdp × 4 tokens'


def test_an_activation_is_constrained_under_a_mesh():
  with jax.set_mesh(_mesh()):
    x = jax.jit(lambda x: sharding.constrain(x, 'batch', None, 'param_tokens'))(np.ones((4, 3, 8)))
  assert x.sharding.shard_shape(x.shape) == (1, 3, 4), 'activations are not split by the rules'


def test_axes_that_do_not_divide_are_whole_if_asked():
  shardings = sharding.tree_shardings(_mesh(), {'x': ('param_tokens', 'width')})
  abstract = {'x': jax.ShapeDtypeStruct((7, 8), jnp.float32)}
  even = sharding.with_even_shardings(abstract, shardings)['x'].sharding
  assert even.shard_shape((7, 8)) == (7, 2)


def test_a_program_is_for_the_platform_of_the_mesh_that_is_set():
  assert sharding.platform() == 'cpu', 'no mesh is set: it is for this process'
  elsewhere = AbstractDevice(device_kind='TPU v5', num_cores=1, platform='tpu')
  axes = tuple(field.name for field in dataclasses.fields(MeshConfig))
  mesh = AbstractMesh((1,) * len(axes), axes, abstract_device=elsewhere)
  with jax.sharding.use_abstract_mesh(mesh):
    assert sharding.platform() == 'tpu', 'its devices are not those here'


def test_a_parameter_that_cannot_be_split_is_named():
  definition = define_lm(tiny_model(tokens={'qkv': 24, 'proj': 42, 'ffn': 48}))
  mesh = sharding.make_mesh(MeshConfig(fsdp=2, tokens=4))
  sentence = "'param_tokens' of parameter blocks/attention/proj/keys has the size 42, which is not"
  with pytest.raises(UserError, match=sentence):
    sharding.check_divides(mesh, definition.abstract, definition.axes)


@section
class FiveAxes(MeshConfig):
  stages: Int = 1


@pytest.mark.slow
def test_a_new_axis_of_the_mesh_is_a_size_and_a_rule(monkeypatch):
  four = _states()['after']['params']
  monkeypatch.setitem(rules.RULES, 'stages', 'stages')
  monkeypatch.setitem(rules.RULES, 'batch', ('replica', 'fsdp', 'experts', 'stages'))
  config = FiveAxes(fsdp=2, tokens=2, stages=-1)
  mesh = sharding.make_mesh(config)
  assert mesh.shape == {
    'replica': 1,
    'fsdp': 2,
    'experts': 1,
    'sequence': 1,
    'tokens': 2,
    'stages': 2,
  }
  assert (rules.shard_count('batch', mesh), rules.shard_count('stages', mesh)) == (4, 2)
  place = sharding.tree_shardings(mesh, {'x': ('stages', 'param_tokens', 'width')})['x']
  assert place.shard_shape((4, 24, 32)) == (2, 12, 16), 'stages are not split by their rule'
  jax.tree.map(
    lambda one, other: np.testing.assert_allclose(
      one, other, rtol=1e-3, atol=1e-5, err_msg='a step computes something else on a fifth axis'
    ),
    _states(on=config)['after']['params'],
    four,
  )


@pytest.mark.parametrize('axis', ['batch', 'width', 'heads', 'layers'])
def test_an_axis_has_as_many_parts_as_its_mesh_axes(axis):
  want = {'batch': 4, 'width': 2, 'heads': 2, 'layers': 1}[axis]
  mesh = sharding.make_mesh(MeshConfig(replica=2, fsdp=2, tokens=2))
  assert rules.shard_count(axis, mesh) == want
  assert rules.shard_count(axis) == 1, 'without a mesh nothing is split'
  with jax.set_mesh(mesh):
    assert rules.shard_count(axis) == want, 'the mesh that is set does not count'


def test_no_other_file_names_an_axis_of_the_mesh():
  package = Path(sharding.__file__).parent.parent
  for file in package.rglob('*.py'):
    text = file.read_text()
    if file.name in ('rules.py', 'sharding.py') or not re.search('replica|fsdp', text):
      continue
    nodes = list(ast.walk(ast.parse(text)))
    named = {node.value for node in nodes if isinstance(node, ast.Constant)}
    named |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    # `tokens` has other meanings elsewhere.
    assert not named & {'replica', 'fsdp'}, f'{file} does not ask rules.py, but knows its mesh'
