"""Train language models on pairs of a chosen and a rejected answer, by DPO or ORPO."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.model import models
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import Counts
from tokenformer_jax.model.loss import LossSums, row_loss_sums, weighted_objective
from tokenformer_jax.model.params import Definition, Params, lookup
from tokenformer_jax.tasks.task import EvalSums, Figures, with_aux
from tokenformer_jax.tasks.text import TextTask

_LARGEST_LOG_PROB = -1e-6  # for finite odds


class PairSums(NamedTuple):
  """Sums over pairs.

  The log-probability of an answer is that of all its tokens for DPO, and the mean of them for ORPO.
  A reward is β times it, less that by the reference.
  """

  loss: jax.Array
  accuracy: jax.Array  # pairs whose chosen answer has the higher reward
  reward_margin: jax.Array  # reward of the chosen answer − that of the rejected one
  chosen_log_prob: jax.Array
  rejected_log_prob: jax.Array


class PreferenceTask(TextTask):
  """The preference of one answer over another one.

  Batches are int32 [B, 2 T + 2], marked as those of `TextTask`: in the first half of a row is the
  chosen answer with its prompt, in the second half the rejected one.
  """

  _before: Definition | None = None

  def __init__(
    self,
    config: Config,
    vocabulary: dict[str, Any] | None = None,
    teacher: ModelConfig | None = None,
    before: ModelConfig | None = None,
    tokenizer: Tokenizer | None = None,
  ):
    """Take the reference of DPO, unless the task computes no loss.

    It is a `teacher`, with parameters of its own, or the model `before` its last growth by groups
    of tokens, which has the first tokens of each array.
    """
    super().__init__(config, vocabulary, tokenizer)
    if config.preference.loss == 'dpo':
      execution = Execution.from_config(config)
      self.teacher = teacher and models.define(teacher, execution)
      self._before = before and models.define(before, execution)

  def abstract_batch(self) -> jax.ShapeDtypeStruct:
    data = self.config.data
    return jax.ShapeDtypeStruct((data.batch_size, 2 * data.sequence_length + 2), jnp.int32)

  def loss(
    self,
    params: Params,
    batch: jax.Array,
    key: jax.Array,
    *teacher: Params,
    counts: Counts | None = None,
  ) -> tuple[jax.Array, Figures]:
    """Return the mean loss of the pairs of a batch, and its figures: see `PairSums`.

    One pass over the logits computes log-probabilities, and a second one the gradient by the
    derivative of the loss by each of them, so only a chunk of logits is in memory at once.
    """
    counts = counts or self.counts(batch)
    ids_BxT, targets_BxT = self.inputs_and_targets(batch)
    model = self.definition.bind(params)
    hidden_BxTxD, aux = self.hidden(model, ids_BxT, key)
    inputs = hidden_BxTxD, model.output_embedding, targets_BxT
    how = {'chunk': self.config.train.loss_chunk, 'cap': model.logit_cap}
    rows = row_loss_sums(*jax.lax.stop_gradient(inputs), **how)
    reference_B = self._reference_nats(params, ids_BxT, targets_BxT, *teacher)

    def total(nats_B: jax.Array) -> tuple[jax.Array, PairSums]:
      sums = self._compare(rows._replace(nats=nats_B), reference_B)
      return sums.loss, sums

    slopes_B, sums = jax.grad(total, has_aux=True)(rows.nats)
    linear = weighted_objective(*inputs, slopes_B, **how)
    objective = sums.loss + linear - jax.lax.stop_gradient(linear)
    pairs = jnp.maximum(counts.targets, 1)
    means = {name: value / pairs for name, value in sums._asdict().items()}
    value, figures = with_aux(objective / pairs, means['loss'], aux, counts)
    return value, {**figures, **means}

  def sums(self, params: Params, batch: jax.Array, *teacher: Params) -> EvalSums:
    ids_BxT, targets_BxT = self.inputs_and_targets(batch)
    rows, aux = self._apply_to_targets(row_loss_sums, params, batch)
    reference_B = self._reference_nats(params, ids_BxT, targets_BxT, *teacher)
    return EvalSums(self._compare(rows, reference_B), aux, self.counts(batch))

  def counts(self, batch: jax.Array) -> Counts:
    """Return the divisors of the sums of a batch, of which `targets` are pairs."""
    _, targets_BxT = self.inputs_and_targets(batch)
    pairs = jnp.sum(jnp.any(targets_BxT >= 0, axis=1)) // 2
    return super().counts(batch)._replace(targets=pairs)

  def inputs_and_targets(self, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the ids and targets [2 B, T] of the answers; those of a pair follow each other."""
    return super().inputs_and_targets(batch.reshape(-1, batch.shape[1] // 2))

  def _reference_nats(
    self, params: Params, ids_BxT: jax.Array, targets_BxT: jax.Array, *teacher: Params
  ) -> jax.Array | float:
    """Return Σ −log p of each answer by the reference [B], without a gradient; 0 without one."""
    if self.teacher is not None:
      model = self.teacher.bind(*teacher)
    elif (before := self._before) is not None:
      old = jax.tree.map_with_path(
        lambda path, like: lookup(params, path)[tuple(map(slice, like.shape))], before.abstract
      )
      model = before.bind(jax.lax.stop_gradient(old))
    else:  # by ORPO; and in a plan, which leaves a teacher out
      return 0.0
    hidden_BxTxD, _ = self.hidden(model, ids_BxT, None)
    how = {'chunk': self.config.train.loss_chunk, 'cap': model.logit_cap}
    rows = row_loss_sums(hidden_BxTxD, model.output_embedding, targets_BxT, **how)
    return jax.lax.stop_gradient(rows.nats)

  def _compare(self, rows: LossSums, reference_B: jax.Array | float) -> PairSums:
    """Return the sums over the pairs of two rows; a pair without tokens counts nowhere."""
    loss, beta = self.config.preference.loss, self.config.preference.beta
    tokens_Px2 = rows.tokens.reshape(-1, 2)
    if loss == 'dpo':
      log_probs_Px2 = -rows.nats.reshape(-1, 2)
      rewards_Px2 = beta * (reference_B - rows.nats).reshape(-1, 2)
      losses_P = -jax.nn.log_sigmoid(_difference(rewards_Px2))
    else:
      log_probs_Px2 = -rows.nats.reshape(-1, 2) / jnp.maximum(tokens_Px2, 1)
      rewards_Px2 = beta * log_probs_Px2
      likely_Px2 = jnp.minimum(log_probs_Px2, _LARGEST_LOG_PROB)
      log_odds_Px2 = likely_Px2 - jnp.log(-jnp.expm1(likely_Px2))
      odds_losses_P = -jax.nn.log_sigmoid(_difference(log_odds_Px2))
      losses_P = -log_probs_Px2[:, 0] + beta * odds_losses_P
    margins_P = _difference(rewards_Px2)
    values = PairSums(losses_P, margins_P > 0, margins_P, log_probs_Px2[:, 0], log_probs_Px2[:, 1])
    return jax.tree.map(lambda x_P: jnp.sum(jnp.where(tokens_Px2[:, 0] > 0, x_P, 0.0)), values)

  def describe_data(self) -> str:
    return f'{self.examples:,} pairs of up to {self.config.data.sequence_length:,} tokens each'

  def train_figures(self, loss: float) -> dict[str, float]:
    del loss
    return {}

  def eval_figures(self, sums: EvalSums, source: str = '') -> dict[str, float]:
    del source
    means = {name: value / sums.counts.targets for name, value in sums.task._asdict().items()}
    return {**means, **sums.layer_figures()}


def _difference(x_Px2: jax.Array) -> jax.Array:
  return x_Px2[:, 0] - x_Px2[:, 1]
