"""Recover the lines of a lost or empty metrics.jsonl from other files of the run.

TensorBoard's events have every figure in float32. Checkpoints have the validation loss at their
step, unrounded.
"""

import contextlib
import json
import math
import struct
from collections.abc import Iterator
from typing import Any

from tokenformer_jax.errors import counted
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs import orbax_setup
from tokenformer_jax.storage import paths

Line = dict[str, Any]  # `step`, and a float or None for each figure


def recover(workdir: paths.Path) -> list[Line]:
  """Return the lines that other files of a run have, and print where they come from, if any."""
  lines = _lines_of_events(workdir / 'tensorboard')
  losses = _losses_of_checkpoints(workdir / 'checkpoints')
  origins = (
    [f"{counted(len(lines), 'line')} from TensorBoard's events, in float32"] if lines else []
  )
  for step, loss in losses.items():
    for line in lines:
      if line['step'] == step and 'eval/loss' in line:
        line['eval/loss'] = loss
        break
    else:
      lines.append({'step': step, 'eval/loss': loss})
  if losses:
    steps = ', '.join(map(str, losses))
    origins.append(f'the validation losses of the checkpoints of steps {steps}')
  if origins:
    messages.say(f'{workdir}/metrics.jsonl is lost or empty; given back: {" and ".join(origins)}')
  return sorted(lines, key=lambda line: line['step'])


def _losses_of_checkpoints(directory: paths.Path) -> dict[int, float]:
  """Return the finite losses of a run's checkpoints by step, ascending."""
  losses = {}
  for step in sorted(paths.steps(directory)):
    with contextlib.suppress(FileNotFoundError, ValueError):
      figures = json.loads((directory / str(step) / 'metrics/metrics').read_bytes())
      if math.isfinite(loss := orbax_setup.sound_loss(figures)):
        losses[step] = loss
  return losses


def _lines_of_events(directory: paths.Path) -> list[Line]:
  """Return the figures in the event files of a directory, as lines of metrics.jsonl."""
  lines: list[Line] = []
  files = directory.iterdir() if paths.exists(directory) else ()
  for file in sorted(files, key=lambda file: file.name):  # A name begins with the time.
    for event in _events(file.read_bytes()):
      if event.HasField('session_log'):  # A run resumed here; a crash lost the later lines.
        lines = [line for line in lines if line['step'] < event.step]
      for value in event.summary.value:
        if value.HasField('simple_value'):
          _add(lines, event.step, value.tag, value.simple_value)
  return lines


def _add(lines: list[Line], step: int, name: str, value: float) -> None:
  """Add a figure to the last line, or to a new one as `Metrics.write` would begin."""
  last: Line = lines[-1] if lines else {'step': -1}
  evaluated = any(known.startswith('eval/') for known in last)
  if last['step'] != step or name in last or evaluated != name.startswith('eval/'):
    last = {'step': step}
    lines.append(last)
  last[name] = value if math.isfinite(value) else None


def _events(content: bytes) -> Iterator[Any]:
  """Yield the events in a file, up to the first one that is cut short or has changed."""
  # These modules import PyTorch if it is installed, so import them only when needed.
  from tensorboardX import record_writer  # noqa: PLC0415
  from tensorboardX.proto import event_pb2  # noqa: PLC0415

  at = 0
  while at + 12 <= len(content):
    (size,) = struct.unpack_from('<Q', content, at)
    end = at + 12 + size
    record, checksum = content[at + 12 : end], content[end : end + 4]
    if len(checksum) < 4 or struct.unpack('<I', checksum)[0] != record_writer.masked_crc32c(record):
      return
    yield event_pb2.Event.FromString(record)  # pyright: ignore[reportAttributeAccessIssue]
    at = end + 4
