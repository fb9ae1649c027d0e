r"""Fit a scaling law to small runs, and test what it predicts before the runs are made.

  python experiments/laws.py --out=runs/laws --parts=sweep    36 runs; goes on where it stopped
  python experiments/laws.py --out=runs/laws --parts=predict  writes laws_predicted.json
  python experiments/laws.py --out=runs/laws --parts=larger   the runs that it predicts

The models are byte language models on the text of the Python standard library, 512 tokens a step:
2 layers of width 8 to 48, one head and as many parameter tokens for each 8 of width, and
four times as many in the feed-forward part. Each size has one run at a constant rate, from which
six lengths decay to zero over their last fifth. The rates are those of the best of three for width
8 and 48 at 500,000 tokens, by the power −½ of the width between.
"""

import argparse

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.laws import grid, grid_runs

GRID = grid.Grid(
  scale='width',
  factors=(1, 2, 3, 4, 5, 6),
  lengths=(250_000, 500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000),
  rate_power=-0.5,
)


def base() -> Config:
  """Return the config of the smallest size; the length has no meaning yet."""
  c = config_lib.defaults()
  layer, mixer = c.model.layer, c.model.layer.mixer
  c.model.pattern = 'layer*2'
  c.model.width, mixer.heads = 8, 1
  mixer.qkv.tokens = mixer.proj.tokens = 8
  layer.ffn.tokens = 32
  mixer.positions.fraction, c.model.init.std = 1.0, 0.1
  c.data.update(source='stdlib', tokenizer='bytes', sequence_length=64, batch_size=8)
  c.optim.update(schedule='wsd', warmup_steps=50, learning_rate=8e-3, final_fraction=0.0)
  c.train.update(log_every=500, eval_every=0, eval_batches=128, sample_tokens=0, loss_chunk=64)
  c.train.tensorboard = False
  return config_lib.resolve(c)


def sweep(out: str) -> None:
  """Train the grid."""
  jobs = grid.jobs(base(), GRID, f'{out}/grid')
  print(grid_runs.listing(jobs, grid_runs.progress(jobs, f'{out}/grid')), flush=True)
  if not grid_runs.train_missing(jobs, f'{out}/grid'):
    raise SystemExit('stopped; run the same command to continue')


PARTS = {'sweep': sweep}


def main() -> None:
  """Run the parts."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', required=True)
  parser.add_argument('--parts', default=','.join(PARTS))
  args = parser.parse_args()
  for name in args.parts.split(','):
    PARTS[name](args.out)


if __name__ == '__main__':
  main()
