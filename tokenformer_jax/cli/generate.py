r"""Write text with a trained language model.

  tokenformer generate --source=runs/lm_stdlib --prompt='def main('
  tokenformer generate --source=runs/lm_stdlib --requests=prompts.jsonl
  tokenformer generate --source=runs/chat --chat

The first command prints one text while it is drawn. The second reads one JSON object per line, with
a `prompt`, or `messages` to answer and maybe `tools` and `chat_template_kwargs`, and optionally
`length`, `temperature`, `top_k`, `top_p`, `seed` and `stop` (a list of strings), which override the
flags. It writes the texts in batches and prints JSON in the same order. The third answers each line
of standard input, or only --prompt, with a model that was trained on conversations (docs/chat.md).
"""

from __future__ import annotations  # Types of models are not imported.

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path as LocalPath
from typing import TYPE_CHECKING, Any

from tokenformer_jax.api.run import Run
from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli import signatures
from tokenformer_jax.config import arguments
from tokenformer_jax.config.arguments import Count, Path, Text, needs_value
from tokenformer_jax.config.section import Bool, Str
from tokenformer_jax.data.chat_rows import ARGUMENTS, Chat, read_arguments
from tokenformer_jax.errors import UserError, nearest
from tokenformer_jax.parallel import messages

if TYPE_CHECKING:
  from tokenformer_jax.data.chat_template import Template
  from tokenformer_jax.decoding.texts import TextRequest
  from tokenformer_jax.decoding.writer import Writer


def read_requests(path: LocalPath, default: TextRequest) -> list[TextRequest]:
  """Read the requests of a JSON-lines file, with missing values from `default`."""
  try:
    lines = path.read_text('utf-8').split('\n')
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'--requests={path} cannot be read ({error})') from error
  requests = []
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      requests.append(_request(json.loads(line), default))
    except (json.JSONDecodeError, UserError) as error:
      raise UserError(f'line {number} of {path} is not a request: {error}') from error
  if not requests:
    raise UserError(f'{path} has no requests; write lines like {{"prompt": "Once upon a time"}}')
  return requests


def _request(values: Any, default: TextRequest) -> TextRequest:
  """Return a request of a file, whose values are checked as the arguments of `Run.generate`."""
  from tokenformer_jax.decoding import chats
  from tokenformer_jax.decoding.sampling import choose
  from tokenformer_jax.decoding.texts import TextRequest

  hints, sampling = arguments.annotations(Run.generate), dataclasses.asdict(default.sampling)
  types = {'prompt': Str, **{name: hints[name] for name in ('length', 'stop', *sampling)}}
  types |= {'messages': Any, 'tools': Any, ARGUMENTS: Any}
  if not isinstance(values, dict) or ('prompt' in values) == ('messages' in values):
    raise UserError('it must be an object with either a "prompt" or "messages"')
  for key in values:
    if key not in types:
      raise UserError(f'the key {key!r} is unknown{nearest(key, types)}')
  given: Any = {key: arguments.convert(types[key], value, key) for key, value in values.items()}
  asked, tools = given.get('messages'), given.get('tools')
  own = read_arguments(given.get(ARGUMENTS), 'it')
  for key in ('tools', ARGUMENTS):
    if given.get(key) and not asked:
      raise UserError(f'{key} has an effect only with messages; leave it out')
  chat = None
  if 'messages' in given:
    known = (default.chat or Chat([])).arguments or {}
    chat = chats.question(asked, tools, {**known, **(own or {})})
  return TextRequest(
    prompt=given.get('prompt', ''),
    length=given.get('length') or default.length,
    sampling=choose(sampling, **{name: given.get(name) for name in sampling}),
    stop=tuple(given.get('stop', default.stop)),
    max_length=default.max_length,
    chat=chat,
  )


def main(
  source: Text,
  *,
  prompt: Str | None = None,
  chat: Bool = False,
  chat_template_kwargs: Text | None = None,
  requests: Path | None = None,
  groups: Count | None = None,
  token_shards: Count = 1,
  **options: Any,
) -> None:
  """Print the prompt and its continuation, or a JSON object for each request.

  Args:
    source: A run: DIR, or DIR@STEP.
    prompt: The text to continue; default: a new document.
    chat: Answer the prompt, or each line of standard input, in turn.
    chat_template_kwargs: Values for the chat template as JSON, such as {"enable_thinking": false}.
    requests: A file of requests, one JSON object per line; see above.
    groups: Use only the first N groups of tokens of each projection; default: all.
    token_shards: Devices to split parameter tokens and heads over.
    **options: As for `Run.generate`.
  """
  from tokenformer_jax.convert import hub_generation
  from tokenformer_jax.decoding import chats, trained
  from tokenformer_jax.decoding.sampling import choose
  from tokenformer_jax.decoding.texts import TextRequest
  from tokenformer_jax.decoding.writer import Writer
  from tokenformer_jax.runs import checkpoint

  if requests and (chat or prompt is not None):
    name = 'chat' if chat else 'prompt'
    raise UserError(f'--{name} has no effect with --requests; leave out one of them')
  if chat and prompt is not None and not prompt.strip():
    raise UserError(
      f'--prompt is {prompt!r}, and --chat needs a question; write one, or leave --prompt out to '
      'answer lines of standard input'
    )
  needs_value('chat', chat or requests, chat_template_kwargs=chat_template_kwargs)
  needs_value('requests=FILE', requests, batch_size=options.get('batch_size'))
  values = signatures.with_defaults(Run.generate, options)
  opened = checkpoint.open_source(source, checkpoint.check_is_language_model)
  names = ('temperature', 'top_k', 'top_p', 'seed')
  stated = hub_generation.stored_draws(opened.meta.tokenizer)
  sampling = choose(stated, **{name: values[name] for name in names})
  for name in names[1:]:
    if name in options and sampling.is_greedy and not requests:
      raise UserError(f'--{name} has no effect with --temperature={sampling.temperature:g}')
  stop, max_length = tuple(values['stop']), values['max_length']
  arguments_of_chat = read_arguments(chat_template_kwargs, 'the command')
  empty = Chat([], arguments=arguments_of_chat) if chat or requests else None
  default = TextRequest(prompt or '', values['length'], sampling, stop, max_length, empty)
  asked = read_requests(LocalPath(requests), default) if requests else [default]
  is_chat = any(one.chat for one in asked)
  template: Any = chats.find_template(opened.meta, opened.directory) if is_chat else None
  model = trained.load(source, token_shards, clip_positions=values['clip_positions'], groups=groups)
  model.context_length(max_length)
  writer = Writer.from_trained(model)
  if chat:
    _chat(writer, template, default)
  elif requests:
    asked = [chats.ask(template, one.chat, one) if one.chat else one for one in asked]
    _write_all(writer, asked, values['batch_size'])
  else:
    _write_one(writer, default, default.prompt)


def _chat(writer: Writer, template: Template, default: TextRequest) -> None:
  """Answer the prompt, or each line of standard input after the turns before it."""
  import jax

  from tokenformer_jax.decoding import chats

  turns, known = [], (default.chat or Chat([])).arguments
  if not default.prompt and jax.process_count() > 1:
    raise UserError('--chat reads standard input, which several hosts do not share; give --prompt')
  for line in [default.prompt] if default.prompt else sys.stdin:
    if not line.strip():
      continue
    turns.append({'role': 'user', 'content': line.strip()})
    request = chats.ask(template, chats.question(turns, None, known), default)
    turns.append({'role': chats.ANSWER_ROLE, 'content': _write_one(writer, request)})


def _write_one(writer: Writer, request: TextRequest, start: str = '') -> str:
  """Stream one text to standard output after its start, and return it."""
  import jax

  from tokenformer_jax.decoding import decode

  times = [time.perf_counter()]
  written = []
  with jax.set_mesh(writer.mesh):
    pieces = writer.stream(request, lambda: times.append(time.perf_counter()))
    _print(start)
    for piece in pieces:
      _print(piece)
      written.append(piece)
  _print('\n')
  # Tokens come in chunks. The time of the first chunk includes the compilation.
  rest = len(times) - 1 - decode.STREAM_CHUNK
  rate = f', then {rest / (times[-1] - times[1]):.1f} tokens/s' if rest > 0 else ''
  messages.say(f'{len(times) - 1} tokens, the first after {times[1] - times[0]:.1f} s{rate}')
  return ''.join(written)


def _write_all(writer: Writer, requests: Sequence[TextRequest], batch_size: int) -> None:
  """Write a JSON object for each request to standard output."""
  start, total = time.perf_counter(), 0
  for request, (text, tokens) in zip(requests, writer.write(requests, batch_size), strict=True):
    chat = request.chat
    asked = {'messages': chat.messages} if chat else {'prompt': request.prompt}
    _print(json.dumps({**asked, 'text': text, 'tokens': tokens}) + '\n')
    total += tokens
  seconds = time.perf_counter() - start
  messages.say(
    f'{total} tokens of {len(requests)} texts in {seconds:.1f} s, compiling included: '
    f'{total / seconds:.1f} tokens/s'
  )


def _print(text: str) -> None:
  """Print a text on the first host only, because all hosts compute the same text."""
  if messages.is_first():
    sys.stdout.write(text)
    sys.stdout.flush()


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.command(main, like=Run.generate)
