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


def row(name: str, figures: Figures) -> Row:
  """Return a row of the table."""
  if 'error' in figures:
    return (name, '', '', figures['error'], *[''] * 6)
  shown = cells.columns(figures)
  exchanged = [one for one in figures['traffic'] if one['kind'] == 'all-to-all']
  return (
    name,
    shown['mesh'],
    figures['config']['train']['remat'],
    *(shown[key] for key in HEAD[3:7]),
    f'{sum(one["gigabytes"] for one in figures["traffic"]):.1f}',
    f'{sum(one["gigabytes"] for one in exchanged):.1f}',
    f'{1e3 * sum(one["seconds"] for one in exchanged):,.0f}',
  )


def main() -> None:
  """Plan the cells and print the table."""
  parser = cells.parser(__doc__, 'runs/long_context')
  parser.add_argument('--length', type=int, default=131072, help='tokens of a row')
  parser.add_argument('--parts', type=int, default=4, help='devices that split a row')
  parser.add_argument('--remat', default='full', help='recomputation')
  args, others = parser.parse_known_args()
  model, planned = 'lm_pile:1_5b', {}
  for name in TOPOLOGIES:
    if args.only not in model or args.on not in name:
      continue
    on = topology.parse(name)
    figures = cells.planned(
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
    if figures:
      planned[name] = figures
  print(f'{model}, rows of {args.length:,} tokens; {cells.versions(planned.values())}\n')
  lines = [row(*one) for one in planned.items()]
  print(cells.table(HEAD, lines))
  cells.write_csv(args.csv, HEAD, lines)


if __name__ == '__main__':
  main()
