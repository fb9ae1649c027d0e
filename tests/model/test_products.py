"""Products of activations with parameters, on one device and on meshes that split them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import with_gradients

from tokenformer_jax.config import MeshConfig
from tokenformer_jax.model import products
from tokenformer_jax.parallel import per_device, rules, sharding

KEYS, UP, DOWN = ('param_tokens', 'width'), ('width', 'hidden'), ('hidden', 'width')


def _trace_for(monkeypatch, platform: str) -> None:
  """Write programs as for devices of this kind."""
  for module in (products, per_device):
    monkeypatch.setattr(module, 'platform', lambda: platform)


@pytest.mark.parametrize(('equation', 'width'), [('BTN,NO->BTO', 96), ('BTI,NI->BTN', 16)])
def test_a_row_takes_the_matrix_as_it_is(equation, width):
  x, matrix = jnp.ones((1, 1, width)), jnp.ones((96, 16))
  multiply = jax.jit(functools.partial(products.product, equation))
  assert ' transpose(' not in multiply.lower(x, matrix).compile().as_text(), 'a copy for each token'


@pytest.mark.parametrize(
  ('equation', 'x', 'matrix'),
  [
    ('BTI,NI->BTN', (2, 64, 5), (7, 5)),
    ('BTHK,NHK->BTN', (2, 3, 2, 4), (6, 2, 4)),
  ],
)
def test_products_are_the_same_for_every_platform(monkeypatch, equation, x, matrix):
  rng = np.random.default_rng(0)
  x, matrix = (np.float32(rng.normal(size=shape)) for shape in (x, matrix))

  def on(platform: str):
    monkeypatch.setattr(products, 'platform', lambda: platform)
    product = functools.partial(products.product, equation)
    return jax.jit(functools.partial(with_gradients, product))(x, matrix)

  for got, want in zip(on('tpu'), on('cpu'), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# The equation of what is stored, its axes, the position of what is summed over, and heads if they
# come out.
PROJECTIONS = {
  'scores': ('BTI,OI->BTO', KEYS, 1, None),
  'scores of heads': ('BTHK,OHK->BTO', KEYS, 1, None),
  'values': ('BTI,IO->BTO', KEYS, 0, None),
  'values to heads': ('BTI,IHK->BTHK', KEYS, 0, (4, 2)),
  'up': ('BTI,IO->BTO', UP, 0, None),
  'up to heads': ('BTI,IHK->BTHK', UP, 0, (4, 2)),
  'down': ('BTI,IO->BTO', DOWN, 0, None),
  'down of heads': ('BTHK,HKO->BTO', DOWN, 0, None),
}
MIXED = {'replica': 2, 'fsdp': 2, 'tokens': 2}


def _projection(name: str):
  """Return arrays [B, T, 8] or [B, T, 4, 2] and [8, 8], `project` of them, and its results."""
  equation, axes, contract, out_heads = PROJECTIONS[name]
  of_x, of_matrix, of_out = re.split(',|->', equation)
  sizes = {'B': 8, 'T': 3, 'I': 8, 'O': 8, 'H': 4, 'K': 2}
  rng = np.random.default_rng(0)
  x, matrix = (rng.normal(size=[sizes[axis] for axis in of]) for of in (of_x, of_matrix))
  out = np.einsum(equation, x, matrix)
  d_x = np.einsum(f'{of_out},{of_matrix}->{of_x}', np.cos(out), matrix)
  d_matrix = np.einsum(f'{of_x},{of_out}->{of_matrix}', x, np.cos(out))

  project = functools.partial(products.project, axes=axes, contract=contract, out_heads=out_heads)
  want = out, d_x, d_matrix.reshape(8, 8)
  return np.float32(x), np.float32(matrix.reshape(8, 8)), project, want


def _check(name: str, mesh: dict[str, int]) -> str:
  """Check a projection and its gradients on a mesh, and return the compiled program."""
  mesh = sharding.make_mesh(MeshConfig(**mesh))
  x, matrix, project, want = _projection(name)
  matrix = jax.device_put(matrix, jax.NamedSharding(mesh, rules.spec(PROJECTIONS[name][1])))
  x = jax.device_put(x, sharding.batch_sharding(mesh))
  with jax.set_mesh(mesh):
    step = jax.jit(functools.partial(with_gradients, project)).lower(x, matrix).compile()
    got = step(x, matrix)
  for one, other in zip(got, want, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
  return step.as_text()


@pytest.mark.parametrize('name', PROJECTIONS)
def test_a_projection_is_the_product_and_so_are_its_gradients(monkeypatch, name):
  x, matrix, project, want = _projection(name)
  got = jax.jit(functools.partial(with_gradients, project))(x, matrix)
  for one, other in zip(got, want, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
  _trace_for(monkeypatch, 'tpu')
  monkeypatch.setattr(per_device, '_TWO_STEPS', 4)
  _check(name, {'fsdp': 2, 'tokens': 4})


@pytest.mark.parametrize(('tokens', 'width'), [(9, 8), (8, 6)])
def test_a_matrix_that_the_mesh_does_not_divide_is_multiplied_all_the_same(tokens, width):
  rng = np.random.default_rng(0)
  x, keys = (np.float32(rng.normal(size=(n, width))) for n in (8, tokens))
  with jax.set_mesh(sharding.make_mesh(MeshConfig(fsdp=4, tokens=2))):
    got = jax.jit(functools.partial(products.project, axes=KEYS, contract=1))(x[:, None], keys)
  np.testing.assert_allclose(got[:, 0], x @ keys.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ('name', 'platform', 'scatters'),
  [*((name, 'tpu', 2) for name in PROJECTIONS), ('scores of heads', 'gpu', 1)],
)
def test_no_device_gets_the_whole_gradient_of_a_matrix(monkeypatch, name, platform, scatters):
  _trace_for(monkeypatch, platform)
  program = _check(name, {'replica': 2, 'fsdp': 4} if scatters == 2 else {})
  found = re.findall(r'f32\[([0-9,]*)\]\S* (all-reduce|reduce-scatter|all-gather)\(', program)
  found = [(kind, np.prod([int(size) for size in shape.split(',')])) for shape, kind in found]
  assert [kind for kind, _ in found].count('reduce-scatter') == scatters, found
  assert [size for kind, size in found if kind == 'all-gather'] == [64], found
  assert all(size < 64 for kind, size in found if kind == 'all-reduce'), found


TABLE = ('vocab', 'width')


def _many_of_few(rows: int, width: int):
  """A table, 24,576 ids of which a seventh are one row, and a bfloat16 gradient for each."""
  rng = np.random.default_rng(0)
  likely = 1 / np.arange(1, rows + 1)
  ids_BxT = rng.choice(rows, (8, 3072), p=likely / likely.sum()).astype(np.int32)
  table = jnp.asarray(rng.normal(size=(rows, width)), jnp.float32)
  change_BxTxD = jnp.asarray(rng.normal(1, 1, (*ids_BxT.shape, width)), jnp.bfloat16)
  return table, ids_BxT, change_BxTxD


def _looked_up(table, ids_BxT, change_BxTxD):
  """Rows in bfloat16, and the gradient of the table."""
  rows, backward = jax.vjp(
    lambda table: products.look_up(table, ids_BxT, TABLE, jnp.dtype('bfloat16')), table
  )
  return rows, backward(change_BxTxD)[0]


@pytest.mark.parametrize('mesh', [None, MIXED])
def test_all_gradients_of_a_frequent_row_are_summed(monkeypatch, mesh):
  _trace_for(monkeypatch, 'tpu' if mesh else 'cpu')
  table, ids, change = _many_of_few(256, 16)
  want = np.zeros(table.shape)
  np.add.at(want, ids, np.asarray(change, np.float64))
  if mesh is None:
    rows, got = jax.jit(_looked_up)(table, ids, change)
  else:
    mesh = sharding.make_mesh(MeshConfig(**mesh))
    place = jax.NamedSharding(mesh, rules.spec(TABLE))
    with jax.set_mesh(mesh):
      table = jax.device_put(table, place)
      ids, change = (jax.device_put(x, sharding.batch_sharding(mesh)) for x in (ids, change))
      rows, got = jax.jit(_looked_up)(table, ids, change)
  stored = np.asarray(table).astype(jnp.bfloat16)
  assert (np.asarray(rows) == stored[np.asarray(ids)]).all(), 'a row is not that of its token'
  error = np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)
  assert error < 1e-4, f'the gradient of a table is off by {error:.1%}: was it summed in bfloat16?'


def test_no_device_gets_the_whole_gradient_of_a_table(monkeypatch):
  _trace_for(monkeypatch, 'gpu')
  mesh = sharding.make_mesh(MeshConfig(**MIXED))
  place = jax.NamedSharding(mesh, rules.spec(TABLE))
  table, ids, change = _many_of_few(256, 16)
  with jax.set_mesh(mesh):
    table = jax.device_put(table, place)
    ids, change = (jax.device_put(x, sharding.batch_sharding(mesh)) for x in (ids, change))
    gradient = jax.jit(lambda *arguments: _looked_up(*arguments)[1], out_shardings=place)
    program = gradient.lower(table, ids, change).compile().as_text()
  found = re.findall(r'(\w+)\[([0-9,]*)\]\S* (all-reduce|reduce-scatter)\(', program)
  sums = [(kind, dtype, np.prod(list(map(int, shape.split(','))))) for dtype, shape, kind in found]
  part = table.size // mesh.shape['tokens']
  assert ('reduce-scatter', 'f32', part // mesh.shape['fsdp']) in sums, sums
  whole = [one for one in sums if one[0] == 'all-reduce' and one[2] >= part]
  assert not whole, f'a sum of the whole table in the place of one that is scattered: {whole}'
