"""Encode pieces of text, and write their tokens into the part of a split in a shard."""

from collections.abc import Sequence
from typing import BinaryIO

import numpy as np

from tokenformer_jax.data.corpus import Piece
from tokenformer_jax.data.shards import Digests, Part, flush
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import UserError


def encode(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[np.ndarray]:
  """Return the ids of pieces, with marks if they are conversations."""
  if pieces[0].answers is None:
    return tokenizer.encode_batch([piece.text for piece in pieces])
  return tokenizer.encode_chats([(piece.text, piece.answers) for piece in pieces])


class PartWriter:
  """Writer of the tokens of a split in a shard, which also counts documents, bytes and tokens."""

  def __init__(self, file: BinaryIO, dtype: np.dtype, tokenizer: Tokenizer):
    self.tokens = self.bytes = self.documents = self.answers = self.divided = 0
    self._digests = Digests()
    self._file = file
    self._dtype = dtype
    self._tokenizer = tokenizer

  def add(self, piece: Piece, ids: np.ndarray) -> None:
    """Append the ids of a piece, and those that begin or end its document where it does."""
    if piece.answers is not None:
      self._add_chat(piece, ids)
      return
    ids = self._tokenizer.document(ids, begins=piece.begins, ends=piece.ends)
    self._check(ids)
    self._write(ids.astype(self._dtype))
    self.bytes += len(piece.text.encode())
    self.documents += piece.ends

  def _add_chat(self, piece: Piece, ids: np.ndarray) -> None:
    """Append a conversation, and unless it has them the ids that begin and end a document.

    Those at the beginning carry no loss, and the end that of the last token.
    """
    from tokenformer_jax.data import marks  # noqa: PLC0415 (only for conversations)

    end, opening = self._tokenizer.end_of_document, np.array(self._tokenizer.opening, np.int32)
    if not np.array_equal(marks.plain(ids)[: len(opening)], opening):
      ids = np.concatenate([marks.flip(opening), ids])
    if marks.plain(ids)[-1] != end:
      ids = np.append(ids, end if ids[-1] >= 0 else marks.flip(end))
    self._check(marks.plain(ids))
    self._write(marks.pack(ids, self._dtype))
    self.bytes += sum(len(piece.text[start:stop].encode()) for start, stop in piece.answers)
    self.documents += 1
    self.answers += int((ids >= 0).sum())
    inside = marks.plain(ids)[1 : None if len(opening) else -1]
    self.divided += bool((inside == self._tokenizer.boundary).any())

  def _check(self, ids: np.ndarray) -> None:
    if ids.max(initial=0) >= self._tokenizer.size:
      raise UserError(
        f'the tokenizer {self._tokenizer.fingerprint} returned the id {ids.max()}, but its '
        f'vocabulary has {self._tokenizer.size} ids; repair its vocabulary'
      )

  def _write(self, ids: np.ndarray) -> None:
    data = ids.tobytes()
    self._file.write(data)
    self._digests.update(data)
    self.tokens += len(ids)

  def part(self) -> Part:
    """Return the counts and digests of what was written."""
    return Part(
      self.tokens,
      self.bytes,
      self.documents,
      self._digests.whole().hex(),
      tuple(self._digests.blocks()),
      self.answers,
      self.divided,
    )

  def flush(self) -> None:
    """Wait until the file is on disk, so that a power cut leaves no renamed file of zeros."""
    flush(self._file)
