r"""Plan the paper's models on TPU pods, for the table in docs/planned_speed.md.

  python benchmarks/pods.py                       plan the missing cells and print all
  python benchmarks/pods.py --only=1_5b --on=v5p  plan some of them
  python benchmarks/pods.py --report              print the tables of the kept cells

The TPU's own compiler compiles every step, which takes from 6 to 40 minutes of a core for each, and
up to 16 GB; with --quick it takes a minute. The command needs `pip install -e ".[tpu]"`, but no
TPU. The second table has the parts of each step. Every chip has the same number of tokens on
every topology: sequences have the config's length, and the batch is proportional to the chips. Up
to `--fsdp` devices share one copy of the model; more devices are replicas. Cells are kept in
`--out` by their flags, so an interrupted run can continue. After a change of the code, use another
directory.
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
  'model', 'chips', 'topology', 'mesh', 'way', 'HBM peak, GiB', 'ms a step', 'MFU', 'tokens/s',
  'ms in its order', 'collectives, GB in', 'ms by the schedule',
)  # fmt: skip

PARTS_HEAD = ('cell', 'part', 'ms', 'of the step', 'matrix', 'vector', 'HBM')
_SHOWN = 0.04  # of a step, of a part in the second table

Found = dict[tuple[str, str], Figures]


def mesh(devices: int, most: int) -> tuple[int, int]:
  """Return the sizes of `replica` and `fsdp`."""
  replica, rest = divmod(devices, min(most, devices))
  if rest:
    sys.exit(f'--fsdp={most} does not divide {devices} devices')
  return replica, min(most, devices)


def row(model: str, sold: str, found: Figures) -> Row:
  """Return a row of the table."""
  name = TOPOLOGIES[sold]
  if 'error' in found:
    return (model, sold, name, '', '', found['error'], *[''] * 6)
  memory = found['memory']
  (fast, slow), (high, low) = found['step_seconds'], found['mfu']
  most, least = found['tokens_per_second']
  sizes = (f'{size} {axis}' for axis, size in found['mesh'].items() if size > 1)
  gigabytes = sum(part['gigabytes'] for part in found['traffic'])
  scheduled = found['scheduled_seconds']  # None before code generation
  return (
    model,
    sold,
    name,
    ' × '.join(sizes),
    '{remat}, {layers}'.format_map(found['config']['train']),
    f'{memory["peak"] / 2**30:.2f} of {memory["capacity"] / 2**30:.0f}',
    f'{fast * 1e3:,.0f} … {slow * 1e3:,.0f}',
    f'{low:.1%} … {high:.1%}',
    f'{least:,.0f} … {most:,.0f}',
    f'{found["ordered_seconds"] * 1e3:,.0f}',
    f'{gigabytes:.2f}',
    f'{scheduled * 1e3:,.0f}' if scheduled else '',
  )


def parts(model: str, sold: str, found: Figures) -> list[Row]:
  """Return a row of the second table for each large part of a step, with its bounds in ms."""
  step = found['ordered_seconds']
  return [
    (
      f'{model} on {sold}',
      part['name'],
      f'{part["seconds"] * 1e3:,.1f}',
      f'{part["seconds"] / step:.1%}',
      *(f'{part[bound] * 1e3:,.1f}' for bound in ('matrix', 'vector', 'memory')),
    )
    for part in found['breakdown']
    if part['seconds'] >= _SHOWN * step
  ]


def fit(found: Figures) -> str:
  """Return whether a step fits, as the end of a sentence."""
  if 'error' in found:
    return found['error']
  memory = found['memory']
  return f'fits: {memory["left"] / 2**30:.2f} of {memory["capacity"] / 2**30:.0f} GiB are left'


def larger_pod(found: Found) -> list[Row]:
  """Return the time of a step on 512 chips of v5p over that on 64, with equal tokens per chip."""
  rows = []
  for model in MODELS:
    few, many = found.get((model, 'v5p-64')), found.get((model, 'v5p-512'))
    if few and many and not {'error'} & (few.keys() | many.keys()):
      ratios = (b / a for a, b in zip(few['step_seconds'], many['step_seconds'], strict=True))
      rows.append((model, *(f'{ratio:.3f}' for ratio in ratios)))
  return rows


def main() -> None:
  """Plan the cells and print the tables."""
  parser = cells.parser(__doc__, 'runs/pods')
  cells.choose(parser)
  parser.add_argument('--remat', default='auto', help='a value of train.remat')
  parser.add_argument('--fsdp', type=int, default=64, help='devices that share a copy, at most')
  args, others = parser.parse_known_args()
  found = {}
  for model in MODELS:
    for sold, name in TOPOLOGIES.items():
      if args.only not in model or args.on not in f'{sold} {name}':
        continue
      on = topology.parse(name)
      replica, fsdp = mesh(on.devices, args.fsdp)
      batch = MODELS[model].rows(args.tokens_per_chip) * on.chips
      found[model, sold] = cells.planned(
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
  planned = {key: figures for key, figures in found.items() if figures}
  print(
    f'{args.tokens_per_chip:,} tokens a chip, recomputation {args.remat}; '
    f'{cells.versions(planned.values())}\n'
  )
  print(cells.table(HEAD, [row(*key, figures) for key, figures in planned.items()]))
  if where := [
    row for key, one in planned.items() if 'error' not in one for row in parts(*key, one)
  ]:
    print(f'\n{cells.table(PARTS_HEAD, where)}')
  if grown := planned.get(('lm_openwebtext:1_4b', 'v5e-16')):
    rows = MODELS['lm_openwebtext:1_4b'].rows(args.tokens_per_chip)
    print(f'\nthe grown 1_4b at {rows} sequences of 1,024 a chip on v5e:4x4 {fit(grown)}')
  if ratios := larger_pod(planned):
    head = ('a step on v5p-512 over v5p-64', 'all overlapped', 'nothing overlapped')
    print(f'\n{cells.table(head, ratios)}')
  if missing := [' on '.join(key) for key, figures in found.items() if not figures]:
    print(f'\nnot planned: {", ".join(missing)}')


if __name__ == '__main__':
  main()
