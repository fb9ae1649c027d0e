"""Measure the tokens a second of `tokenformer prepare` beside the tokenizers library alone.

  python benchmarks/prepare.py                          # 20 million tokens; 1 process, one a core
  python benchmarks/prepare.py --tokens=1000000000      # an hour on two cores

Rates are by processor time, so other programs on the machine do not count: tokens a second of one
core, with the start of the processes. The text is synthetic: words of a Zipf distribution, in JSON
lines of about 300 words. A BPE of 4096 entries is trained on it. `library` is `encode_batch_fast`
in one thread on a part of the text, without reading, counting and writing. A line for each number
of processes follows, with its time over the library's.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import numpy as np

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import store, tokenizers

_FILE_TOKENS = 2_000_000  # about, of a file of text


def _cpu_seconds() -> float:
  """Return the processor time of this process and of those that it has waited for."""
  return sum(os.times()[:4])


def write_text(folder: Path, tokens: int) -> None:
  """Write JSON lines with about this many tokens."""
  random = np.random.default_rng(0)
  letters = np.array(list('etaoinshrdlucmfwypvbgkjqxz'))
  words = [''.join(random.choice(letters, random.integers(2, 11))) for _ in range(20_000)]
  chances = 1 / np.arange(1, len(words) + 1)
  chances /= chances.sum()
  for i in range(max(1, tokens // _FILE_TOKENS)):
    drawn = random.choice(len(words), size=(5000, 300), p=chances)
    with open(folder / f'{i:06}.jsonl', 'w') as file:
      for row in drawn:
        file.write(json.dumps({'text': ' '.join(words[j] for j in row)}) + '\n')


def library_rate(folder: Path, tokenizer: tokenizers.Tokenizer) -> float:
  """Return the tokens a second of the library in one thread."""
  first = sorted(folder.iterdir())[0]
  texts = [json.loads(line)['text'] for line in first.read_text().splitlines()]
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'
  begin, tokens = _cpu_seconds(), 0
  for i in range(0, len(texts), 250):
    encoded = tokenizer._tokenizer.encode_batch_fast(texts[i : i + 250], add_special_tokens=False)
    tokens += sum(map(len, encoded))
  seconds = _cpu_seconds() - begin
  del os.environ['TOKENIZERS_PARALLELISM']
  return tokens / seconds


def main() -> None:
  """Print a line for the library and one for each number of processes."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--tokens', type=int, default=20_000_000)
  parser.add_argument('--workers', type=int, nargs='+', default=[1, len(os.sched_getaffinity(0))])
  parser.add_argument('--folder', help='for the text and the stores; else a temporary one')
  arguments = parser.parse_args()
  with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
    folder = Path(name)
    (folder / 'text').mkdir()
    write_text(folder / 'text', arguments.tokens)
    lines = (folder / 'text/000000.jsonl').read_text().splitlines()
    tokenizer = tokenizers.train_bpe((json.loads(line)['text'] for line in lines), 4096)
    (folder / 'tokenizer.json').write_text(json.dumps(tokenizer.to_json()['tokenizer']))
    alone = library_rate(folder / 'text', tokenizer)
    print(f'{"library":>10}  {alone:12,.0f} tokens/s')
    for workers in dict.fromkeys(arguments.workers):
      config = DataConfig(
        source=f'files:{folder}/text',
        tokenizer=f'{folder}/tokenizer.json',
        store=str(folder / f'store{workers}'),
      )
      os.environ['RAYON_NUM_THREADS'] = str(workers)
      begin = _cpu_seconds()
      made = store.make(config, workers=workers, progress=False)
      rate = (len(made.train) + len(made.validation)) / (_cpu_seconds() - begin)
      print(
        f"{workers:>10}  {rate:12,.0f} tokens/s, {alone / rate:.2f} of the library's time; "
        f'digest {made.digest[:8]}'
      )


if __name__ == '__main__':
  main()
