"""Show how fast runs were, and what their wall time went to."""

from collections.abc import Sequence

import numpy as np

from tokenformer_jax.report import record, tables
from tokenformer_jax.report.charts import Figure
from tokenformer_jax.report.record import LOST, Record
from tokenformer_jax.runs import wall_time

_KINDS = {  # name and colour, in the order of a bar
  'training': ('training', '#009E73'),
  'data': ('waiting for data', '#E69F00'),
  'evaluation': ('evaluation', '#56B4E9'),
  'saving': ('saving', '#0072B2'),
  'compiling': ('compilation', '#CC79A7'),
  'starting': ('starting', '#999999'),
  LOST: ('lost to restarts', '#D55E00'),
}
_GOODPUT = (
  'Goodput is the share of training in the time of all processes. Waiting for data is a lower '
  'bound of the time that the devices had no batch.'
)
_RESTARTS = (
  'Lost to restarts is the time of steps that a crash undid and that were made again; pauses lie '
  'between the processes of a run, and are not in the bars.'
)


def figure(records: Sequence[Record]) -> Figure | None:
  """Return a bar for each run with the time of each kind; None if no run recorded its times."""
  runs = [(run.name, run.sessions) for run in records if run.times]
  if not runs:
    return None
  assert {*_KINDS} == {*wall_time.KINDS, LOST}
  longest = max(sum(spent.seconds.values()) for _, spent in runs)
  unit, name = next(
    (unit, name)
    for unit, name in ((3600, 'hours'), (60, 'minutes'), (1, 'seconds'))
    if longest >= 2 * unit or unit == 1
  )
  data = [
    {
      'type': 'bar',
      'orientation': 'h',
      'name': label,
      'y': [run for run, _ in runs],
      'x': [record.digits(spent.seconds[kind] / unit) for _, spent in runs],
      'customdata': [spent.seconds[kind] / (sum(spent.seconds.values()) or 1) for _, spent in runs],
      'marker': {'color': colour},
      'hovertemplate': f'{label}: %{{x:.3g}} {name}, %{{customdata:.1%}}<extra></extra>',
    }
    for kind, (label, colour) in _KINDS.items()
    if any(spent.seconds[kind] for _, spent in runs)
  ]
  return {
    'data': data,
    'layout': {
      'barmode': 'stack',
      'height': 240 + 34 * len(runs),  # room for the legend on a phone
      'xaxis': {'title': {'text': f'{name} of wall time'}},
      'yaxis': {
        'title': {'text': 'run'},
        'autorange': 'reversed',
      },
      'legend': {'orientation': 'h', 'y': 1.02, 'yanchor': 'bottom', 'traceorder': 'normal'},
      'hovermode': 'closest',
    },
  }


def time_table(records: Sequence[Record]) -> str:
  """Return the time of each run as a table of HTML."""
  rows = []
  for run in records:
    if run.times:
      spent = run.sessions
      total = sum(spent.seconds.values())
      rows.append(
        {
          'run': run.name,
          'devices': spent.devices or tables.ABSENT,
          'time of processes': tables.duration(total),
          'goodput': f'{spent.seconds["training"] / total:.1%}' if total else tables.ABSENT,
          'restarts': f'{spent.count - 1}' if spent.count > 1 else tables.ABSENT,
          'lost to restarts': tables.duration(spent.seconds[LOST] if spent.count > 1 else None),
          'pauses': tables.duration(spent.pauses if spent.count > 1 else None),
        }
      )
  is_restarted = any(run.sessions.count > 1 for run in records if run.times)
  notes = [_GOODPUT, _RESTARTS] if is_restarted else [_GOODPUT]
  return tables.table_of_dicts(rows, texts=2) + tables.paragraph(' '.join(notes))


def speed_table(records: Sequence[Record]) -> str:
  """Return the median speed of each run as a table of HTML, '' if no run has any."""
  columns = {
    'perf/step_seconds': ('seconds a step', tables.digits),
    'perf/tokens_per_second': ('tokens per second', '{:,.0f}'.format),
    'perf/images_per_second': ('images per second', '{:,.0f}'.format),
    'perf/model_tflops_per_second': ('model TFLOP/s', tables.digits),
    'perf/mfu': ('MFU', '{:.1%}'.format),
    'perf/host_peak_gib': ('peak GiB of the host', tables.digits),
    'perf/device_peak_gib': ('peak GiB of a device', tables.digits),
  }

  def cell(run: Record, name: str) -> str:
    if not (values := run.values(name)):
      return tables.ABSENT
    summary = max if name.endswith('peak_gib') else np.median
    return columns[name][1](float(summary(values)))

  rows = [(run.name, *(cell(run, name) for name in columns)) for run in records]
  if all(one == tables.ABSENT for _, *speeds in rows for one in speeds):
    return ''
  note = tables.paragraph('Medians over the log points; the curves have every one of them.')
  return tables.table(('run', *(head for head, _ in columns.values())), rows) + note
