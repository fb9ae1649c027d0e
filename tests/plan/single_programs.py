"""Compile single products for one device of a chip; print their times by the schedule.

  python tests/plan/single_programs.py v6e:2x2 product:1536x6144 gelu:1536x1536 loss:768x50304

This is a process of its own, because libtpu reads the flags of the dump when it loads.
"""

import argparse
import json
import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tokenformer_jax.config import TokenGroup
from tokenformer_jax.model import groups, pattention
from tokenformer_jax.model.loss import objective
from tokenformer_jax.plan import costs, schedule, topology

ROWS = 16_384


def product(x_RxI: jax.Array, w_IxO: jax.Array) -> jax.Array:
  """Return a matrix product."""
  return x_RxI @ w_IxO


def gelu(x_RxI: jax.Array, w_IxO: jax.Array) -> jax.Array:
  """Return the exact GELU of a matrix product."""
  return pattention.activate(x_RxI @ w_IxO, 'exact')


def norm(x_RxI: jax.Array, w_IxO: jax.Array) -> jax.Array:
  """Return the weights of parameter tokens: GELU of normed scores."""
  count = w_IxO.shape[1]
  scores_1xRxO = (x_RxI @ w_IxO)[None]
  group = TokenGroup(count, count)
  return pattention.parameter_weights(scores_1xRxO, group.score, groups.make((group,)))


def loss(x_RxI: jax.Array, head_OxI: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return the gradients of the training loss, which has three products in chunks of positions."""
  hidden_BxTxI = x_RxI.reshape(16, -1, x_RxI.shape[1])
  targets_BxT = jnp.arange(ROWS).reshape(16, -1) % len(head_OxI)

  def value(hidden_BxTxI: jax.Array, head_OxI: jax.Array) -> jax.Array:
    return objective(hidden_BxTxI, head_OxI, targets_BxT, z_loss=0.0, chunk=512)[0]

  return jax.grad(value, argnums=(0, 1))(hidden_BxTxI, head_OxI)


def main() -> None:
  """Print a JSON object: bounds and seconds of the fusions with products, and all seconds."""
  parser = argparse.ArgumentParser()
  parser.add_argument('topology')
  parser.add_argument('programs', nargs='+', help='PROGRAM:INxOUT')
  args = parser.parse_args()
  jax.config.update('jax_platforms', 'cpu')
  figures = {}
  with tempfile.TemporaryDirectory() as directory:
    os.environ['LIBTPU_INIT_ARGS'] = schedule.flags(directory)
    on = topology.parse(args.topology)
    mesh = Mesh(np.array(topology.devices(on)[:1]), ('one',), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec())
    for name in args.programs:
      function, _, sizes = name.partition(':')
      inputs, outputs = map(int, sizes.split('x'))
      matrix = (outputs, inputs) if function == 'loss' else (inputs, outputs)
      arguments = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)
        for shape in ((ROWS, inputs), matrix)
      )
      with topology.quiet():
        compiled = jax.jit(globals()[function]).lower(*arguments).compile()
      reader = schedule.Reader(directory)
      reader.read(complete=True)
      read = costs.read(compiled.as_text(), mesh, on.chip, reader.bundles)
      products = [operation for operation in read.operations if operation.products]
      figures[name] = {
        key: sum(one.times * getattr(one, key) for one in products)
        for key in ('scheduled', 'matrix', 'slots')
      }
      figures[name]['cycles'] = read.cycles / on.chip.clock
      figures[name]['program'] = read.scheduled_seconds
  print(json.dumps(figures))


if __name__ == '__main__':
  main()
