"""Show the runs at a glance, and the keys in which their configs differ."""

from collections.abc import Sequence

from tokenformer_jax.config import section
from tokenformer_jax.model import models
from tokenformer_jax.report import charts, tables
from tokenformer_jax.report.record import Record


def overview(records: Sequence[Record]) -> str:
  """Return a table of HTML with the size, length and losses of each run."""
  rows = []
  for run in records:
    config, last = run.config, run.last_step
    losses, trained = run.values('eval/loss'), run.values('train/loss')
    bits = charts.last_value(run.lines, 'eval/bits_per_byte', run.last_step)
    samples = 'tokens' if 'tokens' in run.axes else 'images'
    rows.append(
      {
        'run': run.name,
        'model': _shape(run),
        'data': config.data.source if config else tables.ABSENT,
        'parameters': tables.amount(models.define(config.model).count if config else None),
        'steps': f'{last:,} of {config.train.steps:,}' if config else f'{last:,}',
        'seen': f'{tables.amount(run.at(samples, last))} {samples}' if config else tables.ABSENT,
        'FLOPs': tables.flops(run.at('flops', last)),
        'bits per byte': tables.loss(bits),
        'training loss': tables.loss(trained[-1] if trained else None),
        'validation loss': tables.loss(charts.last_value(run.lines, 'eval/loss', last)),
        'lowest validation loss': tables.loss(min(losses) if losses else None),
      }
    )
  return tables.table_of_dicts(rows, texts=3)


def table(records: Sequence[Record]) -> str:
  """Return a table of HTML with the keys whose values differ, '' if there is nothing to compare."""
  configs = [
    (run.name, {leaf.path: leaf.value for leaf in section.leaves(run.config)})
    for run in records
    if run.config
  ]
  if len(configs) < 2:
    return ''
  paths = dict.fromkeys(path for _, config in configs for path in config)
  rows = [
    (path, *(_shown(config, path) for _, config in configs))
    for path in paths
    if len({_shown(config, path) for _, config in configs}) > 1
  ]
  if not rows:
    return tables.paragraph('The configs are equal.')
  return tables.table(('key', *(name for name, _ in configs)), rows, texts=1 + len(configs))


def _shown(config: dict[str, object], path: str) -> str:
  if path not in config:
    return tables.ABSENT
  value = config[path]
  if isinstance(value, tuple):
    return ', '.join(map(str, value)) or tables.ABSENT
  return str(value).lower() if isinstance(value, bool) else str(value) or tables.ABSENT


def _shape(run: Record) -> str:
  if run.config is None:
    return tables.ABSENT
  model = run.config.model
  kind = 'LM' if model.kind == 'lm' else 'ViT'
  return f'{kind}, {model.depth} layers × {model.width}'
