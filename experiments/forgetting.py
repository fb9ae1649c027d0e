r"""Teach a trained TokenFormer other text in the ways that shall forget little, and measure both.

  python experiments/forgetting.py --out=runs/forgetting --csv=runs/forgetting.csv  # an hour
  python experiments/forgetting.py --csv=experiments/forgetting.csv --picture=docs/forgetting.png

A byte TokenFormer of 2 layers learns the text of the Python standard library, then Python's
language reference, in as many FLOPs by every arm. Each arm tries three rates with seed 0, and at
the one that is best on the new text it runs the other seeds. The old text is a source of weight 0,
which is only evaluated, but for the arm with replay. Without `--out` the table and the picture are
made from stored runs.

Predicted before these runs, after one pilot at twice the width (tenth of the tokens, one rate):

- Sparse tokens learn less than full fine-tuning, the less the fewer they are, and at their best
  rates a tenth forgets 0.85 of what full fine-tuning does, 2 % a half, 50 % as much.
- At the same loss on the new text, full fine-tuning at a lower rate forgets no more than sparse
  tokens do: every Pattention uses all of its tokens at every position, unlike a memory layer.
- LoRA and new tokens forget less than full fine-tuning at its best rate, and not less at the same
  loss. Replay forgets less than a third, within 0.05 bits on the new text.

The last arm was added when these runs were half done: it tells the cost of few tokens from that of
a frozen embedding, head and norms.

The arms with sparse tokens did not pay, and the key that made them, `optim.sparse_tokens`, is gone.
Their stored runs were made by commit 911f2952.
"""

import argparse
import dataclasses
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import trials

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.model import flops
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.runs.pictures import styled

FIRST, SECOND = 4000, 250  # steps on the old text, and on the new one by full fine-tuning
COUNTS = {'qkv': 64, 'proj': 64, 'ffn': 256}  # parameter tokens
LOW, HIGH = (3e-4, 1e-3, 3e-3), (3e-3, 1e-2, 3e-2)  # rates


@dataclasses.dataclass(frozen=True)
class Arm:
  """A way to learn other text."""

  rates: tuple[float, ...] = HIGH  # that it tries
  new: int = 0  # tokens, or ranks, beside those of each projection, which are frozen; 0: none
  score: str = ''  # of these tokens; `linear` makes them LoRA
  replayed: float = 0.0  # the share of the old text in the new one


FULL = 'full fine-tuning'
ARMS = {
  FULL: Arm(LOW),
  'with 30 % replay': Arm(LOW, replayed=0.3),
  'frozen base and LoRA': Arm(new=16, score='linear'),
  'frozen base and tokens': Arm(new=16),
}


@dataclasses.dataclass(frozen=True)
class Run:
  """A run on the new text; all figures are bits per byte of held-out text."""

  arm: str
  rate: float
  seed: int
  steps: int
  new_before: float
  new: float
  old_before: float
  old: float

  @property
  def forgotten(self) -> float:
    """Return the bits that are lost on the old text."""
    return self.old - self.old_before


def make_config(new: int = 0, changes: dict[str, Any] | None = None, text: str = '') -> Config:
  """Return the config of the TokenFormer, with `new` more tokens in each projection.

  With `text` it learns that source, and the old text is evaluated as well.
  """
  c = config_lib.defaults()
  layer, mixer = c.model.layer, c.model.layer.mixer
  c.model.pattern, c.model.width, mixer.heads, mixer.positions.fraction = 'layer*2', 32, 4, 1.0
  mixer.qkv.tokens, mixer.proj.tokens, layer.ffn.tokens = (n + new for n in COUNTS.values())
  c.data.update(source='stdlib', tokenizer='bytes', sequence_length=64, batch_size=8)
  c.optim.update(learning_rate=3e-3, warmup_steps=20, new_token_warmup=20)
  c.optim.schedule = {'kind': 'linear', 'final_fraction': 0.0}
  c.train.update(steps=FIRST, log_every=50, eval_every=0, eval_batches=128)
  c.train.update(checkpoint_every=10**9, sample_tokens=0, trackers=())
  if text:
    c.data.mixture.new = {'source': text, 'weight': 1.0}
    c.data.mixture.old = {'source': 'stdlib', 'weight': 0.0}
  return config_lib.resolve(c, config_lib.from_dotted(changes or {}))


def steps_of(arm: Arm) -> int:
  """Return the steps in which an arm spends the FLOPs of full fine-tuning.

  A frozen token has a product forward and one backward, for the gradient of its input.
  """
  base, config = (complete(make_config(new)) for new in (0, arm.new))
  examples = config.data.batch_size * config.data.sequence_length
  frozen = examples * flops.forward_flops(base.model, 0) if arm.new else 0
  return round(SECOND * flops.step_flops(base) / (flops.step_flops(config) - frozen))


def learn(out: Path, text: str, name: str, rate: float, seed: int) -> Run:
  """Run an arm on the base."""
  arm, steps = ARMS[name], steps_of(ARMS[name])
  changes = {
    'init_from': str(trials.once(out, 'base', make_config())),
    'grow.step': 'restart',
    'grow.moments': 'drop',
    'train.steps': steps,
    'train.seed': seed,
    'optim.learning_rate': rate,
  }
  if arm.new:
    changes |= {'optim.old_tokens': 'freeze', 'grow.method.new_score': arm.score}
  if arm.replayed:
    weights = {'new': round(1 - arm.replayed, 3), 'old': arm.replayed}
    changes |= {f'data.mixture.{text}.weight': weight for text, weight in weights.items()}
  workdir = trials.once(out, f'{name}/{rate:g}/{seed}', make_config(arm.new, changes, text))
  lines = trials.evaluations(workdir)
  ends = lines[0], lines[-1]
  figures = (line[f'eval/{text}/bits_per_byte'] for text in ('new', 'old') for line in ends)
  return Run(name, rate, seed, steps, *figures)


def train(out: Path, seeds: tuple[int, ...]) -> list[Run]:
  """Make all runs."""
  text, runs = f'files:{trials.write_second_corpus(out)}/*.txt', []
  for name, arm in ARMS.items():
    tried = [learn(out, text, name, rate, seeds[0]) for rate in arm.rates]
    best = min(tried, key=lambda run: run.new)
    runs += tried + [learn(out, text, name, best.rate, seed) for seed in seeds[1:]]
  return runs


def best_of(runs: list[Run], name: str) -> list[Run]:
  """Return the runs of an arm at its best rate, one for each seed."""
  own = [run for run in runs if run.arm == name]
  rate = min(own, key=lambda run: (run.seed != own[0].seed, run.new)).rate
  return [run for run in own if run.rate == rate]


def by_rate(runs: list[Run], name: str) -> list[Run]:
  """Return the runs of an arm at all rates, with the first seed."""
  own = [run for run in runs if run.arm == name]
  return sorted((run for run in own if run.seed == own[0].seed), key=lambda run: run.rate)


def report(runs: list[Run]) -> None:
  """Print a table: what each arm learns and forgets, and what full fine-tuning forgets for that."""
  full = sorted(by_rate(runs, FULL), key=lambda run: run.new)
  rows = []
  for name in dict.fromkeys(run.arm for run in runs):
    best = best_of(runs, name)
    learned = statistics.mean(run.new for run in best)
    losses, lost = [run.new for run in full], [run.forgotten for run in full]
    known = np.interp(learned, [*losses, full[0].new_before], [*lost, 0])
    same = '–' if name == FULL or learned < losses[0] else f'{known:.3f}'
    figures = (trials.spread(run.new for run in best), trials.spread(r.forgotten for r in best))
    rows.append([name, *figures, same, f'{best[0].rate:g}', str(best[0].steps), str(len(best))])
  new, old = runs[0].new_before, runs[0].old_before
  print(f'before: {new:.3f} on the new text, {old:.3f} on the old one\n')
  trials.table([['', 'new text', 'forgotten', 'full, as far', 'rate', 'steps', 'seeds'], *rows])


@styled()
def draw(runs: list[Run], path: str) -> None:
  """Draw what is forgotten against what is learned."""
  from matplotlib import pyplot  # noqa: PLC0415 (needed for the picture only)

  figure, axes = pyplot.subplots(figsize=(7.5, 4.8))
  for name, marker in zip(dict.fromkeys(run.arm for run in runs), 'osD^v*PX', strict=False):
    best, line = best_of(runs, name), by_rate(runs, name)
    color = axes.plot([run.new for run in line], [run.forgotten for run in line], '-', alpha=0.4)[
      0
    ].get_color()
    new, lost = [run.new for run in best], [run.forgotten for run in best]
    spread = [statistics.stdev(x) if len(x) > 1 else 0 for x in (new, lost)]
    at = statistics.mean(new), statistics.mean(lost)
    axes.errorbar(
      *at, xerr=spread[0], yerr=spread[1], fmt=marker, color=color, capsize=2, label=name
    )
  full = by_rate(runs, FULL)[0]
  axes.plot([full.new, full.new_before], [full.forgotten, 0], 'k:', alpha=0.4)
  axes.set_xlim(right=3.0)
  axes.set_ylim(0, 0.6)  # the largest rates of half of the tokens leave the picture
  axes.set_xlabel('new text, bits per byte')
  axes.set_ylabel('forgotten of the old text, bits per byte')
  axes.legend(fontsize=8)
  figure.savefig(path)


def main() -> None:
  """Make the runs or read them; print a table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', default='', help='the folder of the runs; none: read the CSV file')
  parser.add_argument(
    '--csv', type=Path, default='experiments/forgetting.csv', help='the runs as a table'
  )
  parser.add_argument('--picture', default='', help='the PNG to write')
  parser.add_argument('--seeds', default='0,1,2,3,4')
  args = parser.parse_args()
  if args.out:
    trials.keep_programs(Path(args.out))
    trials.write(train(Path(args.out), tuple(map(int, args.seeds.split(',')))), args.csv)
  runs = trials.read(args.csv, Run)
  report(runs)
  if args.picture:
    draw(runs, args.picture)


if __name__ == '__main__':
  main()
