"""Measure the memory and the time of `convert to-jax` for a folder of the hub's layout.

  python benchmarks/convert.py [--layers=8] [--dtype=bfloat16] [--folder=/tmp/convert]

The folder has the shapes of Llama 3 8B, but for the number of layers, in bfloat16 and of random
numbers. It takes 0.44 GB a layer and 2.1 GB besides, and the run as much in bfloat16 and twice as
much in float32. A dry run of a growth by parameter tokens follows.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers as hf

from tokenformer_jax.convert import families, tensor_files, tensor_layout
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.convert.to_run import to_jax

_KEYS = {
  'vocab_size': 128256,
  'hidden_size': 4096,
  'intermediate_size': 14336,
  'num_attention_heads': 32,
  'num_key_value_heads': 8,
  'max_position_embeddings': 8192,
  'rope_theta': 5e5,
}


def _write(folder: Path, layers: int) -> None:
  """Write the folder, a tensor at a time."""
  family = families.FAMILIES['llama']
  keys = {**_KEYS, 'num_hidden_layers': layers}
  layout = tensor_layout.layout(family.to_model(Keys(keys, 'the benchmark')), family.rules)
  some = (0.02 * np.random.default_rng(0).standard_normal(2**20)).astype(ml_dtypes.bfloat16)
  shapes = {name: entry.shape for name, entry in layout.items()}
  stream = ((name, np.resize(some, shape)) for name, shape in shapes.items())
  folder.mkdir(parents=True)
  tensor_files.write(folder, 'bfloat16', shapes, stream)
  values = {'architectures': [family.architecture], **keys}
  (folder / 'config.json').write_text(json.dumps(values))
  hf.Tokenizer(hf.models.BPE({'<|endoftext|>': 0}, [])).save(str(folder / 'tokenizer.json'))


def _convert(folder: Path, dtype: str) -> None:
  to_jax(folder / 'source', folder / 'run', dtype=dtype)


def _grow(folder: Path) -> None:
  run = [f'--source={folder}/run', f'--target={folder}/grown', '--dry_run']
  command = [sys.executable, '-m', 'tokenformer_jax', 'grow']
  subprocess.run([*command, *run, '--param_tokens=qkv=512,ffn=2048'], check=True)


def _measured(step: Callable[..., None], arguments: tuple[Any, ...]) -> tuple[float, float]:
  """Return the seconds that a step takes, and the most GiB of memory of this process."""
  start = time.perf_counter()
  step(*arguments)
  most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  return time.perf_counter() - start, most


def main() -> None:
  """Write the folder, convert it, and print what each step takes in a process of its own."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--layers', type=int, default=8)
  parser.add_argument('--dtype', default='float32')
  parser.add_argument('--folder', type=Path, default=Path('/tmp/convert'))
  options = parser.parse_args()
  folder = options.folder
  shutil.rmtree(folder, ignore_errors=True)
  steps = {
    'the folder is written': (_write, folder / 'source', options.layers),
    f'it is converted to {options.dtype}': (_convert, folder, options.dtype),
    'a dry run of growth': (_grow, folder),
  }
  try:
    for name, (step, *arguments) in steps.items():
      with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
        seconds, most = pool.submit(_measured, step, tuple(arguments)).result()
      print(f'{options.layers} layers, {name}: {seconds:.0f} s, at most {most:.1f} GiB of memory')
  finally:
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == '__main__':
  main()
