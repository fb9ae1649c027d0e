r"""Fit scaling laws to small runs, and test what they predict before the runs are made.

  python experiments/laws.py --out=runs/laws --parts=sweep           36 runs; goes on where it ended
  python experiments/laws.py --out=runs/laws --parts=predict         the losses of two larger runs
  python experiments/laws.py --out=runs/laws --parts=larger          these runs
  python experiments/laws.py --out=runs/laws --parts=tokens          20 runs of one width
  python experiments/laws.py --out=runs/laws --parts=calibrate       a chain that gives the handover
  python experiments/laws.py --out=runs/laws --parts=predict_growth  the loss of another chain
  python experiments/laws.py --out=runs/laws --parts=grow            this chain

Predictions go to experiments/laws_predicted.json, and were committed before their runs were made.

The models are byte language models on the text of the Python standard library, 512 tokens a step:
2 layers with one head and as many parameter tokens for each 8 of width, and four times as many in
the feed-forward part. Each size has one run at a constant rate, from which all lengths decay to
zero over their last fifth. Rates fall by the power −½ of the width: of three rates at 500,000
tokens 8e-3 was best for width 8 and 24, and 4e-3 for width 48. In the second grid the width is 16
and the parameter tokens grow; values start at a quarter of the default's size, as in growth.py.
With the default's, more tokens were worse until 2 million tokens of text.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import trials

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.laws import analysis, fit, grid, grid_runs, growth, points, runs, stages
from tokenformer_jax.training import sizes

GRID = grid.Grid(
  scale='width',
  factors=(1, 2, 3, 4, 5, 6),
  lengths=(250_000, 500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000),
  rate_power=-0.5,
)
LARGER = grid.Grid('width', factors=(8, 10), lengths=(8_000_000,), branches=False, rate_power=-0.5)
TOKENS = grid.Grid(
  scale='tokens',
  factors=(1, 2, 4, 8),
  lengths=(250_000, 500_000, 1_000_000),
)
DECAY = 0.2
GROWN_RATE = 0.5  # of the rate before a growth: the best of three in docs/growth.md
# Factors of parameter tokens after the growth, and tokens of text before it and in all.
CALIBRATION, TEST = (4, 200_000, 800_000), (8, 400_000, 1_000_000)
PREDICTED = Path(__file__).parent / 'laws_predicted.json'


def base(width: int = 8, output_std: float = 0.0) -> Config:
  """Return the config of the smallest size; the length has no meaning yet.

  Args:
    width: of the model.
    output_std: of the first values; 0: the default, 1 / √width.
  """
  c = config_lib.defaults()
  layer, mixer = c.model.layer, c.model.layer.mixer
  c.model.pattern = 'layer*2'
  c.model.width, mixer.heads = width, width // 8
  mixer.qkv.tokens = mixer.proj.tokens = width
  layer.ffn.tokens = 4 * width
  mixer.positions.fraction, c.model.init.std = 1.0, 0.1
  c.model.init.output_std = output_std
  c.data.update(source='stdlib', tokenizer='bytes', sequence_length=64, batch_size=8)
  c.optim.update(schedule='wsd', warmup_steps=50, final_fraction=0.0)
  c.optim.learning_rate = 8e-3 * (8 / width) ** 0.5
  c.train.update(log_every=500, eval_every=0, eval_batches=128, sample_tokens=0, loss_chunk=64)
  c.train.trackers = ()
  return config_lib.resolve(c)


def small() -> Config:
  """Return the smallest size of `TOKENS`, whose values start at a quarter as in growth.py."""
  return base(16, 0.25 / 16**0.5)


def train(config: Config, wanted: grid.Grid, out: str) -> None:
  """Train a grid."""
  jobs = grid.jobs(config, wanted, out)
  print(grid_runs.listing(jobs, grid_runs.progress(jobs, out)), flush=True)
  if not grid_runs.make_missing(jobs, out):
    raise SystemExit('stopped; run the same command to continue')


def fitted(folder: str, least: float = 0) -> analysis.Analysis:
  """Return the laws of a grid, of sizes with at least so many parameters."""
  found = [runs.read(name) for name in points.find_runs([folder])]
  found = [run for run in found if run.size.parameters >= least]
  return analysis.analyse(
    points.from_runs(found, 'all'), points.from_runs(found, 'without_embeddings')
  )


def predict(out: str) -> None:
  """Write the losses of the larger runs, by three fits."""
  fits = {'all 36 runs': fitted(f'{out}/grid'), 'the 24 of N > 20,000': fitted(f'{out}/grid', 2e4)}
  found = []
  for job in grid.jobs(base(), LARGER, f'{out}/larger'):
    n, inner, d = job.size.parameters, job.size.without_embeddings, job.tokens
    by = {}
    for name, law in fits.items():
      made = analysis.predict(law, n, d, n)
      by[name] = {'loss': made.loss, 'interval': made.interval}
    kaplan = fits['all 36 runs'].kaplan['kaplan_nd']
    logs = {'n': np.log([inner]), 'd': np.log([d])}
    drawn = kaplan.predicted(logs)[:, 0]
    by["Kaplan's L(N, D), all 36 runs"] = {
      'loss': float(np.exp(kaplan.log_loss(logs))[0]),
      'interval': fit.interval(drawn),
    }
    found.append({'run': job.name, 'parameters': n, 'tokens': d, 'predicted': by})
  _write({'larger': found})


def _write(content: dict[str, Any]) -> None:
  """Add predictions to the file; those that it has stay as they are."""
  before = json.loads(PREDICTED.read_text()) if PREDICTED.exists() else {}
  if again := before.keys() & content.keys():
    raise SystemExit(f'{PREDICTED.name} has {again} already; a prediction is made once')
  PREDICTED.write_text(json.dumps({**before, **content}, indent=2) + '\n')
  print(json.dumps(content, indent=2))


def grown(out: str, case: tuple[int, int, int]) -> Path:
  """Train the smallest model of `TOKENS`, grow it by a group, and train on; return the run."""
  factor, before, whole = case
  config, folder = small(), f'{out}/chains'
  step_tokens = grid.step_tokens(config)
  first, steps = round(before / step_tokens), round(whole / step_tokens)
  constant = dataclasses.replace(config.optim, schedule='constant', final_fraction=0.1)
  stable = grid.with_train(dataclasses.replace(config, optim=constant), steps=first)
  source = trials.once(Path(folder), f'small_{before}', stable)
  rate = config.optim.learning_rate * GROWN_RATE
  large = dataclasses.replace(
    grid.with_train(config, steps=steps, decay_from=steps - round(DECAY * steps)),
    model=grid.scaled(config.model, 'tokens', factor),
    optim=dataclasses.replace(config.optim, learning_rate=rate),
    init_from=str(source),
    grow=config_lib.GrowConfig(),
  )
  return trials.once(Path(folder), f'x{factor}_{before}_{whole}', large)


def predict_growth(out: str) -> None:
  """Write the loss of the second chain, with the handover of the first."""
  law = fitted(f'{out}/values')
  calibration = [runs.read(str(grown(out, CALIBRATION)))]
  each, handover = stages.handovers(calibration, law.main, 'all', DECAY)
  factor, before, whole = TEST
  config = small()
  sizes_of = [
    runs.measure_size(sizes.fill_in(dataclasses.replace(config, model=model))).parameters
    for model in (config.model, grid.scaled(config.model, 'tokens', factor))
  ]
  legs = [(sizes_of[0], before), (sizes_of[1], whole - before)]
  assumed = growth.Assumptions(handover, DECAY)
  drawn = growth.chain_loss(law.main.drawn, legs, assumed)
  rng = np.random.default_rng(0)
  drawn = drawn * np.exp(rng.choice(law.main.residuals, drawn.shape))
  one = {name: np.array([value]) for name, value in law.main.values.items()}
  central = growth.Assumptions(float(each[0]), DECAY)
  alone = analysis.predict(law, legs[1][0], whole, legs[1][0])
  _write(
    {
      'growth': {
        'handover': float(each[0]),
        'handover_interval': fit.interval(handover),
        'legs': legs,
        'loss': float(growth.chain_loss(one, legs, central)[0]),
        'interval': fit.interval(drawn),
        'from_scratch_on_as_many_tokens': alone.loss,
        'no_handover_cost': float(growth.chain_loss(one, legs, growth.Assumptions(0.0, DECAY))[0]),
      }
    }
  )


PARTS: dict[str, Callable[[str], Any]] = {
  'sweep': lambda out: train(base(), GRID, f'{out}/grid'),
  'predict': predict,
  'larger': lambda out: train(base(), LARGER, f'{out}/larger'),
  'tokens': lambda out: train(small(), TOKENS, f'{out}/values'),
  'calibrate': lambda out: grown(out, CALIBRATION),
  'predict_growth': predict_growth,
  'grow': lambda out: grown(out, TEST),
}


def main() -> None:
  """Run the parts."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', required=True)
  parser.add_argument('--parts', default='sweep,larger,tokens,calibrate,grow')
  args = parser.parse_args()
  for name in args.parts.split(','):
    PARTS[name](args.out)


if __name__ == '__main__':
  main()
