"""The feed-forward layer of a Transformer."""

import functools

import jax
from flax import nnx

from tokenformer_jax.config import MLPConfig, ModelConfig
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.gelu import activate
from tokenformer_jax.model.projections import Dense, output_std, tokens_beside
from tokenformer_jax.parallel.rules import Axes
from tokenformer_jax.parallel.sharding import constrain

ACTIVATIONS = {
  'gelu': functools.partial(activate, gelu='exact'),
  'gelu_tanh': functools.partial(activate, gelu='tanh'),
  'relu': jax.nn.relu,
  'silu': jax.nn.silu,
}


class MLP(nnx.Module):
  """The Transformer's feed-forward layer: φ(x W₁) W₂ or, gated, (φ(x W₃) ⊙ x W₁) W₂.

  The output of parameter tokens can be added (`beside`), also to each product (`each`).
  """

  def __init__(
    self, config: MLPConfig, model: ModelConfig, *, execution: Execution, rngs: nnx.Rngs
  ):
    hidden = hidden_width(config, model)

    def make(axes: Axes, widths: tuple[int, int], std: float, *, adds: bool = False) -> Dense:
      how = {'adds_to_residual': adds, 'rngs': rngs}
      own = tokens_beside(config.each, model, widths, execution=execution, **how)
      return Dense(*widths, axes, std=std, bias=config.bias, beside=own, **how)

    into = functools.partial(make, ('width', 'hidden'), (model.width, hidden), model.init.std)
    self.up = into()
    self.gate = into() if config.gated else None
    self.down = make(('hidden', 'width'), (hidden, model.width), output_std(model), adds=True)
    self.activation = config.activation
    how = {'adds_to_residual': True, 'execution': execution, 'rngs': rngs}
    self.beside = tokens_beside(config.beside, model, **how)

  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    """Apply the layer: [B, T, D] → [B, T, D]."""
    y_BxTxD = self._apply(x_BxTxD)
    return y_BxTxD if self.beside is None else y_BxTxD + self.beside(x_BxTxD)

  def _apply(self, x_BxTxD: jax.Array) -> jax.Array:
    activation = ACTIVATIONS[self.activation]
    hidden_BxTxF = constrain(self.up(x_BxTxD), 'batch', 'slots', 'hidden')
    if self.gate is None:
      return self.down(activation(hidden_BxTxF))
    gate_BxTxF = constrain(self.gate(x_BxTxD), 'batch', 'slots', 'hidden')
    return self.down(activation(gate_BxTxF) * hidden_BxTxF)


def hidden_width(config: MLPConfig, model: ModelConfig) -> int:
  """Return the width between the two matrices of an MLP."""
  return config.width or 4 * model.width
