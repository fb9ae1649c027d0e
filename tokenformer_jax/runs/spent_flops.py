"""Count the model FLOPs of a run's training, each stage at the size that the model had then.

A lineage records the FLOPs before each growth. Lineages of earlier versions do not; then the FLOPs
of a stage follow from the model that the lineage names, and from the batch size and length of the
run in question.
"""

import dataclasses

from tokenformer_jax.config import Config
from tokenformer_jax.model import flops
from tokenformer_jax.runs.checkpoint_meta import Lineage, Meta


@dataclasses.dataclass(frozen=True)
class Spent:
  """The model FLOPs of training up to any step of a run's last stage.

  Attributes:
    before: the FLOPs of all stages before the last one.
    begin: the step at which the last stage begins.
    per_step: the FLOPs of a step of the last stage.
    assumed: whether `before` takes a batch size and a length that no lineage records.
  """

  before: float
  begin: int
  per_step: float
  assumed: bool

  def at(self, step: float) -> float:
    """Return the FLOPs of all training up to a step."""
    return self.before + (step - self.begin) * self.per_step


def of_run(lineage: Lineage, config: Config) -> Spent:
  """Return the FLOPs of a run and of the runs that it descends from.

  The training of tokens that a merge appended does not count.
  """
  before, begin, assumed = 0.0, 0, False
  for one in lineage:
    if one.flops:
      before, assumed = one.flops, False
    elif one.step > begin:
      of_step = flops.step_flops(dataclasses.replace(config, model=one.model))
      before, assumed = before + (one.step - begin) * of_step, True
    begin = one.first_step
  return Spent(before, begin, flops.step_flops(config), assumed)


def of_checkpoint(meta: Meta) -> float:
  """Return the FLOPs of the training that led to a checkpoint; 0 if there is none or not known."""
  spent = of_run(meta.lineage, meta.config)
  return 0.0 if spent.assumed else spent.at(meta.step)
