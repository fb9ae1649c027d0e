"""Count the samples, tokens and FLOPs of a run, whose batches may have had several sizes.

A checkpoint records the sizes of batches by the step from which each was used, and a lineage the
tokens and FLOPs before each growth.
"""

import dataclasses
from collections.abc import Iterator

from tokenformer_jax.config import Config, DataConfig, Stage, at_stage, stages_after
from tokenformer_jax.model import flops as flops_lib
from tokenformer_jax.runs.checkpoint_meta import Batches, Lineage, Meta

History = tuple[Batches, ...]  # ascending by `first`; the first one begins at step 0


def history(meta: Meta) -> History:
  """Return the batches of the steps that led to a checkpoint; without training, its config's."""
  return meta.seen.batches or continued((), 0, meta.config.data)


def continued(before: History, step: int, data: DataConfig) -> History:
  """Return the batches of a run that continues after a step with the batches of its config."""
  batches = [*until(before, step)]
  for stage in stages_after(data, step if batches else 0):
    now = Batches(*stage, data.sequences)
    if not batches or dataclasses.replace(now, first=batches[-1].first) != batches[-1]:
      batches.append(now)
  return tuple(batches)


def of_run(meta: Meta | None, data: DataConfig) -> History:
  """Return the batches of a run that continues from a checkpoint, or from nothing for None."""
  return continued(history(meta), meta.step, data) if meta else continued((), 0, data)


def until(batches: History, step: int) -> History:
  """Return the batches of the steps up to `step`."""
  return tuple(entry for entry in batches if entry.first < step)


def segments(batches: History, begin: float, end: float) -> Iterator[tuple[float, Batches]]:
  """Yield the steps after `begin` up to `end` as (number of steps, their batches).

  The last batches have no end.
  """
  for i, entry in enumerate(batches):
    until = batches[i + 1].first if i + 1 < len(batches) else end
    steps = min(until, end) - max(entry.first, begin)
    if steps > 0:
      yield steps, entry


def samples(batches: History, step: float) -> float:
  """Return the number of samples in the steps up to `step`."""
  return sum(steps * entry.samples for steps, entry in segments(batches, 0, step))


def tokens(batches: History, step: float) -> float:
  """Return the number of tokens in the steps up to `step`."""
  return sum(
    steps * entry.samples * entry.sequences * entry.length
    for steps, entry in segments(batches, 0, step)
  )


def all_tokens(lineage: Lineage, batches: History, step: float) -> float:
  """Return the tokens of a model's training up to a step of its run, its growths included."""
  since = tokens(batches, step)
  if not lineage:
    return since
  return lineage[-1].tokens + since - tokens(batches, lineage[-1].first_step)


def tokens_at_checkpoint(meta: Meta) -> float:
  """Return the tokens of the training that led to a checkpoint; 0 for images."""
  if meta.config.model.kind != 'lm':
    return 0.0
  return all_tokens(meta.lineage, history(meta), meta.step)


def all_flops(lineage: Lineage, config: Config, batches: History, step: float) -> float:
  """Return the FLOPs of a model's training up to a step of its run, its growths included.

  Each stage counts at the size that the model had then. The training of tokens that a merge
  appended does not count.
  """
  total, begin = (lineage[-1].flops, lineage[-1].first_step) if lineage else (0.0, 0)
  for steps, entry in segments(batches, begin, step):
    data = at_stage(config.data, Stage(0, 1, entry.length))
    sequences = steps * entry.samples * entry.sequences
    total += sequences * flops_lib.sequence_flops(dataclasses.replace(config, data=data))
  return total


def flops_at_checkpoint(meta: Meta) -> float:
  """Return the FLOPs of the training that led to a checkpoint."""
  return all_flops(meta.lineage, meta.config, history(meta), meta.step)
