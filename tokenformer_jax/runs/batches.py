"""Count the samples and tokens of a run's steps, whose batches may have had several sizes.

A checkpoint records the sizes of batches by the step from which each was used. Checkpoints without
this record have the number of samples, from which a mean follows.
"""

import dataclasses
from collections.abc import Iterator

from tokenformer_jax.config import DataConfig
from tokenformer_jax.runs.checkpoint_meta import Batches, Lineage, Meta

History = tuple[Batches, ...]  # ascending by `first`; the first one begins at step 0


def history(meta: Meta) -> History:
  """Return the batches of the steps that led to a checkpoint."""
  if meta.seen.batches:
    return meta.seen.batches
  data, samples = meta.config.data, meta.seen.samples
  # A new order of the data counts its samples from 0.
  begins = {0, data.new_order_at, *(entry.first_step for entry in meta.lineage)}
  same = any(samples == (meta.step - begin) * data.batch_size for begin in begins)
  size = data.batch_size if same or not samples or not meta.step else samples / meta.step
  return (Batches(0, size, data.sequence_length),)


def continued(before: History, step: int, data: DataConfig) -> History:
  """Return the batches of a run that continues after a step with the batches of its config."""
  kept = tuple(entry for entry in before if entry.first < step)
  now = Batches(step if kept else 0, data.batch_size, data.sequence_length)
  if kept and dataclasses.replace(now, first=kept[-1].first) == kept[-1]:
    return kept
  return (*kept, now)


def parts(batches: History, begin: float, end: float) -> Iterator[tuple[float, Batches]]:
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
  return sum(steps * entry.samples for steps, entry in parts(batches, 0, step))


def tokens(batches: History, step: float) -> float:
  """Return the number of tokens in the steps up to `step`."""
  return sum(steps * entry.samples * entry.length for steps, entry in parts(batches, 0, step))


def tokens_before(lineage: Lineage, batches: History) -> float:
  """Return the tokens of the training before the last entry of a nonempty lineage.

  An entry without a record counts the steps that it names, at the batches of the same steps.
  """
  return lineage[-1].tokens or all_tokens(lineage[:-1], batches, lineage[-1].step)


def all_tokens(lineage: Lineage, batches: History, step: float) -> float:
  """Return the tokens of a model's training up to a step of its run, its growths included."""
  if not lineage:
    return tokens(batches, step)
  since = tokens(batches, step) - tokens(batches, lineage[-1].first_step)
  return tokens_before(lineage, batches) + since
