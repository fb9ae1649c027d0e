r"""Plan the paper's models on TPU pods, for docs/planned_speed.md and its CSV.

  python benchmarks/pods.py                       plan the missing cells and print all
  python benchmarks/pods.py --only=1_5b --on=v5p  plan some of them
  python benchmarks/pods.py --report              print the tables of the kept cells

The TPU's own compiler compiles every step, which takes from 6 to 40 minutes of a core for each, and
up to 16 GB; with --quick it takes a minute. The command needs `pip install -e ".[tpu]"`, but no
TPU. The second table has the largest rows of each breakdown. Every chip has the same number of
tokens on every topology: sequences have the config's length, and the batch is proportional to the
chips. Up to `--fsdp` devices share one copy of the model; more devices are replicas. Cells are kept
in `--out` by their flags, so an interrupted run can continue. After a change of the code, use
another directory.
"""

import sys

import cells
from cells import MODELS, Figures, Row

from tokenformer_jax.plan import topology

TOPOLOGIES = {  # by the name under which the slice is sold
  'v5e-16': 'v5e:4x4',
  'v5e-256': 'v5e:16x16',
  'v5p-64': 'v5p:4x4x4',
  'v5p-512': 'v5p:8x8x8',
  'v6e-256': 'v6e:16x16',
  'tpu7x-64': 'tpu7x:4x4x4',
}
HEAD = (
  'model', 'chips', 'topology', 'mesh', 'plan', 'HBM peak, GiB', 'ms a step', 'MFU', 'tokens/s',
  'ms in its order', 'collectives, GB in', 'ms by the schedule',
)  # fmt: skip

SHARES_HEAD = ('cell', 'part', 'ms', 'of the step', 'matrix', 'vector', 'HBM')
_SHOWN = 0.04  # of a step, in a row of the second table


def mesh(devices: int, most: int) -> tuple[int, int]:
  """Return the sizes of `replica` and `fsdp`."""
  replica, rest = divmod(devices, min(most, devices))
  if rest:
    sys.exit(f'--fsdp={most} does not divide {devices} devices')
  return replica, min(most, devices)


def row(model: str, sold: str, figures: Figures) -> Row:
  """Return a row of the table."""
  name = TOPOLOGIES[sold]
  if 'error' in figures:
    return (model, sold, name, '', '', figures['error'], *[''] * 6)
  shown, scheduled = cells.columns(figures), figures['scheduled_seconds']
  return (
    model,
    sold,
    name,
    shown['mesh'],
    '{remat}, {layers}'.format_map(figures['config']['train']),
    *(shown[key] for key in ('HBM peak, GiB', 'ms a step', 'MFU', 'tokens/s')),
    f'{figures["ordered_seconds"] * 1e3:,.0f}',
    shown['collectives, GB in'],
    f'{scheduled * 1e3:,.0f}' if scheduled else '',  # None before code generation
  )


def shares(model: str, sold: str, figures: Figures) -> list[Row]:
  """Return a row of the second table for each large share of a step, with its bounds in ms."""
  step = figures['ordered_seconds']
  return [
    (
      f'{model} on {sold}',
      share['name'],
      f'{share["seconds"] * 1e3:,.1f}',
      f'{share["seconds"] / step:.1%}',
      *(f'{share[bound] * 1e3:,.1f}' for bound in ('matrix', 'vector', 'memory')),
    )
    for share in figures['breakdown']
    if share['seconds'] >= _SHOWN * step
  ]


def main() -> None:
  """Plan the cells and print the tables."""
  parser = cells.parser(__doc__, 'runs/pods')
  parser.add_argument('--remat', default='auto', help='a value of train.remat')
  parser.add_argument('--fsdp', type=int, default=64, help='devices that share a copy, at most')
  args, others = parser.parse_known_args()
  kept = {}
  for model in MODELS:
    for sold, name in TOPOLOGIES.items():
      if args.only not in model or args.on not in f'{sold} {name}':
        continue
      on = topology.parse(name)
      replica, fsdp = mesh(on.devices, args.fsdp)
      batch = MODELS[model].rows(args.tokens_per_chip) * on.chips
      kept[model, sold] = cells.planned(
        f'{model}-{sold}',
        MODELS[model].on(
          name,
          batch,
          '--breakdown',
          f'--config.train.remat={args.remat}',
          f'--config.mesh.replica={replica}',
          f'--config.mesh.fsdp={fsdp}',
          *others,
        ),
        args.out,
        report=args.report,
      )
  planned = {key: figures for key, figures in kept.items() if figures}
  print(
    f'{args.tokens_per_chip:,} tokens a chip, recomputation {args.remat}; '
    f'{cells.versions(planned.values())}\n'
  )
  lines = [row(*key, figures) for key, figures in planned.items()]
  print(cells.table(HEAD, lines))
  cells.write_csv(args.csv, HEAD, lines)
  if where := [
    row for key, one in planned.items() if 'error' not in one for row in shares(*key, one)
  ]:
    print(f'\n{cells.table(SHARES_HEAD, where)}')
  if missing := [' on '.join(key) for key, figures in kept.items() if not figures]:
    print(f'\nnot planned: {", ".join(missing)}')


if __name__ == '__main__':
  main()
