"""Draw the loss of each size of a family against the FLOPs that it needs."""

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenformer_jax import figures
from tokenformer_jax.runs.curves import COLOURS
from tokenformer_jax.storage import paths

if TYPE_CHECKING:
  from matplotlib.figure import Figure

FILE = 'family.png'


def draw(content: Mapping[str, Any]) -> 'Figure':
  """Return the figure of all ways in a family's JSON file, with a line for each.

  Raises:
    UserError: matplotlib is missing.
  """
  figure = figures.make()
  axes = figure.add_subplot()
  for colour, (way, found) in zip(COLOURS, content['ways'].items(), strict=False):
    spent = [one['flops_alone'] for one in found['sizes']]
    losses = [one['loss'] for one in found['sizes']]
    label = f'{way}: {found["flops"]:.3g} FLOPs in all'
    axes.plot(spent, losses, 'o-', color=colour, linewidth=1.6, markersize=4, label=label)
    for one in found['sizes']:
      place = (one['flops_alone'], one['loss'])
      axes.annotate(
        f'×{one["size"]:g}', place, xytext=(4, 4), textcoords='offset points', fontsize=8
      )
  axes.set_xscale('log')
  figures.use_log_losses(axes)
  figures.finish(
    axes, 'training FLOPs, if this size alone is wanted', 'loss on held-out text (nats per token)'
  )
  axes.legend(frameon=False, fontsize=8)
  return figure


def write(content: Mapping[str, Any], path: paths.Path) -> None:
  """Draw the figure to a .png file.

  Raises:
    UserError: matplotlib is missing.
  """
  image = io.BytesIO()
  draw(content).savefig(image)
  path.write_bytes(image.getvalue())
