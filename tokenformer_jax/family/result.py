"""The figures of a family: sizes, tokens, FLOPs and losses; its table, JSON file and picture."""

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenformer_jax import figures
from tokenformer_jax.errors import UserError
from tokenformer_jax.family import make
from tokenformer_jax.family.jobs import Family, Job, needed
from tokenformer_jax.parallel.messages import aligned
from tokenformer_jax.runs.curves import COLOURS
from tokenformer_jax.storage import paths

if TYPE_CHECKING:
  from matplotlib.figure import Figure

FILE, PICTURE = 'family.json', 'family.png'


@dataclasses.dataclass(frozen=True)
class Member:
  """One size of a finished family."""

  size: float  # the factor
  run: str  # its work directory, below that of the family
  parameters: int
  tokens: int  # those that its own run has seen; of a shrunken model not those of the teacher
  flops: float  # of the runs of this size; those of a family add up
  flops_alone: float  # of all runs that this size needs
  loss: float  # on held-out text, in nats a token


def members(jobs: Sequence[Job], out: str) -> list[Member]:
  """Return the sizes of a family whose jobs are all finished, in rising order."""
  sizes = []
  for job in jobs:
    if not job.final:
      continue
    if (loss := make.loss(job, out)) is None:
      raise UserError(
        f'the last loss of {out}/{job.name} is not finite; lower config.optim.learning_rate, and '
        'choose another --out'
      )
    own = sum(other.flops for other in jobs if other.factor == job.factor)
    alone = sum(other.flops for other in needed(jobs, job.factor))
    parameters = job.size.parameters
    sizes.append(Member(job.factor, job.name, parameters, job.tokens, own, alone, loss))
  return sorted(sizes, key=lambda member: member.size)


def table(sizes: Sequence[Member]) -> str:
  """Return the sizes as a table."""
  rows = [('size', 'run', 'parameters', 'tokens', 'FLOPs', 'FLOPs alone', 'loss')]
  for one in sizes:
    counts = f'{one.parameters:,}', f'{one.tokens:,}'
    spent = f'{one.flops:.3g}', f'{one.flops_alone:.3g}'
    rows.append((f'{one.size:g}', one.run, *counts, *spent, f'{one.loss:.4f}'))
  return aligned(rows, left=(1,))


def totals(jobs: Sequence[Job], family: Family, apart: float) -> str:
  """Return the FLOPs of a family in all, as a share of those of its sizes apart."""
  spent = sum(job.flops for job in jobs)
  text = f'{len(family.sizes)} sizes by {family.method}: {spent:.3g} FLOPs'
  return text if family.method == 'apart' else f'{text}, {spent / apart:.1%} of {apart:.3g} apart'


def read(out: str, family: Family) -> dict[str, Any]:
  """Return the content of the JSON file in `out`; that of a new one if there is none."""
  path = paths.parse_path(out) / FILE
  new = {'sizes': list(family.sizes), 'tokens': family.tokens, 'scale': family.scale}
  if not paths.exists(path):
    return {**new, 'methods': {}}
  try:
    content = json.loads(path.read_text())
    differing = [name for name in new if content[name] != new[name]]
    content['methods'].values()
  except (ValueError, TypeError, AttributeError, KeyError) as error:
    raise UserError(
      f'{path} is not a file that this command wrote; move it away, or choose another --out'
    ) from error
  for name in differing:
    raise UserError(
      f'{path} is of another family: {name} is {content[name]} there and {new[name]} here; choose '
      'another --out'
    )
  return content


def write(
  out: str, family: Family, apart: float, jobs: Sequence[Job], sizes: Sequence[Member]
) -> dict[str, Any]:
  """Add a method to the JSON file in `out`, and return all that it has."""
  content = read(out, family)
  settings = {
    name: list(value) if isinstance(value, tuple | list) else value
    for name, value in dataclasses.asdict(family).items()
    if name not in (*content, 'method')
  }
  content['methods'][family.method] = {
    'flops': sum(job.flops for job in jobs),
    'flops_apart': apart,
    'settings': settings,
    'sizes': [dataclasses.asdict(one) for one in sizes],
  }
  paths.replace(paths.parse_path(out) / FILE, json.dumps(content, indent=2) + '\n')
  return content


def draw(content: Mapping[str, Any]) -> 'Figure':
  """Return the picture of all methods in a family's JSON file, with a line for each."""
  figure = figures.make()
  axes = figure.add_subplot()
  for colour, (method, one) in zip(COLOURS, content['methods'].items(), strict=False):
    spent = [size['flops_alone'] for size in one['sizes']]
    losses = [size['loss'] for size in one['sizes']]
    label = f'{method}: {one["flops"]:.3g} FLOPs in all'
    axes.plot(spent, losses, 'o-', color=colour, linewidth=1.6, markersize=4, label=label)
    style = {'xytext': (4, 4), 'textcoords': 'offset points', 'fontsize': 8}
    for size, x, y in zip(one['sizes'], spent, losses, strict=True):
      axes.annotate(f'×{size["size"]:g}', (x, y), **style)
  axes.set_xscale('log')
  figures.use_log_losses(axes)
  x_label = 'training FLOPs, if this size alone is wanted'
  figures.finish(axes, x_label, 'loss on held-out text (nats per token)')
  axes.legend(frameon=False, fontsize=8)
  return figure


def write_picture(content: Mapping[str, Any], out: str) -> None:
  """Write the picture into `out`."""
  image = io.BytesIO()
  draw(content).savefig(image)
  (paths.parse_path(out) / PICTURE).write_bytes(image.getvalue())
