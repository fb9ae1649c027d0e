r"""Plan steps for an H200 without one, beside what was measured, and show their kernels.

  python benchmarks/gpu_plans.py                  150m, 1_5b, b16 and grown_1_4b, in 3 minutes
  python benchmarks/gpu_plans.py --only=150m
  python benchmarks/gpu_plans.py --kernels=150m   what a layer consists of

The command needs the compiler for GPUs (docs/plan.md), but no GPU. The rates in
tokenformer_jax/plan/gpu_times.py were fitted to 150m and 1_5b; the others test them. The measured
steps had three kernels for the weights of parameter tokens and three for their gradients, which are
now one each: docs/plan.md has the plans of those steps.
"""

import argparse
import collections
from collections.abc import Iterable

from cells import Row, table
from contenders import SIZES, train_config

from tokenformer_jax import config
from tokenformer_jax.plan import estimate, topology
from tokenformer_jax.plan.operations import Operation

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
OTHERS = 'all but products and attention'
# The groups of kernels that `group` returns. Those of layers come first, in their order, and with
# each goes what would remove its bytes.
OF_LAYERS = {
  'products': 'fewer FLOPs',
  'attention': '–',
  'casts, joins and slices': 'a copy of the parameters in bfloat16, and q, k, v as they come',
  'norms of the residual stream': 'chains of a row in one kernel, as for the weights',
  'rotary positions': 'a product or an attention that turns what it reads',
  'weights of tokens': 'a product that ends with norm and GELU',
  'their gradients': 'a product that begins with them',
  'copies of the residual stream': 'a product that adds to another array than it writes',
  OTHERS: '',
}
OUTSIDE = {
  'optimizer': 'one pass over each array: 26 bytes a parameter, and 2 for the gradient norm',
  'head and loss': 'a product that ends with the softmax',
  'embedding': '–',
  'the rest': '–',
}
BY = {
  'product': 'cuBLASLt', 'attention': 'cuDNN', 'triton': 'Triton, by XLA', 'copy': 'a copy',
}  # fmt: skip


def plan(name: str) -> estimate.Plan:
  """Return the plan of the step of a size."""
  return estimate.plan(config.resolve(train_config(SIZES[name])), topology.parse('h200:1'))


def row(name: str) -> Row:
  """Return a row of the table."""
  planned = plan(name)
  milliseconds, gib = MEASURED[name]
  operations = planned.costs.operations
  seconds = {'product': 0.0, 'attention': 0.0, '': 0.0}
  for one in operations:
    seconds[one.opcode if one.opcode in seconds else ''] += one.times * one.seconds
  others = [one for one in operations if one.opcode not in seconds]
  memory, step = planned.memory.peak / 2**30, planned.step_seconds[0] * 1e3
  return (
    name,
    'fitted' if name in FITTED else 'tested',
    f'{gib:.2f}',
    f'{memory:.2f} ({memory / gib - 1:+.1%})',
    str(milliseconds),
    f'{step:.0f} ({step / milliseconds - 1:+.0%})',
    *(f'{1e3 * kind:.1f}' for kind in seconds.values()),
    f'{sum(one.times for one in operations):,}',
    f'{sum(one.times * one.memory for one in others) * planned.topology.chip.hbm_rate / 1e9:.1f}',
  )


def group(one: Operation) -> str:
  """Return the group of a kernel, by JAX's names of the operations in it."""
  own, inside = one.scopes[0] if one.scopes else '', ' '.join(one.scopes)
  if 'head_and_loss' in inside:
    return 'head and loss'
  if 'scatter' in one.holds or ('gather' in one.holds and '/norm/' not in inside):
    return 'embedding'
  if one.opcode == 'attention':
    return 'attention'
  if one.opcode == 'product' or one.flops:
    return 'products'
  if one.opcode == 'copy':
    return 'copies of the residual stream' if one.memory else 'the rest'
  if 'jvp' not in own:
    return 'optimizer' if own else 'the rest'
  if 'rotary' in own:
    return 'rotary positions'
  if '/norm/' in inside:
    return 'norms of the residual stream'
  if 'closed_call' not in inside:
    return 'the rest'
  if not one.holds & {'multiply', 'reduce'}:
    return 'casts, joins and slices'
  return 'their gradients' if 'transpose' in own else 'weights of tokens'


def by_group(operations: Iterable[Operation]) -> dict[str, list[Operation]]:
  """Return the kernels of each group, the groups in their order."""
  groups: dict[str, list[Operation]] = {name: [] for name in (*OF_LAYERS, *OUTSIDE)}
  for one in operations:
    name = group(one)
    groups[name].append(one)
    if name in OF_LAYERS and name not in ('products', 'attention'):
      groups[OTHERS].append(one)
  return groups


def kernel_rows(planned: estimate.Plan, layers: int) -> list[Row]:
  """Return a row for each group of kernels, those of layers a layer."""
  rows = []
  for name, kernels in by_group(planned.costs.operations).items():
    share = layers if name in OF_LAYERS else 1
    moved = sum(one.times * one.memory for one in kernels) * planned.topology.chip.hbm_rate
    by = collections.Counter[str]()
    for one in kernels:
      by[BY.get(one.opcode, 'XLA')] += one.times
    rows.append(
      (
        name,
        'a layer' if name in OF_LAYERS else 'a step',
        f'{by.total() / share:.1f}',
        f'{moved / share / 1e9:.2f}',
        f'{1e3 * sum(one.times * one.seconds for one in kernels) / share:.2f}',
        ''
        if name == OTHERS
        else ', '.join(f'{who} {n / share:.1f}' for who, n in by.most_common()),
        (OF_LAYERS | OUTSIDE)[name],
      )
    )
  return rows


def main() -> None:
  """Plan the steps and print a table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--only', default='', help='a part of the names of the models to plan')
  parser.add_argument('--kernels', choices=SIZES, help='the model whose kernels to print')
  args = parser.parse_args()
  if args.kernels:
    head = ('kernels', '', 'number', 'GB', 'ms planned', 'by', 'what would remove them')
    print(table(head, kernel_rows(plan(args.kernels), SIZES[args.kernels].layers)))
  else:
    print(table(HEAD, [row(name) for name in MEASURED if args.only in name]))


if __name__ == '__main__':
  main()
