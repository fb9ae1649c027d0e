"""Ask a language model that was trained on conversations for the next answer."""

import dataclasses
from typing import Any

import numpy as np

from tokenformer_jax.data import marks
from tokenformer_jax.data.chat_rows import (
  ANSWER_ROLE,
  Chat,
  read_arguments,
  read_messages,
  read_tools,
)
from tokenformer_jax.data.chat_template import Template
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.decoding.decode import Request
from tokenformer_jax.decoding.texts import TextRequest
from tokenformer_jax.errors import UserError, check_installed
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.storage import paths


@dataclasses.dataclass(frozen=True)
class ChatRequest(TextRequest):
  """A request for an answer. The prompt is a text of the template, with its special tokens."""

  template: Template | None = None  # None: the prompt is all that the model reads

  def tokens(self, tokenizer: Tokenizer, trained: int | None = None) -> Request:
    return dataclasses.replace(super().tokens(tokenizer, trained), grows=True)

  def ids(self, tokenizer: Tokenizer) -> np.ndarray:
    (encoded,) = tokenizer.encode_chats([(self.prompt, ())])
    begin = self.template.begin(tokenizer) if self.template else ()
    ids = marks.plain(marks.after(begin, encoded))
    return ids if len(ids) else tokenizer.start(ids)


def find_template(meta: Meta, directory: paths.Path) -> Template:
  """Return the template of the conversations of a model, that of its training or of its folder."""
  checkpoint.check_is_language_model(meta, directory)
  template = meta.tokenizer.get('chat')
  if template is None:
    raise UserError(
      f'{directory} was trained on plain text, so it has no chat template; use it on plain text, '
      'or train it on conversations with config.data.rows=chat'
    )
  check_installed('jinja2', 'renders conversations', 'chat')
  return Template(**template)


def question(messages: Any, tools: Any = None, arguments: Any = None) -> Chat:
  """Return messages to answer, tools that the answer may call, and arguments of the template."""
  tools, arguments = read_tools(tools, 'the request'), read_arguments(arguments, 'the request')
  chat = Chat(read_messages(messages, 'messages:'), tools, arguments)
  if chat.messages[-1]['role'] == ANSWER_ROLE:
    raise UserError('messages end with an answer of the assistant; end them with a question')
  return chat


def ask(template: Template, chat: Chat, request: TextRequest) -> ChatRequest:
  """Return the request for the answer to a `question`; `request` has all but the prompt."""
  end = template.end_of_turn(*chat)
  stop = (*request.stop, end) if end else request.stop
  fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
  prompt = template.render(*chat, ask=True).text
  return ChatRequest(**{**fields, 'prompt': prompt, 'stop': stop, 'template': template})
