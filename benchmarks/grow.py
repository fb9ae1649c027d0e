r"""Measure time and memory of growing a model at full size, against reading and writing it.

  python benchmarks/grow.py                            124M → 354M → 757M on this machine
  python benchmarks/grow.py --chain=124m,354m --keep   leaves the runs in --directory

The models are those of configs/lm_openwebtext.py, with random weights and moments; nothing is
trained. A stage runs `python -m tokenformer_jax grow` with its verification, in turn with a process
that reads the source and writes the target. The command prints the median of the seconds over the
rounds, the smallest and the largest factor of a round, and the largest peak of resident memory
against the size of the target's state.
"""

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
BYTES = 12  # a parameter and its two moments


def model_config(variant: str):
  """Return the resolved config of a variant. Its text is not read."""
  sys.path.insert(0, str(ROOT / 'configs'))
  import lm_openwebtext  # noqa: PLC0415 (each process loads what it times)

  from tokenformer_jax import config  # noqa: PLC0415

  values = lm_openwebtext.get_config(variant)
  values.data.tokenizer = 'bytes'
  return dataclasses.replace(config.resolve(values), init_from='')


def make_first(variant: str, directory: Path) -> None:
  """Write a run with random weights and random moments."""
  import jax  # noqa: PLC0415
  import jax.numpy as jnp  # noqa: PLC0415

  from tokenformer_jax.data.tokenizers import ByteTokenizer  # noqa: PLC0415
  from tokenformer_jax.grow import grow_run  # noqa: PLC0415
  from tokenformer_jax.model.lm import define_lm  # noqa: PLC0415
  from tokenformer_jax.parallel import sharding  # noqa: PLC0415
  from tokenformer_jax.runs.checkpoint_meta import Meta  # noqa: PLC0415
  from tokenformer_jax.steps import optim, step  # noqa: PLC0415

  config = model_config(variant)
  definition = define_lm(config.model)
  tx = optim.make_optimizer(config.optim, optim.NO_RATE, definition.info)
  mesh = sharding.make_mesh(config.mesh)

  @jax.jit
  def new():
    state = step.initial_state(definition, tx, 0)
    key = jax.random.key(1)
    noise = lambda x: jax.random.normal(key, x.shape) if x.dtype == jnp.float32 else x  # noqa: E731
    return {**state, 'opt_state': jax.tree.map(noise, state['opt_state'])}

  state = jax.device_put(new(), step.state_shardings(mesh, definition, tx))
  grow_run.write(directory, Meta(0, config, ByteTokenizer().to_json()), state)


def time_reading_and_writing(source: Path, target: Path) -> tuple[float, float]:
  """Return the seconds to read the state of `source`, and to write that of `target` again."""
  import jax  # noqa: PLC0415

  from tokenformer_jax.config import MeshConfig  # noqa: PLC0415
  from tokenformer_jax.grow import grow_run  # noqa: PLC0415
  from tokenformer_jax.parallel import sharding  # noqa: PLC0415
  from tokenformer_jax.runs import checkpoint  # noqa: PLC0415

  mesh = sharding.make_mesh(MeshConfig())
  start = time.perf_counter()
  jax.block_until_ready(grow_run.read(checkpoint.open_source(source), mesh))
  reading = time.perf_counter() - start
  origin = checkpoint.open_source(target)
  state = grow_run.read(origin, mesh)
  again = target.with_name(f'{target.name}_again')
  start = time.perf_counter()
  grow_run.write(again, origin.meta, state)
  writing = time.perf_counter() - start
  shutil.rmtree(again)
  return reading, writing


def run(arguments: list[str]) -> tuple[float, float, str]:
  """Run a command; return its seconds, peak resident GB, and standard output."""
  start = time.perf_counter()
  process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT)
  output = process.stdout.read()
  _, status, usage = os.wait4(process.pid, 0)
  if status:
    sys.exit(f'failed: {" ".join(arguments)}')
  return time.perf_counter() - start, usage.ru_maxrss * 1024 / 1e9, output


def time_stage(source: Path, target: Path, counts: str) -> tuple[float, float, float, float]:
  """Make the target; return the seconds of growing, reading and writing, and the peak memory."""
  shutil.rmtree(target, ignore_errors=True)
  grow = [sys.executable, '-m', 'tokenformer_jax', 'grow', '--method=zero_keys']
  grow.append(f'--param_tokens={counts}')
  growing, peak, _ = run([*grow, f'--source={source}', f'--target={target}'])
  reading, writing = json.loads(
    run([sys.executable, __file__, '--time', str(source), str(target)])[2]
  )
  return growing, reading, writing, peak


def main() -> None:
  """Run the chain and print a row for each stage."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--chain', default='124m,354m,757m')
  parser.add_argument('--rounds', type=int, default=5, help='rounds of each stage (default: 5)')
  parser.add_argument('--directory', help='for the runs (default: temporary)')
  parser.add_argument('--keep', action='store_true', help='do not remove the runs')
  parser.add_argument('--make', nargs=2, help=argparse.SUPPRESS)
  parser.add_argument('--time', nargs=2, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.make:
    make_first(args.make[0], Path(args.make[1]))
    return
  if args.time:
    print(json.dumps(time_reading_and_writing(*map(Path, args.time))))
    return
  chain = args.chain.split(',')
  directory = Path(args.directory or tempfile.mkdtemp())
  directory.mkdir(parents=True, exist_ok=True)
  run([sys.executable, __file__, '--make', chain[0], str(directory / chain[0])])
  from tokenformer_jax import config  # noqa: PLC0415
  from tokenformer_jax.model.lm import define_lm  # noqa: PLC0415

  print('| stage | s | s, read + write | factor | target GB | peak GB | factor |')
  print('|---|---|---|---|---|---|---|')
  for old, new in itertools.pairwise(chain):
    model = model_config(new).model
    counts = config.counts_as_text(config.token_counts(model))
    rounds = [time_stage(directory / old, directory / new, counts) for _ in range(args.rounds)]
    size, peak = define_lm(model).count * BYTES / 1e9, max(peak for *_, peak in rounds)
    growing, reading, writing, _ = map(statistics.median, zip(*rounds, strict=True))
    factors = sorted(grow / (read + write) for grow, read, write, _ in rounds)
    print(
      f'| {old} → {new} | {growing:.1f} | {reading:.1f} + {writing:.1f} '
      f'| {growing / (reading + writing):.2f} ({factors[0]:.2f}…{factors[-1]:.2f}) '
      f'| {size:.2f} | {peak:.2f} | {peak / size:.2f} |',
      flush=True,
    )
  if not args.keep:
    for variant in chain:
      shutil.rmtree(directory / variant)


if __name__ == '__main__':
  main()
