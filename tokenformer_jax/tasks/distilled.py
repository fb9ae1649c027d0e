"""Train language models on text and on the probabilities of a teacher."""

from typing import Any

import jax
import jax.numpy as jnp

from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.model import models
from tokenformer_jax.model.distilled_loss import Heads, distilled_objective
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import Counts
from tokenformer_jax.model.params import Params
from tokenformer_jax.tasks.task import Figures, with_aux
from tokenformer_jax.tasks.text import TextTask


class DistilledTextTask(TextTask):
  """The prediction of the next token and of a teacher's probabilities.

  Evaluation is that of `TextTask`, without the teacher.
  """

  def __init__(
    self,
    config: Config,
    vocabulary: dict[str, Any] | None,
    teacher: ModelConfig,
    tokenizer: Tokenizer | None = None,
  ):
    super().__init__(config, vocabulary, tokenizer)
    self.teacher = self._teacher = models.define(teacher, Execution.from_config(config))

  def loss(
    self,
    params: Params,
    batch: jax.Array,
    key: jax.Array,
    *teacher: Params,
    counts: Counts | None = None,
  ) -> tuple[jax.Array, Figures]:
    """Return the objective of a batch and its figures.

    `loss` is the cross-entropy to the targets, as without a teacher; `distill_loss` is that to the
    teacher's probabilities; `teacher_loss` is the teacher's cross-entropy to the targets.
    """
    counts, distill = counts or self.counts(batch), self.config.distill
    ids_BxT, targets_BxT = self.inputs_and_targets(batch)
    model, teacher_model = self.definition.bind(params), self._teacher.bind(*teacher)
    hidden_BxTxD, aux = self.hidden(model, ids_BxT, key)
    teacher_hidden_BxTxD, _, _ = teacher_model.hidden(*self.model_inputs(ids_BxT))
    total, sums = distilled_objective(
      Heads(hidden_BxTxD, model.output_embedding),
      Heads(teacher_hidden_BxTxD, teacher_model.output_embedding),
      targets_BxT,
      weight=distill.weight,
      temperature=distill.temperature,
      z_loss=self.config.optim.z_loss,
      chunk=self.config.train.loss_chunk,
      caps=(model.logit_cap, teacher_model.logit_cap),
    )
    targets = jnp.maximum(counts.targets, 1)
    objective, figures = with_aux(total / targets, sums.student.nats / targets, aux, counts)
    figures['distill_loss'] = sums.soft_nats / targets
    figures['teacher_loss'] = sums.teacher.nats / targets
    return objective, figures | self.learned_figures(sums.student.tokens)
