r"""Plan a step with its layers run in every way, for the order of `PLANS` in steps/remat_plans.py.

  python benchmarks/ways.py                       plan the missing cells and print all
  python benchmarks/ways.py --only=1_5b --on=v5p
  python benchmarks/ways.py --report              print the tables of the kept cells

A way is a value of `train.remat` with one of `train.layers`. Models have `--depth` layers, because
a program without a loop is as long as the model is deep; the embedding, the head and the optimizer
weigh more than in a whole model. Each program takes minutes. The command needs
`pip install -e ".[tpu]"`, but no TPU. Cells are kept in `--out`, as in pods.py.
"""

import cells
from cells import MODELS, Figures, Row
from pods import TOPOLOGIES

from tokenformer_jax.plan import topology
from tokenformer_jax.steps.remat_plans import PLANS, RematPlan

# Loops with more layers in their bodies, beside the ways that `auto` chooses from.
MORE = (RematPlan('everything', '2'), RematPlan('everything', '4'))
HEAD = ('remat', 'layers', 'HBM, GiB', 'ms a step', 'over the fastest', 'compiled in, s')


def rows(found: dict[RematPlan, Figures]) -> list[Row]:
  """Return the rows of a table, the fastest way first."""
  times = {way: one['step_seconds'][0] for way, one in found.items() if 'error' not in one}
  fastest = min(times.values(), default=0.0)
  return [
    (
      *way,
      f'{found[way]["memory"]["peak"] / 2**30:.2f}',
      f'{times[way] * 1e3:,.1f}',
      f'{times[way] / fastest:.3f}',
      f'{found[way]["compile_seconds"]:,.0f}',
    )
    for way in sorted(times, key=times.__getitem__)
  ] + [(*way, one['error'], '', '', '') for way, one in found.items() if 'error' in one]


def main() -> None:
  """Plan the cells and print the tables."""
  parser = cells.parser(__doc__, 'runs/ways')
  cells.choose(parser)
  parser.add_argument('--depth', type=int, default=8, help='layers of a model')
  args, others = parser.parse_known_args()
  for model in MODELS:
    for sold, name in TOPOLOGIES.items():
      if args.only not in model or args.on not in f'{sold} {name}':
        continue
      batch = MODELS[model].rows(args.tokens_per_chip) * topology.parse(name).chips
      found = {}
      for way in (*PLANS, *MORE):
        flags = (*way.flags.split(), f'--config.model.pattern=layer*{args.depth}', *others)
        label = f'{model}-{sold}-{way.remat}-{way.layers}'
        cell = MODELS[model].on(name, batch, *flags)
        if figures := cells.planned(label, cell, args.out, report=args.report):
          found[way] = figures
      if found:
        print(f'\n{model}, {args.depth} layers, {name}; {cells.versions(found.values())}\n')
        print(cells.table(HEAD, rows(found)))


if __name__ == '__main__':
  main()
