"""Make text of conversations with a Jinja template, and find the ranges of it that carry loss.

A template is one of those that Hugging Face's `transformers` reads: `apply_chat_template` there
gives the same text and the same marks. It encloses in {% generation %} … {% endgeneration %} what
the model has to learn to write; a template without these marks can ask for answers only.
`bos_token`, `eos_token` and the other tokens of the tokenizer have their values, `tools` and the
names in `chat_template_kwargs` those of the row, `documents` is None else; `raise_exception`,
`strftime_now` and `tojson` are there.
"""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenformer_jax.config import TextConfig
from tokenformer_jax.data import chat_jinja, special_tokens, tokenizers
from tokenformer_jax.data.chat_jinja import MARKS, RenderError
from tokenformer_jax.data.chat_rows import ANSWER_ROLE, more_keys
from tokenformer_jax.data.row_columns import WEIGHTS, is_learned
from tokenformer_jax.errors import UserError, check_installed

Messages = Sequence[dict[str, Any]]

# For tokenizers without a template. Its marks are plain text, which every vocabulary has.
OURS = """\
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}
{{- raise_exception('the role ' ~ message.role ~ ' is none of system, user and assistant; name a '
    ~ 'template that knows it in config.data.chat_template') }}
{%- endif %}
{{- '<|' ~ message.role ~ '|>\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- message.content ~ '<|end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- message.content ~ '<|end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}
"""
_ADVICE = (
  'put {% generation %} before and {% endgeneration %} after what the assistant writes, in a copy '
  'that config.data.chat_template names'
)
_PROBE = 'ANSWER'
# The keys of a message that hold the reasoning before an answer, the first that has a value wins.
_REASONING = ('reasoning_content', 'thinking', 'reasoning')
# Values of a template that the arguments of a row or a request cannot replace.
_RESERVED = {'messages', 'tools', 'add_generation_prompt', 'raise_exception', 'strftime_now'}


class Rendered(NamedTuple):
  """The text of a conversation, and the ranges of its characters that carry loss, ascending."""

  text: str
  answers: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Template:
  """A template and the tokens that it may write.

  Attributes:
    name: says in messages where the template is from.
    source: the Jinja template.
    tokens: the text of special tokens by their names, such as `eos_token`.
    named: other templates of the folder by their names; `tool_use` writes rows with tools.
  """

  name: str
  source: str
  tokens: dict[str, str]
  named: dict[str, str] = dataclasses.field(default_factory=dict)

  @property
  def fingerprint(self) -> str:
    """Return a hash of all that the text depends on."""
    sources = dict.fromkeys((self._choose(None), self._choose(True)))
    content = json.dumps([*sources, self.tokens], sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()

  def to_json(self) -> dict[str, Any]:
    """Return the template for stores and checkpoints; `Template(**…)` makes it again."""
    return dataclasses.asdict(self)

  def begin(self, tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the ids before a conversation that a model continues or scores.

    The template of a folder writes a whole text, as in transformers. The built-in one does not, and
    a model that was trained here learned to write after the end of the document before.
    """
    is_after_end = tokenizer.begin == (tokenizer.end_of_document,)
    return tokenizer.begin if is_after_end or self.source == OURS else ()

  def render(
    self,
    messages: Messages,
    tools: Any = None,
    arguments: dict[str, Any] | None = None,
    *,
    ask: bool = False,
    label: str = '',
  ) -> Rendered:
    """Return the text of messages and of tools; with `ask`, up to where the model answers.

    `arguments` are further values for the template by their names, such as `enable_thinking`: the
    `chat_template_kwargs` of a row. An answer with a weight of 0 (`row_columns.WEIGHTS`) carries no
    loss. Errors name the conversation by its `label` and its beginning.
    """
    label = _label(messages, label)
    self._check_arguments(arguments or {}, tools, label, ask=ask)
    values = {'ask': ask, 'arguments': arguments}
    rendered = whole = self._rendered(messages, label, learn=not ask, tools=tools, **values)
    if tools and self._is_same(whole, messages, **values):
      raise UserError(
        f'{label} has tools, of which {self.name} makes no text; leave them out, or name a '
        'template that writes them in config.data.chat_template'
      )
    for key in dict.fromkeys(key for message in messages for key in more_keys(message)):
      without = [{k: v for k, v in message.items() if k != key} for message in messages]
      # Templates that read the reasoning of an answer may leave out that of earlier turns.
      is_read = key in _REASONING and any(name in self._choose(tools) for name in _REASONING)
      if is_read or not self._is_same(whole, without, tools=tools, **values):
        continue
      if key not in WEIGHTS:
        raise UserError(
          f'{label} has {key!r} in a message, of which {self.name} makes no text; leave the key '
          'out, or name a template that writes it in config.data.chat_template'
        )
      if not ask:
        rendered = self._learned(rendered, messages, key, label)
    if not ask and not any(rendered.text[start:stop].strip() for start, stop in rendered.answers):
      raise UserError(
        f'{label} has no answer to learn: {self.name} marks none of its text, or its weight is 0; '
        'leave the row out'
      )
    return rendered

  def _check_arguments(
    self, arguments: dict[str, Any], tools: Any, label: str, *, ask: bool
  ) -> None:
    """Check that the template reads each argument; in rows, each that has a value."""
    read = chat_jinja.variables(self._choose(tools)) if arguments else frozenset()
    harmless = (None,) if ask else (None, False, '', [], {})
    for name, value in arguments.items():
      is_reserved = name in _RESERVED | chat_jinja.TOKENS | {*self.tokens}
      if is_reserved or (name not in read and value not in harmless):
        raise UserError(
          f'{label} has {name!r} in chat_template_kwargs, which {self.name} does not read from '
          'there; leave it out, or name a template that does in config.data.chat_template'
        )

  def _learned(self, rendered: Rendered, messages: Messages, key: str, label: str) -> Rendered:
    """Return the text without the marks of answers that a key says are not to be learned."""
    learned = []
    for number, message in enumerate(messages, start=1):
      is_answer, value = message['role'] == ANSWER_ROLE, message.get(key)
      asked = is_answer if value is None else is_learned(value)
      if asked is None or asked > is_answer:
        raise UserError(
          f'{label} has {key} {value!r} in message {number}; it must be 0 or 1, and not 1 in a '
          'message that is no answer; correct the row, or leave it out'
        )
      if is_answer:
        learned.append(asked)
    if len(learned) != len(rendered.answers):
      raise UserError(
        f'{label} has {key!r} in its messages, but {self.name} does not mark each answer once, so '
        'it is not known which marks are meant; leave the key out'
      )
    return rendered._replace(answers=tuple(itertools.compress(rendered.answers, learned)))

  def end_of_turn(
    self, messages: Messages, tools: Any = None, arguments: dict[str, Any] | None = None
  ) -> str:
    """Return the text that ends an answer to messages, or '' if it ends with its document."""
    answered = [*messages, {'role': ANSWER_ROLE, 'content': _PROBE}]
    values = {'tools': tools, 'arguments': arguments}
    text, answers = self._rendered(answered, _label(messages), **values)
    answer = text[slice(*answers[-1])] if answers else text  # A template may mark none.
    end = answer.rpartition(_PROBE)[2]
    return end.strip() or end

  def check(self, *, to_learn: bool) -> None:
    """Check that the template is valid, and for one `to_learn` from, that it marks answers."""
    try:
      marked, *_ = map(chat_jinja.has_marks, (self.source, *self.named.values()))
    except RenderError as error:
      raise UserError(f'{self.name} is not a valid Jinja template ({error}); correct it') from error
    if not to_learn:
      return
    if not marked:
      raise UserError(f'{self.name} does not say what the model has to learn; {_ADVICE}')
    question = [{'role': 'user', 'content': 'QUESTION'}]
    try:
      asked = self._marked(question, ask=True)
      answered = self._marked([*question, {'role': ANSWER_ROLE, 'content': _PROBE}])
    except RenderError:
      return  # It may refuse these messages, and no others.
    text, answers = _without_marks(answered)
    before = text[: answers[0][0]] if answers else ''
    if before.startswith(asked) and (header := before[len(asked) :].strip()):
      raise UserError(
        f'{self.name} writes {header!r} before an answer, which is neither learned nor in the text '
        'that asks for an answer; write it as well at the end, between '
        '{% if add_generation_prompt %} and {% endif %}'
      )

  def _is_same(self, rendered: Rendered, messages: Messages, **values: Any) -> bool:
    """Return whether a text is also that of some messages, which lack a key or the tools."""
    try:
      return _without_marks(self._marked(messages, **values)) == rendered
    except RenderError:
      return False

  def _rendered(self, messages: Messages, label: str, **values: Any) -> Rendered:
    try:
      return _without_marks(self._marked(messages, **values))
    except RenderError as error:
      raise UserError(f'{label} cannot be written by {self.name}: {error}') from error

  def _marked(
    self,
    messages: Messages,
    *,
    ask: bool = False,
    learn: bool = False,
    tools: Any = None,
    arguments: dict[str, Any] | None = None,
  ) -> str:
    more = {'add_generation_prompt': ask, 'tools': tools, 'documents': None, **(arguments or {})}
    values = {'messages': [*map(_with_reasoning, messages)], **more, **self.tokens}
    return chat_jinja.render(self._choose(tools), values, learn=learn)

  def _choose(self, tools: Any) -> str:
    """Return the source for rows with or without tools, as `get_chat_template` of transformers."""
    return self.named.get('tool_use', self.source) if tools else self.source


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
  """Return a message with its reasoning under the names that templates read, as in transformers."""
  given = (message.get(key) for key in _REASONING)
  if (reasoning := next((one for one in given if one is not None), None)) is None:
    return message
  return {'thinking': reasoning, **message, 'reasoning_content': reasoning}


def _label(messages: Messages, row: str = '') -> str:
  return f'{row} a conversation that begins with {messages[0].get("content")!r:.80}'.lstrip()


def find_template(data: TextConfig, *, to_learn: bool = True) -> Template:
  """Return the template of a run's conversations; one `to_learn` from marks what is learned.

  It is the file `chat_template`, or that of the tokenizer: files of templates or the entry of
  `tokenizer_config.json` in the folder of its `tokenizer.json`; or `OURS`.
  """
  check_installed('jinja2', 'renders conversations', 'chat')
  name, named = 'the built-in template', {'default': OURS}
  folder = _tokenizer_folder(data.tokenizer)
  if data.chat_template:
    name = f'config.data.chat_template={data.chat_template}'
    named = {'default': _read(Path(data.chat_template).expanduser(), name)}
  elif folder and (own := _own_templates(folder)):
    name, named = own
  if 'default' not in named:
    raise UserError(
      f'{name} has no template named default, only {", ".join(named)}; name a file in '
      'config.data.chat_template'
    )
  tokens = _special_tokens(data.tokenizer, folder)
  template = Template(name, named.pop('default'), tokens, named)
  template.check(to_learn=to_learn)
  return template


def has_own(data: TextConfig) -> bool:
  """Return whether a template is in the folder of the tokenizer's file."""
  file = Path(data.tokenizer).expanduser()
  return file.is_file() and _own_templates(file.parent) is not None


def _own_templates(folder: Path) -> tuple[str, dict[str, str]] | None:
  """Return where the templates in a folder are from, and their sources by name; None: it has none.

  As in transformers, files win over `tokenizer_config.json`, which holds one or several.
  """
  more = folder / 'additional_chat_templates'
  files = {'default': folder / 'chat_template.jinja', **{x.stem: x for x in more.glob('*.jinja')}}
  if files := {name: file for name, file in sorted(files.items()) if file.is_file()}:
    where = str(files.get('default', more))
    return where, {name: _read(file, str(file)) for name, file in files.items()}
  entry = special_tokens.read(folder).settings.get('chat_template')
  where = f'the chat_template of {folder}/tokenizer_config.json'
  named: Any = entry
  if isinstance(entry, list) and all(isinstance(one, dict) for one in entry):
    named = {one.get('name'): one.get('template') for one in entry}
  elif not isinstance(entry, dict):
    named = {'default': entry} if entry else {}
  if not all(isinstance(text, str) for pair in named.items() for text in pair):
    raise UserError(
      f'{where} is {entry!r:.80}; it must be a template, or a list of {{"name", "template"}}'
    )
  return (where, named) if named else None


def _tokenizer_folder(tokenizer: str) -> Path | None:
  """Return the folder of a tokenizer.json; None: the tokenizer has no file."""
  if tokenizer == 'bytes' or tokenizers.bpe_size(tokenizer):
    return None
  path = Path(tokenizer).expanduser()
  if not path.is_file():
    tokenizers.load(tokenizer)  # raises
  return path.parent


def _read(path: Path, name: str) -> str:
  try:
    return path.read_text('utf-8')
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, 'strerror', None) or error
    raise UserError(f'{name} cannot be read ({reason}); name a .jinja file') from error


def _special_tokens(tokenizer: str, folder: Path | None) -> dict[str, str]:
  if folder is None:
    return {} if tokenizer == 'bytes' else {'eos_token': tokenizers.END_OF_DOCUMENT}
  named = special_tokens.read(folder).named
  if 'eos_token' not in named:
    loaded = tokenizers.load(tokenizer)
    named['eos_token'] = loaded.decode([loaded.end_of_document])
  return named


def _without_marks(marked: str) -> Rendered:
  pieces, answers, length, start = [], [], 0, 0
  for piece in re.split(f'([{"".join(MARKS)}])', marked):
    if piece == MARKS[0]:
      start = length
    elif piece == MARKS[1]:
      answers.append((start, length))
    else:
      pieces.append(piece)
      length += len(piece)
  return Rendered(''.join(pieces), tuple(answers))
