"""What the benchmarks of planned steps share: cells of a table, each planned once, on its own."""

import argparse
import dataclasses
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLAN = ('-m', 'tokenformer_jax.plan')

Figures = dict[str, Any]
Row = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Model:
  """A config that is planned.

  Attributes:
    file: of `configs/`, and the variant.
    length: of its sequences.
    flags: that change the config.
  """

  file: str
  length: int
  flags: tuple[str, ...] = ()

  def rows(self, tokens: int) -> int:
    """Sequences that have so many tokens."""
    rows, rest = divmod(tokens, self.length)
    if rest or not rows:
      sys.exit(f'--tokens_per_chip={tokens} is no number of sequences of {self.length}')
    return rows

  def on(self, topology: str, batch: int, *flags: str) -> list[str]:
    """The planner's flags for it."""
    return [
      f'--config=configs/{self.file}',
      f'--topology={topology}',
      f'--config.data.batch_size={batch}',
      *self.flags,
      *flags,
    ]


MODELS = {
  'lm_pile:150m': Model('lm_pile.py:150m', 2048),
  'lm_pile:1_5b': Model('lm_pile.py:1_5b', 2048),
  'lm_openwebtext:1_4b': Model('lm_openwebtext.py:1_4b', 1024),
}


def parser(doc: str, out: str) -> argparse.ArgumentParser:
  """A parser with the flags that all of them have."""
  made = argparse.ArgumentParser(
    description=doc.splitlines()[0],
    epilog="Other flags are the planner's, --config.model.pattern=layer*2 say.",
    allow_abbrev=False,
  )
  made.add_argument('--out', type=Path, default=Path(out), help='where the cells are kept')
  made.add_argument('--tokens_per_chip', type=int, default=32768, help='of a batch')
  made.add_argument('--report', action='store_true', help='plan nothing, print what there is')
  return made


def planned(
  label: str,
  flags: list[str],
  out: Path,
  *,
  report: bool,
  command: tuple[str, ...] = PLAN,
) -> Figures | None:
  """The planner's figures of a cell: those kept of the same flags, or new ones, which are kept.

  The compiler is in a process of its own, because when it fails it takes its process with it.

  Args:
    label: of the cell.
    flags: of the planner.
    out: the directory where cells are kept.
    report: only look at what is kept.
    command: what takes these flags, and `--json`.

  Returns:
    What `--json` has, or as `error` the sentence of a step that does not fit, or that libtpu
    aborted; None if there is nothing.
  """
  digest = hashlib.sha256('\n'.join((*command, *flags)).encode()).hexdigest()[:8]
  file = out.resolve() / f'{label.replace(":", "_")}-{digest}.json'
  if file.exists():
    return json.loads(file.read_text())
  if report:
    return None
  print(f'planning {label}', file=sys.stderr, flush=True)
  file.parent.mkdir(parents=True, exist_ok=True)
  new = file.with_suffix('.new')
  done = subprocess.run(
    [sys.executable, *command, *flags, f'--json={new}'],
    capture_output=True, text=True, check=False, cwd=ROOT,
  )  # fmt: skip
  last = (done.stderr.strip().splitlines() or ['nothing was said'])[-1]
  if done.returncode == 0:
    found = json.loads(new.read_text())
  elif done.returncode == 2 and last.startswith('error: the step '):
    found = {'error': last.removeprefix('error: the step ').partition('; what may')[0]}
  elif done.returncode == -signal.SIGABRT:
    found = {'error': 'is too much for libtpu, which aborts'}
  else:  # Of a mistake nothing is kept; the other cells may still be planned.
    print(f'{label}: exit status {done.returncode}: {last}', file=sys.stderr, flush=True)
    return None
  versions = {name: metadata.version(name) for name in ('jax', 'libtpu')}
  found = {'label': label, 'flags': flags, 'versions': versions} | found
  new.write_text(json.dumps(found, indent=2) + '\n')
  new.rename(file)
  return found


def choose(made: argparse.ArgumentParser) -> None:
  """Adds the flags that choose some of the cells."""
  made.add_argument('--only', default='', help='a part of the names of the models to take')
  made.add_argument('--on', default='', help='a part of the names of the topologies to take')


def versions(found: Iterable[Figures]) -> str:
  """What compiled the cells."""
  return '; '.join(sorted({', '.join(f'{k} {v}' for k, v in f['versions'].items()) for f in found}))


def table(head: Row, rows: list[Row]) -> str:
  """A Markdown table."""
  return '\n'.join(f'| {" | ".join(row)} |' for row in (head, ('---',) * len(head), *rows))
