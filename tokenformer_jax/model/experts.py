"""Routed experts as a feed-forward part, and the matrices of all experts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tokenformer_jax.config import (
  ExpertsConfig,
  MLPConfig,
  ModelConfig,
  PattentionConfig,
)
from tokenformer_jax.model import dispatch
from tokenformer_jax.model import groups as groups_lib
from tokenformer_jax.model.layer import FROM_START, NO_INPUTS, Aux, Context, LayerInputs
from tokenformer_jax.model.mlp import ACTIVATIONS, hidden_width
from tokenformer_jax.model.params import Initializer, Role, param
from tokenformer_jax.model.pattention import parameter_weights
from tokenformer_jax.model.projections import output_std
from tokenformer_jax.model.router import Router
from tokenformer_jax.model.stack import PROJECTED
from tokenformer_jax.parallel.rules import Axes


class ExpertMLPs(nnx.Module):
  """φ(x W₁) W₂ or (φ(x W₃) ⊙ x W₁) W₂ of every expert: `up`, `gate` [E, D, F], `down` [E, F, D].

  The output of parameter tokens of each expert can be added (`beside`).
  """

  def __init__(
    self,
    config: ExpertsConfig,
    own: MLPConfig,
    model: ModelConfig,
    active: float,
    *,
    rngs: nnx.Rngs,
  ):
    inner = config.count, model.width, hidden_width(own, model)
    normal, axes = nnx.initializers.normal(model.init.std), ('expert_width', 'expert_hidden')

    def make(shape: tuple[int, ...], axes: Axes, init: Initializer, **info: Any) -> nnx.Param:
      info = {'role': Role.KERNEL, 'active': active, **info}
      return param(rngs, init, shape, ('experts', *axes), **info)

    self.up = make(inner, axes, normal)
    self.gate = make(inner, axes, normal) if own.gated else None
    adds = nnx.initializers.normal(output_std(model))
    shape = inner[0], inner[2], inner[1]
    self.down = make(shape, axes[::-1], adds, adds_to_residual=True)
    self.activation = ACTIVATIONS[own.activation]
    self.axes = [('experts', *axes)] * (2 if own.gated else 1) + [('experts', *axes[::-1])]
    beside = None
    if isinstance(own.beside, PattentionConfig):
      beside = ExpertPattentions(config, own.beside, model, active, rngs=rngs)
      self.axes += beside.axes
    self.beside = beside

  def matrices(self) -> list[jax.Array]:
    """Return the matrices, in the order of `axes`."""
    used = [self.up, self.gate, self.down]
    beside = [] if self.beside is None else self.beside.matrices()
    return [*(matrix[...] for matrix in used if matrix is not None), *beside]

  def apply(self, rows: jax.Array, product: Any, up: jax.Array, *others: jax.Array) -> jax.Array:
    """Apply each expert to its rows: see `dispatch.run`."""
    matrices = others if self.beside is None else others[:-2]
    *gate, down = matrices
    hidden = checkpoint_name(product(rows, up), PROJECTED)
    if gate:
      hidden *= self.activation(checkpoint_name(product(rows, gate[0]), PROJECTED))
    else:
      hidden = self.activation(hidden)
    out = product(hidden, down)
    if self.beside is None:
      return out
    return out + self.beside.apply(rows, product, *others[-2:])


class ExpertPattentions(nnx.Module):
  """Θ(x Kᵀ) V of every expert, each with its own norm: `keys` and `values` [E, N, D]."""

  def __init__(
    self,
    config: ExpertsConfig,
    own: PattentionConfig,
    model: ModelConfig,
    active: float,
    *,
    rngs: nnx.Rngs,
  ):
    """Make the tokens of `own`, for each expert."""
    axes = ('experts', 'param_tokens', 'expert_width')
    (self.group,) = own.groups
    shape = config.count, own.tokens, model.width

    def make(std: float, role: Role, **info: Any) -> nnx.Param:
      normal = nnx.initializers.normal(std)
      groups = {'groups': (own.tokens,), 'frozen': (self.group.frozen,)}
      return param(rngs, normal, shape, axes, role=role, active=active, **groups, **info)

    self.keys = make(model.init.std, Role.KEY)
    self.values = make(output_std(model), Role.VALUE, adds_to_residual=True)
    self.axes = [axes, axes]

  def matrices(self) -> list[jax.Array]:
    """Return keys and values."""
    return [self.keys[...], self.values[...]]

  def apply(
    self, rows: jax.Array, product: Any, keys_ExNxD: jax.Array, values_ExNxD: jax.Array
  ) -> jax.Array:
    """Apply each expert to its rows: see `dispatch.run`."""
    scores = product(rows, jnp.swapaxes(keys_ExNxD, 1, 2))
    group = groups_lib.on_devices(self.group.scale_count)
    weights = parameter_weights(checkpoint_name(scores, PROJECTED), self.group.score, group)
    return product(weights, values_ExNxD)


class Experts(nnx.Module):
  """A part that all tokens use, plus the experts that a router chooses for each token.

  Switch Transformer (Fedus et al. 2021, arXiv 2101.03961) with one expert a token; DeepSeekMoE (Dai
  et al. 2024, arXiv 2401.06066) with small and shared experts.
  """

  def __init__(
    self,
    config: ExpertsConfig,
    model: ModelConfig,
    shared: Any,
    *,
    rngs: nnx.Rngs,
  ):
    self.shared = shared
    normal = nnx.initializers.normal(model.init.std)
    gate = functools.partial(param, rngs, normal, (model.width,), ('norm',), role=Role.GATE)
    self.shared_gate = gate() if config.shared_gate else None
    self.router = Router(config, model, rngs=rngs)
    active, own = config.router.top_k / config.count, config.expert
    if isinstance(own, MLPConfig):
      self.experts = ExpertMLPs(config, own, model, active, rngs=rngs)
    else:
      self.experts = ExpertPattentions(config, own, model, active, rngs=rngs)
    self.dispatch = config.dispatch

  def __call__(
    self, x_BxTxD: jax.Array, context: Context = FROM_START, inputs: LayerInputs = NO_INPUTS
  ) -> tuple[jax.Array, Aux]:
    """Return the output [B, T, D], and sums of the router's losses and of figures of the load.

    In training `inputs.key` draws the jitter of the router.
    """
    valid_BxT = context.is_token(x_BxTxD.shape[1])
    choice, aux = self.router(x_BxTxD, valid_BxT, inputs.key if context.training else None)
    routed = dispatch.run(
      self.experts.apply,
      x_BxTxD,
      choice,
      self.experts.matrices(),
      self.experts.axes,
      self.dispatch if context.is_beginning else dispatch.WITHOUT_DROPS,
      training=context.training,
    )
    dropped_BxTxK = (choice.experts_BxTxK < self.router.count) & ~routed.kept_BxTxK
    dropped = jnp.sum(dropped_BxTxK) / dropped_BxTxK.shape[-1]
    y_BxTxD = checkpoint_name(routed.out_BxTxD, PROJECTED)
    if self.shared is not None:
      y_BxTxD += self._gated(x_BxTxD, self.shared(x_BxTxD))
    return y_BxTxD, aux._replace(figures={**aux.figures, 'router/dropped': dropped})

  def _gated(self, x_BxTxD: jax.Array, shared_BxTxD: jax.Array) -> jax.Array:
    """Return the output of the shared part times its gate, computed in float32, if it has one."""
    if self.shared_gate is None:
      return shared_BxTxD
    products_BxT = jnp.einsum('BTD,D->BT', x_BxTxD.astype(jnp.float32), self.shared_gate[...])
    gates_BxTx1 = jax.nn.sigmoid(products_BxT)[..., None]
    return (shared_BxTxD.astype(jnp.float32) * gates_BxTx1).astype(shared_BxTxD.dtype)
