r"""Make tables and pictures of the runs of `architectures.py`.

  python experiments/architectures_report.py runs/arch docs

Writes architectures_blocks.png, architectures_length.png and architectures_pairs.png into the
directory and prints the tables of docs/architectures.md, as mean ± standard deviation over the
finished seeds; those of even pairs seed by seed. Losses of text are bits per byte on held-out text.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import architectures
import even_pairs
import length_tests
import matplotlib
from trials import directories, spread, table

from tokenformer_jax.runs import metrics

matplotlib.use('Agg')
import matplotlib.pyplot as plt

Curve = dict[int, float]  # step → bits per byte
NATS = 0.6931471805599453  # of a bit; a token is a byte
LEARNED = 0.1  # loss of the answer, in nats, below which a model knows even pairs


def curves(folder: Path) -> list[Curve]:
  """Return the evaluations of all finished seeds under a folder."""
  found = []
  for done in sorted(folder.glob('*/done')):
    lines = [line for line in metrics.read(done.parent) if 'eval/bits_per_byte' in line]
    found.append({line['step']: line['eval/bits_per_byte'] for line in lines})
  return found


def read_all(folder: Path, pattern: str) -> list[Any]:
  """Return the content of all JSON files of a pattern under a folder."""
  return [json.loads(file.read_text()) for file in sorted(folder.glob(pattern))]


def at(curve: Curve, step: float) -> float:
  """Return the loss at a step, linear between evaluations."""
  before = max((s for s in curve if s <= step), default=min(curve))
  after = min((s for s in curve if s >= step), default=max(curve))
  if before == after:
    return curve[before]
  share = (step - before) / (after - before)
  return curve[before] * (1 - share) + curve[after] * share


def mean(found: Sequence[Curve]) -> Curve:
  """Return the mean over seeds, at the steps that all seeds have."""
  steps = set.intersection(*(set(c) for c in found)) if found else set()
  return {step: statistics.mean(c[step] for c in found) for step in sorted(steps)}


def blocks(out: Path, pictures: Path, part: str = 'blocks') -> None:
  """Report the loss of each block by steps and by time."""
  times = json.loads(file.read_text()) if (file := out / 'speed.json').exists() else {}
  found = {name: curves(out / part / name) for name in architectures.BLOCKS}
  found = {name: each for name, each in found.items() if each}
  last = max(max(each[0]) for each in found.values())
  timed = {}  # name → seconds of a step
  if times and part == 'blocks':
    timed = {name: min(run['cpu'] for run in times[name].values()) for name in found}
  fastest = last * min(timed.values(), default=0)
  budget = [f'{fastest:.1f} s of CPU'] if timed else []
  points = [last // 4, last // 2, last]
  rows = [['', *(f'{p} steps' for p in points), *budget, 'seeds']]
  for name, each in found.items():
    losses = [spread(at(c, point) for c in each) for point in points]
    there = [spread(at(c, fastest / timed[name]) for c in each)] if timed else []
    rows.append([name, *losses, *there, str(len(each))])
  print(f'## {part}\n')
  table(rows)
  if not timed:
    return
  remats = architectures.REMATS
  rows = [['', 'parameters', *(f'ms of CPU a step, remat={r}' for r in remats), 'tokens/s']]
  for name, seconds in timed.items():
    first = times[name][remats[0]]
    each = (f'{times[name][remat]["cpu"] * 1e3:.1f}' for remat in remats)
    rows.append([name, f'{first["parameters"]:,}', *each, f'{first["tokens"] / seconds:,.0f}'])
  print('## speed\n')
  table(rows)
  figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
  for name, each in found.items():
    line, style = mean(each), '--' if 'tokens' in name else '-'
    by_step.plot(line.keys(), line.values(), style, label=name, lw=1.3)
    if name in timed:
      by_time.plot([s * timed[name] for s in line], line.values(), style, label=name, lw=1.3)
  by_step.set(xlabel='steps', ylabel='bits per byte, held out')
  by_time.set(xlabel='seconds of CPU')
  by_step.grid(alpha=0.3)
  finish(by_time, figure, pictures / 'architectures_blocks.png')


def rates(out: Path) -> None:
  """Report the last loss of each block by learning rate."""
  folders = {1.0: out / 'blocks'}
  folders |= {f: out / f'rates/{f:.2g}' for f in architectures.RATE_FACTORS}
  rows = [['', *(f'rate × {factor:.2g}' for factor in sorted(folders))]]
  for name in architectures.BLOCKS:
    by_rate = [curves(folders[factor] / name) for factor in sorted(folders)]
    first = [f'{each[0][max(each[0])]:.3f}' if each else '–' for each in by_rate]
    rows.append([name, *first])
  print('## rates, seed 0\n')
  table(rows)


def tested(out: Path) -> Iterator[tuple[str, list[Any]]]:
  """Yield the name and the tests on longer texts of each model."""
  for name in architectures.MODELS:
    folder = out / f'length/{name}'
    for file in ('lengths', *(f'lengths, ReRoPE {clip}' for clip in architectures.CLIPS)):
      if each := read_all(folder, f'*/{file}.json'):
        yield name + file.removeprefix('lengths'), each


def length(out: Path, pictures: Path) -> None:
  """Report loss and accuracy on longer texts."""
  lengths = [str(architectures.LENGTH * times) for times in length_tests.TIMES]
  figure, all_axes = plt.subplots(1, 3, figsize=(13, 4.2))
  sections = (('text', 'loss'), ('text', 'accuracy'), ('repeats', 'loss'), ('repeats', 'accuracy'))
  drawn = {('text', 'loss'): 0, ('repeats', 'loss'): 1, ('repeats', 'accuracy'): 2}
  for kind, figure_name in sections:
    unit = 'bits per byte' if figure_name == 'loss' else 'accuracy, %'
    factor = 1 / NATS if figure_name == 'loss' else 100
    rows = [['', *(f'{n} tokens' for n in lengths), 'seeds']]
    for name, each in tested(out):
      values = [[factor * run[kind][n][figure_name] for run in each] for n in lengths]
      digits = 3 if figure_name == 'loss' else 1
      rows.append([name, *(spread(v, digits) for v in values), str(len(each))])
      if (kind, figure_name) in drawn:
        axes = all_axes[drawn[kind, figure_name]]
        style = ':' if 'ReRoPE' in name else '-'
        means = [statistics.mean(v) for v in values]
        axes.plot([int(n) for n in lengths], means, f'o{style}', ms=3, lw=1.3, label=name)
        axes.set(xlabel='tokens of a text', title=f'{kind}: {unit}', xscale='log')
        axes.set_xticks([int(n) for n in lengths], lengths)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    print(f'## length: {kind}, {unit}\n')
    table(rows)
  all_axes[0].set_ylim(top=5.2)  # room for the legend
  finish(all_axes[0], figure, pictures / 'architectures_length.png')


def pairs(out: Path, pictures: Path) -> None:
  """Report the accuracy of even pairs by length."""
  print('## pairs: accuracy of each seed, %\n')
  lengths = [str(n) for n in even_pairs.TESTS]
  rows = [['', f'loss below {LEARNED} at step', *(f'{n} letters' for n in lengths)]]
  others = [(name, 'accuracy') for name in even_pairs.ARMS if name != 'HWFA']
  figure, axes = plt.subplots(figsize=(8, 4.5))
  for name, field in [('HWFA', 'accuracy'), ('HWFA', 'unscaled'), *others]:
    if each := read_all(out / f'pairs/{name}', '*.json'):
      firsts = [next((s for s, loss in run['losses'] if loss < LEARNED), None) for run in each]
      learned = ', '.join('never' if step is None else str(step) for step in firsts)
      values = [[100 * run[field][n] for run in each] for n in lengths]
      label = name if field == 'accuracy' else 'no length scale'
      # A seed has learned the task or not, so a mean would describe none of them.
      rows.append([label, learned, *(', '.join(f'{value:.0f}' for value in v) for v in values)])
      style, color = ('--' if field == 'unscaled' else '-'), f'C{len(rows) - 2}'
      for seed, line in enumerate(zip(*values, strict=True)):
        text = label if seed == 0 else None
        first = {'lw': 2, 'zorder': 3} if label == 'HWFA' else {'lw': 1}
        axes.plot(
          [int(n) for n in lengths], line, f'o{style}', color=color, ms=3, label=text, **first
        )
  table(rows)
  axes.set(xlabel='letters of a string', ylabel='accuracy, %', xscale='log')
  axes.set_xticks([int(n) for n in lengths], lengths)
  axes.minorticks_off()
  finish(axes, figure, pictures / 'architectures_pairs.png')


def growth(out: Path) -> None:
  """Report the exactness of growth, and the loss after it."""
  head = ['', 'largest difference of logits', 'largest logit', 'before', 'not grown', 'grown']
  rows = [[*head, 'seeds']]
  for name in architectures.GROWN:
    folder = out / 'growth' / name
    exact = read_all(folder / 'exact', '*.json')
    base = curves(folder / 'base' if (folder / 'base').exists() else out / 'blocks' / name)
    arms = [curves(folder / arm) for arm in ('not grown', 'grown')]
    if not (exact and all(arms)):
      continue
    count = min(map(len, arms))
    ends = [spread(c[max(c)] for c in each[:count]) for each in (base, *arms)]
    difference = max(run['difference'] for run in exact)
    largest = max(run['logit'] for run in exact)
    rows.append([name, f'{difference:.1e}', f'{largest:.1f}', *ends, str(count)])
  print('## growth\n')
  table(rows)


def finish(axes: plt.Axes, figure: plt.Figure, path: Path) -> None:
  """Add legend and grid, and write the file."""
  axes.legend(fontsize=7, frameon=False)
  axes.grid(alpha=0.3)
  figure.tight_layout()
  figure.savefig(path, dpi=120)
  plt.close(figure)


def main() -> None:
  """Report on every part that has runs."""
  out, pictures = directories()
  if (out / 'blocks').exists():
    blocks(out, pictures)
  if (out / 'rates').exists():
    rates(out)
  for part in ('learned', 'depth'):
    if (out / part).exists():
      blocks(out, pictures, part)
  if (out / 'length').exists():
    length(out, pictures)
  if (out / 'pairs').exists():
    pairs(out, pictures)
  if (out / 'growth').exists():
    growth(out)


if __name__ == '__main__':
  main()
