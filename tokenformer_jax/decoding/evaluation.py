"""Measure a trained language model on lm-evaluation-harness and on any text; render tables."""

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tqdm

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import DataConfig, ModelConfig, token_counts
from tokenformer_jax.data.chat_rows import conversation
from tokenformer_jax.data.sources import open_source
from tokenformer_jax.data.text import CHAT
from tokenformer_jax.decoding import perplexity
from tokenformer_jax.decoding.chats import find_template
from tokenformer_jax.decoding.score import Scorer
from tokenformer_jax.decoding.trained import Trained
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.parallel import hosts, messages
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.storage import paths

# Table 1 of arXiv 2410.23168: task, metric, and the factor from the harness to the table.
_COLUMNS = {
  'LAMBADA ppl': ('lambada_openai', 'perplexity', 1),
  'LAMBADA': ('lambada_openai', 'acc', 100),
  'HellaSwag': ('hellaswag', 'acc_norm', 100),
  'PIQA': ('piqa', 'acc', 100),
  'ARC-E': ('arc_easy', 'acc', 100),
  'ARC-C': ('arc_challenge', 'acc_norm', 100),
  'WinoGrande': ('winogrande', 'acc', 100),
}
_AVERAGE = 'average'  # the mean of all accuracies

# The figures of the paper, by layers and width of the model.
_PUBLISHED = {
  (12, 768): ('TokenFormer-150M', (16.38, 45.0, 35.5, 64.9, 47.3, 24.9, 50.4, 44.7)),
  (24, 1024): ('TokenFormer-450M', (7.69, 57.3, 47.5, 69.5, 56.2, 26.7, 54.6, 52.0)),
  (32, 1280): ('TokenFormer-900M', (5.46, 64.0, 55.3, 72.4, 59.9, 30.6, 56.4, 56.4)),
  (40, 1536): ('TokenFormer-1.5B', (5.24, 64.7, 60.0, 74.8, 64.8, 32.0, 59.7, 59.3)),
}


def published(model: ModelConfig) -> tuple[str, dict[str, float]] | None:
  """Return name and published figures of the released model of exactly this size, or None."""
  counts = {'qkv': model.width, 'proj': model.width, 'ffn': 4 * model.width}
  if (model.depth, model.width) not in _PUBLISHED or token_counts(model) != counts:
    return None
  name, figures = _PUBLISHED[model.depth, model.width]
  return name, dict(zip([*_COLUMNS, _AVERAGE], figures, strict=True))


def table_1(tasks: Mapping[str, Any]) -> dict[str, float]:
  """Return the columns of the paper's Table 1, and the average if all columns are there.

  `tasks` has results by task, from `harness.evaluate`.
  """
  columns = {}
  for column, (task, metric, factor) in _COLUMNS.items():
    if metric in tasks.get(task, {}).get('metrics', {}):
      columns[column] = factor * tasks[task]['metrics'][metric]['value']
  accuracies = [value for column, value in columns.items() if column != 'LAMBADA ppl']
  if len(columns) == len(_COLUMNS):
    columns[_AVERAGE] = math.fsum(accuracies) / len(accuracies)
  return columns


def import_harness() -> Any:
  """Import and return the module `harness`, which needs lm-evaluation-harness."""
  try:
    from tokenformer_jax.decoding import harness  # noqa: PLC0415 (an extra)
  except ImportError as error:
    raise UserError(
      f'{arg.tasks} needs lm-evaluation-harness ({error}); install it: pip install -e ".[eval]"'
    ) from error
  # The harness warns about every default that a task uses.
  logging.getLogger('lm_eval').setLevel(logging.ERROR)
  return harness


def find_tasks(names: str | Sequence[str], include_path: str | None = None) -> list[Any]:
  """Return tasks of lm-evaluation-harness by one name or several, for `evaluate`.

  `include_path` is a folder with tasks of your own. Without a name the harness is not imported.
  """
  names = [names] if isinstance(names, str) else names
  return import_harness().find_tasks(names, include_path) if names else []


def make_scorer(
  model: Trained, max_length: int | None = None, batch_size: int | None = None
) -> Scorer:
  """Return a scorer for rows of a language model; it keeps the programs that it compiles.

  It reads rows with several documents as the training did (`data.documents`).

  `max_length` is the most tokens of input; None: the training's sequence length. `batch_size` is
  the rows of a batch; None: enough rows for several thousand tokens.
  """
  return Scorer(
    model.definition,
    model.params,
    model.mesh,
    max_length=model.context_length(max_length),
    batch_size=batch_size,
    documents=model.config.data.documents,
  )


def evaluate(
  model: Trained,
  scorer: Scorer,
  *,
  documents: Iterable[str] | None = None,
  stride: int | None = None,
  chats: Iterable[str] | None = None,
  tasks: Sequence[Any] = (),
  num_fewshot: int | None = None,
  limit: int | None = None,
) -> dict[str, Any]:
  """Measure a language model on the documents of a text, on conversations, and on tasks.

  The scorer comes from `make_scorer`, `chats` from `open_chats`, `tasks` from `find_tasks`.
  `stride` is the tokens that each window over the text scores; None: a whole window. `num_fewshot`
  is the solved examples before each question; None: the task's own number. `limit` is the samples
  of each task; None: all.

  Returns:
    A report as JSON: source, step, model, dtype, max_length, versions; `text` has the figures of
    `perplexity.Figures`, `chats` those of `perplexity.measure_answers`, `tasks` those of each task
    (see `harness.evaluate`).
  """
  report = {
    'source': model.source,
    'step': model.meta.step,
    'model': config_lib.to_json(model.config.model),
    'dtype': str(model.execution.dtype),
    'max_length': scorer.max_length,
    'versions': checkpoint.package_versions(('tokenformer_jax', 'jax', 'lm_eval')),
  }
  if tasks:
    harness = import_harness()
    adapter = harness.TokenFormerLM(model, scorer)
    report['tasks'] = harness.evaluate(adapter, tasks, num_fewshot, limit)
    report['limit'] = limit
  no_bar = None if hosts.is_first() else True  # None shows the bar on a terminal only.
  if chats is not None:
    template = find_template(model.meta, paths.parse_path(model.source))
    with tqdm.tqdm(desc='answers', disable=no_bar) as bar:
      report['chats'] = perplexity.measure_answers(
        scorer, model.tokenizer, template, chats, bar.update
      )
  if documents is not None:
    with tqdm.tqdm(desc='windows', disable=no_bar) as bar:
      figures = perplexity.measure(scorer, model.tokenizer, documents, stride, bar.update)
    report['text'] = dataclasses.asdict(figures)
  return report


def open_documents(
  texts: str | Iterable[str] | None, data: DataConfig, setting: str = 'texts'
) -> Iterable[str] | None:
  """Return documents, or the documents of a source as in `data.source`; None for None.

  `data` is that of the model's training.
  """
  if not isinstance(texts, str):
    return texts
  return open_source(texts, data.text_field, setting).parted(data.document_separator).documents()


def open_chats(
  chats: str | Iterable[dict[str, Any]] | None, setting: str = 'chats'
) -> Iterable[str] | None:
  """Return the conversations of rows, or of a source; None for None."""
  if chats is None:
    return None
  if isinstance(chats, str):
    return open_source(chats, CHAT, setting).documents()
  return [conversation(row, f'{setting}, row {i},') for i, row in enumerate(chats, start=1)]


def flat_figures(report: Mapping[str, Any]) -> dict[str, float]:
  """Return the figures of a report from `evaluate` by name.

  They are those of `perplexity.Figures` and `perplexity.measure_answers`, `TASK/METRIC` and
  `TASK/METRIC_stderr`.
  """
  figures = {**report.get('text', {}), **report.get('chats', {})}
  for task, result in report.get('tasks', {}).items():
    for name, figure in result['metrics'].items():
      figures[f'{task}/{name}'] = figure['value']
      if figure['stderr'] is not None:
        figures[f'{task}/{name}_stderr'] = figure['stderr']
  return figures


def render(report: Mapping[str, Any], model: ModelConfig) -> str:
  """Return the tables of a report from `evaluate`."""
  blocks = []
  if tasks := report.get('tasks'):
    rows = [('task', 'metric', 'value', '±', 'samples')]
    for task, result in tasks.items():
      for metric, figure in result['metrics'].items():
        error = '' if figure['stderr'] is None else f'{figure["stderr"]:.4f}'
        rows.append((task, metric, f'{figure["value"]:.4f}', error, str(result['samples'])))
    blocks.append(messages.aligned(rows, left=(0, 1)))
    if columns := table_1(tasks):
      blocks.append(_render_table_1(f'{report["source"]}, step {report["step"]}', columns, model))
  for figures in filter(None, map(report.get, ('chats', 'text'))):
    rows = [(key.replace('_', ' '), _number(value)) for key, value in figures.items()]
    blocks.append(messages.aligned(rows))
  return '\n\n'.join(blocks)


def _render_table_1(name: str, columns: Mapping[str, float], model: ModelConfig) -> str:
  rows = [('', *columns), (name, *(f'{value:.2f}' for value in columns.values()))]
  if known := published(model):
    size, figures = known
    rows.append((f'{size}, as published', *(f'{figures[column]:.2f}' for column in columns)))
  return messages.aligned(rows)


def _number(value: Any) -> str:
  return f'{value:,.4f}' if isinstance(value, float) else str(value)
