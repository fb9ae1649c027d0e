"""Look into the models of runs: the tables of `inspect` about parameter tokens and experts."""

import html
from collections.abc import Callable, Sequence

from tokenformer_jax.config import TextConfig
from tokenformer_jax.data import held_out
from tokenformer_jax.decoding.trained import Trained
from tokenformer_jax.errors import UserError, counted
from tokenformer_jax.inspection import model as inspect_model
from tokenformer_jax.inspection import report
from tokenformer_jax.inspection.weights import pattentions
from tokenformer_jax.model import models
from tokenformer_jax.report import tables
from tokenformer_jax.report.record import Record

_MOST_PARAMETERS = 10**9  # of a model that is read for a report
_MEASURED = 8192  # tokens of text to measure usage on


def look(
  records: Sequence[Record], models: int, load: Callable[[str], Trained]
) -> tuple[str, list[str]]:
  """Return tables of HTML about the newest models of the last runs, and notes about the others."""
  able = [run for run in records if _can_look(run)]
  bodies, notes, definitions = [], [], {}
  for run in able[len(able) - min(models, len(able)) :]:
    try:
      body, terms = _look_into(run, load)
      bodies.append(body)
      definitions |= dict.fromkeys(terms)
    except UserError as error:
      notes.append(str(error))
  if 0 < models < len(able):
    notes.append(
      f'This page looks into the {counted(models, "model")} of the last runs, and has '
      f'{len(able)} with parameter tokens; --models=N takes more.'
    )
  if bodies:
    shown = '\n'.join(definitions)
    bodies.append(f'<pre>{html.escape(shown)}</pre>')
  return ''.join(bodies), notes


def _can_look(run: Record) -> bool:
  """Return whether a run has a language model with parameter tokens, an MLP or experts."""
  try:
    if run.meta:
      inspect_model.check_has_tokens(run.meta, run.directory)
  except UserError:
    return False
  return run.meta is not None


def _look_into(run: Record, load: Callable[[str], Trained]) -> tuple[str, list[str]]:
  """Return the tables about a model on text that it was not trained on, and their definitions."""
  assert run.meta
  if (count := models.define(run.meta.config.model).count) > _MOST_PARAMETERS:
    raise UserError(
      f'{run.directory} has {tables.amount(count)} parameters, and a report looks into models of '
      f'at most {tables.amount(_MOST_PARAMETERS)}; tokenformer inspect shows the others'
    )
  try:
    model = load(f'{run.directory}@{run.meta.step}')
  except UserError:  # A run in progress has written another one, and removed this one.
    model = load(str(run.directory))
  config = model.config
  assert isinstance(config.data, TextConfig)
  corpus, name = held_out.held_out_tokens(config.data, model.tokenizer, _MEASURED)
  heading = f'{run.name}, step {model.meta.step:,}, on {len(corpus):,} tokens of {name}'
  body, definitions = f'<h3>{html.escape(heading)}</h3>', []
  if any(layers := pattentions(model.definition)):
    definitions.append(report.TOKEN_DEFINITIONS)
    if any(tokens.is_mlp for layer in layers for tokens in layer.values()):
      definitions.append(report.MLP_DEFINITIONS)
    usage = inspect_model.measure(model, corpus)
    body += _table(report.usage_rows(usage), report.USAGE)
    if old := inspect_model.old_tokens(model):
      action = model.meta.lineage[-1].action
      body += f'<h4>Old and new tokens of the last {html.escape(action)}</h4>'
      body += _table(report.age_rows(usage, old), report.AGE)
  if answers := inspect_model.answers(model, corpus):
    body += '<h4>Load of experts</h4>' + _table(report.expert_rows(answers), report.LOAD)
    definitions.append(report.EXPERT_DEFINITIONS)
  return body, definitions


def _table(rows: Sequence[report.Row], columns: report.Columns) -> str:
  heads, *lines = report.cells(rows, columns)
  return tables.table(heads, lines, texts=2 if 'kind' in heads else 1)
