r"""Make tables and pictures of the runs of `growth.py`.

  python experiments/growth_report.py runs/growth runs

Writes growth_saved.png and growth_handover.png into the directory and prints all tables; a part of
them is in docs/growth_trials.md. Losses are bits per byte on held-out text, as mean ± standard
deviation over the finished seeds.
"""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import elastic
import forgetting
import growth
import matplotlib
import numpy as np
from growth import ARMS, FACTORS, POINTS, SCALES, SCRATCH, SCRATCH_BUDGETS, Arm, Plan, Size
from trials import directories, spread, table

from tokenformer_jax.runs import metrics

matplotlib.use('Agg')
import matplotlib.pyplot as plt

Losses = dict[int, float]  # by seed

_GAINS = ('bits a byte', 'saves', 'saves, given small')
_TABLES = (('tiny', 'small'), ('large',))  # scales beside each other in a table
# What the picture shows: models from scratch of four times the size, and arms.
_SCRATCH = {
  'scratch': 'k-o',
  'scratch, tokens and depth': 'k:^',
  'scratch, transformer': 'k--s',
}
_DRAWN = (
  'no growth',
  'group',
  'tokens and depth, copies',
  'tokens and depth, copies at 25%',
  'zero_keys',
  'as released',
  'net2net',
)


def losses(folder: Path, runs: str) -> dict[float, Losses]:
  """Return the last loss of each finished seed by the factor of the rate.

  Args:
    folder: the folder of an arm.
    runs: the pattern of its runs' folders below FACTOR/SEED.
  """
  found: dict[float, Losses] = {}
  for done in sorted(folder.glob(f'*/*/{runs}done')):
    factor, seed = done.relative_to(folder).parts[:2]
    found.setdefault(float(factor), {})[int(seed)] = growth.final_loss(done.parent)
  return found


def best(found: dict[float, Losses]) -> tuple[float, Losses]:
  """Return the factor with the least loss at seed 0, and the losses there."""
  factor = min(found, key=lambda rate: found[rate].get(0, math.inf))
  return factor, found[factor]


def rates(plan: Plan) -> None:
  """Print the losses of the small models by rate."""
  rates = plan.scale.rates
  rows = [['rate', *(f'{rate:g}' for rate in rates)]]
  for folder in sorted((plan.out / 'rates').iterdir()):
    factor = growth.KINDS[folder.name].rate
    found = [folder / f'{rate * factor:g}' for rate in rates]
    last = [f'{growth.final_loss(run):.3f}' if (run / 'done').exists() else '' for run in found]
    rows.append([folder.name if factor == 1 else f'{folder.name}, × {factor:g}', *last])
  table(rows)


def scratch_curve(plan: Plan, name: str) -> list[tuple[float, float]]:
  """Return FLOPs and mean loss of a model from scratch at each budget."""
  arm, curve = SCRATCH[name], []
  for budget in SCRATCH_BUDGETS:
    found = losses(plan.out / f'scratch/{name}/{budget:g}', '')
    if found:
      curve.append((budget * plan.budget(arm.kind), statistics.mean(best(found)[1].values())))
  return curve


def needed(curve: list[tuple[float, float]], loss: float) -> float | None:
  """Return the FLOPs at which a curve reaches a loss, by its logarithm between points; or None."""
  for (x0, y0), (x1, y1) in itertools.pairwise(curve):
    if y1 <= loss <= y0:
      part = (y0 - loss) / (y0 - y1)
      return math.exp(math.log(x0) + part * (math.log(x1) - math.log(x0)))
  return None


def saved(curve: list[tuple[float, float]], budget: float, loss: float) -> str:
  """Return how much of the FLOPs from scratch an arm saves."""
  if not curve:
    return ''
  flops = needed(curve, loss)
  if flops is None:
    end, sign = (curve[-1], '> ') if curve[-1][1] > loss else (curve[0], '< ')
    return sign + percent(1 - budget / end[0])
  return percent(1 - budget / flops)


def percent(share: float, digits: int = 0, sign: str = '') -> str:
  """Format a share as the docs do; `sign='+'` gives what rises a sign as well."""
  rounded = round(100 * share, digits) or 0.0
  return f'{rounded:{sign if rounded else ""}.{digits}f} %'.replace('-', '−')


# Of each kind of model, the arm that does not grow, and one whose growth is exact.
_OF_KIND = {
  'tokenformer': ('no growth', 'group'),
  'transformer': ('transformer, no growth', 'transformer, depth, copies'),
  **{name: (f'{name}, no growth', f'{name}, group') for name in ('muon', 'adafactor', 'lion')},
}
Curve = list[tuple[float, float]]  # FLOPs since the growth, and bits per byte in training


def training_curves(plan: Plan, name: str, arm: Arm) -> tuple[list[float], list[Curve]]:
  """Return what the last stage of an arm logged at its best rate.

  Returns:
    For each seed the loss on held-out text at the growth; and the training losses, each at the
    middle of the steps that it is a mean over.
  """
  folder = plan.out / 'arms' / name
  factor, _ = best(losses(folder, '0/'))
  per_step, at_growth, curves = plan.step_flops(arm.kind, arm.size), [], []
  for done in sorted(folder.glob(f'{factor:.3g}/*/0/done')):
    lines = list(metrics.read(done.parent))
    at_growth.append(next(x['eval/bits_per_byte'] for x in lines if 'eval/bits_per_byte' in x))
    start = before = lines[0]['step']
    curve = []
    for line in lines:
      if 'train/bits_per_byte' in line:
        middle = (line['step'] + before) / 2 - start
        curve.append((middle * per_step, line['train/bits_per_byte']))
        before = line['step']
    curves.append(curve)
  return at_growth, curves


def ahead(plan: Plan, name: str, arm: Arm) -> tuple[str, str]:
  """Return the jump of the loss at growth, and after how many steps an arm passes no growth.

  The loss before growth is that after an exact one.
  """
  if arm.kind not in _OF_KIND or arm.stages or arm.part != 1:
    return '', ''
  base, exact = _OF_KIND[arm.kind]
  if name == base or not all(losses(plan.out / 'arms' / arm, '0/') for arm in (base, name)):
    return '', ''
  _, without = training_curves(plan, base, ARMS[base])
  after, curves = training_curves(plan, name, arm)
  jump = ''
  if losses(plan.out / 'arms' / exact, '0/'):
    before, _ = training_curves(plan, exact, ARMS[exact])
    pairs = zip(before, after, strict=False)
    jump = percent(statistics.mean(new / old - 1 for old, new in pairs), 1, '+')
  own, other = _mean(curves), _mean(without)
  passed = (x for x, y in own if y < np.interp(x, *zip(*other, strict=True)))
  first = next(passed, None)
  return jump, 'never' if first is None else f'{first / plan.step_flops(arm.kind, arm.size):,.0f}'


def _mean(curves: list[Curve]) -> Curve:
  """Return the mean of curves with the same FLOPs."""
  return [
    (points[0][0], statistics.mean(y for _, y in points)) for points in zip(*curves, strict=False)
  ]


def arm_losses(plan: Plan, name: str, arm: Arm) -> dict[float, Losses]:
  """Return the last loss of each finished seed of an arm by the factor of the rate."""
  return losses(plan.out / 'arms' / name, f'{max(0, len(arm.stages) - 1)}/')


def gains(plan: Plan, name: str, arm: Arm) -> tuple[str, str, str]:
  """Return the loss of an arm, and the FLOPs that it saves: in all, and after the small model."""
  found = arm_losses(plan, name, arm)
  if not found:
    return '', '', ''
  values = best(found)[1].values()
  # From scratch at the size that the arm ends with; what does not grow, at four times the tokens.
  size = Size(4) if arm.size in (Size(), Size(2), Size(8)) else arm.size
  references = [of for of, other in SCRATCH.items() if (other.kind, other.size) == (arm.kind, size)]
  curve = scratch_curve(plan, references[0]) if references else []
  loss, budget = statistics.mean(values), arm.part * plan.budget(arm.kind)
  point = arm.stages[0][0] if arm.stages else growth.POINT
  before = point * plan.scale.steps * plan.step_flops(arm.kind, Size())
  return cell(values), saved(curve, budget, loss), saved(curve, budget - before, loss)


def cell(values: Collection[float]) -> str:
  """Format losses as mean ± standard deviation, or say that there is one seed only."""
  return spread(values) + ' (1 seed)' * (len(values) == 1)


def arms(plan: Plan) -> None:
  """Print each rate that arms and models from scratch tried, at seed 0."""
  rows = [['', *(f'rate × {factor:g}' for factor in FACTORS), 'all seeds', 'seeds']]

  def add(name: str, found: dict[float, Losses]) -> None:
    tries = [f'{found[f][0]:.3f}' if 0 in found.get(f, {}) else '' for f in map(shown, FACTORS)]
    values = best(found)[1].values()
    rows.append([name, *tries, spread(values), str(len(values))])

  for name, arm in {**ARMS, **POINTS}.items():
    if found := arm_losses(plan, name, arm):
      add(name, found)
  for name in SCRATCH:
    for budget in SCRATCH_BUDGETS:
      if found := losses(plan.out / f'scratch/{name}/{budget:g}', ''):
        add(f'{name}, {budget:g} budgets', found)
  table(rows)


def compare(
  plans: Mapping[str, Plan],
  all_: Mapping[str, Arm],
  heads: Sequence[str],
  cells: Callable[[Plan, str, Arm], Sequence[str]],
) -> None:
  """Print arms with the scales beside each other.

  Args:
    plans: the scales, by name.
    all_: the arms, by name.
    heads: the columns of each scale.
    cells: returns what an arm has in these columns; empty texts without a finished run.
  """
  rows = [['', *(f'{scale}: {head}' for scale in plans for head in heads)]]
  for name, arm in all_.items():
    row = [text for plan in plans.values() for text in cells(plan, name, arm)]
    if any(row):
      rows.append([name, *row])
  table(rows)


def head_start(plans: Mapping[str, Plan]) -> None:
  """Print by how many budgets the small model is ahead of the large ones from scratch.

  A growth that keeps all that was learned, and gains nothing more, is ahead by as much.
  """
  rows = [['ahead of, in budgets', *(f'{scale}: {part:g}' for scale in plans for part in (0.5, 1))]]
  for name in ('scratch', 'scratch, depth', 'scratch, tokens and depth'):
    cells = []
    for plan in plans.values():
      for part, arm in ((0.5, 'no growth, half the budget'), (1, 'no growth')):
        found = losses(plan.out / 'arms' / arm, '0/')
        loss = statistics.mean(best(found)[1].values()) if found else math.inf
        flops = needed(scratch_curve(plan, name), loss)
        budget = plan.budget('tokenformer')
        cells.append(f'{flops / budget - part:+.2f}'.replace('-', '−') if flops else '')
    rows.append([name, *cells])
  table(rows)


def compare_scratch(plans: Mapping[str, Plan]) -> None:
  """Print models from scratch with the scales beside each other."""
  rows = [['from scratch', *(f'{scale}: {part:g}' for scale in plans for part in SCRATCH_BUDGETS)]]
  for name in SCRATCH:
    cells = []
    for plan in plans.values():
      for part in SCRATCH_BUDGETS:
        found = losses(plan.out / f'scratch/{name}/{part:g}', '')
        cells.append(cell(best(found)[1].values()) if found else '')
    if any(cells):
      rows.append([name, *cells])
  table(rows)


def shown(factor: float) -> float:
  """Return a factor as the name of a folder has it."""
  return float(f'{factor:.3g}')


def handover(plan: Plan) -> None:
  """Print by how much the loss rises in the 50 steps after growth."""
  rows = [['', *(f'step {step}' for step in range(0, 51, 10)), 'most', 'seeds']]
  warmups = [f'warmups/{growth.GROWN_RATE}-{warmup}' for warmup in growth.WARMUPS]
  defaults = [f'defaults/{name}' for name in growth.DEFAULTS]
  for name in [*(f'handover/{name}' for name in growth.HANDOVER), *warmups, *defaults]:
    found = []
    for done in sorted((plan.out / name).glob('*/done')):
      lines = [line for line in metrics.read(done.parent) if 'eval/bits_per_byte' in line]
      found.append([line['eval/bits_per_byte'] for line in lines])
    if found:
      change = [[value / values[0] - 1 for value in values] for values in found]
      means = [percent(statistics.mean(step), 2, '+') for step in zip(*change, strict=True)]
      most = max(max(values) for values in change)
      rows.append([name.partition('/')[2], *means, percent(most, 2, '+'), str(len(found))])
  table(rows)


def elastic_models(plan: Plan) -> None:
  """Print the loss of each number of groups, beside models of these sizes alone and `shrink`."""
  rows = [['', 'tokens × 1', 'tokens × 2', 'tokens × 4', 'seeds']]
  for rate in elastic.RATES:
    folders = sorted((plan.out / 'arms' / f'elastic {rate:g}').glob('*/*/1'))
    rows += _elastic_rows(f'groups left out in {rate:.0%} of steps', folders, 'sizes.json')
    if not rate:
      rows += _elastic_rows('the same, by `grow shrink`', folders, 'shrunk.json')
  alone = []
  for name in ('no growth', 'group ×2', 'group'):
    found = losses(plan.out / 'arms' / name, '0/')
    alone.append(spread(best(found)[1].values()) if found else '')
  rows.append(['a model for each size', *alone, ''])
  table(rows)


def _elastic_rows(name: str, folders: list[Path], file: str) -> list[list[str]]:
  found = [
    json.loads((folder / file).read_text()) for folder in folders if (folder / file).exists()
  ]
  if not found:
    return []
  columns = [[content[size] for content in found if size in content] for size in ('1', '2', '3')]
  return [[name, *(spread(column) if column else '' for column in columns), str(len(found))]]


def forgotten(plan: Plan) -> None:
  """Print the loss on the old and on the new text after training on the new one."""
  rows = [['old tokens', 'new text', 'old text', 'seeds']]
  for name in forgetting.ARMS:
    values = []
    for folder in (f'forgetting/{name}', f'forgetting/{name} on the old text'):
      done = sorted((plan.out / folder).glob('*/done'))
      values.append([growth.final_loss(file.parent) for file in done])
    if values[0]:
      rows.append([name, *(spread(runs) for runs in values), str(len(values[0]))])
  table(rows)


def picture(plans: Mapping[str, Plan], pictures: Path) -> None:
  """Draw the loss of models from scratch against FLOPs, with the arms at their budget."""
  drawn = {name: plan for name, plan in plans.items() if scratch_curve(plan, 'scratch')}
  if not drawn:
    return
  figure, all_axes = plt.subplots(1, len(drawn), figsize=(5 * len(drawn) + 2.4, 4.6), squeeze=False)
  for axes, (name, plan) in zip(all_axes[0], drawn.items(), strict=True):
    for scratch, style in _SCRATCH.items():
      if curve := scratch_curve(plan, scratch):
        axes.plot(*zip(*curve, strict=True), style, ms=4, label=f'from {scratch}')
    for arm in _DRAWN:
      found = losses(plan.out / 'arms' / arm, '0/')
      if found:
        values = list(best(found)[1].values())
        error = statistics.stdev(values) if len(values) > 1 else 0
        x = plan.budget({**ARMS, **POINTS}[arm].kind)
        axes.errorbar(x, statistics.mean(values), error, fmt='D', ms=5, capsize=3, label=arm)
    layers, width = plan.scale.layers, plan.scale.width
    axes.set(title=f'{name}: {layers} layers × {width}, grown ×4', xlabel='training FLOPs, in all')
    axes.set_xscale('log')
    axes.grid(alpha=0.3, which='both')
  axes.legend(fontsize=8, frameon=False, loc='upper left', bbox_to_anchor=(1.01, 1))
  all_axes[0][0].set_ylabel('bits per byte on held-out text, after the decay')
  figure.tight_layout()
  figure.savefig(pictures / 'growth_saved.png', dpi=120)


def main() -> None:
  """Report on every scale that has runs."""
  out, pictures = directories()
  plans = {
    name: Plan(out / name, scale, (0, 1, 2))
    for name, scale in SCALES.items()
    if (out / name / 'rates').exists()
  }
  for name, plan in plans.items():
    tera = {kind: plan.budget(kind) / 1e12 for kind in ('tokenformer', 'transformer')}
    per_step = (plan.step_flops('tokenformer', Size(size)) for size in (1, 4))
    steps = ' and '.join(f'{plan.budget("tokenformer") / flops:,.0f}' for flops in per_step)
    print(f'## {name}\n\nbudget: {json.dumps(tera)} TFLOP; {steps} steps at ×1 and ×4\n')
    rates(plan)
    arms(plan)
    handover(plan)
    elastic_models(plan)
    forgotten(plan)
  for scales in _TABLES:
    beside = {name: plans[name] for name in scales if name in plans}
    print(f'## {", ".join(beside)}\n')
    compare(beside, ARMS, _GAINS, gains)
    compare_scratch(beside)
    head_start(beside)
    compare(beside, POINTS, _GAINS, gains)
    compare(beside, ARMS, ('jump', 'ahead after'), ahead)
  picture(plans, pictures)


if __name__ == '__main__':
  main()
