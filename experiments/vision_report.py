r"""Make the tables and the picture of the runs of `vision.py`.

  python experiments/vision_report.py runs/vision docs

Writes vision.png into the directory and prints the tables of docs/vision.md: the last evaluation on
held-out images, as mean ± standard deviation over five seeds, or over the finished ones.
"""

import statistics
from pathlib import Path

import matplotlib
import vision
from trials import directories, spread, table

from tokenformer_jax.config import Config
from tokenformer_jax.model import flops
from tokenformer_jax.runs import saved_config

matplotlib.use('Agg')
import matplotlib.pyplot as plt

Figures = dict[str, float]  # the figures of one run
SEEDS = 5  # The table marks arms with fewer seeds.


def found(folder: Path) -> list[Figures]:
  """Return the last evaluation of every finished seed."""
  return [vision.last(done.parent) for done in sorted(folder.glob('*/done'))]


def training_flops(out: Path, data: str, name: str) -> float:
  """Return the FLOPs of a run from its first step, including the model before a growth."""

  def read_config(arm: str) -> Config:
    path = next(iter(sorted((out / data / arm).glob('*/config.json'))))
    return saved_config.read(path, 'run the experiment again')

  config = read_config(name)
  steps, per_step = config.train.steps, flops.step_flops(config)
  if not config.init_from:
    return steps * per_step
  before = read_config('TokenFormer')
  first = before.train.steps
  return first * flops.step_flops(before) + (steps - first) * per_step


def rates(out: Path, data: str) -> None:
  """Print the loss of seed 0 by peak learning rate."""
  print(f'\nrates, {data}:\n')
  by_arm = {}
  for done in (out / data / 'rates').glob('*/*/done'):
    rate, arm = float(done.parent.name), done.parent.parent.name
    by_arm.setdefault(arm, {})[rate] = vision.last(done.parent)['eval/loss']
  tried = sorted({rate for losses in by_arm.values() for rate in losses})
  rows = [['', *(f'{rate:g}' for rate in tried)]]
  for arm, losses in sorted(by_arm.items()):
    rows.append([arm, *(f'{losses[rate]:.3f}' if rate in losses else '' for rate in tried)])
  table(rows)


def compare(out: Path, part: str) -> None:
  """Print the results of one part on every set of images."""
  head, rows = [''], {label: [label] for label in vision.PARTS[part]}
  for data in vision.DATA:
    head += [f'{data}: top-1 %', 'loss', 'calibration error']
    head += ['training TFLOP'] * (part == 'growth')
    for label, name in vision.PARTS[part].items():
      lines = found(out / data / name)
      if not lines:
        rows[label] += ['–'] * (3 + (part == 'growth'))
        continue
      rows[label].append(spread((100 * line['eval/accuracy'] for line in lines), digits=2))
      for figure in ('loss', 'calibration_error'):
        rows[label].append(spread(line[f'eval/{figure}'] for line in lines))
      if part == 'growth':
        rows[label].append(f'{training_flops(out, data, name) / 1e12:.1f}')
      if len(lines) < SEEDS:
        rows[label][-1] += f' ({len(lines)} seeds)'
  print(f'\n{part}:\n')
  table([head, *rows.values()])


def picture(out: Path, path: Path) -> None:
  """Draw the loss of every run: a row for each set of images, a panel for each part."""
  figure, all_axes = plt.subplots(
    len(vision.DATA),
    len(vision.PARTS),
    figsize=(13, 5.5),
    sharey='row',
    layout='constrained',
    squeeze=False,
  )
  for data, row in zip(vision.DATA, all_axes, strict=True):
    for (part, arms), axes in zip(vision.PARTS.items(), row, strict=True):
      for x, name in enumerate(arms.values()):
        losses = [line['eval/loss'] for line in found(out / data / name)]
        axes.plot([x] * len(losses), losses, 'o', alpha=0.5, ms=5)
        if losses:
          axes.plot([x - 0.25, x + 0.25], [statistics.mean(losses)] * 2, color='black', lw=1)
      # A label with the score function in parentheses becomes the function's name.
      labels = [label.partition('(')[2].rstrip(')') or label.replace(', ', ',\n') for label in arms]
      axes.set_xticks(range(len(arms)), labels, fontsize=7)
      axes.set_xlim(-0.6, len(arms) - 0.4)
      axes.set_title(f'{part}, {data}', fontsize=9)
      axes.grid(axis='y', alpha=0.3)
    row[0].set_ylabel('loss, held out')
  figure.savefig(path, dpi=120)
  plt.close(figure)


def main() -> None:
  """Report on every part that has runs."""
  out, pictures = directories()
  for data in vision.DATA:
    rates(out, data)
  for part in vision.PARTS:
    compare(out, part)
  picture(out, pictures / 'vision.png')


if __name__ == '__main__':
  main()
