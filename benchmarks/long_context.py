r"""Plan a model with long rows, whose positions are split over devices, for docs/planned_speed.md.

  python benchmarks/long_context.py                     plan the missing cells and print all
  python benchmarks/long_context.py --on=v6e --quick    without cycles: memory, bytes, rough times
  python benchmarks/long_context.py --report            print the tables of the kept cells

The TPU's own compiler compiles every step, which takes many minutes for each on two cores: rows of
131,072 tokens have large kernels. The command needs `pip install -e ".[tpu]"`, but no TPU. Every
chip has the same number of tokens. Cells are kept in `--out` by their flags, so an interrupted run
can continue. After a change of the code, use another directory.
"""

import cells
from cells import MODELS, Figures, Row

from tokenformer_jax.plan import topology

TOPOLOGIES = ('v5p:4x4x4', 'v6e:8x8')
HEAD = (
  'topology', 'mesh', 'recomputation', 'HBM peak, GiB', 'ms a step', 'MFU', 'tokens/s',
  'collectives, GB in', 'slots for heads, GB in', 'the same, ms',
)  # fmt: skip


def row(name: str, found: Figures) -> Row:
  """Return a row of the table."""
  if 'error' in found:
    return (name, '', '', found['error'], *[''] * 6)
  memory, traffic = found['memory'], found['traffic']
  (fast, slow), (high, low) = found['step_seconds'], found['mfu']
  most, least = found['tokens_per_second']
  sizes = (f'{size} {axis}' for axis, size in found['mesh'].items() if size > 1)
  exchanged = [one for one in traffic if one['kind'] == 'all-to-all']
  return (
    name,
    ' × '.join(sizes),
    found['config']['train']['remat'],
    f'{memory["peak"] / 2**30:.2f} of {memory["capacity"] / 2**30:.0f}',
    f'{fast * 1e3:,.0f} … {slow * 1e3:,.0f}',
    f'{low:.1%} … {high:.1%}',
    f'{least:,.0f} … {most:,.0f}',
    f'{sum(one["gigabytes"] for one in traffic):.1f}',
    f'{sum(one["gigabytes"] for one in exchanged):.1f}',
    f'{1e3 * sum(one["seconds"] for one in exchanged):,.0f}',
  )


def main() -> None:
  """Plan the cells and print the table."""
  parser = cells.parser(__doc__, 'runs/long_context')
  cells.choose(parser)
  parser.add_argument('--length', type=int, default=131072, help='tokens of a row')
  parser.add_argument('--parts', type=int, default=4, help='devices that split a row')
  parser.add_argument('--remat', default='full', help='recomputation')
  args, others = parser.parse_known_args()
  model, rows = 'lm_pile:1_5b', []
  for name in TOPOLOGIES:
    if args.only not in model or args.on not in name:
      continue
    on = topology.parse(name)
    found = cells.planned(
      f'{model}-{name}',
      MODELS[model].on(
        name,
        args.tokens_per_chip * on.chips // args.length,
        f'--config.data.sequence_length={args.length}',
        f'--config.mesh.fsdp={on.devices // args.parts}',
        f'--config.mesh.sequence={args.parts}',
        f'--config.train.remat={args.remat}',
        *others,
      ),
      args.out,
      report=args.report,
    )
    if found:
      rows.append((row(name, found), found))
  print(f'{model}, rows of {args.length:,} tokens; {cells.versions(cell for _, cell in rows)}\n')
  print(cells.table(HEAD, [line for line, _ in rows]))


if __name__ == '__main__':
  main()
