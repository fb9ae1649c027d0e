r"""Plan a training step of several architectures on TPUs, for docs/architectures.md and its CSV.

  python benchmarks/architectures.py            plan the missing cells and print the table
  python benchmarks/architectures.py --only=SAS --on=v5p
  python benchmarks/architectures.py --report   print the table of the kept cells

Every model has 12 layers of width 768, sequences of 2,048 tokens, recomputation `full`, and the
vocabulary and batch of `configs/lm_pile.py:150m`. The times are the rough ones of
`python -m tokenformer_jax plan --quick`, from the TPU compiler's layout of the step, which takes
seconds. The command needs `pip install -e ".[tpu]"`, but no TPU.
"""

import cells
from cells import Figures, Model, Row

LENGTH = 2048
SIMPLIFIED = (
  '--config.model.pattern=first layer*11',
  '--config.model.vocab_size=50304',
  f'--config.data.sequence_length={LENGTH}',
  '--config.train.remat=full',
  '--config.train.loss_chunk=512',
)
WINDOWS = (
  '--config.model.pattern=local*11 layer',
  '--config.model.variants.local.mixer.window=256',
)
MODELS = {
  'TokenFormer': Model('lm_pile.py:150m', LENGTH),
  'Transformer': Model('transformer_pile.py:150m', LENGTH),
  'SAS-P, dense': Model('lm_simplified.py:18x768,sas_p', LENGTH, SIMPLIFIED),
  'SAS-P, tokens': Model('lm_simplified.py:18x768,sas_p,tokens', LENGTH, SIMPLIFIED),
  'TokenFormer, local*11 full': Model('lm_pile.py:150m', LENGTH, WINDOWS),
}
TOPOLOGIES = ('v5p:4x4x4', 'v6e:8x8')
CHIPS = 64
HEAD = (
  'model', 'topology', 'parameters', 'HBM peak, GiB', 'ms a step', 'over TokenFormer',
  'model PFLOP', 'MFU',
)  # fmt: skip


def row(name: str, on: str, figures: Figures, base: Figures | None) -> Row:
  """Return a row of the table; `base` is the TokenFormer on the same topology."""
  if 'error' in figures:
    return (name, on, '', figures['error'], *[''] * 4)
  shown, seconds, (high, low) = cells.columns(figures), figures['step_seconds'][0], figures['mfu']
  ratio = f'{seconds / base["step_seconds"][0]:.2f}' if base and 'error' not in base else ''
  return (
    *(name, on, f'{figures["parameters"]:,}', shown['HBM peak, GiB'], shown['ms a step'], ratio),
    f'{figures["model_flops"] / 1e15:.2f}',
    f'{low:.0%} … {high:.0%}',
  )


def main() -> None:
  """Plan the cells and print the table."""
  parser = cells.parser(__doc__, 'runs/architectures_tpu')
  args, others = parser.parse_known_args()
  kept = {}
  for on in TOPOLOGIES:
    for name, model in MODELS.items():
      if args.only in name and args.on in on:
        batch = model.rows(args.tokens_per_chip) * CHIPS
        flags = model.on(on, batch, f'--config.mesh.fsdp={CHIPS}', '--quick', *others)
        label = f'{name}-{on}'.replace(' ', '_').replace('*', 'x')
        kept[name, on] = cells.planned(label, flags, args.out, report=args.report)
  planned = {key: figures for key, figures in kept.items() if figures}
  print(f'{args.tokens_per_chip:,} tokens a chip; {cells.versions(planned.values())}\n')
  rows = [row(*key, made, planned.get(('TokenFormer', key[1]))) for key, made in planned.items()]
  print(cells.table(HEAD, rows))
  cells.write_csv(args.csv, HEAD, rows)
  if missing := [' on '.join(key) for key, figures in kept.items() if not figures]:
    print(f'\nnot planned: {", ".join(missing)}')


if __name__ == '__main__':
  main()
