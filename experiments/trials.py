"""Run trainings once and print Markdown tables, for the experiments."""

import argparse
import csv
import dataclasses
import shutil
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from tokenformer_jax.config import Config
from tokenformer_jax.runs import metrics
from tokenformer_jax.training import loop


def once(out: Path, name: str, config: Config) -> Path:
  """Train, unless the run is done; return the work directory."""
  workdir = out / name
  if not (workdir / 'done').exists():
    print(f'== {name}', flush=True)
    _, stopped = loop.train_or_stop(config, workdir)
    if stopped:
      raise SystemExit('stopped; run the same command to continue')
    (workdir / 'done').touch()
  return workdir


def finished(folder: Path) -> list[Path]:
  """Return the runs in a folder that are done, one for each seed."""
  return [done.parent for done in sorted(folder.glob('*/done'))]


def evaluations(run: Path) -> list[dict[str, Any]]:
  """Return the figures of a run's evaluations."""
  return [line for line in metrics.read(run) if 'eval/loss' in line]


def write(rows: Sequence[Any], path: Path) -> None:
  """Write records of one kind as CSV."""
  with path.open('w', newline='') as file:
    writer = csv.writer(file, lineterminator='\n')
    writer.writerow([field.name for field in dataclasses.fields(rows[0])])
    for row in rows:
      writer.writerow([f'{x:.6g}' if isinstance(x, float) else x for x in vars(row).values()])


def read(path: Path, kind: Any) -> list[Any]:
  """Return the records of a CSV file."""
  types = {field.name: field.type for field in dataclasses.fields(kind)}
  with path.open() as file:
    return [kind(**{k: types[k](v) for k, v in line.items()}) for line in csv.DictReader(file)]


def latest(rows: Iterable[Any]) -> list[Any]:
  """Return the last record of each run: of those that differ in loss and time alone."""
  return list({dataclasses.replace(row, loss=0, step_seconds=0): row for row in rows}.values())


def parser(description: str, parts: Sequence[str]) -> argparse.ArgumentParser:
  """Return the parser of an experiment's command line, with the flags that all have."""
  made = argparse.ArgumentParser(description=description)
  made.add_argument('--out', required=True)
  made.add_argument('--parts', default=','.join(parts))
  made.add_argument('--seeds', default='0,1,2')
  return made


def begin(
  parser: argparse.ArgumentParser, parts: Sequence[str]
) -> tuple[argparse.Namespace, Path, list[str], tuple[int, ...]]:
  """Return the arguments, the folder of the runs, the parts and the seeds; keep programs there.

  Most runs share their programs with runs of other seeds or methods.
  """
  args = parser.parse_args()
  wanted = args.parts.split(',')
  if unknown := set(wanted) - set(parts):
    parser.error(f'unknown parts {", ".join(unknown)}; there are {", ".join(parts)}')
  out = Path(args.out)
  keep_programs(out)
  return args, out, wanted, tuple(map(int, args.seeds.split(',')))


def keep_programs(out: Path) -> None:
  """Keep compiled programs in a folder."""
  jax.config.update('jax_compilation_cache_dir', str((out / 'compiled').absolute()))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


def spread(values: Iterable[float], digits: int = 3) -> str:
  """Format values as mean ± standard deviation."""
  values = list(values)
  if not values:
    return '–'
  deviation = f' ± {statistics.stdev(values):.{digits}f}' if len(values) > 1 else ''
  return f'{statistics.mean(values):.{digits}f}{deviation}'


def table(rows: Sequence[Sequence[str]]) -> None:
  """Print a Markdown table; the first row is its head."""
  head, *body = rows
  for row in (head, ['---'] * len(head), *body):
    print('| ' + ' | '.join(row) + ' |')
  print()


def write_second_corpus(out: Path) -> Path:
  """Write English prose: Python's language reference for `help`, with a file for each topic."""
  from pydoc_data import topics  # noqa: PLC0415 (needed for this part only)

  folder = out / 'corpus'
  if not folder.exists():
    temporary = out / 'corpus.partial'
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, text in topics.topics.items():
      (temporary / f'{name}.txt').write_text(text)
    temporary.rename(folder)
  return folder
