r"""Plan a step with every remat plan, for the order of `PLANS` in steps/remat_plans.py.

  python benchmarks/remat_plans.py                       plan the missing cells and print all
  python benchmarks/remat_plans.py --only=1_5b --on=v5p
  python benchmarks/remat_plans.py --report              print the tables of the kept cells

A plan is a value of `train.remat` with one of `train.layers`. Models have `--depth` layers, because
a program without a loop is as long as the model is deep; the embedding, the head and the optimizer
weigh more than in a whole model. Each program takes minutes. The command needs
`pip install -e ".[tpu]"`, but no TPU. Cells are kept in `--out`, as in pods.py.
"""

import cells
from cells import MODELS, Figures, Row
from pods import TOPOLOGIES

from tokenformer_jax.plan import topology
from tokenformer_jax.steps.remat_plans import PLANS, RematPlan

HEAD = ('remat', 'layers', 'HBM, GiB', 'ms a step', 'over the fastest', 'compiled in, s')


def rows(by_plan: dict[RematPlan, Figures]) -> list[Row]:
  """Return the rows of a table, the fastest plan first."""
  times = {plan: one['step_seconds'][0] for plan, one in by_plan.items() if 'error' not in one}
  fastest = min(times.values(), default=0.0)
  return [
    (
      *plan,
      f'{by_plan[plan]["memory"]["peak"] / 2**30:.2f}',
      f'{times[plan] * 1e3:,.1f}',
      f'{times[plan] / fastest:.3f}',
      f'{by_plan[plan]["compile_seconds"]:,.0f}',
    )
    for plan in sorted(times, key=times.__getitem__)
  ] + [(*plan, one['error'], '', '', '') for plan, one in by_plan.items() if 'error' in one]


def main() -> None:
  """Plan the cells and print the tables."""
  parser = cells.parser(__doc__, 'runs/remat_plans')
  parser.add_argument('--depth', type=int, default=8, help='layers of a model')
  args, others = parser.parse_known_args()
  lines: list[Row] = []
  for model in MODELS:
    for sold, name in TOPOLOGIES.items():
      if args.only not in model or args.on not in f'{sold} {name}':
        continue
      batch = MODELS[model].rows(args.tokens_per_chip) * topology.parse(name).chips
      by_plan = {}
      for plan in PLANS:
        flags = (*plan.flags.split(), f'--config.model.pattern=layer*{args.depth}', *others)
        label = f'{model}-{sold}-{plan.remat}-{plan.layers}'
        cell = MODELS[model].on(name, batch, *flags)
        if figures := cells.planned(label, cell, args.out, report=args.report):
          by_plan[plan] = figures
      if by_plan:
        print(f'\n{model}, {args.depth} layers, {name}; {cells.versions(by_plan.values())}\n')
        print(cells.table(HEAD, rows(by_plan)))
        lines += [(model, name, str(args.depth), *row) for row in rows(by_plan)]
  cells.write_csv(args.csv, ('model', 'topology', 'depth', *HEAD), lines)


if __name__ == '__main__':
  main()
