r"""Evaluates a trained language model: on tasks of lm-evaluation-harness, and on any text.

  tokenformer evaluate --source=runs/150m \
    --tasks=lambada_openai,hellaswag,piqa,arc_easy,arc_challenge,winogrande
  tokenformer evaluate --source=runs/lm_stdlib --text='files:corpus/**/*.txt'

The first gives the columns of Table 1 of the TokenFormer paper, and needs `lm_eval`
(pip install -e ".[eval]"). The second gives perplexity and bits per byte with the run's own
tokenizer; documents follow each other with an end of document after each, which is predicted too,
and windows go over it, as in training (see `perplexity.windows`).
"""

import dataclasses
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tqdm
from absl import flags

from tokenformer_jax import checkpoint, cli, hosts, perplexity, trained
from tokenformer_jax.config import ModelConfig
from tokenformer_jax.data import text
from tokenformer_jax.errors import UserError
from tokenformer_jax.score import Scorer

# Table 1 (arXiv 2410.23168): a task, its metric, and the factor from the harness to the table.
_COLUMNS = {
  'LAMBADA ppl': ('lambada_openai', 'perplexity', 1),
  'LAMBADA': ('lambada_openai', 'acc', 100),
  'HellaSwag': ('hellaswag', 'acc_norm', 100),
  'PIQA': ('piqa', 'acc', 100),
  'ARC-E': ('arc_easy', 'acc', 100),
  'ARC-C': ('arc_challenge', 'acc_norm', 100),
  'WinoGrande': ('winogrande', 'acc', 100),
}
_AVERAGE = 'average'  # of all accuracies

# What the paper reports, by layers and width of the model.
_PUBLISHED = {
  (12, 768): ('TokenFormer-150M', (16.38, 45.0, 35.5, 64.9, 47.3, 24.9, 50.4, 44.7)),
  (24, 1024): ('TokenFormer-450M', (7.69, 57.3, 47.5, 69.5, 56.2, 26.7, 54.6, 52.0)),
  (32, 1280): ('TokenFormer-900M', (5.46, 64.0, 55.3, 72.4, 59.9, 30.6, 56.4, 56.4)),
  (40, 1536): ('TokenFormer-1.5B', (5.24, 64.7, 60.0, 74.8, 64.8, 32.0, 59.7, 59.3)),
}


def published(model: ModelConfig) -> tuple[str, dict[str, float]] | None:
  """The name and the published figures of the released model of exactly this size, if any."""
  if model.projection != 'pattention' or (model.layers, model.width) not in _PUBLISHED:
    return None
  counts = (model.param_tokens.qkv, model.param_tokens.proj, model.param_tokens.ffn)
  if counts != (model.width, model.width, 4 * model.width):
    return None
  name, figures = _PUBLISHED[model.layers, model.width]
  return name, dict(zip([*_COLUMNS, _AVERAGE], figures, strict=True))


def table_1(tasks: Mapping[str, Any]) -> dict[str, float]:
  """The columns of the paper's Table 1 that the results have; the average if they have all.

  Args:
    tasks: results by task, as `harness.evaluate` gives them.
  """
  found = {}
  for column, (task, metric, factor) in _COLUMNS.items():
    if metric in tasks.get(task, {}).get('metrics', {}):
      found[column] = factor * tasks[task]['metrics'][metric]['value']
  accuracies = [value for column, value in found.items() if column != 'LAMBADA ppl']
  if len(found) == len(_COLUMNS):
    found[_AVERAGE] = math.fsum(accuracies) / len(accuracies)
  return found


def render(report: Mapping[str, Any], model: ModelConfig) -> str:
  """The tables of a report, as it is written to --output."""
  blocks = []
  if tasks := report.get('tasks'):
    rows = [('task', 'metric', 'value', '±', 'samples')]
    for task, result in tasks.items():
      for metric, figure in result['metrics'].items():
        error = '' if figure['stderr'] is None else f'{figure["stderr"]:.4f}'
        rows.append((task, metric, f'{figure["value"]:.4f}', error, str(result['samples'])))
    blocks.append(_aligned(rows, left=2))
    if columns := table_1(tasks):
      blocks.append(_table_1(f'{report["source"]}, step {report["step"]}', columns, model))
  if figures := report.get('text'):
    rows = [(key.replace('_', ' '), _number(value)) for key, value in figures.items()]
    blocks.append(_aligned(rows, left=1))
  return '\n\n'.join(blocks)


def _table_1(name: str, columns: Mapping[str, float], model: ModelConfig) -> str:
  rows = [('', *columns), (name, *(f'{value:.2f}' for value in columns.values()))]
  if known := published(model):
    size, figures = known
    rows.append((f'{size}, as published', *(f'{figures[column]:.2f}' for column in columns)))
  return _aligned(rows, left=1)


def _number(value: Any) -> str:
  return f'{value:,.4f}' if isinstance(value, float) else str(value)


def _aligned(rows: Sequence[Sequence[str]], left: int) -> str:
  """Rows in columns, the first `left` of them aligned on the left and the others on the right."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return '\n'.join(
    '  '.join(
      cell.ljust(width) if i < left else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  )


def define_flags() -> None:
  """Define the command's flags."""
  flags.DEFINE_string('source', None, 'A run: DIR, or DIR@STEP.', required=True)
  flags.DEFINE_list('tasks', [], 'Names of tasks or groups of tasks of lm-evaluation-harness.')
  flags.DEFINE_string('text', '', 'A text: files:GLOB, or another source as in data.source.')
  flags.DEFINE_integer(
    'num_fewshot', None, 'Solved examples before each question (default: as the task says).', 0
  )
  flags.DEFINE_integer('limit', None, 'Only so many samples of each task.', 1)
  flags.DEFINE_string('include_path', None, 'A directory with tasks of your own (YAML).')
  flags.DEFINE_integer(
    'stride', None, 'Tokens that each window over --text scores (default: a whole window).', 1
  )
  flags.DEFINE_integer(
    'max_length', None, 'Tokens of input at most (default: the length of the training).', 1
  )
  flags.DEFINE_integer('batch_size', None, 'Rows of a batch (default: as many as fill one).', 1)
  flags.DEFINE_integer('tokens', 1, 'Devices to split parameter tokens and heads over.', 1)
  flags.DEFINE_string('output', None, 'A JSON file for the results.')


def main(argv: Sequence[str]) -> None:
  """Prints the results, and writes them to --output."""
  del argv
  values, start = flags.FLAGS, time.monotonic()
  if not (values.tasks or values.text):
    raise UserError('nothing to evaluate on; give --tasks=NAME,…, --text=files:GLOB, or both')
  output = cli.output_file('output')
  # What can be wrong with the tasks comes out before a model is read.
  harness = _import_harness() if values.tasks else None
  tasks = harness.find_tasks(values.tasks, values.include_path) if harness else []
  if values.text:  # The same again below, with the run's text_field: a wrong name costs no model.
    text.open_source(values.text, 'text', '--text')
  model = trained.load(values.source, values.tokens)
  source = None
  if values.text:
    source = text.open_source(values.text, model.config.data.text_field, '--text')
  length = model.context_length(values.max_length)
  scorer = Scorer(
    model.definition, model.params, model.mesh, max_length=length, batch_size=values.batch_size
  )
  report = {
    'source': model.source,
    'step': model.meta.step,
    'model': dataclasses.asdict(model.config.model),
    'dtype': str(model.compute.dtype),
    'max_length': length,
    'versions': checkpoint.package_versions(('tokenformer_jax', 'jax', 'lm_eval')),
  }
  if harness:
    adapter = harness.TokenFormerLM(model, scorer)
    report['tasks'] = harness.evaluate(adapter, tasks, values.num_fewshot, values.limit)
    report['limit'] = values.limit
  if source:
    documents = source.documents()
    no_bar = None if hosts.is_first() else True  # None: no bar unless on a terminal
    with tqdm.tqdm(desc='windows', disable=no_bar) as bar:
      figures = perplexity.measure(scorer, model.tokenizer, documents, values.stride, bar.update)
    report['text'] = {'source': values.text, **dataclasses.asdict(figures)}
  report['seconds'] = round(time.monotonic() - start, 3)
  if hosts.is_first():
    print(render(report, model.config.model))
    if output:
      _write(output, report)


def _import_harness() -> Any:
  try:
    from tokenformer_jax import harness  # noqa: PLC0415 (an extra)
  except ImportError as error:
    raise UserError(
      f'--tasks needs lm-evaluation-harness ({error}); install it: pip install -e ".[eval]"'
    ) from error
  # It warns of every choice that a task leaves to it.
  logging.getLogger('lm_eval').setLevel(logging.ERROR)
  return harness


def _write(path: Path, report: Mapping[str, Any]) -> None:
  try:
    path.write_text(json.dumps(report, indent=2) + '\n')
  except OSError as error:
    raise UserError(f'--output={path} cannot be written: {error.strerror or error}') from error


def run() -> None:
  """Run the command with the arguments of this process."""
  define_flags()
  cli.run(main)


if __name__ == '__main__':
  run()
