"""Count the model FLOPs of a run's training, each stage at the size that the model had.

A lineage records the FLOPs before each growth. Checkpoints of earlier versions do not: the FLOPs of
a stage that no entry records follow from the model that the entry names, and from the batch size
and length of the run that asks.
"""

import dataclasses

from tokenformer_jax.config import Config
from tokenformer_jax.model import flops
from tokenformer_jax.runs.checkpoint_meta import Lineage, Meta


@dataclasses.dataclass(frozen=True)
class Spent:
  """The model FLOPs of training up to any step of a run.

  Attributes:
    before: those of all stages before the last entry of the lineage.
    begin: the step at which the run's last stage begins.
    per_step: those of a step of this stage.
    assumed: whether `before` is in part counted with the batch size and length of this run.
  """

  before: float
  begin: int
  per_step: float
  assumed: bool = False

  def at(self, step: float) -> float:
    """Return the FLOPs of all training up to a step."""
    return self.before + (step - self.begin) * self.per_step


def of_run(lineage: Lineage, config: Config) -> Spent:
  """Return the FLOPs of a run.

  The training of tokens that a merge appended is not counted.

  Args:
    lineage: of the run.
    config: of the run.
  """
  spent = Spent(0.0, 0, 0.0)
  for one in lineage:
    before, assumed = one.flops, False
    if not before and one.step > spent.begin:
      of_stage = flops.step_flops(dataclasses.replace(config, model=one.model))
      before = spent.before + (one.step - spent.begin) * of_stage
      assumed = True
    begin = 0 if one.grow.step == 'restart' else one.step
    spent = Spent(before or spent.before, begin, 0.0, assumed or (spent.assumed and not before))
  return dataclasses.replace(spent, per_step=flops.step_flops(config))


def of_checkpoint(meta: Meta) -> float:
  """Return the FLOPs of the training of a checkpoint, with those of the runs that it comes from.

  The result is 0 if they are not known: for a converted model, or where a lineage does not say.
  """
  spent = of_run(meta.lineage, meta.config)
  if meta.contents != 'model' or spent.assumed:
    return 0.0
  return spent.at(meta.step)
