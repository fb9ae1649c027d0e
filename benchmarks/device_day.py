r"""Measure in ten minutes what only a GPU can show, and keep the logs.

  python benchmarks/device_day.py --out=day          on one GPU, with 150m and 1_5b
  python benchmarks/device_day.py --out=day --quick  a tiny model on any device, as a test
  python benchmarks/device_day.py --out=day --profile=150m

Needs `pip install -e ".[benchmark]"`; without PyTorch ours runs alone. The command runs the others
of this folder one after the other: steps of training, variants of XLA's flags, and decoding. It
kills a process that takes longer than its limit, with its children, and goes on. It prints the end
of each log, and a table. For another version of JAX make an environment of its own:

  python -m venv next && next/bin/pip install -e ".[benchmark]" "jax[cuda13]==0.12.*"
  next/bin/python benchmarks/device_day.py --out=next_day

`--profile` traces three steps and prints the groups of kernels of benchmarks/gpu_plans.py: their
bytes, the planned and the measured time, and the rate. There kernels are launched one by one.
"""

import argparse
import collections
import contextlib
import dataclasses
import gzip
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cells import Row, table
from contenders import SIZES

HERE = Path(__file__).resolve().parent
STEPS = 3  # of a profile
NO_ROWS = '--xla_disable_hlo_passes=triton-softmax-rewriter'
LINES = 14  # of the end of a log
# What the measured steps and tokens aim at on an H200: docs/benchmarks.md has the arithmetic.
AIMS = (
  'aims: 47 % MFU at 150m and 43 % at 1_5b, of floors by arithmetic at 52 and 48 %; at most 0.90 '
  'of the time of compiled PyTorch'
)


@dataclasses.dataclass(frozen=True)
class Job:
  """A command of this folder."""

  name: str
  seconds: float  # its limit
  script: str
  arguments: tuple[str, ...]
  flags: str = ''  # of XLA


def jobs(quick: bool, out: Path) -> list[Job]:
  """Return the jobs in the order of what matters most."""
  small, large = ('tiny', 'tiny') if quick else ('150m', '1_5b')
  has_torch = importlib.util.find_spec('torch') is not None
  both = 'jax,torch_compiled' if has_torch and not quick else 'jax'
  rounds = '--rounds=2' if quick else '--rounds=12'
  texts = ('--prompt=8', '--length=32', '--rounds=2') if quick else ('--rounds=3',)
  batches = '--batches=1' if quick else '--batches=1,8'

  def steps(size: str, contenders: str, flags: str = '', *, what: str = '', limit: float) -> Job:
    options = (f'--size={size}', f'--contenders={contenders}', '--apart', rounds)
    return Job(f'steps of {size}{what}', limit, 'train_step.py', options, flags)

  def tokens(draw: str, flags: str = '', what: str = '') -> Job:
    contenders = (f'--size={small}', batches, f'--draw={draw}', *texts)
    return Job(f'tokens of {small}, {draw}{what}', 60, 'decode.py', contenders, flags)

  def profile(size: str) -> Job:
    options = (f'--profile={size}', f'--out={out}')
    return Job(f'profile of {size}', 90, 'device_day.py', options)

  while_loops = '--xla_gpu_enable_command_buffer=+WHILE'
  return [
    profile(small),
    steps(small, both, limit=120),
    tokens('default'),
    tokens('default', while_loops, ' in one command buffer'),
    steps(large, 'jax', limit=90),
    steps(small, 'jax', NO_ROWS, what=' without kernels of rows', limit=60),
    steps(
      small, 'jax', '--xla_gpu_enable_triton_gemm=false', what=' without Triton products', limit=60
    ),
    *([tokens('greedy')] if has_torch else []),
    steps(
      large, 'jax', '--xla_gpu_dot_merger_threshold_mb=0', what=', products not joined', limit=90
    ),
    profile(large),
  ]


def run(job: Job, seconds: float, out: Path, number: int) -> str:
  """Run a job for at most some seconds, print the end of its log and return how it ended."""
  log = out / f'{number:02}_{job.name.replace(" ", "_").replace(",", "")}.log'
  flags = f'{os.environ.get("XLA_FLAGS", "")} {job.flags}'.strip()
  print(f'\n{job.name}: {log}', flush=True)
  with log.open('w') as file:
    process = subprocess.Popen(
      [sys.executable, str(HERE / job.script), *job.arguments],
      stdin=subprocess.DEVNULL,
      stdout=file,
      stderr=subprocess.STDOUT,
      env={**os.environ, 'XLA_FLAGS': flags},
      start_new_session=True,
    )
    try:
      status = process.wait(seconds)
      ended = 'done' if status == 0 else f'exit status {status}'
    except subprocess.TimeoutExpired:
      ended = f'stopped after {seconds:.0f} s'
    finally:
      with contextlib.suppress(ProcessLookupError):  # The children are in the same group.
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
  print('\n'.join(log.read_text().splitlines()[-LINES:]), flush=True)
  return ended


def run_all(quick: bool, minutes: float, out: Path) -> bool:
  """Run the jobs, print a table and return whether all of them ended well."""
  out.mkdir(parents=True, exist_ok=True)
  end, rows = time.monotonic() + 60 * minutes, []
  for number, job in enumerate(jobs(quick, out)):
    begin = time.monotonic()
    left = min(job.seconds, end - begin)
    ended = run(job, left, out, number) if left > 0 else 'no time was left'
    rows.append((job.name, f'{time.monotonic() - begin:.0f}', ended))
  print(f'\n{table(("job", "seconds", ""), rows)}\n{AIMS}')
  return all(ended == 'done' for *_, ended in rows)


def profile(name: str, out: Path) -> None:
  """Profile steps of a size and print the time of each group of kernels."""
  folder = out / f'profile_{name}'
  flags = (
    f'--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_step '
    '--xla_gpu_enable_command_buffer='  # In a command buffer kernels have no names.
  )
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flags}'
  os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'  # A program from a cache is not dumped.
  import jax  # noqa: PLC0415 (after the flags)
  from train_step import WARM_UP, jax_step  # noqa: PLC0415

  step = jax_step(SIZES[name])
  for _ in range(WARM_UP):
    step()
  begin = time.perf_counter()
  with jax.profiler.trace(str(folder)):
    for _ in range(STEPS):
      step()
  seconds = (time.perf_counter() - begin) / STEPS
  texts = sorted(folder.glob('*after_optimizations.txt'), key=lambda file: file.stat().st_mtime)
  measured = trace_seconds(sorted(folder.glob('**/*.trace.json.gz'))[-1])
  head = ('kernels', 'number', 'GB', 'ms planned', 'ms measured', 'TB/s')
  print(table(head, profile_rows(texts[-1].read_text(), measured)))
  print(f'{name}: {1e3 * seconds:.1f} ms a step while it is traced, on {jax.devices()[0]}')


def trace_seconds(trace: Path) -> dict[str, float]:
  """Return the seconds of a step that each operation of XLA takes, by its name, from a trace."""
  seconds: collections.Counter[str] = collections.Counter()
  for event in json.loads(gzip.decompress(trace.read_bytes()))['traceEvents']:
    if name := event.get('args', {}).get('hlo_op'):
      seconds[name] += event.get('dur', 0) / 1e6 / STEPS
  return dict(seconds)


def profile_rows(text: str, measured: dict[str, float]) -> list[Row]:
  """Return a row for each group of kernels of a program, and for what the trace has besides."""
  from gpu_plans import OTHERS, by_group  # noqa: PLC0415 (with JAX, after the flags)

  from tokenformer_jax.plan import gpu_times, trip_counts  # noqa: PLC0415
  from tokenformer_jax.plan.chips import CHIPS  # noqa: PLC0415
  from tokenformer_jax.plan.hlo import parse  # noqa: PLC0415

  chip, program, rows, left = CHIPS['h200'], parse(text), [], dict(measured)
  for name, kernels in by_group(
    gpu_times.read(program, list(trip_counts.visit(program)), chip)
  ).items():
    if name == OTHERS or not kernels:
      continue
    moved = sum(one.times * one.memory for one in kernels) * chip.hbm_rate
    seconds = sum(left.pop(one.name, 0.0) for one in kernels)
    rows.append(
      (
        name,
        str(sum(one.times for one in kernels)),
        f'{moved / 1e9:.2f}',
        f'{1e3 * sum(one.times * one.seconds for one in kernels):.2f}',
        f'{1e3 * seconds:.2f}',
        f'{moved / seconds / 1e12:.2f}' if seconds else '–',
      )
    )
  rows.append(('of no kernel', '', '', '', f'{1e3 * sum(left.values()):.2f}', ''))
  return rows


def main() -> None:
  """Run the jobs, or profile one model."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', type=Path, required=True, help='the folder of logs and profiles')
  parser.add_argument('--quick', action='store_true', help='a tiny model, on any device')
  parser.add_argument('--minutes', type=float, default=10.0)
  parser.add_argument('--profile', choices=SIZES, help='only profile the steps of this model')
  args = parser.parse_args()
  if args.profile:
    profile(args.profile, args.out.resolve())
  elif not run_all(args.quick, args.minutes, args.out.resolve()):
    sys.exit(1)


if __name__ == '__main__':
  main()
