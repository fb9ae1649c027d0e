"""Print digests of large lowered training steps, and of the numbers of small models.

  python tests/support/digests.py --out=before.json            all cases
  python tests/support/digests.py --against=before.json        compare with the kept ones
  python tests/support/digests.py --against=before.json shaped only cases with this in their name

A change that should alter no program and no number keeps every digest. A lowered step is compared
by its operations and their operands, so names in the code and the order of its lines do not matter.
A small model is compared by the bits of three losses, of the parameters after these steps, and of
the logits of a prompt and three more tokens from its caches. Needs libtpu for the large steps.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import xla_flags

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = xla_flags.join_flags(devices=8)

import architectures
import jax
import numpy as np
import tiny
import tiny_run

from tokenformer_jax import config, tasks
from tokenformer_jax.config import MeshConfig, ModelConfig
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.lm import define_lm, unstack
from tokenformer_jax.parallel import sharding
from tokenformer_jax.plan import program, topology
from tokenformer_jax.steps import step as step_lib

jax.config.update('jax_traceback_in_locations_limit', 0)  # kernels hold paths of this code
ROOT = Path(__file__).resolve().parents[2]

# By name: config file and variant, topology, batch, and changes of the config.
LARGE: dict[str, tuple[str, str, int, dict[str, Any]]] = {
  '1_5b': ('lm_pile:1_5b', 'v5p:4x4x4', 1024, {}),
  '1_5b sequence': ('lm_pile:1_5b', 'v5p:4x4x4', 256, {'mesh.sequence': 4}),
  '1_4b': ('lm_openwebtext:1_4b', 'v5e:4x4', 512, {'mesh.tokens': 4}),
  'vit b16': ('vit_imagenet:b16', 'v5p:4x4x4', 4096, {}),
  '16b': (
    'lm_deepseekmoe:16b', 'v5p:4x4x4', 4608,
    {'mesh.experts': 8, 'model.layer.ffn.dispatch.device_factor': 1.25},
  ),
  'hybrid sequence': ('lm_hybrid', 'v5p:4x4x4', 64, {'mesh.sequence': 4}),
}  # fmt: skip

SHAPED = architectures.MODELS['skips and norms']
GATED = functools.partial(tiny.gated_model, tied_head=False)
ONE, EIGHT = MeshConfig(), MeshConfig(fsdp=4, tokens=2)
SLOTS, ALL_SLOTS = MeshConfig(fsdp=2, sequence=2, tokens=2), MeshConfig(sequence=4)

# By name: model, mesh and changes of the run's config.
SMALL: dict[str, tuple[ModelConfig, MeshConfig, dict[str, Any]]] = {
  **{name: (model, ONE, {}) for name, model in architectures.MODELS.items()},
  'default': (tiny.tiny_model(), ONE, {}),
  'dense': (tiny.tiny_model(dense=True, bias=True, norm='affine'), ONE, {}),
  'bfloat16': (tiny.tiny_model(window=7), ONE, {'dtype': 'bfloat16'}),
  'offload': (tiny.tiny_model(layers=6), ONE, {'train.remat': 'full', 'train.layers': 'scan'}),
  'squared relu': (GATED(scores='squared_relu', window=7), ONE, {}),
  'gau alpha': (GATED(length_scale=config.SeenScaleConfig()), ONE, {}),
  'shaped window': (tiny.with_mixer(SHAPED, window=7), ONE, {}),
  **{
    f'{name}, {documents}': (model, ONE, {'data.documents': documents})
    for documents in ('masked', 'separate')
    for name, model in {
      'default': tiny.tiny_model(),
      'window': tiny.tiny_model(window=7),
      'shaped': SHAPED,
      'shaped window': tiny.with_mixer(SHAPED, window=7),
      'gated': GATED(),
      'linear': architectures.MODELS['linear'],
      'position scale': architectures.MODELS['hybrid'],
    }.items()
  },
  **{
    f'{name} on {mesh}': (model, sizes, {})
    for mesh, sizes in {'eight': EIGHT, 'slots': SLOTS}.items()
    for name, model in {
      'default': tiny.tiny_model(),
      'shaped': SHAPED,
      'simplified': architectures.MODELS['parallel, window'],
      'gated': GATED(),
      'linear': architectures.MODELS['linear'],
      'few key heads': architectures.MODELS['few key heads'],
      'clipped': architectures.MODELS['clipped'],
      'experts of tokens': architectures.MODELS['experts of tokens'],
    }.items()
  },
  'halo': (tiny.tiny_model(window=3), ALL_SLOTS, {}),
  'halo, separate': (tiny.tiny_model(window=3), ALL_SLOTS, {'data.documents': 'separate'}),
  'halo, shaped': (tiny.with_mixer(SHAPED, window=3), ALL_SLOTS, {}),
  **{
    f'vit {pool}': (tiny.tiny_vit(pool=pool, position_embedding=positions), mesh, {})
    for pool, positions, mesh in (
      ('mean', 'sincos', ONE),
      ('token', 'sincos', EIGHT),
    )
  },
}


def digest(*leaves: Any) -> str:
  """Return a digest of the bytes of texts or arrays."""
  total = hashlib.sha256()
  for leaf in leaves:
    total.update(f'{leaf}\0'.encode() if isinstance(leaf, str) else np.asarray(leaf).tobytes())
  return total.hexdigest()[:16]


def dataflow(module: Any) -> str:
  """Return a digest of what a lowered program computes, by its operations and their operands.

  It depends neither on names and locations, nor on the order of independent operations, nor on
  operations whose results are not used.
  """
  symbols = {op.sym_name.value: op for op in module.body.operations}

  @functools.cache
  def of_symbol(name: str) -> str:
    op = symbols[name]
    keys = sorted(set(op.attributes) - {'sym_name', 'sym_visibility'})
    regions = [of_region(region, {}, 0) for region in op.operation.regions]
    return digest(*(f'{key}={resolve(op.attributes[key])}' for key in keys), *regions)

  def resolve(attribute: Any) -> str:
    """Return the text of an attribute, with the contents of symbols for their names."""

    def content(match: re.Match[str]) -> str:
      name = match.group(1)
      return of_symbol(name) if name in symbols else name

    return re.sub(r'@(\w+)', content, str(attribute))

  def of_region(region: Any, outer: dict[Any, str], depth: int) -> str:
    known, last = dict(outer), []
    for block in region.blocks:
      for i, argument in enumerate(block.arguments):
        known[argument] = f'{depth}.{i} {argument.type}'
      of_op = ''
      for op in block.operations:
        of_op = of_operation(op.operation, known, depth)
        for i, result in enumerate(op.operation.results):
          known[result] = f'{of_op}.{i}'
      last.append(of_op)  # of the terminator, which leads to all results
    return digest(*last)

  def of_operation(op: Any, known: dict[Any, str], depth: int) -> str:
    return digest(
      op.name,
      *(known[operand] for operand in op.operands),
      *(str(result.type) for result in op.results),
      *(f'{key}={resolve(op.attributes[key])}' for key in sorted(op.attributes)),
      *(of_region(region, known, depth + 1) for region in op.regions),
    )

  return of_symbol('main')


def lowered(name: str) -> dict[str, str]:
  """Return the digest of a large step."""
  file, shape, batch, changes = LARGE[name]
  stem, _, variant = file.partition(':')
  make = runpy.run_path(str(ROOT / 'configs' / f'{stem}.py'))['get_config']
  values = make(variant) if variant else make()
  values.data.batch_size = batch
  if values.model.kind == 'vit':
    values.model.update(classes=1000, channels=3)
  else:
    values.model.vocab_size = values.model.vocab_size or 32768
  values.update_from_flattened_dict(changes)
  run, on = config.resolve(values), topology.parse(shape)
  step, mesh = program.make_step(run), sharding.make_mesh(run.mesh, topology.devices(on))
  function = step_lib.make_train_step(step, mesh)
  arguments = step.abstract_state(mesh), step.abstract_batch(mesh)
  with jax.set_mesh(mesh):  # Only lower inside: the mesh's devices cannot run anything.
    module = function.lower(*arguments).compiler_ir('stablehlo')
  return {'step': dataflow(module)}


def numbers(name: str) -> dict[str, str]:
  """Return digests of the losses and parameters of three steps, and of decoded logits."""
  model, sizes, changes = SMALL[name]
  make = tiny_run.vit_config if model.kind == 'vit' else tiny_run.config
  where = () if model.kind == 'vit' else ('files:/nothing/*.txt', Path('/nothing'))
  run = make(*where, **{key.replace('.', '__'): value for key, value in changes.items()})
  run = dataclasses.replace(run, model=model.with_scale_length(16), mesh=sizes)
  task = tasks.make(run)
  made = step_lib.make_program(task, run)
  needed = 8 if sizes in (EIGHT, SLOTS) else 4 if sizes == ALL_SLOTS else 1
  mesh = sharding.make_mesh(sizes, jax.devices()[:needed])
  rng, losses = np.random.default_rng(0), []
  with jax.set_mesh(mesh):
    state = step_lib.make_first_state(made, mesh)(0)
    first = digest(*jax.tree.leaves(state['params']))
    step = step_lib.make_train_step(made, mesh)
    places = sharding.batch_sharding(mesh)
    for _ in range(3):
      batch = jax.tree.map(functools.partial(_drawn, rng), task.abstract_batch())
      state, figures = step(state, jax.device_put(batch, places))
      losses.append(np.asarray(figures['loss']))
  found = {
    'first': first,
    'losses': digest(*losses),
    'params': digest(*jax.tree.leaves(state['params'])),
  }
  if model.kind == 'lm' and sizes == ONE:
    found['decoded'] = decoded(run.model, jax.device_get(state['params']))
  return found


def _drawn(rng: np.random.Generator, array: jax.ShapeDtypeStruct) -> np.ndarray:
  """Return a batch's array: few ids, so that documents end, or pixels and labels."""
  return rng.integers(0, 10, array.shape).astype(array.dtype)


def decoded(model: ModelConfig, params: Any) -> str:
  """Return the digest of the logits of a padded prompt, and of tokens one by one and together."""
  definition = define_lm(model, Execution(layers='list'))
  ids = np.random.default_rng(1).integers(0, 64, (2, 24), np.int32)
  padding = np.asarray([0, 3])

  @functools.partial(jax.jit, static_argnums=0)
  def run(is_first: bool, params: Any, ids: Any, caches: Any, start: Any):
    module = definition.bind(params)
    if is_first:
      caches, start = module.init_caches(2, 24), 0
    return module(ids, Context(start, padding), caches)

  params, found, caches, start = unstack(params, model), [], None, 0
  for count in (12, 1, 1, 5):
    logits, caches = run(start == 0, params, ids[:, start : start + count], caches, start)
    found.append(logits)
    start += count
  whole = jax.jit(lambda params, ids: definition.bind(params)(ids, Context(0, padding))[0])
  return digest(*found, whole(params, ids))


def main() -> None:
  """Print the digests of the cases, or say which of them differ."""
  parser = argparse.ArgumentParser()
  parser.add_argument('cases', nargs='*', help='parts of the names of cases; default: all')
  parser.add_argument('--out', type=Path)
  parser.add_argument('--against', type=Path)
  args = parser.parse_args()
  found, kept = {}, json.loads(args.against.read_text()) if args.against else {}
  different = []
  for name in [*SMALL, *LARGE]:
    if args.cases and not any(part in name for part in args.cases):
      continue
    found[name] = numbers(name) if name in SMALL else lowered(name)
    old = kept.get(name, {})
    wrong = [key for key in old | found[name] if old and found[name].get(key) != old.get(key)]
    if wrong:
      different.append(name)
    print(name, f'DIFFERENT: {wrong}' if wrong else digest(*found[name].values()), flush=True)
  if args.out:
    args.out.write_text(json.dumps({**kept, **found}, indent=1))
  if different:
    sys.exit(f'{len(different)} of {len(found)} cases differ: {", ".join(different)}')


if __name__ == '__main__':
  main()
