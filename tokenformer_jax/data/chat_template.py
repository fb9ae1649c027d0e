"""Make text of conversations with a Jinja template, and find the parts of it that carry loss.

A template is one of those that Hugging Face's `transformers` reads: `apply_chat_template` there
gives the same text and the same marks. It encloses in {% generation %} … {% endgeneration %} what
the model has to learn to write; a template without these marks can ask for answers only.
`bos_token`, `eos_token` and the other tokens of the tokenizer have their values; `raise_exception`,
`strftime_now` and `tojson` are there.
"""

import dataclasses
import datetime
import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import special_tokens, tokenizers
from tokenformer_jax.data.chat_rows import ANSWER_ROLE, MARKS
from tokenformer_jax.errors import UserError

if TYPE_CHECKING:
  import jinja2

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
  """

  name: str
  source: str
  tokens: dict[str, str]

  @property
  def fingerprint(self) -> str:
    """Return a hash of all that the text depends on."""
    content = json.dumps([self.source, self.tokens], sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()

  def to_json(self) -> dict[str, Any]:
    """Return the template for stores and checkpoints; `Template(**…)` makes it again."""
    return dataclasses.asdict(self)

  def render(self, messages: Messages, *, ask: bool = False) -> Rendered:
    """Return the text of messages; with `ask`, up to where the model answers.

    Raises:
      UserError: the template refuses the messages or, without `ask`, marks no answer.
    """
    found = self._render(messages, ask=ask)
    if not ask and not any(found.text[start:stop].strip() for start, stop in found.answers):
      raise UserError(
        f'{self._place(messages)} has no answer: {self.name} marks none of its text; leave the row '
        'out'
      )
    return found

  def _render(self, messages: Messages, *, ask: bool) -> Rendered:
    compiled, _ = _compile(self.source, self.name)
    try:
      marked = compiled.render(messages=messages, add_generation_prompt=ask, **self.tokens)
    except Exception as error:  # A template can raise anything.
      kind = '' if isinstance(error, _RefusalError) else f'{type(error).__name__}: '
      place = self._place(messages)
      raise UserError(f'{place} cannot be written by {self.name}: {kind}{error}') from error
    return _without_marks(marked)

  def end_of_turn(self, messages: Messages) -> str:
    """Return the text that ends an answer to messages, or '' if it ends with its document."""
    answered = [*messages, {'role': ANSWER_ROLE, 'content': _PROBE}]
    text, answers = self._render(answered, ask=False)
    answer = text[slice(*answers[-1])] if answers else text  # A template may mark none.
    end = answer.rpartition(_PROBE)[2]
    return end.strip() or end

  @staticmethod
  def _place(messages: Messages) -> str:
    return f'a conversation that begins with {messages[0]["content"]!r:.80}'


def find_template(data: DataConfig, *, to_learn: bool = True) -> Template:
  """Return the template of a run's conversations; one `to_learn` from marks what is learned.

  It is the file `chat_template`, or that of the tokenizer: `chat_template.jinja` or the entry of
  `tokenizer_config.json` beside its `tokenizer.json`; or `OURS`.

  Raises:
    UserError: jinja2 is missing, or the template cannot be read, is not valid or has no marks, and
      it is to learn from.
  """
  check_installed('config.data.rows is chat, which' if to_learn else 'a chat template')
  name, source = 'the built-in template', OURS
  beside = _beside(data.tokenizer)
  if data.chat_template:
    name = f'config.data.chat_template={data.chat_template}'
    source = _read(Path(data.chat_template).expanduser(), name)
  elif beside and (beside / 'chat_template.jinja').is_file():
    name = str(beside / 'chat_template.jinja')
    source = _read(beside / 'chat_template.jinja', name)
  elif found := _named(_tokenizer_config(beside).get('chat_template')):
    name, source = f'the chat_template of {beside}/tokenizer_config.json', found
  _, is_marked = _compile(source, name)
  if to_learn and not is_marked:
    raise UserError(f'{name} does not say what the model has to learn; {_ADVICE}')
  return Template(name, source, _special_tokens(data.tokenizer, beside))


def has_own(data: DataConfig) -> bool:
  """Return whether a template is beside the tokenizer's file."""
  file = Path(data.tokenizer).expanduser()
  if not file.is_file():
    return False
  named = _named(_tokenizer_config(file.parent).get('chat_template'))
  return bool(named) or (file.parent / 'chat_template.jinja').is_file()


def check_installed(what: str) -> None:
  """Check that jinja2 is there for `what`, the subject of the sentence if it is not."""
  if importlib.util.find_spec('jinja2') is None:
    raise UserError(f'{what} needs jinja2; run pip install -e ".[chat]"')


def _beside(tokenizer: str) -> Path | None:
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


def _tokenizer_config(folder: Path | None) -> dict[str, Any]:
  return special_tokens.read_json(folder / 'tokenizer_config.json') if folder else {}


def _named(found: Any) -> str:
  """Return the template of a tokenizer's config, which may have several with names, or ''."""
  if isinstance(found, list):
    found = next((one['template'] for one in found if one.get('name') == 'default'), '')
  return found if isinstance(found, str) else ''


def _special_tokens(tokenizer: str, folder: Path | None) -> dict[str, str]:
  if folder is None:
    return {} if tokenizer == 'bytes' else {'eos_token': tokenizers.END_OF_DOCUMENT}
  found = special_tokens.read(folder)
  if 'eos_token' not in found:
    loaded = tokenizers.load(tokenizer)
    found['eos_token'] = loaded.decode([loaded.end_of_document])
  return found


@functools.lru_cache(maxsize=8)
def _compile(source: str, name: str) -> tuple['jinja2.Template', bool]:
  """Compile a template, and return whether it has marks.

  Raises:
    UserError: it is not valid.
  """
  import jinja2  # noqa: PLC0415 (from an extra, and only for chat)
  from jinja2 import ext, nodes, sandbox  # noqa: PLC0415

  class Marks(ext.Extension):
    """The block {% generation %}, whose text comes out between two marks."""

    tags = frozenset({'generation'})

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(['name:endgeneration'], drop_needle=True)
      return nodes.CallBlock(self.call_method('mark'), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
      return caller().join(MARKS)

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Marks, ext.loopcontrols]
  )
  environment.globals |= {'raise_exception': _raise, 'strftime_now': _strftime_now}
  environment.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
  try:
    tree = environment.parse(source)
    compiled = environment.from_string(source)
  except jinja2.TemplateSyntaxError as error:
    raise UserError(
      f'{name} is not a valid Jinja template (line {error.lineno}: {error.message}); correct it'
    ) from error
  used = tree.find_all(nodes.ExtensionAttribute)
  return compiled, any(node.identifier == Marks.identifier for node in used)


class _RefusalError(Exception):
  """A template refuses messages by `raise_exception`."""


def _raise(message: str) -> None:
  raise _RefusalError(message)


def _strftime_now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


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
