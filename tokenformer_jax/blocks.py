"""The pre-norm block."""

import jax
from flax import nnx

from tokenformer_jax.attention import Attention, Cache
from tokenformer_jax.compute import Compute
from tokenformer_jax.config import ModelConfig
from tokenformer_jax.layers import LayerNorm, feed_forward
from tokenformer_jax.sharding import constrain


class Block(nnx.Module):
  """x + Attention(Norm(x)), then x + FeedForward(Norm(x)) (TokenFormer, eq. 6-7)."""

  def __init__(
    self,
    config: ModelConfig,
    *,
    causal: bool = True,
    compute: Compute,
    rngs: nnx.Rngs,
  ):
    def norm():
      return LayerNorm(config.width, config.block_norm, epsilon=config.norm_epsilon, rngs=rngs)

    self.attention_norm, self.ffn_norm = norm(), norm()
    self.attention = Attention(config, causal=causal, compute=compute, rngs=rngs)
    self.ffn = feed_forward(config, compute=compute, rngs=rngs)

  def __call__(
    self,
    x_BxTxD: jax.Array,
    start: jax.Array | int = 0,
    cache: Cache | None = None,
    padding_B: jax.Array | None = None,
    branch_scales_Bx2: jax.Array | None = None,
  ) -> tuple[jax.Array, Cache | None]:
    """The block's output [B, T, D], and the cache; for the other arguments see `Attention`.

    `branch_scales` are factors of what its two halves add, for each row: see `vit.branch_scales`.
    """

    def scaled(added_BxTxD: jax.Array, branch: int) -> jax.Array:
      if branch_scales_Bx2 is None:
        return added_BxTxD
      return added_BxTxD * branch_scales_Bx2[:, branch, None, None].astype(added_BxTxD.dtype)

    attended, cache = self.attention(self.attention_norm(x_BxTxD), start, cache, padding_B)
    x_BxTxD = constrain(x_BxTxD + scaled(attended, 0), 'batch', None, None)
    x_BxTxD = x_BxTxD + scaled(self.ffn(self.ffn_norm(x_BxTxD)), 1)
    return constrain(x_BxTxD, 'batch', None, None), cache
