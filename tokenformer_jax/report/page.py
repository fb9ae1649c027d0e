"""Build the page: sections of HTML, and the data, the library and the script that draw the charts.

The page is one file, and asks nothing of any other place: its security policy forbids it. The
library and the data are compressed inside it.
"""

import base64
import gzip
import html
import importlib.resources
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tokenformer_jax.config import arguments
from tokenformer_jax.config.arguments import Path
from tokenformer_jax.decoding import trained
from tokenformer_jax.decoding.trained import Trained
from tokenformer_jax.errors import UserError, check_installed
from tokenformer_jax.parallel import messages
from tokenformer_jax.report import (
  MODELS,
  charts,
  differences,
  lineage,
  looks,
  record,
  spending,
  tables,
)
from tokenformer_jax.report.record import Record
from tokenformer_jax.runs import curves
from tokenformer_jax.storage import paths

ENDINGS = ('.html', '.htm')
_SAMPLES = 40  # of a run
_POLICY = (
  "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


class Page:
  """A report. A notebook shows it inline.

  Attributes:
    html: the whole page.
  """

  def __init__(self, content: str):
    """Keep a page of HTML."""
    self.html = content

  def __repr__(self) -> str:
    return f'<Page of {len(self.html) / 1e6:.1f} MB; write(path) saves it>'

  def _repr_html_(self) -> str:
    style = 'width: 100%; height: 900px; border: 1px solid #ddd'
    return f'<iframe srcdoc="{html.escape(self.html)}" style="{style}"></iframe>'

  @arguments.checked
  def write(self, path: Path) -> None:
    """Write the page to a file."""
    paths.check_ending(path, ENDINGS, 'write: path')
    try:
      pathlib.Path(path).write_text(self.html, 'utf-8')
    except OSError as error:
      raise UserError(f'write: path={path} cannot be written ({paths.reason(error)})') from error


def build(
  runs: Sequence[str | paths.Path],
  *,
  models: int = MODELS,
  load: Callable[[str], Trained] | None = None,
) -> Page:
  """Return the report on runs, of which nothing is changed.

  Args:
    runs: work directories; one that is given again is shown once.
    models: look into the models of at most so many runs, the last ones.
    load: loads the model of DIR or DIR@STEP; None: onto all devices.
  """
  check_installed('plotly', 'draws the report', 'report')
  from plotly import offline  # noqa: PLC0415

  by_target, notes = {}, []  # links followed
  for run in map(paths.parse_path, runs):
    if by_target.setdefault(run.resolve(), run) is not run:
      notes.append(f'{run} is given more than once, and shown once')
  directories = [*by_target.values()]
  names = curves.run_names(directories)
  records = [record.read(run, name) for run, name in zip(directories, names, strict=True)]
  notes += [note for one in records for note in one.notes]
  stages = lineage.stages(records)
  flops, times = charts.loss_by_flops(records, lineage.parents(stages)), spending.figure(records)
  samples = _samples(records)
  looked, unseen = looks.look(records, models, load or trained.load)
  notes += unseen
  for note in notes:
    messages.say(note)
  listed = ''.join(f'<li>{html.escape(note)}</li>' for note in notes)
  sections = (  # those without a body are left out
    ('overview', 'Runs', differences.overview(records)),
    ('curves', 'Curves', _CURVES),
    ('flops', 'Loss against FLOPs', _chart('flops') + _FLOPS_NOTE if flops else ''),
    ('lineage', 'Lineage', lineage.table(stages)),
    ('speed', 'Speed', spending.speed_table(records)),
    (
      'times',
      'Where wall time went',
      _chart('times') + spending.time_table(records) if times else '',
    ),
    ('config', 'Differences between the configs', differences.table(records)),
    ('samples', 'Samples', _SAMPLES_BODY if samples else ''),
    ('looks', 'Inside the models', looked),
    ('notes', 'Notes', f'<ul>{listed}</ul>' if notes else ''),
  )
  data = {
    **charts.data(records),
    'samples': samples,
    'figures': {name: one for name, one in (('flops', flops), ('times', times)) if one},
  }
  shown = [section for section in sections if section[-1]]
  return Page(_page(f'Report on {", ".join(names)}', shown, data, offline.get_plotlyjs()))


def _samples(records: Sequence[Record]) -> list[dict[str, Any]]:
  """Return the texts of each run that has any, thinned."""
  samples = []
  for run in records:
    if count := len(run.samples):
      kept = np.unique(np.linspace(0, count - 1, min(count, _SAMPLES)).round().astype(int)).tolist()
      texts = [{'step': run.samples[i]['step'], 'text': run.samples[i]['text']} for i in kept]
      samples.append({'name': run.name, 'texts': texts})
  return samples


def _page(
  title: str, sections: Sequence[tuple[str, str, str]], data: dict[str, Any], library: str
) -> str:
  """Return the whole page, with sections of a name, a title and a body of HTML."""
  files = importlib.resources.files('tokenformer_jax.report')
  style, script = (files.joinpath(f'page.{kind}').read_text('utf-8') for kind in ('css', 'js'))
  content = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(',', ':'))
  links = ''.join(f'<a href="#{name}">{html.escape(title)}</a>' for name, title, _ in sections)
  bodies = '\n'.join(
    f'<section id="{name}"><h2>{html.escape(heading)}</h2>{body}</section>'
    for name, heading, body in sections
  )
  return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{html.escape(title)}</h1><nav>{links}</nav></header>
<p id="problem" hidden></p>
{bodies}
<script type="text/plain" id="library">{_packed(library)}</script>
<script type="text/plain" id="data">{_packed(content)}</script>
<script>
{script}</script>
</body>
</html>
"""


def _packed(text: str) -> str:
  """Return a text compressed, in letters; the same text always gives the same letters."""
  return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _chart(name: str) -> str:
  return f'<div class="chart" id="chart-{name}"></div>'


_CURVES = """
<form class="choices">
<label>figure <select id="curve-figure"></select></label>
<label>against <select id="curve-axis"></select></label>
<label><input type="checkbox" id="curve-log-x"> logarithmic x</label>
<label><input type="checkbox" id="curve-log-y"> logarithmic y</label>
</form>
<div class="chart tall" id="chart-curves"></div>
<p>Lines are on the training data, points on the validation data. Drag to zoom, double-click to
zoom out, click on a run in the legend to hide it.</p>
"""
_FLOPS_NOTE = tables.paragraph(
  'FLOPs count every stage of a model that has grown, each at its size. A run that continues '
  'another one of this page begins on its curve; decays are dashed.'
)
_SAMPLES_BODY = """
<form class="choices">
<label>run <select id="sample-run"></select></label>
<label>step <input type="range" id="sample-step" min="0" value="0"></label>
<output id="sample-at"></output>
</form>
<pre id="sample-text"></pre>
"""
