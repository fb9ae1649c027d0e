"""Encode pieces of text, and write the shards of a token store."""

import bisect
import collections
import concurrent.futures
import concurrent.futures.process
import contextlib
import dataclasses
import hashlib
import heapq
import itertools
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from tokenformer_jax.data import marks, shards, text, tokenizers, tokens
from tokenformer_jax.data.corpus import SPLITS, Piece, Unit
from tokenformer_jax.data.shards import Shard, SplitCounts
from tokenformer_jax.data.tokenizers import Spans, Tokenizer
from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import paths, sealed

NAMED_BAD = 100  # documents that cannot be read, of those that the index describes a shard's
BATCH_CHARACTERS = 2**19  # characters of the documents that are encoded together

_BLOCK_TOKENS = 2**20  # of documents that are packed together
_BLOCK_ROWS = 64  # at least

_tokenizer: Tokenizer  # of a worker process


def encode(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[np.ndarray]:
  """Return the ids of pieces, with marks if they are conversations."""
  if pieces[0].answers is None:
    return tokenizer.encode_batch([piece.text for piece in pieces])
  return tokenizer.encode_chats([(piece.text, piece.answers or ()) for piece in pieces])


class SplitWriter:
  """Writer of the tokens of a split in a shard, which also counts documents, bytes and tokens.

  `spelled` counts how often text spells the end of a document, by the spelling.
  """

  def __init__(self, file: BinaryIO, build: 'ShardBuild', tokenizer: Tokenizer):
    """Write to a file, as a build says; the digest does not depend on its `bounds`."""
    self.tokens = self.bytes = self.documents = self.answers = 0
    self.spelled = collections.Counter[str]()
    self.longest: list[tuple[int, str]] = []  # a heap of tokens and rows
    self._hash = hashlib.blake2b(digest_size=16)
    self._file, self._build, self._dtype = file, build, np.dtype(build.dtype)
    self._chat, row = build.unit.template is not None, build.row
    self._digested = shards.token_dtype(tokenizer.size + (row > 0), marked=self._chat)
    self._tokenizer, self._ends = tokenizer, tokenizer.spelled_ends
    lead = [] if tokenizer.opening or build.pairs else [marks.flip(tokenizer.end_of_document)]
    self._packer = Packer(row, np.array(lead, np.int32), self._put) if row else None

  def add(self, piece: Piece, ids: np.ndarray) -> None:
    """Append the ids of a piece, and those that begin or end its document where it does."""
    if piece.answers is not None:
      self._add_chat(piece, piece.answers, ids)
      return
    ids = self._tokenizer.document(ids, begins=piece.begins, ends=piece.ends)
    self._check(marks.plain(ids))
    self._put(ids)
    self.bytes += len(piece.text.encode())
    self.documents += piece.ends
    self.spelled.update({end: count for end in self._ends if (count := piece.text.count(end))})

  def _add_chat(self, piece: Piece, answers: Spans, ids: np.ndarray) -> None:
    """Append a conversation, with the ids that begin and end a document."""
    ids = self._tokenizer.conversation(ids, self._tokenizer.opening * piece.begins)
    self._check(marks.plain(ids))
    (self._packer.add if self._packer else self._put)(ids)
    if self._packer and self._build.pairs:
      self._packer.flush()
    self.bytes += sum(len(piece.text[start:stop].encode()) for start, stop in answers)
    self.documents += piece.ends
    self.answers += int((ids >= 0).sum())
    push = heapq.heappush if len(self.longest) < shards.LONGEST else heapq.heappushpop
    push(self.longest, (len(ids), piece.label))

  def _check(self, ids: np.ndarray) -> None:
    if ids.max(initial=0) >= self._tokenizer.size:
      raise UserError(
        f'the tokenizer {self._tokenizer.fingerprint} returned the id {ids.max()}, but its '
        f'vocabulary has {self._tokenizer.size} ids; repair its vocabulary'
      )

  def _put(self, ids: np.ndarray) -> None:
    digested = marks.pack(ids, self._digested) if self._chat else marks.plain(ids)
    digested = digested.astype(self._digested)
    self._hash.update(digested.tobytes())
    stored = marks.pack(ids, self._dtype, bounds=True) if self._build.bounds else digested
    self._file.write(stored.tobytes())
    self.tokens += len(ids)

  def result(self) -> SplitCounts:
    """Write what waits, and return the counts and the digest of what was written."""
    if self._packer:
      self._packer.flush()
    counts = self.tokens, self.bytes, self.documents
    return SplitCounts(*counts, self._hash.hexdigest(), self.answers)


@dataclasses.dataclass(frozen=True)
class ShardBuild:
  """The build of one shard: its unit of text, and a hash of everything that determines it."""

  folder: paths.Path
  name: str
  unit: Unit
  key: str
  dtype: str
  skip_bad: bool = False
  row: int = 0  # tokens of a row of packed conversations, or 0
  pairs: bool = False  # whether each has a row of its own, after the other one of its pair
  bounds: bool = False  # whether the shard says where documents begin

  def find(self, sizes: dict[str, int]) -> Shard | None:
    """Return the shard if an earlier build wrote it; `sizes` are of all files of the store."""
    name = record_name(self.name)
    if name not in sizes:
      return None
    try:
      record = sealed.load((self.folder / name).read_bytes())
      shard = Shard.from_json(record['shard'])
      whole = shard.is_among(sizes) and (self.skip_bad or not shard.bad_documents)
      return shard if record['key'] == self.key and whole else None
    except (ValueError, LookupError, TypeError, AttributeError):
      return None  # A power cut can leave a file without content.

  def write(self, tokenizer: Tokenizer) -> Shard:
    """Write the shard and its record."""
    bad, named = 0, list[str]()

    def leave_out(error: UserError) -> None:
      nonlocal bad
      bad += 1
      if len(named) < NAMED_BAD:
        named.append(str(error))

    with shards.temporary_folder(self.folder) as temporary, contextlib.ExitStack() as stack:
      files = {s: stack.enter_context(open(temporary / s, 'w+b')) for s in SPLITS}
      writers = {split: SplitWriter(file, self, tokenizer) for split, file in files.items()}
      bad_rows: text.Bad = leave_out if self.skip_bad else text.refuse
      encoded = (
        (piece, ids)
        for pieces in _batches(self.unit.pieces(bad_rows))
        for piece, ids in zip(pieces, encode(tokenizer, pieces), strict=True)
      )
      for piece, ids in _fitting(encoded, tokenizer, self.row, bad_rows) if self.pairs else encoded:
        writers[piece.split].add(piece, ids)
      splits = {split: writer.result() for split, writer in writers.items()}
      train, validation = files.values()
      validation.seek(0)
      shutil.copyfileobj(validation, train)
      train.flush()
      array_files: dict[str, tuple[int, str]] = {}
      if train.tell():
        tokens.write(temporary / 'array', np.memmap(train.name, self.dtype, 'r'))
        array_files = shards.put_array(temporary / 'array', self.folder / self.name)
    spelled = sum((writer.spelled for writer in writers.values()), collections.Counter[str]())
    longest = sorted(itertools.chain(*(w.longest for w in writers.values())), reverse=True)
    lengths, row = tuple(n for n, _ in longest[: shards.LONGEST]), longest[0][1] if longest else ''
    shard = Shard(self.name, splits, array_files, tuple(named), bad, dict(spelled), lengths, row)
    record = {'key': self.key, 'shard': dataclasses.asdict(shard)}
    shards.put_json(self.folder, record_name(self.name), record)
    return shard


def _fitting(
  encoded: Iterator[tuple[Piece, np.ndarray]], tokenizer: Tokenizer, row: int, bad: text.Bad
) -> Iterator[tuple[Piece, np.ndarray]]:
  """Yield both pieces of each pair; `bad` is called for a pair with one longer than a row."""
  for pair in zip(encoded, encoded, strict=True):
    opening = tokenizer.opening * pair[0][0].begins
    longest = max(len(tokenizer.conversation(ids, opening)) for _, ids in pair)
    if longest <= row:
      yield from pair
    else:
      bad(
        UserError(
          f'{pair[0][0].label} has an answer that takes {longest:,} tokens with its prompt; set '
          f'config.data.sequence_length to {longest - 1:,} or more, or leave the row out '
          '(tokenformer prepare --bad=skip)'
        )
      )


def record_name(shard: str) -> str:
  """Return the name of the file that is written when a shard is complete."""
  return f'{shard}.json'


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
  batch, characters = [], 0
  for piece in pieces:
    batch.append(piece)
    characters += len(piece.text)
    if characters >= BATCH_CHARACTERS:
      yield batch
      batch, characters = [], 0
  if batch:
    yield batch


class Packer:
  """A writer of rows of `size` tokens, which packs the conversations that `add` takes.

  Each goes whole into the row that it leaves the least room in: best fit decreasing, as in Ding et
  al. 2024 (arXiv 2404.10830), in blocks of documents that follow each other, which bound memory.
  A row has T + 1 tokens. It begins with the end of a document, unless documents have a beginning,
  and ends with padding. A longer document is cut into rows: each begins with the last token of the
  row before it, and the rest of the last one is filled up. So the tokens of a store are rows, and
  `order` is a function of the step as ever.
  """

  def __init__(self, size: int, lead: np.ndarray, write: Callable[[np.ndarray], None]):
    """Write rows by `write`; `lead` are the tokens before a document at the start of a row."""
    self._size, self._lead, self._write = size, lead, write
    self._documents: list[np.ndarray] = []
    self._waiting = 0  # tokens

  def add(self, ids: np.ndarray) -> None:
    """Add a document."""
    self._documents.append(ids)
    self._waiting += len(ids)
    if self._waiting >= max(_BLOCK_TOKENS, _BLOCK_ROWS * self._size):
      self.flush()

  def flush(self) -> None:
    """Write the rows of the documents that wait."""
    for row in pack_rows(self._documents, self._size, self._lead):
      self._write(row)
    self._documents, self._waiting = [], 0


def pack_rows(documents: Iterable[np.ndarray], size: int, lead: np.ndarray) -> Iterator[np.ndarray]:
  """Yield rows of `size` tokens with all documents; for `lead` see `Packer`."""
  rows: list[list[np.ndarray]] = []
  whole: list[np.ndarray] = []
  for document in documents:
    led = np.concatenate([lead, document])
    if len(led) <= size:
      whole.append(document)
    else:
      rows += [[led[i : i + size]] for i in range(0, len(led) - 1, size - 1)]
  rooms = sorted((size - len(start), row) for row, (start,) in enumerate(rows))
  for document in sorted(whole, key=len, reverse=True):
    smallest = bisect.bisect_left(rooms, (len(document), 0))
    if smallest == len(rooms):
      rooms.append((size - len(lead), len(rows)))
      rows.append([lead])
    room, row = rooms.pop(smallest)
    rows[row].append(document)
    bisect.insort(rooms, (room - len(document), row))
  for row in map(np.concatenate, rows):
    yield np.append(row, np.full(size - len(row), marks.NO_TOKEN, np.int32))


def write_in_processes(
  builds: Sequence[ShardBuild], tokenizer: Tokenizer, workers: int
) -> Iterator[Shard]:
  """Yield the shards of builds, in their order; each process tokenizes in one thread."""
  content = tokenizer.to_json()
  context = multiprocessing.get_context('spawn')  # A fork would copy locks of other threads.
  pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (content,))
  try:
    yield from pool.map(_write_shard, builds)
  except concurrent.futures.process.BrokenProcessPool as error:
    raise UserError(
      'a process that tokenized was killed, as the system does when memory runs out; run the same '
      'command again with fewer --workers, and it continues after the last complete shard'
    ) from error
  finally:
    pool.shutdown(wait=False, cancel_futures=True)
    for process in multiprocessing.active_children():
      process.terminate()  # A shard that is not complete is written again.


def _start_worker(content: dict[str, Any]) -> None:
  """Prepare a worker process, which ends when its parent does."""
  global _tokenizer
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends its workers.
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'
  threading.Thread(target=_end_with_parent, daemon=True).start()
  _tokenizer = tokenizers.from_json(content)


def _end_with_parent() -> None:
  if parent := multiprocessing.parent_process():
    parent.join()
  os._exit(1)


def _write_shard(build: ShardBuild) -> Shard:
  return build.write(_tokenizer)
