r"""Compare two lookups of the embedding and their gradients, by the compiler's cycles.

  python benchmarks/lookup.py
  python benchmarks/lookup.py --topology=v6e:8x8 --vocab=50304 --width=768 --tokens_per_chip=32768

One lookup is `products.look_up`, which sums gradients in float32 on each device and scatters them.
The other is `jnp.take` of the table in bfloat16, partitioned by XLA. Each compiles in seconds. The
command needs `pip install -e ".[tpu]"`, but no TPU.
"""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tokenformer_jax.config import MeshConfig
from tokenformer_jax.model.products import look_up
from tokenformer_jax.parallel import rules, sharding
from tokenformer_jax.parallel.messages import aligned
from tokenformer_jax.plan import costs, topology

AXES = ('vocab', 'width')
Lookup = Callable[[jax.Array, jax.Array], jax.Array]


def by_device(table_VxD: jax.Array, ids_BxT: jax.Array) -> jax.Array:
  """Look rows up as the model does."""
  return look_up(table_VxD, ids_BxT, AXES, jnp.bfloat16)


def by_xla(table_VxD: jax.Array, ids_BxT: jax.Array) -> jax.Array:
  """Look rows up with XLA's own partitioning, which sums the gradient in bfloat16."""
  return jnp.take(table_VxD.astype(jnp.bfloat16), ids_BxT, axis=0)


def compiled(lookup: Lookup, mesh: Mesh, rows: int, args: argparse.Namespace) -> str:
  """Return the text of the program that looks rows up and computes the table's gradient."""

  def loss(table_VxD: jax.Array, ids_BxT: jax.Array, weight_BxTxD: jax.Array) -> jax.Array:
    x_BxTxD = sharding.constrain(lookup(table_VxD, ids_BxT), 'batch', None, None)
    return jnp.sum(x_BxTxD * weight_BxTxD, dtype=jnp.float32)

  def abstract(shape: tuple[int, ...], dtype: jnp.dtype, axes: tuple) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, rules.spec(axes)))

  ids = (rows, args.sequence_length)
  table = abstract((args.vocab, args.width), jnp.float32, AXES)
  with jax.set_mesh(mesh):
    step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, table.sharding))
    lowered = step.lower(
      table,
      abstract(ids, jnp.int32, ('batch', None)),
      abstract((*ids, args.width), jnp.bfloat16, ('batch', None, None)),
    )
  return lowered.compile().as_text()


def main() -> None:
  """Print a table with a row for each topology and lookup."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--topology', nargs='+', default=['v5p:4x4x4', 'v6e:8x8'])
  parser.add_argument('--vocab', type=int, default=50304, help='rows of the table')
  parser.add_argument('--width', type=int, default=768, help='entries of a row')
  parser.add_argument('--sequence_length', type=int, default=2048)
  parser.add_argument('--tokens_per_chip', type=int, default=32768)
  args = parser.parse_args()
  lines = [('topology', 'by', 'million cycles', 'collective', 'MB received')]
  for name in args.topology:
    on = topology.parse(name)
    mesh = sharding.make_mesh(MeshConfig(), topology.devices(on))
    rows = args.tokens_per_chip // args.sequence_length * on.chips
    for way, lookup in (('XLA', by_xla), ('look_up', by_device)):
      found = costs.read(compiled(lookup, mesh, rows, args), mesh, on.chip)
      kinds = ' + '.join(traffic.kind for traffic in found.traffic)
      received = ' + '.join(f'{traffic.gigabytes * 1e3:.0f}' for traffic in found.traffic)
      lines.append((name, way, f'{found.cycles / 1e6:.2f}', kinds, received))
  print(aligned(lines))


if __name__ == '__main__':
  main()
