r"""Plan the measured steps of an H200 without one, beside what was measured.

  python benchmarks/gpu_plans.py                  150m, 1_5b, b16 and grown_1_4b, in 3 minutes
  python benchmarks/gpu_plans.py --only=150m

The command needs the compiler for GPUs (docs/plan.md), but no GPU. The rates in
tokenformer_jax/plan/gpu_times.py were fitted to 150m and 1_5b; the others test them.
"""

import argparse

from cells import table
from contenders import SIZES, train_config

from tokenformer_jax import config
from tokenformer_jax.plan import estimate, topology

# Median milliseconds of a step and most GiB of the device, on an H200 (docs/benchmarks.md).
MEASURED = {
  '150m': (86, 17.18),
  '1_5b': (197, 43.97),
  'b16': (87, 22.82),
  'grown_1_4b': (190, 45.27),
}
FITTED = ('150m', '1_5b')
HEAD = (
  'model', '', 'GiB measured', 'planned', 'ms measured', 'planned', 'products', 'attention',
  'others', 'kernels', 'GB of others',
)  # fmt: skip


def row(name: str) -> tuple[str, ...]:
  """Return a row of the table."""
  plan = estimate.plan(config.resolve(train_config(SIZES[name])), topology.parse('h200:1'))
  milliseconds, gib = MEASURED[name]
  operations = plan.costs.operations
  seconds = {'product': 0.0, 'attention': 0.0, '': 0.0}
  for one in operations:
    seconds[one.opcode if one.opcode in seconds else ''] += one.times * one.seconds
  others = [one for one in operations if one.opcode not in seconds]
  memory, step = plan.memory.peak / 2**30, plan.step_seconds[0] * 1e3
  return (
    name,
    'fitted' if name in FITTED else 'tested',
    f'{gib:.2f}',
    f'{memory:.2f} ({memory / gib - 1:+.1%})',
    str(milliseconds),
    f'{step:.0f} ({step / milliseconds - 1:+.0%})',
    *(f'{1e3 * kind:.1f}' for kind in seconds.values()),
    f'{sum(one.times for one in operations):,}',
    f'{sum(one.times * one.memory for one in others) * plan.topology.chip.hbm_rate / 1e9:.1f}',
  )


def main() -> None:
  """Plan the steps and print the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--only', default='', help='a part of the names of the models to plan')
  args = parser.parse_args()
  print(table(HEAD, [row(name) for name in MEASURED if args.only in name]))


if __name__ == '__main__':
  main()
