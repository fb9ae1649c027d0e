"""Count the model FLOPs of a run's training, each stage at the size that the model had then.

A lineage records the FLOPs before each growth.
"""

import dataclasses

from tokenformer_jax.config import Config, Stage, at_stage
from tokenformer_jax.model import flops
from tokenformer_jax.runs import batches as batches_lib
from tokenformer_jax.runs.batches import History
from tokenformer_jax.runs.checkpoint_meta import Lineage, Meta


def until(lineage: Lineage, config: Config, batches: History, step: float) -> float:
  """Return the FLOPs of a model's training up to a step of its run, its growths included.

  The training of tokens that a merge appended does not count.
  """
  total, begin = (lineage[-1].flops, lineage[-1].first_step) if lineage else (0.0, 0)
  for steps, entry in batches_lib.segments(batches, begin, step):
    data = at_stage(config.data, Stage(0, 1, entry.length))
    sequences = steps * entry.samples * entry.sequences
    total += sequences * flops.sequence_flops(dataclasses.replace(config, data=data))
  return total


def at_checkpoint(meta: Meta) -> float:
  """Return the FLOPs of the training that led to a checkpoint."""
  return until(meta.lineage, meta.config, batches_lib.history(meta), meta.step)
