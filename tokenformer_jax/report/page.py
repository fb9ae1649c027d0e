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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tokenformer_jax.config import arguments
from tokenformer_jax.config.arguments import Path
from tokenformer_jax.decoding import trained
from tokenformer_jax.decoding.trained import Trained
from tokenformer_jax.errors import UserError, check_installed, counted
from tokenformer_jax.parallel import messages
from tokenformer_jax.report import charts, differences, lineage, looks, record, spending, tables
from tokenformer_jax.report.record import Record
from tokenformer_jax.runs import curves
from tokenformer_jax.storage import paths

ENDINGS = ('.html', '.htm')
MODELS = 3  # that a report looks into unless more are asked for
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


class _Section(NamedTuple):
  name: str  # of its anchor
  title: str
  body: str  # HTML


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
    load: loads the model of DIR@STEP; None: onto all devices.
  """
  library = _library()
  by_target, notes = {}, []  # links followed
  for run in map(paths.parse_path, runs):
    if by_target.setdefault(run.resolve(), run) is not run:
      notes.append(f'{run} is given more than once, and shown once')
  directories = [*by_target.values()]
  names = curves.run_names(directories)
  records = [record.read(run, name) for run, name in zip(directories, names, strict=True)]
  notes += [note for one in records for note in one.notes]
  looked = _look(records, models, load or trained.load, notes)
  data, sections = _content(records, looked)
  if notes:
    body = ''.join(f'<li>{html.escape(note)}</li>' for note in notes)
    sections.append(_Section('notes', 'Notes', f'<ul>{body}</ul>'))
  return Page(_page(f'Report on {", ".join(names)}', sections, data, library))


def _library() -> str:
  """Return the script of plotly."""
  check_installed('plotly', 'draws the report', 'report')
  from plotly import offline  # noqa: PLC0415

  return offline.get_plotlyjs()


def _look(
  records: Sequence[Record], models: int, load: Callable[[str], Trained], notes: list[str]
) -> dict[int, dict[str, Any]]:
  """Return what the models of some runs show, by the number of the run; add to the notes."""
  looked: dict[int, dict[str, Any]] = {}
  able = [i for i, run in enumerate(records) if looks.can_look(run.meta, run.directory)]
  for i in able[len(able) - min(models, len(able)) :]:
    run, meta = records[i], records[i].meta
    if meta is None:
      continue
    if (count := looks.parameters(meta)) > looks.MOST_PARAMETERS:
      notes.append(
        f'{run.directory} has {tables.amount(count)} parameters, and a report looks into models of '
        f'at most {tables.amount(looks.MOST_PARAMETERS)}; tokenformer inspect shows the others'
      )
      continue
    try:
      try:
        model = load(f'{run.directory}@{meta.step}')
      except UserError:  # A run in progress has written another one, and removed this one.
        model = load(str(run.directory))
      looked[i] = looks.look(model)
    except UserError as error:
      notes.append(str(error))
  if 0 < models < len(able):
    notes.append(
      f'This page looks into the {counted(models, "model")} of the last runs, and has '
      f'{len(able)} with parameter tokens; --models=N takes more.'
    )
  for note in notes:
    messages.say(note)
  return looked


def _content(
  records: Sequence[Record], looked: Mapping[int, dict[str, Any]]
) -> tuple[dict[str, Any], list[_Section]]:
  """Return the data of the charts, and the sections that have something to show."""
  stages = lineage.stages(records)
  tables_of_runs = [charts.tables(run, len(records)) for run in records]
  is_of_images = all(run.config and run.config.model.kind != 'lm' for run in records)
  figures = {
    'flops': charts.loss_by_flops(records, lineage.parents(stages)),
    'lineage': lineage.figure(stages),
    'times': spending.figure(records),
  }
  data: dict[str, Any] = {
    'runs': [
      {'name': run.name, 'colour': charts.colour(i), 'tables': tables_of_runs[i]}
      for i, run in enumerate(records)
    ],
    'axes': charts.AXES,
    'flops_axis': charts.FLOPS_AXIS,
    'choices': charts.choices(
      tables_of_runs, 'image' if is_of_images else 'token', charts.main_figure(records)
    ),
    'samples': _samples(records),
  }
  sections = [
    _Section('overview', 'Runs', differences.overview(records)),
    _Section('curves', 'Curves', _CURVES),
  ]
  if figures['flops']:
    sections.append(_Section('flops', 'Loss against FLOPs', _chart('flops') + _FLOPS_NOTE))
  if figures['lineage']:
    body = _chart('lineage') + lineage.table(stages)
    sections.append(_Section('lineage', 'Lineage', body))
  sections += _costs(records, bool(figures['times']))
  if compared := differences.table(records):
    sections.append(_Section('config', 'Differences between the configs', compared))
  if data['samples']:
    sections.append(_Section('samples', 'Samples', _SAMPLES_BODY))
  sections += _looks(records, looked, figures)
  data['figures'] = {name: figure for name, figure in figures.items() if figure}
  return data, sections


def _costs(records: Sequence[Record], has_times: bool) -> list[_Section]:
  """Return the sections about speed and wall time."""
  sections = []
  if speeds := spending.speed_table(records):
    note = tables.paragraph('Medians over the log points; the curves have every one of them.')
    sections.append(_Section('speed', 'Speed', speeds + note))
  if has_times:
    body = _chart('times') + spending.time_table(records) + tables.paragraph(spending.DEFINITIONS)
    sections.append(_Section('times', 'Where wall time went', body))
  return sections


def _looks(
  records: Sequence[Record], looked: Mapping[int, dict[str, Any]], figures: dict[str, Any]
) -> list[_Section]:
  """Return the sections about usage and experts, and add their figures."""
  usage, load = '', ''
  for i, look in looked.items():
    heading = html.escape(f'{records[i].name}, step {look["step"]:,}')
    if look.get('usage'):
      usage += f'<h3>{heading}, on {look["measured"]:,} tokens of {look["text"]}</h3>'
      for number, (title, figure) in enumerate(looks.usage_figures(look['usage']).items()):
        name = f'usage-{i}-{number}'
        figures[name] = figure
        usage += f'<h4>{html.escape(title)}</h4>{_chart(name)}'
    if look.get('load'):
      figures[f'load-{i}'] = looks.load_figure(look['load'])
      load += f'<h3>{heading}</h3><h4>{_LOAD_TITLE}</h4>{_chart(f"load-{i}")}'
  sections = []
  if usage:
    body = usage + tables.paragraph(_USAGE_NOTE)
    sections.append(_Section('usage', 'Usage of parameter tokens', body))
  if load:
    sections.append(_Section('load', 'Load of experts', load))
  return sections


def _samples(records: Sequence[Record]) -> list[dict[str, Any]]:
  """Return the texts of each run that has any, thinned."""
  samples = []
  for run in records:
    kept = [run.samples[i] for i in record.spread(len(run.samples), _SAMPLES)]
    if kept:
      texts = [{'step': one['step'], 'text': one['text']} for one in kept]
      samples.append({'name': run.name, 'texts': texts})
  return samples


def _page(title: str, sections: Sequence[_Section], data: dict[str, Any], library: str) -> str:
  """Return the whole page."""
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
<p>Dashed lines with points are on the validation data. Drag to zoom, double-click to zoom out,
click on a run in the legend to hide it.</p>
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
_LOAD_TITLE = 'Tokens of an expert, as a multiple of the even load'
_USAGE_NOTE = (
  'A token that contributes less than 1/100 of the mean of its projection, |weight| · ‖value‖ over '
  'the text, is not in use. The contribution of a token is relative to that mean: a group at 1 '
  'contributes in proportion to its size. Query 2 is the second group of the projection query.'
)
