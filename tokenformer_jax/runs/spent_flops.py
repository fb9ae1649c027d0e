"""Count the model FLOPs of a run's training, each stage at the size that the model had then.

A lineage records the FLOPs before each growth.
"""

import dataclasses

from tokenformer_jax.config import Config, ModelConfig, Stage, at_stage
from tokenformer_jax.model import flops
from tokenformer_jax.runs import batches as batches_lib
from tokenformer_jax.runs.batches import History
from tokenformer_jax.runs.checkpoint_meta import Lineage, Meta


@dataclasses.dataclass(frozen=True)
class Spent:
  """The model FLOPs of training up to any step of a run's last stage.

  Attributes:
    before: the FLOPs of all stages before the last one.
    begin: the step at which the last stage begins.
    config: the config of the last stage.
    batches: the batches of the run.
  """

  before: float
  begin: int
  config: Config
  batches: History

  def at(self, step: float) -> float:
    """Return the FLOPs of all training up to a step."""
    return self.before + _step_range_flops(
      self.config, self.config.model, self.batches, self.begin, step
    )


def count(lineage: Lineage, config: Config, batches: History = ()) -> Spent:
  """Return the FLOPs of a run and of the runs that it descends from.

  The training of tokens that a merge appended does not count. Without `batches`, every step has
  those of the config.
  """
  batches = batches or batches_lib.continued((), 0, config.data)
  before, begin = (lineage[-1].flops, lineage[-1].first_step) if lineage else (0.0, 0)
  return Spent(before, begin, config, batches)


def _step_range_flops(
  config: Config, model: ModelConfig, batches: History, begin: float, end: float
) -> float:
  """Return the FLOPs of the steps after `begin` up to `end`, at the size of a model."""
  total = 0.0
  for steps, entry in batches_lib.segments(batches, begin, end):
    data = at_stage(config.data, Stage(0, 1, entry.length))
    total += (
      steps * entry.samples * flops.step_flops(dataclasses.replace(config, model=model, data=data))
    )
  return total


def at_checkpoint(meta: Meta) -> float:
  """Return the FLOPs of the training that led to a checkpoint."""
  return count(meta.lineage, meta.config, batches_lib.history(meta)).at(meta.step)
