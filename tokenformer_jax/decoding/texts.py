"""Convert text requests to tokens for the decoder, and written tokens back to text."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tokenformer_jax.data import tokenizers
from tokenformer_jax.data.chat_rows import Chat
from tokenformer_jax.decoding.decode import Request
from tokenformer_jax.decoding.sampling import DEFAULT, Sampling
from tokenformer_jax.errors import UserError

LENGTH = 256  # the most tokens to write if a request names no length


@dataclasses.dataclass(frozen=True)
class TextRequest:
  """A request for a text after a prompt: at most `length` tokens, ending before a stop string.

  With `max_length`, prompt and text together have at most that many tokens. With neither, they are
  no longer than the texts of training, if the prompt leaves room for a token.
  """

  prompt: str
  length: int | None = None  # None: `LENGTH`
  sampling: Sampling = DEFAULT
  stop: tuple[str, ...] = ()
  max_length: int | None = None
  chat: Chat | None = None  # to answer, of which `chats.ask` makes the prompt

  def __post_init__(self):
    """Check the prompt and the length."""
    if self.length is not None and self.length >= 2**31:
      raise UserError(f'length is {self.length}; it must be less than 2147483648')
    try:
      self.prompt.encode()
    except UnicodeEncodeError as error:
      raise UserError('the prompt is not UTF-8 text; correct its encoding') from error

  def tokens(self, tokenizer: tokenizers.Tokenizer, trained: int | None = None) -> Request:
    """Return the request in tokens, with the prompt as the beginning of a document.

    `trained` is the tokens of the longest text of training; None: not limited.
    """
    ids = self.ids(tokenizer)
    length = LENGTH if self.length is None else self.length
    if self.length is self.max_length is None and trained is not None and len(ids) < trained:
      length = min(length, trained - len(ids))
    if self.max_length is not None:
      length = min(length, self.max_length - len(ids))
      if length < 1:
        raise UserError(
          f'max_length is {self.max_length}, and a prompt is {len(ids)} tokens with the beginning '
          'of its document, which leaves none to write; raise it, or shorten the prompt'
        )
    return make_request(tokenizer, ids.tolist(), length, self.sampling, self.stop)

  def ids(self, tokenizer: tokenizers.Tokenizer) -> np.ndarray:
    """Return the tokens of the prompt, as the beginning of a document."""
    return tokenizer.start(tokenizer.encode(self.prompt))


def make_request(
  tokenizer: tokenizers.Tokenizer,
  ids: Sequence[int],
  length: int,
  sampling: Sampling,
  stop: Sequence[str],
) -> Request:
  """Return a request that ends with the text, or once the text has one of the stop strings."""

  def ended(written: list[int]) -> bool:
    text = ''.join(stream_text(tokenizer, iter(written), ids))
    return any(string in text for string in stop)

  return Request(ids, length, sampling, stop=tokenizer.ends, ended=ended if stop else None)


def until(pieces: Iterable[str], stop: Sequence[str]) -> Iterator[str]:
  """Yield the pieces' text up to the stop string that completes first. No stop string is empty."""
  waiting = max(map(len, stop), default=1) - 1  # characters that may begin a stop string
  text, written = '', 0
  for piece in pieces:
    text += piece
    starts = [(text.find(string), string) for string in stop if string in text]
    if starts:
      _, start = min((start + len(string), start) for start, string in starts)
      yield text[written:start]
      return
    end = max(written, len(text) - waiting)
    yield text[written:end]
    written = end
  yield text[written:]


def decode_text(
  tokenizer: tokenizers.Tokenizer,
  ids: Sequence[int],
  stop: Sequence[str] = (),
  prompt: Sequence[int] = (),
) -> str:
  """Return the text of tokens after a prompt, up to a token that ends it or a stop string."""
  return ''.join(until(stream_text(tokenizer, iter(ids), prompt), stop))


def stream_text(
  tokenizer: tokenizers.Tokenizer, ids: Iterator[int], prompt: Sequence[int] = ()
) -> Iterator[str]:
  """Yield the text of tokens after a prompt as they come, up to a token that ends it.

  The text comes in whole characters. Tokens are decoded with those before them, because many
  tokenizers leave out the space of the first of the tokens that they decode.
  """
  begin = {*tokenizer.begin, tokenizer.end_of_document}  # no text
  seen = list(itertools.dropwhile(begin.__contains__, prompt))
  start, stop = 0, len(seen)  # tokens whose text is written; they end with a whole character
  for token in ids:
    if token in tokenizer.ends:
      break
    seen.append(token)
    text = tokenizer.decode(seen[start:])
    if text.endswith('\N{REPLACEMENT CHARACTER}'):
      continue  # The rest of the character is in later tokens.
    yield text[len(tokenizer.decode(seen[start:stop])) :]
    start, stop = stop, len(seen)
  yield tokenizer.decode(seen[start:])[len(tokenizer.decode(seen[start:stop])) :]
