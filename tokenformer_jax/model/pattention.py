"""Pattention: attention between the input and learnable parameter tokens.

A TokenFormer has a Pattention wherever a Transformer has a linear projection (Wang et al. 2024,
arXiv 2410.23168, eq. 3-5). With keys K [N, D_in] and values V [N, D_out],

  Pattention(x) = Θ(x Kᵀ) V

where Θ is one of the score functions below. The number N of parameter tokens changes neither the
input's nor the output's width, so a trained model can grow by more tokens.

The tokens may come in several groups, each with its own norm:

  Pattention(x) = Σ_g Θ_g(x K_gᵀ) V_g

So a further group of tokens whose values are zero adds exactly zero, for all keys, score functions
and dtypes. One group is the model of the paper.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tokenformer_jax.config import PattentionConfig, ScoreConfig, TokenGroup
from tokenformer_jax.config.pattention import (
  ExpL2Norm,
  GELUL1Norm,
  GELUL2Norm,
  GELUScore,
  L2NormGELU,
  LinearScore,
  SoftmaxScore,
)
from tokenformer_jax.model import groups as groups_lib
from tokenformer_jax.model.gelu import (
  EPSILON,
  activate,
  activate_rows,
  activate_scaled,
  inverse_root,
)
from tokenformer_jax.model.many_tokens import are_many, weights_of_many
from tokenformer_jax.model.params import TOKEN_AXES, Initializer, Role, param
from tokenformer_jax.model.products import project
from tokenformer_jax.model.stack import PROJECTED, ROW_STATISTICS, SCORES
from tokenformer_jax.parallel.rules import shard_count
from tokenformer_jax.parallel.sharding import constrain, platform

# The most numbers of a row that a kernel of a GPU keeps while it sums over them: with the gradient,
# float32 rows of this length fill half of the registers of a core.
_ROW_OF_A_KERNEL = 16384


def parameter_weights(
  scores_BxTxN: jax.Array,
  score: ScoreConfig,
  groups: groups_lib.OneGroup | groups_lib.Groups,
) -> jax.Array:
  """Compute Θ, the weight of every parameter token, from its score A.

  Norms are over the group of a token. τ² is the reference count of the group: the number of tokens
  that it was first trained with.

    l2_norm_gelu   GELU(τ A / ‖A‖₂)             TokenFormer (as released)
    gelu_l2_norm   τ GELU(A) / ‖GELU(A)‖₂       Table 4, GELU + L2 (as released)
    gelu_l1_norm   τ² GELU(A) / ‖GELU(A)‖₁      Table 4, GELU + L1
    softmax        τ² exp(A) / ‖exp(A)‖₁        Table 4, exp + L1 (as released)
    exp_l2_norm    τ exp(A) / ‖exp(A)‖₂         exp + L2
    gelu           GELU(A)                      the MLP of a Transformer
    linear         A                            LoRA

  τ is data, not the array's shape, so added tokens of score 0 leave the weights of the others
  unchanged (exactly for the forms with GELU, where a zero score has weight 0).

  Intermediate values are float32; the weights have the dtype of the scores. The form of GELU is
  that of `activate`, and `groups` come from `groups.make`.
  """
  match score:
    case LinearScore():
      return scores_BxTxN
    case GELUScore():
      return activate(scores_BxTxN, score.gelu)
    case L2NormGELU() | GELUL2Norm() | GELUL1Norm() | SoftmaxScore() | ExpL2Norm():
      return _normed_weights(scores_BxTxN, score, groups)
  raise TypeError(f'{score} is not a score')


def _normed_weights(
  scores_BxTxN: jax.Array,
  score: L2NormGELU | GELUL2Norm | GELUL1Norm | SoftmaxScore | ExpL2Norm,
  groups: groups_lib.OneGroup | groups_lib.Groups,
) -> jax.Array:
  """Compute the weights of a score with a norm over each group."""
  dtype, scores_BxTxN = scores_BxTxN.dtype, scores_BxTxN.astype(jnp.float32)
  if isinstance(score, L2NormGELU):
    inverse = _inverse_l2(groups.total(jnp.square(scores_BxTxN)), groups.reference)
    scores_BxTxN = _round_gradient(scores_BxTxN, dtype)
    return activate_scaled(scores_BxTxN, groups.spread(inverse), score.gelu).astype(dtype)
  if isinstance(score, GELUL2Norm | GELUL1Norm):
    weights = activate(scores_BxTxN, score.gelu)
  else:
    # A shift of a whole group cancels in its norm and keeps exp from overflowing.
    largest = groups.spread(groups.largest(jax.lax.stop_gradient(scores_BxTxN)))
    weights = jnp.exp(scores_BxTxN - largest)
  if isinstance(score, GELUL1Norm | SoftmaxScore):
    total = checkpoint_name(groups.total(jnp.abs(weights)) + EPSILON, ROW_STATISTICS)
    scale = groups.reference / total
  else:
    scale = _inverse_l2(groups.total(jnp.square(weights)), groups.reference)
  return (_round_gradient(weights, dtype) * groups.spread(scale)).astype(dtype)


def weights_of_groups(scores_BxTxN: jax.Array, groups: Sequence[TokenGroup]) -> jax.Array:
  """Compute the weight of every token of groups that may differ in their score functions."""
  if _are_rows_of_kernels(scores_BxTxN, groups):
    return weights_of_rows(scores_BxTxN, groups[0])
  together = groups_lib.make(groups)
  first, *others = dict.fromkeys(group.score for group in groups)
  weights_BxTxN = parameter_weights(scores_BxTxN, first, together)
  for score in others:
    own = np.repeat([score == g.score for g in groups], [g.tokens for g in groups])
    weights = parameter_weights(scores_BxTxN, score, together)
    weights_BxTxN = jnp.where(own[None, None], weights, weights_BxTxN)
  return weights_BxTxN


def _are_rows_of_kernels(scores_BxTxN: jax.Array, groups: Sequence[TokenGroup]) -> bool:
  """Return whether a kernel of a GPU can have whole rows of scores: see `activate_rows`."""
  return (
    platform() == 'gpu'
    and len(groups) == 1
    and shard_count('param_tokens') == 1
    and scores_BxTxN.shape[-1] <= _ROW_OF_A_KERNEL
  )


def weights_of_rows(scores: jax.Array, group: TokenGroup) -> jax.Array:
  """Compute the weights of one group of tokens, the last axis of `scores`, in one kernel on a GPU.

  The values are those of `parameter_weights`, up to rounding.
  """
  if isinstance(group.score, L2NormGELU):
    return activate_rows(scores, group.scale_count, group.score.gelu)
  return parameter_weights(scores, group.score, groups_lib.make((group,)))


def _round_gradient(rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Return the rows unchanged, with their gradient rounded to `dtype`.

  The gradient needs a reduction over the row (the norm's part) before it is final. Until then it is
  in memory, and XLA, which drops pairs of conversions, would hold it in float32.
  """
  return rows if rows.dtype == dtype else _rounded_gradient(rows, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _rounded_gradient(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  del dtype
  return x


def _forward(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, None]:
  return _rounded_gradient(x, dtype), None


def _backward(dtype: jnp.dtype, _: None, gradient: jax.Array) -> tuple[jax.Array]:
  rounded = jax.lax.optimization_barrier(gradient.astype(dtype))
  return (rounded.astype(gradient.dtype),)


_rounded_gradient.defvjp(_forward, _backward)


def _inverse_l2(square: jax.Array, reference: jax.Array) -> jax.Array:
  """Return τ / ‖A‖₂, given ‖A‖₂² and τ²."""
  return inverse_root(checkpoint_name(square + EPSILON, ROW_STATISTICS), reference)


def scores(x: jax.Array, keys_NxI: jax.Array) -> jax.Array:
  """Return the scores x Kᵀ [B, T, N] of x [B, T, I], or of heads [B, T, H, K] with zero fill."""
  return constrain(project(x, keys_NxI, TOKEN_AXES, contract=1), 'batch', 'slots', 'param_tokens')


def pattention(
  x: jax.Array,
  keys_NxI: jax.Array,
  values_NxO: jax.Array,
  *,
  groups: Sequence[TokenGroup],
  out_heads: tuple[int, int] | None = None,
  keep_scores: bool = False,
  prevent_cse: bool = False,
) -> jax.Array:
  """Return Σ_g Θ_g(x K_gᵀ) V_g in the dtype of x.

  Unless several devices split the tokens, each group is computed apart, and the results are added
  in the order of the groups. A group whose values are zero then changes no bit.

  The input is [B, T, I], or heads [B, T, H, K], which zeros may fill. The output is [B, T, O], or
  with `out_heads` (H, K) heads [B, T, H, K] filled with zeros. The groups are in the order of their
  tokens. The rest is as in `keep_for_backward`.
  """
  if len(groups) > 1 and shard_count('param_tokens') == 1:
    cuts = list(itertools.accumulate(group.tokens for group in groups))[:-1]
    apart = zip(groups, jnp.split(keys_NxI, cuts), jnp.split(values_NxO, cuts), strict=True)
    run = functools.partial(
      pattention, out_heads=out_heads, keep_scores=keep_scores, prevent_cse=prevent_cse
    )
    return functools.reduce(
      jnp.add, [run(x, keys, values, groups=(group,)) for group, keys, values in apart]
    )
  group = groups[0]
  by_keys = len(groups) == 1 and are_many(keys_NxI, x)

  def apply(x: jax.Array, keys_NxI: jax.Array, values_NxO: jax.Array) -> jax.Array:
    if by_keys and isinstance(group.score, L2NormGELU):
      weights_BxTxN = weights_of_many(x, keys_NxI, group.reference, group.score)
    else:
      scores_BxTxN = checkpoint_name(scores(x, keys_NxI), SCORES)
      weights_BxTxN = weights_of_groups(scores_BxTxN, groups)
    return project(weights_BxTxN, values_NxO, TOKEN_AXES, contract=0, out_heads=out_heads)

  return keep_for_backward(apply, keep_scores, prevent_cse)(x, keys_NxI, values_NxO)


def keep_for_backward(
  apply: Callable[..., jax.Array], keep_scores: bool, prevent_cse: bool
) -> Callable[..., jax.Array]:
  """Return `apply`, a Pattention, so that it saves its inputs and the norms of its scores.

  With `keep_scores` it saves the scores as well; otherwise the backward pass recomputes them.
  `prevent_cse` stops XLA from merging the recomputation with the forward pass, which it cannot do
  in a loop over layers anyway. Ignored with `keep_scores`: XLA is then free to save more.
  """
  kept = (ROW_STATISTICS, SCORES) if keep_scores else (ROW_STATISTICS,)
  policy = jax.checkpoint_policies.save_only_these_names(*kept)
  apply = jax.checkpoint(apply, prevent_cse=prevent_cse and not keep_scores, policy=policy)
  return lambda *arguments: checkpoint_name(apply(*arguments), PROJECTED)


class Pattention(nnx.Module):
  """Pattention with its parameters: `keys` [N, D_in] and `values` [N, D_out]."""

  def __init__(
    self,
    d_in: int,
    d_out: int,
    config: PattentionConfig,
    *,
    key_std: float,
    value_std: float,
    first_values: Initializer | None = None,
    adds_to_residual: bool = False,
    keep_scores: bool = False,
    prevent_cse: bool = False,
    rngs: nnx.Rngs,
  ):
    """Draw keys and values from normal distributions with the given standard deviations.

    `first_values` draws the values at the start and not those of growth: see `param`.
    """
    self.groups = config.groups
    groups = {
      'groups': tuple(group.tokens for group in self.groups),
      'frozen': tuple(group.frozen for group in self.groups),
    }
    make = functools.partial(param, rngs, **groups)
    normal = nnx.initializers.normal
    self.keys = make(normal(key_std), (config.tokens, d_in), TOKEN_AXES, role=Role.KEY)
    self.values = make(
      normal(value_std),
      (config.tokens, d_out),
      TOKEN_AXES,
      role=Role.VALUE,
      adds_to_residual=adds_to_residual,
      first=first_values,
    )
    self.keep_scores, self.prevent_cse = keep_scores, prevent_cse

  def weights(self, x: jax.Array) -> jax.Array:
    """Return the weight of every parameter token [B, T, N]; x is as for `__call__`."""
    return weights_of_groups(scores(x, self.keys[...]), self.groups)

  def __call__(self, x: jax.Array, out_heads: tuple[int, int] | None = None) -> jax.Array:
    """Return Θ(x Kᵀ) V; for the arguments see `pattention`."""
    return pattention(
      x,
      self.keys[...],
      self.values[...],
      groups=self.groups,
      out_heads=out_heads,
      keep_scores=self.keep_scores,
      prevent_cse=self.prevent_cse,
    )
