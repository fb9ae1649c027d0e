r"""Evaluate a trained language model on tasks of lm-evaluation-harness and on any text.

  tokenformer evaluate --source=runs/150m \
    --tasks=lambada_openai,hellaswag,piqa,arc_easy,arc_challenge,winogrande
  tokenformer evaluate --source=runs/lm_stdlib --text='files:corpus/**/*.txt'

The first command prints the columns of Table 1 of the TokenFormer paper. It needs `lm_eval`
(pip install -e ".[eval]"). The second prints perplexity and bits per byte with the run's own
tokenizer. As in training, documents are concatenated with an end of document after each, the end is
predicted like any token, and windows span document boundaries (see `perplexity.windows`).
"""

import time
from collections.abc import Sequence

from absl import flags

from tokenformer_jax.api.run import Run
from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli import outputs, parse_flags, signatures
from tokenformer_jax.data.sources import open_source
from tokenformer_jax.decoding import evaluation, length, trained
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import hosts


def define_flags() -> None:
  """Define the command's flags."""
  flags.DEFINE_string('source', None, 'A run: DIR, or DIR@STEP.', required=True)
  flags.DEFINE_string('text', '', 'A text: files:GLOB, or another source as in data.source.')
  signatures.define(Run.evaluate, without=['texts'])
  flags.DEFINE_integer('groups', None, trained.GROUPS_HELP)
  flags.DEFINE_integer('token_shards', 1, 'Devices to split parameter tokens and heads over.', 1)
  flags.DEFINE_string('output', None, 'A JSON file for the results.')


def main(argv: Sequence[str]) -> None:
  """Print the results, and write them to --output."""
  del argv
  values, start = flags.FLAGS, time.monotonic()
  if not (values.tasks or values.text):
    raise UserError('nothing to evaluate on; give --tasks=NAME,…, --text=files:GLOB, or both')
  parse_flags.needs('num_fewshot limit include_path', 'tasks=NAME')
  parse_flags.needs('stride', 'text=files:GLOB')
  outputs.check_file('output', values.output)
  # Report mistakes in the tasks before the model loads.
  tasks = evaluation.find_tasks(values.tasks, values.include_path)
  if values.text:  # Report a wrong name before the model loads, which has the run's text_field.
    open_source(values.text, 'text', '--text')
  model = trained.load(
    values.source, values.token_shards, clip_positions=values.clip_positions, groups=values.groups
  )
  scorer = evaluation.make_scorer(model, values.max_length, values.batch_size)
  length.say_length(model.config, scorer.max_length)
  documents = None
  if values.text:
    documents = open_source(values.text, model.config.data.text_field, '--text').documents()
  report = evaluation.evaluate(
    model,
    scorer,
    documents=documents,
    stride=values.stride,
    tasks=tasks,
    num_fewshot=values.num_fewshot,
    limit=values.limit,
  )
  if documents is not None:
    report['text'] = {'source': values.text, **report['text']}
  report['seconds'] = round(time.monotonic() - start, 3)
  if hosts.is_first():
    print(evaluation.render(report, model.config.model))
  if values.output:
    outputs.write_json('output', values.output, report)


def run() -> None:
  """Run the command with the arguments of this process."""
  define_flags()
  cli.run(main)
