r"""Fit scaling laws to small runs, and test what they predict before the runs are made.

  python experiments/laws.py --out=runs/laws --parts=sweep     36 runs; goes on where it ended
  python experiments/laws.py --out=runs/laws --parts=predict   the losses of two larger runs
  python experiments/laws.py --out=runs/laws --parts=larger    these runs, and how far off they are

Predictions go to experiments/laws_predicted.json, and were committed before their runs were made.

The models are byte language models on the text of the Python standard library, 512 tokens a step:
2 layers with one head and as many parameter tokens for each 8 of width, and four times as many in
the feed-forward part. Each size has one run at a constant rate, from which all lengths decay to
zero over their last fifth. Rates fall by the power −½ of the width: of three rates at 500,000
tokens 8e-3 was best for width 8 and 24, and 4e-3 for width 48.
"""

import json
from pathlib import Path

import trials

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.laws import analysis, grid, grid_runs, points, runs

GRID = grid.Grid(
  scale='width',
  factors=(1, 2, 3, 4, 5, 6),
  lengths=(250_000, 500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000),
  rate_power=-0.5,
)
LARGER = grid.Grid('width', factors=(8, 10), lengths=(8_000_000,), rate_power=-0.5)
PREDICTED = Path(__file__).parent / 'laws_predicted.json'


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
  c.optim.update(warmup_steps=50, learning_rate=8e-3)
  c.optim.schedule = {'kind': 'wsd', 'final_fraction': 0.0}
  c.train.update(log_every=500, eval_every=0, eval_batches=128, sample_tokens=0, loss_chunk=64)
  c.train.trackers = ()
  return config_lib.resolve(c)


def train(config: Config, wanted: grid.Grid, out: str) -> None:
  """Train a grid."""
  jobs = grid.jobs(config, wanted, out)
  print(grid_runs.table(jobs, grid_runs.finished(jobs, out)), flush=True)
  if not grid_runs.make_missing(jobs, out):
    raise SystemExit('stopped; run the same command to continue')


def fitted(folder: str, least: float = 0) -> analysis.Analysis:
  """Return the law of a grid, of sizes with at least so many parameters."""
  finished = [runs.read(name) for name in points.find_runs([folder])]
  return analysis.analyse(points.from_runs(run for run in finished if run.size.parameters >= least))


def predict(out: str) -> None:
  """Write the losses of the larger runs, by two fits."""
  if PREDICTED.exists():
    raise SystemExit(f'{PREDICTED.name} has predictions already; a prediction is made once')
  fits = {'all 36 runs': fitted(f'{out}/grid'), 'the 24 of N > 20,000': fitted(f'{out}/grid', 2e4)}
  larger = []
  for job in grid.jobs(base(), LARGER, f'{out}/larger'):
    if job.stage == 'stable':
      continue
    n, d, by_fit = job.size.parameters, job.tokens, {}
    for name, law in fits.items():
      made = analysis.predict(law, [(n, d)])
      by_fit[name] = {'loss': made.loss, 'interval': made.interval}
    larger.append({'run': job.name, 'parameters': n, 'tokens': d, 'predicted': by_fit})
  PREDICTED.write_text(json.dumps({'larger': larger}, indent=2) + '\n')


def compare(out: str) -> None:
  """Print the losses of the larger runs beside their predictions."""
  rows = [['run', 'predicted by', 'predicted', 'measured']]
  for one in json.loads(PREDICTED.read_text())['larger']:
    measured = runs.read(f'{out}/larger/{one["run"]}').loss
    for name, made in one['predicted'].items():
      low, high = made['interval']
      shown = f'{made["loss"]:.3f} ({low:.3f} … {high:.3f})'
      rows.append([one['run'], name, shown, f'{measured:.3f}'])
  trials.table(rows)


def main() -> None:
  """Run the parts."""
  parser = trials.parser(__doc__.splitlines()[0], ['sweep', 'predict', 'larger'])
  parser.set_defaults(parts='sweep,larger')
  args, _, parts, _ = trials.begin(parser, ['sweep', 'predict', 'larger'])
  if 'sweep' in parts:
    train(base(), GRID, f'{args.out}/grid')
  if 'predict' in parts:
    predict(args.out)
  if 'larger' in parts:
    train(base(), LARGER, f'{args.out}/larger')
    compare(args.out)


if __name__ == '__main__':
  main()
