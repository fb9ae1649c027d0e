"""Plan and keep the cells of a table, for the benchmarks of planned steps."""

import argparse
import csv
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
PLAN = ('-m', 'tokenformer_jax', 'plan')

Figures = dict[str, Any]
Row = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Model:
  """A config to plan."""

  file: str  # in `configs/`, with its variant
  length: int  # of its sequences
  flags: tuple[str, ...] = ()  # that change the config
  before: str = ''  # the layers before the equal ones, as a pattern

  def rows(self, tokens: int) -> int:
    """Return the number of sequences in a number of tokens."""
    rows, rest = divmod(tokens, self.length)
    if rest or not rows:
      sys.exit(f'--tokens_per_chip={tokens} is not a multiple of the sequence length {self.length}')
    return rows

  def on(self, topology: str, batch: int, *flags: str) -> list[str]:
    """Return the planner's flags for the model on a topology."""
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
# Devices have places for 1.25 times the tokens of an even load, and a step is one batch.
MIXTURES = {
  'lm_deepseekmoe:16b': Model(
    'lm_deepseekmoe.py:16b',
    4096,
    (
      '--config.model.layer.ffn.dispatch.device_factor=1.25',
      '--config.optim.accumulation_steps=1',
    ),
    before='dense ',
  ),
}


def parser(doc: str, out: str, *, chooses: bool = True) -> argparse.ArgumentParser:
  """Return a parser with the flags that benchmarks share; some choose among their cells."""
  made = argparse.ArgumentParser(
    description=doc.splitlines()[0],
    epilog='Other flags go to the planner, such as --config.model.pattern=layer*2.',
    allow_abbrev=False,
  )
  made.add_argument('--out', type=Path, default=Path(out), help='the directory of the cells')
  made.add_argument('--tokens_per_chip', type=int, default=32768, help='tokens of a batch')
  made.add_argument('--csv', type=Path, help='a file for the rows of the table as well')
  made.add_argument('--report', action='store_true', help='print the kept cells, plan nothing')
  if chooses:
    made.add_argument('--only', default='', help='a part of the names of the models to plan')
    made.add_argument('--on', default='', help='a part of the names of the topologies to plan on')
  return made


def planned(
  label: str,
  flags: list[str],
  out: Path,
  *,
  report: bool,
  command: tuple[str, ...] = PLAN,
) -> Figures | None:
  """Return the planner's figures of a cell: the kept figures of the same flags, or new ones.

  Plan in another process, because the compiler ends its process when it fails. Keep the new figures
  in the directory `out`. With `report` plan nothing. `command` takes the flags and `--json`.

  Returns:
    The content of `--json`, or `error` with a sentence if the step does not fit or libtpu aborts;
    None if there are no figures.
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
  last = (done.stderr.strip().splitlines() or ['no message'])[-1]
  if done.returncode == 0:
    figures = json.loads(new.read_text())
  elif done.returncode == 2 and last.startswith('error: the step '):
    figures = {'error': last.removeprefix('error: the step ').partition('; what may')[0]}
  elif done.returncode == -signal.SIGABRT:
    figures = {'error': 'is too much for libtpu, which aborts'}
  else:  # Keep nothing after a mistake, and let the benchmark plan the other cells.
    print(f'{label}: exit status {done.returncode}: {last}', file=sys.stderr, flush=True)
    return None
  versions = {name: metadata.version(name) for name in ('jax', 'libtpu')}
  figures = {'label': label, 'flags': flags, 'versions': versions} | figures
  new.write_text(json.dumps(figures, indent=2) + '\n')
  new.rename(file)
  return figures


def columns(figures: Figures) -> dict[str, str]:
  """Return the figures of a plan as texts for a table."""
  memory, (fast, slow), (high, low) = figures['memory'], figures['step_seconds'], figures['mfu']
  most, least = figures['tokens_per_second']
  gigabytes = sum(row['gigabytes'] for row in figures['traffic'])
  return {
    'mesh': ' × '.join(f'{size} {axis}' for axis, size in figures['mesh'].items() if size > 1),
    'HBM peak, GiB': f'{memory["peak"] / 2**30:.2f} of {memory["capacity"] / 2**30:.0f}',
    'ms a step': f'{fast * 1e3:,.0f} … {slow * 1e3:,.0f}',
    'MFU': f'{low:.1%} … {high:.1%}',
    'tokens/s': f'{least:,.0f} … {most:,.0f}',
    'collectives, GB in': f'{gigabytes:.2f}',
  }


def versions(plans: Iterable[Figures]) -> str:
  """Return the versions of the programs that compiled the cells."""
  return '; '.join(sorted({', '.join(f'{k} {v}' for k, v in f['versions'].items()) for f in plans}))


def table(head: Row, rows: list[Row]) -> str:
  """Return a Markdown table."""
  return '\n'.join(f'| {" | ".join(row)} |' for row in (head, ('---',) * len(head), *rows))


def write_csv(path: Path | None, head: Row, rows: list[Row]) -> None:
  """Write the rows of a table to a file of `--csv`, if there is one."""
  if path:
    with path.open('w', newline='') as file:
      csv.writer(file, lineterminator='\n').writerows([head, *rows])
