"""Compile a config's training step for a topology; print the figures that the tests check.

  python tests/plan/full_size.py configs/lm_pile.py:1_5b v5p:4x4x4 --batch=1024

This is a process of its own, because the tests' compiler flags for CPUs must not apply, and because
libtpu ends its process when it fails.
"""

import argparse
import json
import runpy

import jax

from tokenformer_jax import config
from tokenformer_jax.parallel import rules, sharding
from tokenformer_jax.plan import program, topology
from tokenformer_jax.steps.step import Program


def unsplit(step: Program, mesh: jax.sharding.Mesh, compiled: jax.stages.Compiled) -> list[str]:
  """Return the arrays of the state that are not split as the table of sharding rules says."""
  definition = step.task.definition
  named = jax.tree_util.tree_leaves_with_path(definition.axes, is_leaf=rules.is_axes)
  axes = {jax.tree_util.keystr(path): names for path, names in named}

  def part(size: int, name: str) -> int:
    return size // rules.parts(name, mesh)

  found = []
  state = jax.tree_util.tree_leaves_with_path(step.abstract_state(mesh))
  (places, _), _ = compiled.input_shardings
  for (path, array), place in zip(state, jax.tree.leaves(places), strict=True):
    where = jax.tree_util.keystr(path)
    names = next((names for end, names in axes.items() if where.endswith(end)), None)
    if names is None and array.ndim == 0:
      continue  # a counter
    wanted = names and tuple(map(part, array.shape, names))
    if place.shard_shape(array.shape) != wanted:
      found.append(where)
  return found


def main() -> None:
  """Print one JSON object."""
  parser = argparse.ArgumentParser()
  parser.add_argument('config')
  parser.add_argument('topology')
  parser.add_argument('--batch', type=int, required=True)
  args = parser.parse_args()
  jax.config.update('jax_platforms', 'cpu')
  file, _, variant = args.config.partition(':')
  values = runpy.run_path(file)['get_config'](variant)
  values.data.batch_size = args.batch
  if values.model.kind == 'vit':  # what the images would say
    values.model.update(classes=1000, channels=3)
  run, on = config.resolve(values), topology.parse(args.topology)
  step = program.make_step(run)
  mesh = sharding.make_mesh(run.mesh, topology.devices(on))
  compiled = program.compile_step(step, mesh, lambda *_: True)
  text = compiled.as_text()
  memory = program.compiled_memory(step, mesh, compiled, on.chip.hbm)
  print(
    json.dumps(
      {
        'parameters': step.task.definition.count,
        'splash': 'splash_mha_fwd' in text and 'splash_mha_dkv' in text,
        'temporaries_gib': memory.temporaries / 2**30,
        'left_gib': memory.left / 2**30,
        'unsplit': unsplit(step, mesh, compiled),
      }
    )
  )


if __name__ == '__main__':
  main()
