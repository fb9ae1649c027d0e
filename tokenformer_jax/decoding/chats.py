"""Ask a language model that was trained on conversations for the next answer."""

import dataclasses
from typing import Any

import numpy as np

from tokenformer_jax.data import marks
from tokenformer_jax.data.chat_rows import ANSWER_ROLE, Chat, read_messages, read_tools
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

  def tokens(self, tokenizer: Tokenizer, trained: int | None = None) -> Request:
    return dataclasses.replace(super().tokens(tokenizer, trained), grows=True)

  def ids(self, tokenizer: Tokenizer) -> np.ndarray:
    (encoded,) = tokenizer.encode_chats([(self.prompt, ())])
    ids, begin = marks.plain(encoded), np.array(tokenizer.begin, np.int32)
    # Many templates write the first token of a text themselves.
    return ids if len(ids) and np.array_equal(ids[: len(begin)], begin) else tokenizer.start(ids)


def find_template(meta: Meta, directory: paths.Path) -> Template:
  """Return the template of the conversations of a model, that of its training or of its folder."""
  checkpoint.check_is_language_model(meta, directory)
  template = meta.tokenizer.get('chat')
  if template is None:
    raise UserError(
      f'{directory} was trained on plain text, so it has no chat template; generate without chat, '
      'or train it on conversations with config.data.rows=chat'
    )
  check_installed('jinja2', 'renders conversations', 'chat')
  return Template(**template)


def question(messages: Any, tools: Any = None) -> Chat:
  """Return messages to answer, and the tools that the answer may call, checked."""
  chat = Chat(read_messages(messages, 'messages:'), read_tools(tools, 'the request'))
  if chat.messages[-1]['role'] == ANSWER_ROLE:
    raise UserError('messages end with an answer of the assistant; end them with a question')
  return chat


def ask(template: Template, chat: Chat, request: TextRequest) -> ChatRequest:
  """Return the request for the answer to a `question`; `request` has all but the prompt."""
  end = template.end_of_turn(chat.messages)
  stop = (*request.stop, end) if end else request.stop
  fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
  prompt = template.render(*chat, ask=True).text
  return ChatRequest(**{**fields, 'prompt': prompt, 'stop': stop})
