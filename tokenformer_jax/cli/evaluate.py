r"""Evaluate a trained language model on tasks of lm-evaluation-harness and on any text.

  tokenformer evaluate --source=runs/150m \
    --tasks=lambada_openai,hellaswag,piqa,arc_easy,arc_challenge,winogrande
  tokenformer evaluate --source=runs/lm_stdlib --text='files:corpus/**/*.txt'
  tokenformer evaluate --source=runs/chat --chats=files:held_out.jsonl

The first command prints the columns of Table 1 of the TokenFormer paper. It needs `lm_eval`
(pip install -e ".[eval]"). The second prints perplexity and bits per byte with the run's own
tokenizer. As in training, documents are concatenated with an end of document after each, the end is
predicted like any token, and windows span document boundaries (see `perplexity.windows`).
The third prints the loss of the answers of conversations, and the share of them that greedy
decoding writes exactly (docs/chat.md).
"""

import time
from typing import Any

from tokenformer_jax.api.run import Run
from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli import outputs, signatures
from tokenformer_jax.config.arguments import Count, Path, Text, needs_value
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel.messages import is_first


def main(
  source: Text,
  *,
  text: Text | None = None,
  chats: Text | None = None,
  groups: Count | None = None,
  token_shards: Count = 1,
  output: Path | None = None,
  **options: Any,
) -> None:
  """Print the results, and write them to a JSON file.

  Args:
    source: A run: DIR, or DIR@STEP.
    text: A text: files:GLOB, or another source as in data.source.
    chats: Conversations, likewise.
    groups: Use only the first N groups of tokens of each projection; default: all.
    token_shards: Devices to split parameter tokens and heads over.
    output: A JSON file for the results.
    **options: As for `Run.evaluate`.
  """
  from tokenformer_jax.data.sources import open_source
  from tokenformer_jax.decoding import evaluation, length, trained

  start, values = time.monotonic(), signatures.with_defaults(Run.evaluate, options)
  names = values['tasks']
  if not (names or text or chats):
    raise UserError('nothing to evaluate on; give --tasks=NAME,…, --text=files:GLOB or --chats=…')
  few, limit, folder = (values[name] for name in ('num_fewshot', 'limit', 'include_path'))
  needs_value('tasks=NAME', names, num_fewshot=few, limit=limit, include_path=folder)
  needs_value('text=files:GLOB', text, stride=values['stride'])
  outputs.check_file('output', output)
  # Report mistakes in the tasks, and a wrong name of a text, before the model loads.
  tasks = evaluation.find_tasks(names, None if folder is None else str(folder))
  if text:
    open_source(text, 'text', '--text')
  conversations = evaluation.open_chats(chats, '--chats')
  model = trained.load(source, token_shards, clip_positions=values['clip_positions'], groups=groups)
  scorer = evaluation.make_scorer(model, values['max_length'], values['batch_size'])
  length.say_length(model.config, scorer.max_length)
  documents = evaluation.open_documents(text or None, model.config.data, '--text')
  report = evaluation.evaluate(
    model,
    scorer,
    documents=documents,
    stride=values['stride'],
    chats=conversations,
    tasks=tasks,
    num_fewshot=few,
    limit=limit,
  )
  if documents is not None:
    report['text'] = {'source': text, **report['text']}
  if chats:
    report['chats'] = {'source': chats, **report['chats']}
  report['seconds'] = round(time.monotonic() - start, 3)
  if is_first():
    print(evaluation.render(report, model.config.model))
  if output:
    outputs.write_json('output', output, report)


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.command(main, like=Run.evaluate, without=['texts'])
