"""The group `distill`: a trained model that a run learns from."""

import dataclasses

from tokenformer_jax.config.fields import key
from tokenformer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class DistillConfig:
  """A trained language model whose probabilities a run learns besides the targets.

  The loss is weight · T² · (cross-entropy to the teacher's probabilities) + (1 − weight) ·
  (cross-entropy to the targets), where both models' logits are divided by the temperature T in the
  first term. T² keeps the size of its gradient (Hinton et al. 2015, arXiv 1503.02531). A weight of
  0.25 is that of Switch Transformers (Fedus et al. 2021, arXiv 2101.03961).
  """

  teacher: str = key('', "a trained run, DIR or DIR@STEP. '': none", only='lm')
  weight: float = key(
    0.25,
    "of the cross-entropy to the teacher's probabilities; that of the targets has the rest",
    least=0,
    most=1,
    only='lm',
  )
  temperature: float = key(
    1.0,
    'divides the logits of both models before their probabilities are compared',
    above=0,
    only='lm',
  )
  init: str = key(
    'no',
    "whether the run begins with the teacher's arrays, wherever both models have the same: "
    'embedding, attention, norms, head',
    choices=('no', 'yes'),
    only='lm',
  )


def check_distill(distill: DistillConfig, init_from: str) -> None:
  """Check that the keys of a teacher come with one, and that one model says how a run begins.

  Raises:
    UserError: they do not.
  """
  if not distill.teacher:
    for field in dataclasses.fields(distill):
      if (value := getattr(distill, field.name)) != field.default:
        raise UserError(
          f'config.distill.{field.name} is {value!r}, and there is no teacher; name one with '
          'config.distill.teacher=DIR, or leave it out'
        )
  if distill.init == 'yes' and init_from:
    raise UserError(
      f'config.distill.init=yes and config.init_from={init_from} both say which parameters the run '
      'begins with; set config.distill.init=no, or leave init_from out'
    )
