r"""Make tables and pictures of the runs of `growth.py`.

  python experiments/growth_report.py runs/growth docs

Writes growth_scaling.png, growth_handover.png and growth_taming.png into the directory and
prints the tables of docs/growth.md. Losses are bits per byte on held-out text, as mean ± standard
deviation over the finished seeds.
"""

import statistics
from pathlib import Path

import growth
import matplotlib
from trials import directories, spread, table

from tokenformer_jax.config import Config
from tokenformer_jax.runs import metrics, saved_config

matplotlib.use('Agg')
import matplotlib.pyplot as plt

Curve = dict[int, float]  # step → bits per byte


def curves(folder: Path) -> list[Curve]:
  """Return the evaluations of all seeds under a folder."""
  found = []
  for done in sorted(folder.glob('*/done')):
    lines = [line for line in metrics.read(done.parent) if 'eval/bits_per_byte' in line]
    found.append({line['step']: line['eval/bits_per_byte'] for line in lines})
  return found


def mean(found: list[Curve]) -> Curve:
  """Return the mean over seeds, at the steps that all seeds have."""
  steps = set.intersection(*(set(c) for c in found)) if found else set()
  return {step: statistics.mean(c[step] for c in found) for step in sorted(steps)}


def read_config(folder: Path) -> Config:
  """Return the config of the first seed under a folder."""
  path = next(iter(sorted(folder.glob('*/config.json'))))
  return saved_config.read(path, 'run the experiment again')


def rates(out: Path) -> None:
  """Print the losses by peak rate."""
  rows = [['peak rate', *(f'{rate:g}' for rate in growth.RATES)]]
  for kind in growth.KINDS:
    last = []
    for rate in growth.RATES:
      lines = metrics.read(out / f'rates/{kind}/{rate:g}')
      last.append([line['eval/bits_per_byte'] for line in lines if 'eval/loss' in line][-1])
    rows.append([kind, *(f'{value:.3f}' for value in last)])
  print('## rates\n')
  table(rows)


def scaling(out: Path, pictures: Path) -> None:
  """Report the loss against cumulative FLOPs, and at the end of each stage."""
  print('## scaling\n')
  figure, axes = plt.subplots(figsize=(8, 5))
  rows = [['', 'size', 'TFLOP, all stages', 'bits per byte', 'seeds']]
  base = {kind: out / f'base/{kind}' for kind in growth.KINDS}
  spent = {k: growth.BASE_STEPS * growth.step_flops(read_config(base[k])) for k in growth.KINDS}
  for kind in growth.KINDS:
    ends = [c[max(c)] for c in curves(base[kind])]
    rows.append([kind, '×1', f'{spent[kind] / 1e12:.1f}', spread(ends), str(len(ends))])
  for folder in sorted((out / 'scaling').iterdir()):
    name = folder.name
    scratch = name.startswith('scratch_')
    kind = 'transformer' if name in ('net2net_fill', 'scratch_transformer') else 'tokenformer'
    total, style = 0.0 if scratch else spent[kind], '--' if scratch else '-'
    xs, ys = [], []
    if not scratch:
      line = mean(curves(base[kind]))
      per_step = growth.step_flops(read_config(base[kind]))
      xs, ys = [step * per_step for step in line], list(line.values())
    for size in (2, 4):
      here = folder / str(size)
      found = curves(here)
      if not found:
        continue
      per_step, line = growth.step_flops(read_config(here)), mean(found)
      first = 0 if scratch else min(line)
      start = 0.0 if scratch else total
      x = [start + (step - first) * per_step for step in line]
      total = x[-1]
      ends = [c[max(c)] for c in found]
      rows.append([name, f'×{size}', f'{total / 1e12:.1f}', spread(ends), str(len(ends))])
      if scratch:
        axes.plot(x, line.values(), style, label=f'{name} ×{size}', lw=1)
      else:
        xs, ys = xs + x, ys + list(line.values())
    if xs:
      axes.plot(xs, ys, style, label=f'{name}: ×1 → ×2 → ×4', lw=1.5)
  table(rows)
  axes.set(xlabel='cumulative training FLOPs', ylabel='bits per byte, held out')
  axes.set_xscale('log')
  axes.set_ylim(top=min(4.0, axes.get_ylim()[1]))
  finish(axes, figure, pictures / 'growth_scaling.png')


def handover(out: Path, pictures: Path, part: str) -> None:
  """Report the loss right after growth and later, by arm."""
  print(f'## {part}\n')
  points = (0, 20, 40, 100, 200)
  rows = [['', '', *(f'after {point}' for point in points), 'seeds']]
  arms = {}
  for folder in sorted({done.parent.parent for done in (out / part).glob('**/done')}):
    found = curves(folder)
    arms[folder.relative_to(out / part).parts] = mean(found)
    first = growth.BASE_STEPS
    values = [spread(c[first + p] for c in found if first + p in c) for p in points]
    name, *rest = folder.relative_to(out / part).parts
    rows.append([name, ', '.join(rest), *values, str(len(found))])
  table(rows)
  columns = sorted({parts[1:] for parts in arms})
  figure, all_axes = plt.subplots(
    1, len(columns), figsize=(4.2 * len(columns), 4.5), sharey=True, squeeze=False
  )
  for axes, column in zip(all_axes[0], columns, strict=True):
    for parts, line in arms.items():
      if parts[1:] == column:
        axes.plot([s - growth.BASE_STEPS for s in line], line.values(), label=parts[0], lw=1.2)
    axes.set(xlabel='steps after growth', title=', '.join(column))
    axes.grid(alpha=0.3)
  all_axes[0][0].set_ylabel('bits per byte, held out')
  low = min(min(line.values()) for line in arms.values() if line)
  all_axes[0][0].set_ylim(low - 0.05, low + 1.0)
  finish(all_axes[0][-1], figure, pictures / f'growth_{part}.png')


def forgetting(out: Path) -> None:
  """Report the loss on both texts after training on the second."""
  print('## forgetting\n')
  before = spread(c[max(c)] for c in curves(out / 'base/tokenformer'))
  rows = [['old tokens', 'new text, after', 'old text, before', 'old text, after', 'seeds']]
  for folder in sorted((out / 'forgetting').iterdir()):
    if folder.name.endswith(' on the old text'):
      continue
    new = curves(folder)
    old = curves(folder.with_name(f'{folder.name} on the old text'))
    after = spread(c[max(c)] for c in new)
    rows.append([folder.name, after, before, spread(c[min(c)] for c in old), str(len(new))])
  table(rows)


def finish(axes: plt.Axes, figure: plt.Figure, path: Path) -> None:
  """Add legend and grid, and write the file."""
  axes.legend(fontsize=8, frameon=False)
  axes.grid(alpha=0.3)
  figure.tight_layout()
  figure.savefig(path, dpi=120)
  plt.close(figure)


def main() -> None:
  """Report on every part that has runs."""
  out, pictures = directories()
  rates(out)
  if (out / 'scaling').exists():
    scaling(out, pictures)
  for part in ('handover', 'taming'):
    if (out / part).exists():
      handover(out, pictures, part)
  if (out / 'forgetting').exists():
    forgetting(out)


if __name__ == '__main__':
  main()
