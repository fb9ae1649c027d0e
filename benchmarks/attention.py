r"""Time causal attention, forward and backward: ours in XLA's operations, and JAX's.

  python benchmarks/attention.py

On a GPU, cuDNN's kernel in bfloat16, which runs there use, is a third contender.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp

from tokenformer_jax.model.kernels import causal_attention, kernel

SHAPES = ((16, 256, 4, 32), (4, 512, 6, 64), (2, 1024, 12, 64))  # B, T, H, K
ROUNDS = 9


def main() -> None:
  """Run the contenders in turns for every shape and print a table."""
  dtype = jnp.float32 if jax.default_backend() == 'cpu' else jnp.bfloat16
  library = functools.partial(jax.nn.dot_product_attention, is_causal=True)
  contenders = {
    'ours': causal_attention,
    'jax xla': functools.partial(library, implementation='xla'),
  }
  if kernel('auto', dtype) == 'cudnn':
    contenders['cudnn'] = functools.partial(library, implementation='cudnn')
  print(f'{"B, T, H, K":20}{"":10}{"median ms":>11}{"least":>9}')
  for shape in SHAPES:
    inputs = [
      jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), 4)
    ]

    def both_passes(attend, query, key, value, upstream):
      out, backward = jax.vjp(attend, query, key, value)
      return out, backward(upstream)

    runs = {name: jax.jit(functools.partial(both_passes, f)) for name, f in contenders.items()}
    seconds = {name: [] for name in runs}
    for run in runs.values():
      jax.block_until_ready(run(*inputs))
    for _ in range(ROUNDS):
      for name, run in runs.items():
        start = time.perf_counter()
        jax.block_until_ready(run(*inputs))
        seconds[name].append(time.perf_counter() - start)
    for name, values in seconds.items():
      median, least = 1e3 * statistics.median(values), 1e3 * min(values)
      print(f'{shape!s:20}{name:10}{median:11.1f}{least:9.1f}')


if __name__ == '__main__':
  main()
