"""Compile single products for one device of a chip; print their times by the schedule.

  python tests/plan/single_programs.py v6e:2x2 product:1536x6144 gelu:1536x1536

This is a process of its own, because libtpu reads the flags of the dump when it loads.
"""

import argparse
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tokenformer_jax.config import TokenGroup
from tokenformer_jax.model import groups, pattention
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
  return pattention.parameter_weights(scores_1xRxO, groups=groups.make((TokenGroup(count, count),)))


def main() -> None:
  """Print a JSON object: bounds and seconds of the fusion with the product, by the program."""
  parser = argparse.ArgumentParser()
  parser.add_argument('topology')
  parser.add_argument('programs', nargs='+', help='PROGRAM:INxOUT')
  args = parser.parse_args()
  jax.config.update('jax_platforms', 'cpu')
  found = {}
  with schedule.temporary() as directory:
    os.environ['LIBTPU_INIT_ARGS'] = schedule.flags(directory)
    on = topology.parse(args.topology)
    mesh = Mesh(np.array(topology.devices(on)[:1]), ('one',), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec())
    for name in args.programs:
      function, _, sizes = name.partition(':')
      inputs, outputs = map(int, sizes.split('x'))
      arguments = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)
        for shape in ((ROWS, inputs), (inputs, outputs))
      )
      with topology.quiet():
        compiled = jax.jit(globals()[function]).lower(*arguments).compile()
      reader = schedule.Reader(directory)
      reader.read(complete=True)
      read = costs.read(compiled.as_text(), mesh, on.chip, reader.bundles)
      (fusion,) = [operation for operation in read.operations if operation.products]
      found[name] = {key: getattr(fusion, key) for key in ('scheduled', 'matrix', 'slots')}
      found[name]['cycles'] = read.cycles / on.chip.clock
  print(json.dumps(found))


if __name__ == '__main__':
  main()
