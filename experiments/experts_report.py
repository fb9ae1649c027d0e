r"""Make tables and a picture of the runs of `experts.py`.

  python experiments/experts_report.py runs/experts docs

Prints the tables of docs/experts.md and writes experts.png. Losses are bits per byte on held-out
text, as mean ± standard deviation over the finished seeds.
"""

import statistics
from pathlib import Path

import experts
import matplotlib
from trials import directories, spread, table

from tokenformer_jax.model import flops, models
from tokenformer_jax.runs import metrics
from tokenformer_jax.training import sizes

matplotlib.use('Agg')
import matplotlib.pyplot as plt

Lines = list[dict[str, float]]


def runs(folder: Path) -> list[Lines]:
  """Return the figures of each finished seed of a trial."""
  return [list(metrics.read(done.parent)) for done in sorted(folder.glob('*/done'))]


def last(lines: Lines, name: str) -> float:
  """Return the last value of a figure."""
  return [line[name] for line in lines if line.get(name) is not None][-1]


def losses(found: list[Lines]) -> list[float]:
  """Return the final losses on held-out text."""
  return [last(lines, 'eval/bits_per_byte') for lines in found]


def size(changes: experts.Changes) -> list[str]:
  """Return the parameters, those of one token, and the training FLOPs of one token."""
  config = sizes.fill_in(experts.Trial(Path(), 0).config(changes))
  definition = models.define(config.model)
  per_token = flops.train_flops(config.model, config.data.sequence_length)
  return [f'{definition.count:,}', f'{definition.active:,}', f'{per_token / 1e3:,.0f}']


def plain(out: Path, part: str) -> None:
  """Print the losses of a part, with the sizes of its models."""
  rows = [['', 'parameters', 'of one token', 'kFLOP a token', 'bits a byte', 'dropped', 'seeds']]
  for name, changes in experts.PARTS[part].items():
    if found := runs(out / part / name):
      dropped = [100 * line['eval/router/dropped'] for line in map(_final, found) if _routed(line)]
      share = f'{statistics.mean(dropped):.1f} %' if dropped else ''
      rows.append([name, *size(changes), spread(losses(found)), share, str(len(found))])
  table(rows)


def _final(lines: Lines) -> dict[str, float]:
  return [line for line in lines if 'eval/bits_per_byte' in line][-1]


def _routed(line: dict[str, float]) -> bool:
  return 'eval/router/dropped' in line


def balance(out: Path) -> None:
  """Print how uneven the load is over time: the largest load above the mean, in means."""
  steps = [100, 300, 700, experts.STEPS]
  rows = [['', *(f'step {step}' for step in steps), 'entropy', 'bits a byte', 'seeds']]
  for name in experts.BALANCE:
    if found := runs(out / 'balance' / name):
      at = []
      for step in steps:
        here = [line for lines in found for line in lines if line['step'] == step]
        at.append([x['train/router/max_violation'] for x in here if 'train/loss' in x])
      entropy = [last(lines, 'train/router/entropy') for lines in found]
      values = [spread(runs, 2) for runs in at]
      rows.append([name, *values, spread(entropy, 2), spread(losses(found)), str(len(found))])
  table(rows)


def drops(out: Path) -> None:
  """Print the share of choices without a place over time, in training."""
  steps = [100, 300, 700, experts.STEPS]
  rows = [['dropped in training', *(f'step {step}' for step in steps)]]
  parts = (('quality', experts.QUALITY), ('drops', experts.DROPS))
  for part, name in ((part, name) for part, names in parts for name in names):
    at = [
      [
        100 * line['train/router/dropped']
        for lines in runs(out / part / name)
        for line in lines
        if line['step'] == step and 'train/router/dropped' in line
      ]
      for step in steps
    ]
    if all(at) and any(map(any, at)):
      rows.append([name, *(f'{spread(runs, 1)} %' for runs in at)])
  table(rows)


def growth(out: Path) -> None:
  """Print the losses of the ways to go on with a trained model."""
  rows = [['', 'parameters', 'of one token', 'kFLOP a token', 'bits a byte', 'seeds']]
  for name, changes in experts.grown().items():
    if found := runs(out / 'growth' / name):
      rows.append([name, *size(changes), spread(losses(found)), str(len(found))])
  table(rows)


def distillation(out: Path) -> None:
  """Print the losses of students, and how much of the teacher's lead they keep."""
  rows = [['', 'bits a byte', 'share of the lead kept', 'seeds']]
  of = {name: losses(runs(out / 'distillation' / name)) for name in experts.STUDENTS}
  teacher = losses(runs(out / 'distillation' / 'teacher'))
  if not teacher:
    return
  rows.append(['the teacher', spread(teacher), '', str(len(teacher))])
  for name, values in of.items():
    pairs = zip(values, of['alone'], teacher, strict=False)
    kept = [(alone - own) / (alone - best) for own, alone, best in pairs]
    share = f'{100 * statistics.mean(kept):.0f} %' if kept and name != 'alone' else ''
    rows.append([name, spread(values), share, str(len(values))])
  table(rows)


def picture(out: Path, pictures: Path) -> None:
  """Draw the loss against steps and against FLOPs, and the balance over time."""
  figure, (by_step, by_flops, load) = plt.subplots(1, 3, figsize=(15, 4.4))
  for name, changes in experts.QUALITY.items():
    found = runs(out / 'quality' / name)
    if not found:
      continue
    config = sizes.fill_in(experts.Trial(Path(), 0).config(changes))
    lines = [[line for line in run if 'train/bits_per_byte' in line] for run in found]
    steps = [line['step'] for line in lines[0]]
    mean = [
      statistics.mean(line['train/bits_per_byte'] for line in at) for at in zip(*lines, strict=True)
    ]
    by_step.plot(steps, mean, label=name)
    by_flops.plot([step * flops.step_flops(config) / 1e9 for step in steps], mean)
  for name in experts.BALANCE:
    if found := runs(out / 'balance' / name):
      lines = [line for line in found[0] if 'train/router/max_violation' in line]
      load.plot([x['step'] for x in lines], [x['train/router/max_violation'] for x in lines])
      load.lines[-1].set_label(name)
  by_step.set(xlabel='steps', ylabel='bits per byte, training', title='Loss against steps')
  by_flops.set(xlabel='GFLOP', xscale='log', title='The same against training FLOPs')
  load.set(xlabel='steps', title='Largest load above the mean, in means', yscale='log')
  by_step.set_ylim(top=3.6)
  by_flops.set_ylim(top=3.6)
  for axes in (by_step, load):
    axes.legend(fontsize=7, frameon=False)
  for axes in (by_step, by_flops, load):
    axes.grid(alpha=0.3, which='both')
  figure.tight_layout()
  figure.savefig(pictures / 'experts.png', dpi=110)


def main() -> None:
  """Report on the finished runs."""
  out, pictures = directories()
  for part in ('quality', 'precision', 'init'):
    plain(out, part)
  balance(out)
  drops(out)
  growth(out)
  distillation(out)
  picture(out, pictures)


if __name__ == '__main__':
  main()
