"""Routers: choose experts for each token, and balance their load.

Gates and losses are float32 for every dtype of activations (Switch Transformer, section 2.4).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import (
  BiasBalanceConfig,
  ExpertsConfig,
  LossBalanceConfig,
  ModelConfig,
  RouterConfig,
)
from tokenformer_jax.model.layer import LOAD, Aux
from tokenformer_jax.model.params import Role, param
from tokenformer_jax.parallel.sharding import constrain


class Choice(NamedTuple):
  """The numbers (int32) and the weights (float32) of each token's experts.

  A token that does not count has the number E, which no expert has.
  """

  experts_BxTxK: jax.Array
  gates_BxTxK: jax.Array


class Router(nnx.Module):
  """Choose experts by the largest of the gates [E], softmax or sigmoid of x W."""

  def __init__(self, config: ExpertsConfig, model: ModelConfig, *, rngs: nnx.Rngs):
    self.router, self.balance, self.count = config.router, config.balance, config.count
    normal = nnx.initializers.normal(model.init.std)
    shape = model.width, config.count
    self.kernel = param(rngs, normal, shape, ('width', 'routes'), role=Role.ROUTER)
    self.bias = _bias(config, rngs)

  def __call__(
    self,
    x_BxTxD: jax.Array,
    valid_BxT: jax.Array | None = None,
    key: jax.Array | None = None,
  ) -> tuple[Choice, Aux]:
    """Return the experts of each token, and the sums of the weighted losses and of figures.

    Tokens with a false `valid_BxT` do not count. `key` draws the jitter; None: not training.
    """
    dtype = jnp.dtype(self.router.dtype)
    x_BxTxD = x_BxTxD.astype(dtype)
    if key is not None and self.router.jitter:
      near = 1 - self.router.jitter, 1 + self.router.jitter
      x_BxTxD *= jax.random.uniform(key, x_BxTxD.shape, dtype, *near)
    kernel = constrain(self.kernel[...].astype(dtype), None, None)
    logits_BxTxE = jnp.einsum('BTD,DE->BTE', x_BxTxD, kernel, preferred_element_type=dtype)
    bias = None if self.bias is None else self.bias[...]
    choice = choose(logits_BxTxE, self.router, bias, valid_BxT)
    aux = _aux(choice, logits_BxTxE.astype(jnp.float32), valid_BxT, self.router, self.balance)
    if bias is None:
      return choice, aux
    tokens = math.prod(x_BxTxD.shape[:2]) if valid_BxT is None else jnp.sum(valid_BxT)
    moved = _as_gradient(bias, aux.figures[LOAD] - tokens / self.count)
    return choice, aux._replace(losses={**aux.losses, 'tokens': aux.losses['tokens'] + moved})


def _bias(config: ExpertsConfig, rngs: nnx.Rngs) -> nnx.Param | None:
  """Return the bias of the choice, moved by its own update; None for other balances."""
  if not isinstance(config.balance, BiasBalanceConfig):
    return None
  rate = config.balance.rate
  how = {'role': Role.BALANCE, 'own_update': lambda excess: -rate * jnp.sign(excess)}
  return param(rngs, nnx.initializers.zeros, (config.count,), ('routes',), **how)


def gates(logits_BxTxE: jax.Array, config: RouterConfig) -> jax.Array:
  """Return the gate of every expert."""
  return (jax.nn.softmax if config.gates == 'softmax' else jax.nn.sigmoid)(logits_BxTxE)


def shares(logits_BxTxN: jax.Array, config: RouterConfig) -> jax.Array:
  """Return the gates of these logits divided by their sum.

  Use the gates' logarithms, so that gates that are all close to 0 have shares and gradients.
  """
  logs_BxTxN = logits_BxTxN if config.gates == 'softmax' else jax.nn.log_sigmoid(logits_BxTxN)
  return jax.nn.softmax(logs_BxTxN)


def choose(
  logits_BxTxE: jax.Array,
  config: RouterConfig,
  bias_E: jax.Array | None = None,
  valid_BxT: jax.Array | None = None,
) -> Choice:
  """Return the K experts with the largest gates; among equal gates, the lower numbers.

  `bias_E` is added to the gates for the choice only. Tokens with a false `valid_BxT` do not count.
  """
  if bias_E is None:  # Gates rise with their logits, which differ where gates underflow.
    logits_BxTxK, experts_BxTxK = jax.lax.top_k(logits_BxTxE, config.top_k)
  else:
    gates_BxTxE = gates(logits_BxTxE, config).astype(jnp.float32)
    ranked_BxTxE = gates_BxTxE + jax.lax.stop_gradient(bias_E)[None, None]
    _, experts_BxTxK = jax.lax.top_k(ranked_BxTxE, config.top_k)
    logits_BxTxK = jnp.take_along_axis(logits_BxTxE, experts_BxTxK, axis=-1)
  if config.renormalize:
    chosen_BxTxK = shares(logits_BxTxK.astype(jnp.float32), config)
  elif config.gates == 'softmax':
    total_BxTx1 = jax.nn.logsumexp(logits_BxTxE, axis=-1, keepdims=True)
    chosen_BxTxK = jnp.exp(logits_BxTxK - total_BxTx1)
  else:
    chosen_BxTxK = jax.nn.sigmoid(logits_BxTxK)
  if valid_BxT is not None:
    experts_BxTxK = jnp.where(valid_BxT[..., None], experts_BxTxK, logits_BxTxE.shape[-1])
  return Choice(experts_BxTxK.astype(jnp.int32), chosen_BxTxK.astype(jnp.float32))


def _aux(
  choice: Choice,
  logits_BxTxE: jax.Array,
  valid_BxT: jax.Array | None,
  router: RouterConfig,
  balance: Any,
) -> Aux:
  """Return the sums of the weighted losses and of the figures of a router."""
  count, share_BxTxE = logits_BxTxE.shape[-1], shares(logits_BxTxE, router)
  weight_BxT = jnp.ones(logits_BxTxE.shape[:2]) if valid_BxT is None else valid_BxT.astype(float)
  of_choices_BxTxKxE = jax.nn.one_hot(choice.experts_BxTxK, count, dtype=jnp.float32)
  chosen_BxTxE, losses = jnp.sum(of_choices_BxTxKxE, axis=2), {'tokens': jnp.float32(0)}
  if router.z_loss:
    losses['tokens'] += router.z_loss * z_loss(logits_BxTxE, weight_BxT)
  if isinstance(balance, LossBalanceConfig):
    over, divisor = {'sequence': ((1,), 'sequences'), 'batch': ((0, 1), 'tokens')}[balance.over]
    for scale, size in (
      (balance.weight, 1),
      (balance.device_weight, count // balance.devices),
    ):
      if scale:
        loss = scale * balance_loss(chosen_BxTxE, share_BxTxE, weight_BxT, over, size)
        losses[divisor] = losses.get(divisor, 0) + loss
  entropy_BxT = -jnp.sum(jax.scipy.special.xlogy(share_BxTxE, share_BxTxE), axis=-1)
  figures = {
    'router/entropy': jnp.sum(entropy_BxT * weight_BxT),
    LOAD: jnp.sum(chosen_BxTxE, axis=(0, 1)) / router.top_k,
  }
  return Aux(losses, jax.lax.stop_gradient(figures))


def balance_loss(
  chosen_BxTxE: jax.Array,
  share_BxTxE: jax.Array,
  weight_BxT: jax.Array,
  over: tuple[int, ...],
  size: int = 1,
) -> jax.Array:
  """Return the sum of E · Σ f P, which is 1 at even load; for sets of `size` experts Σ f' P'.

  Switch Transformer, eq. 4; DeepSeekMoE, eq. 12 to 17, where f' is the mean of f over a set and P'
  the sum of P. The gradient goes through P alone.

  Here f is each expert's share of `chosen_BxTxE`, and P the mean of `share_BxTxE`, over the axes
  `over`: (1,), and the sum is over the sequences with tokens; or (0, 1), and the sum has this one
  value for each token. `weight_BxT` is 1 for a token that counts, else 0.
  """
  chosen = jnp.sum(chosen_BxTxE * weight_BxT[..., None], axis=over)
  share = chosen / jnp.maximum(jnp.sum(chosen, axis=-1, keepdims=True), 1)  # [..., E]
  tokens = jnp.sum(weight_BxT, axis=over)
  mean = jnp.sum(share_BxTxE * weight_BxT[..., None], axis=over)
  mean /= jnp.maximum(tokens, 1)[..., None]
  share, mean = (
    jnp.sum(values.reshape(*values.shape[:-1], -1, size), axis=-1)
    for values in (jax.lax.stop_gradient(share), mean)
  )
  losses = share.shape[-1] * jnp.sum(share * mean, axis=-1)  # 0 without tokens
  return jnp.sum(losses) if losses.ndim else losses * tokens


def z_loss(logits_BxTxE: jax.Array, weight_BxT: jax.Array) -> jax.Array:
  """Return the sum over tokens of the square of log Σ exp (ST-MoE, arXiv 2202.08906, eq. 5)."""
  square_BxT = jnp.square(jax.nn.logsumexp(logits_BxTxE, axis=-1))
  return jnp.sum(square_BxT * weight_BxT)


def _as_gradient(bias_E: jax.Array, excess_E: jax.Array) -> jax.Array:
  """Return a zero whose gradient with respect to the bias is the excess of the load.

  So the loads of a batch, or of all its parts, reach the bias's own update like a gradient.
  """
  return jnp.sum(jax.lax.stop_gradient(excess_E) * (bias_E - jax.lax.stop_gradient(bias_E)))
