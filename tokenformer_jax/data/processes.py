"""Write the shards of a token store in several processes, each of which tokenizes in one thread."""

import concurrent.futures
import concurrent.futures.process
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from tokenformer_jax.data import tokenizers
from tokenformer_jax.data.shard_writer import ShardBuild
from tokenformer_jax.data.shards import Shard
from tokenformer_jax.errors import UserError

_tokenizer: tokenizers.Tokenizer  # of a worker process


def write_shards(
  builds: Sequence[ShardBuild], tokenizer: tokenizers.Tokenizer, workers: int
) -> Iterator[Shard]:
  """Yield the shards of builds, in their order."""
  context = multiprocessing.get_context('spawn')  # A fork would copy locks of other threads.
  pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start, (tokenizer.to_json(),))
  try:
    yield from pool.map(_write, builds)
  except concurrent.futures.process.BrokenProcessPool as error:
    raise UserError(
      'a process that tokenized was killed, as the system does when memory runs out; run the same '
      'command again with fewer --workers, and it continues after the last complete shard'
    ) from error
  finally:
    pool.shutdown(wait=False, cancel_futures=True)
    for process in multiprocessing.active_children():
      process.terminate()  # A shard that is not complete is written again.


def _start(tokenizer: dict[str, Any]) -> None:
  """Prepare a worker process, which ends when its parent does."""
  global _tokenizer
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends its workers.
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'
  threading.Thread(target=_end_with_parent, daemon=True).start()
  _tokenizer = tokenizers.from_json(tokenizer)


def _end_with_parent() -> None:
  if parent := multiprocessing.parent_process():
    parent.join()
  os._exit(1)


def _write(build: ShardBuild) -> Shard:
  return build.write(_tokenizer)
