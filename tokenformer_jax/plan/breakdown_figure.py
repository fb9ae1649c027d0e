"""Draw where a training step goes."""

from typing import TYPE_CHECKING

from tokenformer_jax import figures
from tokenformer_jax.plan import breakdown
from tokenformer_jax.plan.estimate import Plan

if TYPE_CHECKING:
  from matplotlib.figure import Figure

_MARKERS = {'matrix': ('|', 'C3'), 'vector': ('|', 'C1'), 'memory': ('|', 'C2')}


def check() -> None:
  """Check, before any long computation, that pictures can be drawn."""
  figures.make()


def draw(plan: Plan) -> 'Figure':
  """Return a bar for each row of the breakdown, with marks at its bounds."""
  rows = list(breakdown.bars(plan.costs))
  drawn = figures.make(figsize=(9, 1.4 + 0.34 * len(rows)))
  axes = drawn.add_subplot()
  places = range(len(rows))
  axes.barh(places, [1e3 * seconds for _, seconds, _ in rows], color='0.8', height=0.7)
  for name, (marker, colour) in _MARKERS.items():
    marks = [(1e3 * bounds[name], place) for place, (_, _, bounds) in enumerate(rows) if bounds]
    x, y = zip(*marks, strict=True)
    label = f'bound by the {name} units' if name != 'memory' else 'bound by HBM'
    axes.plot(x, y, marker, color=colour, markersize=14, markeredgewidth=2.5, label=label)
  whole = plan.costs.ordered_seconds
  for place, (_, seconds, _) in enumerate(rows):
    axes.annotate(
      f'{seconds / whole:.1%}', (1e3 * seconds, place), (6, 0),
      textcoords='offset points', va='center', fontsize=8, color='0.3',
    )  # fmt: skip
  axes.set_yticks(places, [name for name, _, _ in rows])
  axes.invert_yaxis()
  axes.margins(x=0.1)
  how = 'by the schedule' if plan.source == 'cycles' else 'roughly'
  axes.set_xlabel(f'ms of a step on a device, {how}')
  on = plan.topology
  axes.set_title(f'{plan.parameters:,} parameters on {on.name}: {1e3 * whole:,.0f} ms', fontsize=10)
  axes.grid(axis='x', color='0.9', linewidth=0.8)
  axes.set_axisbelow(True)
  axes.spines[['top', 'right']].set_visible(False)
  drawn.legend(frameon=False, fontsize=8, loc='outside lower center', ncols=len(_MARKERS))
  return drawn
