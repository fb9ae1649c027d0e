"""Check that the values of routed experts fit together, and ask what they need."""

import math

from tokenformer_jax.config.feed_forward import (
  CapacityConfig,
  ExpertsConfig,
  LossBalanceConfig,
  MLPConfig,
)
from tokenformer_jax.config.model import ModelConfig
from tokenformer_jax.config.pattention import PattentionConfig
from tokenformer_jax.errors import UserError


def check_experts(experts: ExpertsConfig, path: str) -> None:
  """Check that the values of routed experts fit together.

  Args:
    experts: the experts.
    path: the path of their group of keys, for messages.

  Raises:
    UserError: they do not.
  """
  router, balance, expert = experts.router, experts.balance, experts.expert
  if router.top_k > experts.count:
    raise UserError(
      f'{path}.router.top_k is {router.top_k}, and there are {path}.count={experts.count} experts; '
      f'take at most {experts.count}'
    )
  if router.renormalize and router.top_k == 1:
    raise UserError(
      f'{path}.router.renormalize is True with router.top_k=1, whose one gate would always be 1, '
      'so that the router could not learn; set it to False, or top_k to at least 2'
    )
  if isinstance(expert, MLPConfig) and expert.bias:
    raise UserError(f'{path}.expert.bias is True, and experts have no biases; set it to False')
  if isinstance(expert, PattentionConfig) and expert.groups:
    raise UserError(
      f'{path}.expert.groups is {expert.groups!r}, and each expert is one group already; leave it '
      'out'
    )
  if isinstance(balance, LossBalanceConfig):
    if experts.count % balance.devices:
      raise UserError(
        f'{path}.balance.devices is {balance.devices}, which does not divide the '
        f'{experts.count} experts; take a divisor'
      )
    if balance.device_weight and balance.devices == 1:
      raise UserError(
        f'{path}.balance.device_weight is {balance.device_weight}, and with balance.devices=1 '
        'there is nothing to balance between; set devices to the parts of the experts, or leave '
        'it out'
      )


def check_capacity(model: ModelConfig, length: int) -> None:
  """Check that experts with a capacity have a place for at least one token of a group.

  Args:
    model: the model.
    length: T, of the training texts or images.

  Raises:
    UserError: an expert has no place, so that all tokens would be dropped.
  """
  for name, experts in model.experts.items():
    dispatch = experts.dispatch
    if not isinstance(dispatch, CapacityConfig):
      continue
    tokens = dispatch.rows * length * experts.router.top_k / experts.count
    for key in ('factor', 'eval_factor'):
      factor = getattr(dispatch, key)
      if max(round(factor * tokens), dispatch.least) < 1:
        raise UserError(
          f'the ffn.dispatch.{key} of {name} is {factor}, of {tokens:g} tokens at even load: no '
          'expert has a place and every token is dropped; make it larger, or ffn.dispatch.least 1'
        )


def check_accumulation(model: ModelConfig, parts: int) -> None:
  """Check that the objective of a batch is the mean of that of its accumulated parts.

  Args:
    model: the model.
    parts: `optim.accumulation_steps`.

  Raises:
    UserError: a balance loss is over the whole batch.
  """
  for name, experts in model.experts.items():
    balance = experts.balance
    if parts == 1 or not isinstance(balance, LossBalanceConfig):
      continue
    if balance.over == 'batch' and (balance.weight or balance.device_weight):
      raise UserError(
        f'the ffn.balance.over of {name} is batch, and with optim.accumulation_steps={parts} it '
        'would be over each part of a batch alone; set balance.over=sequence, or '
        'accumulation_steps to 1'
      )


def rows_together(model: ModelConfig) -> int:
  """Return the rows of a batch that must stay side by side: those that share experts' places."""
  dispatches = [experts.dispatch for experts in model.experts.values()]
  return math.lcm(*(one.rows for one in dispatches if isinstance(one, CapacityConfig)))


def draws(model: ModelConfig) -> bool:
  """Return whether a router of the model draws random numbers in training."""
  return any(experts.router.jitter > 0 for experts in model.experts.values())
