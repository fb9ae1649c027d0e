"""Measure the memory and the time of `convert to-jax` for a folder of the hub's layout.

  python benchmarks/convert.py [--layers=8] [--folder=/tmp/convert]

The folder has the shapes of Llama 3 8B, but for the number of layers, in bfloat16 and of random
numbers. It takes 0.44 GB a layer and 2.1 GB besides, and the run twice as much.
"""

import argparse
import json
import resource
import shutil
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import tokenizers as hf

from tokenformer_jax.cli import convert
from tokenformer_jax.convert import families, hub, tensor_files
from tokenformer_jax.convert.hub_keys import Keys

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
  places = hub.layout(family.to_model(Keys(keys, 'the benchmark')), family)
  some = (0.02 * np.random.default_rng(0).standard_normal(2**20)).astype(ml_dtypes.bfloat16)
  shapes = {place.name: place.shape for place in places}
  stream = ((name, np.resize(some, shape)) for name, shape in shapes.items())
  folder.mkdir(parents=True)
  tensor_files.write(folder / 'model.safetensors', 'bfloat16', shapes, stream)
  values = {'architectures': [family.architecture], **keys}
  (folder / 'config.json').write_text(json.dumps(values))
  hf.Tokenizer(hf.models.BPE({'<|endoftext|>': 0}, [])).save(str(folder / 'tokenizer.json'))


def _peak_gb() -> float:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
  """Write the folder, convert it, and print what that took."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--layers', type=int, default=8)
  parser.add_argument('--folder', type=Path, default=Path('/tmp/convert'))
  options = parser.parse_args()
  shutil.rmtree(options.folder, ignore_errors=True)
  try:
    _write(options.folder / 'source', options.layers)
    before, start = _peak_gb(), time.perf_counter()
    convert.to_jax(options.folder / 'source', options.folder / 'run')
    print(
      f'{options.layers} layers: {time.perf_counter() - start:.0f} s, at most {_peak_gb():.1f} GiB '
      f'of memory ({before:.1f} before)'
    )
  finally:
    shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == '__main__':
  main()
