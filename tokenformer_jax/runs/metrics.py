"""Write figures to metrics.jsonl, to trackers and to the terminal."""

import contextlib
import functools
import io
import json
import math
import os
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm

from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import hosts, messages
from tokenformer_jax.storage import paths, retry
from tokenformer_jax.trackers import feed
from tokenformer_jax.trackers.feed import Feed
from tokenformer_jax.trackers.tracker import About, TrackedRun

_GIB = 2**30

Line = dict[str, Any]  # `step`, and a float or None for each figure


class Metrics:
  """The writer of a run's figures. Only the first process writes."""

  def __init__(
    self,
    workdir: paths.Path,
    *,
    first_step: int,
    steps: int,
    trackers: Sequence[str] = (),
    about: About | None = None,
    has_figures: bool = False,
  ):
    """Open the files of a run that starts or resumes after `first_step` steps.

    Drop lines of `metrics.jsonl` and `samples.jsonl` after that step, because a crash lost their
    work. Say so if no figure is left of a run that must have some (`has_figures`). `steps` is the
    last step of the run. The named trackers get the same figures and samples, and describe the run
    as `about`.
    """
    self._active = hosts.is_first()
    if not self._active:
      return
    self._steps = steps
    self._files = paths.Growing(workdir)
    self._last_step = first_step
    path = self._files.directory / 'metrics.jsonl'
    with _user_errors(self._files.directory):
      for name in (path.name, 'samples.jsonl', 'times.jsonl'):
        retry.retried(functools.partial(self._files.fetch, name), f'reading {name}')
      if not _drop_after(path, first_step) and has_figures:
        messages.say(
          f'{workdir}/metrics.jsonl is lost or empty; it has no figures up to step {first_step}, '
          'which only the trackers of the run may still have'
        )
      _drop_after(path.with_name('samples.jsonl'), first_step)
      self._lines = _open_lines(path)
    self._bar = None
    if sys.stderr.isatty():
      self._bar = tqdm.tqdm(total=steps, initial=first_step, unit='step', dynamic_ncols=True)
    self._started, self._first_step = time.monotonic(), first_step
    tracked = TrackedRun(workdir, self._files.directory, first_step, about or About())
    self._feeds = [Feed(name, tracked, self.say) for name in trackers]

  def write(self, step: int, figures: dict[str, float]) -> None:
    """Write figures under flat names such as `train/loss`, and show the main ones."""
    if not self._active:
      return
    # JSON has neither NaN nor infinity.
    finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    with _user_errors(self._files.directory):
      _write_line(self._lines, {'step': step, **finite})
    for one in self._feeds:
      one.put('figures', step, figures)
    self._last_step = step
    self._files.publish_sometimes()
    self._show(step, figures)

  def say(self, text: str) -> None:
    """Print a line on the terminal, above the progress bar if there is one."""
    if not self._active:
      return
    if self._bar is not None:
      self._bar.write(text, file=sys.stderr)
    else:
      print(text, file=sys.stderr, flush=True)

  def text(self, step: int, name: str, text: str) -> None:
    """Write a sample of text to samples.jsonl, the trackers and the terminal."""
    if not self._active:
      return
    self._add_to('samples.jsonl', {'step': step, 'name': name, 'text': text})
    for one in self._feeds:
      one.put('text', step, name, text)
    self.say('\n'.join(f'  | {line}' for line in text.splitlines()))

  def times(self, step: int, seconds: dict[str, float | str]) -> None:
    """Write what the time up to a step went to (`wall_time.WallTime.lap`) to times.jsonl."""
    if self._active:
      self._add_to('times.jsonl', {'step': step, **seconds})

  def _add_to(self, name: str, line: Line) -> None:
    """Append a line to a file, which is opened for it: most runs write few."""
    with _user_errors(self._files.directory), _open_lines(self._files.directory / name) as file:
      _write_line(file, line)

  @contextlib.contextmanager
  def pause(self) -> Iterator[None]:
    """Exclude the time of the context from the estimate of the remaining time."""
    before = time.monotonic()
    yield
    if self._active:
      self._started += time.monotonic() - before

  def publish(self) -> None:
    """Bring all written lines into the work directory, which may be in a bucket."""
    if self._active:
      self._files.publish()

  def close(self) -> None:
    """Flush and close files and trackers; leave the progress bar on the terminal."""
    if not self._active:
      return
    self._lines.close()
    if self._bar is not None:
      self._bar.close()
      self._bar = None
    feed.close(self._feeds, finished=self._last_step == self._steps)
    self._files.close()

  def _show(self, step: int, figures: dict[str, float]) -> None:
    forms = {
      'train/loss': 'loss {:.4f}',
      'train/bits_per_byte': 'bits/byte {:.3f}',
      'train/grad_norm': 'grad {:.2f}',
      'train/learning_rate': 'lr {:.2e}',
      'train/skipped_steps': 'skipped {:.0f}',
      'perf/tokens_per_second': '{:,.0f} tok/s',
      'perf/images_per_second': '{:,.0f} img/s',
      'perf/mfu': 'MFU {:.1%}',
      'eval/loss': 'eval loss {:.4f}',
      'eval/perplexity': 'perplexity {:.2f}',
      'eval/bits_per_byte': 'eval bits/byte {:.3f}',
      'eval/accuracy': 'accuracy {:.3f}',
      'eval/ema_accuracy': 'with EMA {:.3f}',
      'eval/calibration_error': 'calibration error {:.3f}',
    }
    if not figures.get('train/skipped_steps'):
      del forms['train/skipped_steps']
    shown = '  '.join(form.format(figures[n]) for n, form in forms.items() if n in figures)
    if self._bar is not None:
      self._bar.update(step - self._bar.n)
      if 'eval/loss' not in figures:
        self._bar.set_postfix_str(shown)
        return
    self.say(f'step {step}/{self._steps}  {shown}{self._remaining(step)}')

  def _remaining(self, step: int) -> str:
    if self._bar is not None or step == self._first_step:
      return ''
    per_step = (time.monotonic() - self._started) / (step - self._first_step)
    left = round(per_step * (self._steps - step))
    return f'  {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left'


class Work(NamedTuple):
  """The work of a step over all devices."""

  units: float  # such as tokens
  flops: float  # model FLOPs, without those of a teacher


class Window:
  """The figures since the last log point, which stay on the device until `figures` is called.

  Attributes:
    skipped_in_a_row: the number of skipped steps before the last call of `figures`.
    device_seconds: a bound of the time that the devices computed before it. The last step was given
      to them when `figures` began to wait for it, so no step took longer than that wait.
  """

  def __init__(
    self,
    *,
    unit: str,
    peak_flops: float | None,
    derived: Callable[[float], dict[str, float]],
    losses: Sequence[float] = (),
  ):
    """Start the clock.

    Args:
      unit: the name of the units of a step's work, such as tokens.
      peak_flops: peak FLOP/s of all devices together, or None if it is not published.
      derived: returns the figures that follow from the mean loss of a window.
      losses: those of earlier steps of the window, which another process made: see `losses`.
    """
    self._earlier = [np.float32(loss) for loss in losses]
    self._unit, self._peak_flops, self._derived = unit, peak_flops, derived
    self._pending: list[dict[str, jax.Array]] = []
    self.skipped_in_a_row = 0
    self.device_seconds = 0.0
    self.restart_clock()

  def add(self, figures: dict[str, jax.Array], work: Work) -> None:
    """Add the figures of a step without waiting for the device."""
    self._pending.append(figures)
    self._timed_steps += 1
    self._work = Work(self._work.units + work.units, self._work.flops + work.flops)

  def restart_clock(self) -> None:
    """Restart the clock, so that the time since the last step does not count as training."""
    self._clock, self._timed_steps, self._work = time.monotonic(), 0, Work(0, 0.0)

  def losses(self) -> list[float]:
    """Wait for the device and return the finite losses of the window, for a checkpoint."""
    fetched = jax.device_get([step['loss'] for step in self._pending])
    return [float(loss) for loss in [*self._earlier, *fetched] if math.isfinite(loss)]

  def figures(self) -> dict[str, float]:
    """Wait for the device and return the mean loss and the last step's other figures."""
    begin = time.monotonic()
    fetched = jax.device_get(self._pending)
    seconds = time.monotonic() - self._clock
    self.device_seconds = (time.monotonic() - begin) * len(fetched)
    steps, work, self._pending = self._timed_steps, self._work, []
    self.restart_clock()
    last = {name: float(value) for name, value in fetched[-1].items()}
    self.skipped_in_a_row = int(last.pop('skipped_in_a_row'))
    losses = [loss for loss in (step['loss'] for step in fetched) if math.isfinite(loss)]
    losses, self._earlier = [*self._earlier, *losses], []
    last['loss'] = float(np.mean(losses)) if losses else math.nan
    figures = {
      **{f'train/{name}': value for name, value in last.items()},
      **self._derived(last['loss']),
      'perf/step_seconds': seconds / steps,
      f'perf/{self._unit}_per_second': work.units / seconds,
      'perf/model_tflops_per_second': work.flops / seconds / 1e12,
      **_memory(),
    }
    if self._peak_flops:
      figures['perf/mfu'] = work.flops / seconds / self._peak_flops
    return figures


def perplexity(loss: float) -> float:
  """Return exp(loss), bounded so that a run that diverges causes no overflow."""
  return math.exp(min(loss, 700.0))


def _memory() -> dict[str, float]:
  """Return peak memory in GiB: of this process, and of the first local device if it reports it."""
  figures = {'perf/host_peak_gib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB}
  stats = jax.local_devices()[0].memory_stats() or {}
  if 'peak_bytes_in_use' in stats:
    figures['perf/device_peak_gib'] = stats['peak_bytes_in_use'] / _GIB
  return figures


def read(workdir: str | os.PathLike[str]) -> list[Line]:
  """Return the whole lines of a run's metrics.jsonl.

  Raises:
    FileNotFoundError: there is no such file.
  """
  return parse_lines((paths.parse_path(workdir) / 'metrics.jsonl').read_bytes())


def read_lines(path: paths.Path) -> list[Line]:
  """Return the whole lines of a JSON-lines file of a run, none if there is no such file."""
  try:
    return parse_lines(path.read_bytes())
  except FileNotFoundError:
    return []


def parse_lines(content: bytes) -> list[Line]:
  """Return the whole lines of a JSON-lines file of a run."""
  lines = []
  for line in content.splitlines():
    with contextlib.suppress(ValueError):  # The line is not JSON, or not UTF-8.
      entry = json.loads(line)
      if isinstance(entry, dict) and 'step' in entry:
        lines.append(entry)
  return lines


def _open_lines(path: pathlib.Path) -> io.FileIO:
  return retry.retried(lambda: path.open('ab', buffering=0), f'opening {path}')


def _write_line(file: io.FileIO, line: Line) -> None:
  """Append a line of JSON to a file, with retries."""
  content = json.dumps(line).encode() + b'\n'
  retry.retried(lambda: _append(file, content), f'writing {file.name}')


def _append(file: io.FileIO, line: bytes) -> None:
  """Append a line to a file, whole or not at all."""
  end = file.seek(0, os.SEEK_END)
  try:
    written = 0
    while written < len(line):
      written += file.write(line[written:])
  except OSError:
    with contextlib.suppress(OSError):
      file.truncate(end)
    raise


@contextlib.contextmanager
def _user_errors(directory: pathlib.Path) -> Iterator[None]:
  """Turn errors that the user has to fix, such as a full disk, into a `UserError`."""
  try:
    yield
  except OSError as error:
    if not retry.is_for_user(error):
      raise
    raise UserError(
      f'figures could not be written to {directory} ({retry.one_line(error)}); the checkpoints are '
      'intact; make room, then run the same command to go on from the last one'
    ) from error


def _drop_after(path: pathlib.Path, step: int) -> bool:
  """Drop the lines of a file after a step; return whether any line is left."""
  if not path.exists():
    return False
  content = retry.retried(path.read_bytes, f'reading {path}')
  kept = [line for line in parse_lines(content) if line['step'] <= step]
  paths.write(path, ''.join(f'{json.dumps(line)}\n' for line in kept))
  return bool(kept)
