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

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path as LocalPath
from typing import Any

import jax

from tokenformer_jax.api.run import Run
from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli import signatures
from tokenformer_jax.config import arguments
from tokenformer_jax.config.arguments import Count, Path, Text, needs_value
from tokenformer_jax.config.section import Bool, Str
from tokenformer_jax.data.chat_rows import ARGUMENTS, read_arguments
from tokenformer_jax.decoding import chats, decode, length, trained
from tokenformer_jax.decoding.sampling import Sampling
from tokenformer_jax.decoding.texts import TextRequest
from tokenformer_jax.decoding.writer import Writer
from tokenformer_jax.errors import UserError, nearest
from tokenformer_jax.parallel import hosts, messages
from tokenformer_jax.runs import checkpoint


def read_requests(
  path: LocalPath, default: TextRequest, arguments_of_chat: Mapping[str, Any] | None = None
) -> list[TextRequest]:
  """Read the requests of a JSON-lines file, with missing values from `default`.

  Those with messages take the `chat_template_kwargs` that they lack from `arguments_of_chat`.
  """
  try:
    lines = path.read_text('utf-8').split('\n')
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'--requests={path} cannot be read ({error})') from error
  requests = []
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      requests.append(_request(json.loads(line), default, arguments_of_chat or {}))
    except (json.JSONDecodeError, UserError) as error:
      raise UserError(f'line {number} of {path} is not a request: {error}') from error
  if not requests:
    raise UserError(f'{path} has no requests; write lines like {{"prompt": "Once upon a time"}}')
  return requests


def _request(values: Any, default: TextRequest, known: Mapping[str, Any]) -> TextRequest:
  """Return a request of a file, whose values are checked as the arguments of `Run.generate`."""
  hints, sampling = arguments.annotations(Run.generate), dataclasses.asdict(default.sampling)
  types = {'prompt': Str, **{name: hints[name] for name in ('length', 'stop', *sampling)}}
  types |= {'messages': Any, 'tools': Any, ARGUMENTS: Any}
  if not isinstance(values, dict) or ('prompt' in values) == ('messages' in values):
    raise UserError('it must be an object with a "prompt", or with "messages"')
  for key in values:
    if key not in types:
      raise UserError(f'the key {key!r} is unknown{nearest(key, types)}')
  given = {key: arguments.convert(types[key], value, key) for key, value in values.items()}
  asked, tools = given.get('messages'), given.get('tools')
  own = read_arguments(given.get(ARGUMENTS), 'it')
  arguments.needs_value('messages', asked, tools=tools, chat_template_kwargs=own)
  return TextRequest(
    prompt=given.get('prompt', ''),
    length=given.get('length', default.length),
    sampling=Sampling(**{name: given.get(name, known) for name, known in sampling.items()}),
    stop=tuple(given.get('stop', default.stop)),
    max_length=default.max_length,
    chat=chats.question(asked, tools, {**known, **(own or {})}) if 'messages' in given else None,
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
  if requests and (chat or prompt is not None):
    name = 'chat' if chat else 'prompt'
    raise UserError(f'--{name} has no effect with --requests; leave out one of them')
  if chat and prompt is not None and not prompt.strip():
    raise UserError(
      f'--prompt is {prompt!r}, and --chat needs a question; write one, or leave --prompt out to '
      'answer lines of standard input'
    )
  needs_value('chat', chat or requests, chat_template_kwargs=chat_template_kwargs)
  template_kwargs = read_arguments(chat_template_kwargs, 'the command')
  needs_value('requests=FILE', requests, batch_size=options.get('batch_size'))
  values = signatures.with_defaults(Run.generate, options)
  for name in ('top_k', 'top_p', 'seed'):
    if name in options and not (requests or values['temperature']):
      raise UserError(f'--{name} has no effect with --temperature=0')
  sampling = Sampling(values['temperature'], values['top_k'], values['top_p'], values['seed'])
  stop, max_length = tuple(values['stop']), values['max_length']
  default = TextRequest(prompt or '', values['length'], sampling, stop, max_length)
  file = LocalPath(requests) if requests else None
  asked = read_requests(file, default, template_kwargs) if file else [default]
  is_chat = chat or any(one.chat for one in asked)
  model = trained.load(
    source,
    token_shards,
    check=chats.find_template if is_chat else checkpoint.check_is_language_model,
    clip_positions=values['clip_positions'],
    groups=groups,
  )
  model.context_length(max_length)
  if chat:
    _chat(model, default, template_kwargs)
    return
  trained_length = model.config.data.sequence_length
  if is_chat:
    template = chats.Template(**model.meta.tokenizer['chat'])
    asked = [chats.ask(template, one.chat, one) if one.chat else one for one in asked]
  texts = [request.tokens(model.tokenizer, trained_length) for request in asked]
  length.say_length(model.config, max(len(text.prompt) + text.length for text in texts))
  writer = Writer.from_trained(model)
  if requests:
    _write_all(writer, asked, values['batch_size'])
  else:
    _write_one(writer, default, default.prompt)


def _chat(
  model: trained.Trained, default: TextRequest, template_kwargs: dict[str, Any] | None
) -> None:
  """Answer the prompt, or each line of standard input after the turns before it."""
  template = chats.Template(**model.meta.tokenizer['chat'])
  writer, turns = Writer.from_trained(model), []
  if not default.prompt and jax.process_count() > 1:
    raise UserError('--chat reads standard input, which several hosts do not share; give --prompt')
  for line in [default.prompt] if default.prompt else sys.stdin:
    if not line.strip():
      continue
    turns.append({'role': 'user', 'content': line.strip()})
    request = chats.ask(template, chats.question(turns, None, template_kwargs), default)
    trained_length = model.config.data.sequence_length
    asked = request.tokens(model.tokenizer, trained_length)
    length.say_length(model.config, len(asked.prompt) + asked.length)
    turns.append({'role': chats.ANSWER_ROLE, 'content': _write_one(writer, request)})


def _write_one(writer: Writer, request: TextRequest, start: str = '') -> str:
  """Stream one text to standard output after its start, and return it."""
  times = [time.perf_counter()]

  _print(start)
  written = []
  with jax.set_mesh(writer.mesh):
    for piece in writer.stream(request, lambda: times.append(time.perf_counter())):
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
  if hosts.is_first():
    sys.stdout.write(text)
    sys.stdout.flush()


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.command(main, like=Run.generate)
