r"""Measure the tokens a second of `tokenformer prepare` beside the tokenizers library alone.

  python benchmarks/prepare.py                          # 20 million tokens; 1 process, one a core
  python benchmarks/prepare.py --tokens=1000000000 --workers 2 --folder=DIR
  python benchmarks/prepare.py --kills=10               # builds it again, killed at random moments

Rates are by processor time, so other programs on the machine count less: tokens a second of one
core, with the start of the processes. The text is synthetic: words of a Zipf distribution, in JSON
lines of about 300 words. A BPE of 4096 entries is trained on it. `library` is `encode_batch_fast`
in the same number of processes at the same time, one thread each, on a part of the text, without
reading, counting and writing, and without their start. A line for `prepare` follows, with its time
over the library's, and the most memory that all its processes have had at once: the sum of their
resident sets, so what they share counts several times.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokenformer_jax.config import DataConfig, TextConfig
from tokenformer_jax.data import store, tokenizers

_FILE_TOKENS = 2_000_000  # about, of a file of text
_SECONDS = 0.2  # between two looks at the memory
_START_SECONDS = 3  # of a process, before its build can be killed


def _cpu_seconds() -> float:
  """Return the processor time of this process and of those that it has waited for."""
  return sum(os.times()[:4])


def write_text(folder: Path, tokens: int) -> None:
  """Write JSON lines with about this many tokens."""
  chance = np.random.default_rng(0)
  letters = np.array(list('etaoinshrdlucmfwypvbgkjqxz'))
  words = [''.join(chance.choice(letters, chance.integers(2, 11))) for _ in range(20_000)]
  chances = 1 / np.arange(1, len(words) + 1)
  chances /= chances.sum()
  for i in range(max(1, tokens // _FILE_TOKENS)):
    drawn = chance.choice(len(words), size=(5000, 300), p=chances)
    with open(folder / f'{i:06}.jsonl', 'w') as file:
      for row in drawn:
        file.write(json.dumps({'text': ' '.join(words[j] for j in row)}) + '\n')


def library_rate(folder: Path, processes: int) -> float:
  """Return the tokens a second of the library in one thread of each of several processes."""
  context = multiprocessing.get_context('spawn')
  files = sorted((folder / 'text').iterdir())
  with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
    used = [files[i % len(files)] for i in range(processes)]
    encoded = list(pool.map(_encode, used, [folder / 'tokenizer.json'] * processes))
  tokens, seconds = map(sum, zip(*encoded, strict=True))
  return tokens / seconds


def _encode(file: Path, tokenizer: Path) -> tuple[int, float]:
  """Return the tokens of a file, and the seconds that the library needs for them."""
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'
  library = tokenizers.load(str(tokenizer))._tokenizer
  texts = [json.loads(line)['text'] for line in file.read_text().splitlines()]
  begin, tokens = time.process_time(), 0
  for i in range(0, len(texts), 250):
    encoded = library.encode_batch_fast(texts[i : i + 250], add_special_tokens=False)
    tokens += sum(map(len, encoded))
  return tokens, time.process_time() - begin


@contextlib.contextmanager
def _memory() -> Iterator[list[int]]:
  """Measure the most bytes that this process and its children have at once, in a list of one."""
  most, done = [0], threading.Event()

  def watch() -> None:
    while not done.wait(_SECONDS):
      most[0] = max(most[0], _resident(os.getpid()))

  thread = threading.Thread(target=watch)
  thread.start()
  try:
    yield most
  finally:
    done.set()
    thread.join()


def _resident(pid: int) -> int:
  """Return the bytes of the resident sets of a process and of all below it."""
  process = Path(f'/proc/{pid}')
  try:
    pages = int((process / 'statm').read_text().split()[1])
    children = [
      int(child)
      for task in (process / 'task').iterdir()
      for child in (task / 'children').read_text().split()
    ]
  except OSError:  # It ended.
    return 0
  return pages * os.sysconf('SC_PAGE_SIZE') + sum(map(_resident, children))


def digest_after_kills(config: DataConfig, workers: int, kills: int, seconds: float) -> str:
  """Return the digest of a store whose build was killed at random moments of so many seconds."""
  chance, context = random.Random(0), multiprocessing.get_context('spawn')
  for _ in range(kills):
    process = context.Process(target=store.make, args=(config,), kwargs={'workers': workers})
    process.start()
    time.sleep(_START_SECONDS + chance.uniform(0, seconds / kills))
    process.kill()
    process.join()
  return store.make(config, workers=workers).digest


def _bytes(folder: Path) -> int:
  return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
  """Print a line for the library and one for `prepare`, for each number of processes."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--tokens', type=int, default=20_000_000)
  parser.add_argument('--workers', type=int, nargs='+', default=[1, len(os.sched_getaffinity(0))])
  parser.add_argument('--kills', type=int, default=0, help='of a second build, to the same digest')
  parser.add_argument('--folder', help='for the text and the stores; else a temporary one')
  arguments = parser.parse_args()
  with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
    folder = Path(name)
    (folder / 'text').mkdir()
    write_text(folder / 'text', arguments.tokens)
    lines = (folder / 'text/000000.jsonl').read_text().splitlines()
    tokenizer = tokenizers.train_bpe((json.loads(line)['text'] for line in lines), 4096)
    (folder / 'tokenizer.json').write_text(json.dumps(tokenizer.to_json()['tokenizer']))
    print(f'text: {_bytes(folder / "text") / 1e9:.2f} GB of JSON lines')
    for workers in dict.fromkeys(arguments.workers):
      alone = library_rate(folder, workers)
      print(f'{workers:>3} library  {alone:12,.0f} tokens/s of a core')
      config = TextConfig(
        source=f'files:{folder}/text',
        tokenizer=f'{folder}/tokenizer.json',
        store=str(folder / f'store{workers}'),
      )
      os.environ['RAYON_NUM_THREADS'] = str(workers)
      begin, began = _cpu_seconds(), time.monotonic()
      with _memory() as most:
        made = store.make(config, workers=workers)
      seconds, tokens = _cpu_seconds() - begin, len(made.train) + len(made.validation)
      took = time.monotonic() - began
      print(
        f'{workers:>3} prepare  {tokens / seconds:12,.0f} tokens/s of a core, '
        f"{alone * seconds / tokens:.2f} of the library's time; {tokens:,} tokens in "
        f'{took:.0f} s, memory {most[0] / 1e9:.2f} GB, store '
        f'{_bytes(made.path) / 1e9:.2f} GB, digest {made.digest[:8]}',
        flush=True,
      )
      if arguments.kills:
        again = dataclasses.replace(config, store=str(folder / f'killed{workers}'))
        digest = digest_after_kills(again, workers, arguments.kills, took)
        same = 'the same' if digest == made.digest else 'ANOTHER'
        print(
          f'{workers:>3} killed {arguments.kills} times: {same} digest {digest[:8]}', flush=True
        )


if __name__ == '__main__':
  main()
