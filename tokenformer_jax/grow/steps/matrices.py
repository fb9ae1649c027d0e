"""Turn matrices into parameter tokens that compute the same.

GELU(z) − GELU(−z) = z. So the keys [I; −I] and the values [W; −W], with the score `gelu`, compute
x W for every x, up to rounding. A neuron of an MLP with GELU, without gate and biases, is a token.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey

from tokenformer_jax.config import DenseConfig, MLPConfig, ModelConfig, PattentionConfig
from tokenformer_jax.config.layer import map_parts, parts
from tokenformer_jax.config.mixers import LinearConfig, SoftmaxConfig, width_of_heads
from tokenformer_jax.config.pattention import GELU, GELUScore, TokenGroup, from_groups
from tokenformer_jax.config.projections import projection_name
from tokenformer_jax.errors import UserError, arg, nearest
from tokenformer_jax.grow.steps.step import Arrays, Keys, Step
from tokenformer_jax.model.mlp import hidden_width
from tokenformer_jax.model.params import Path

_ACTIVATIONS: dict[str, GELU] = {'gelu': 'exact', 'gelu_tanh': 'tanh'}
_KERNEL, _BESIDE = DictKey('kernel'), DictKey('beside')


def wanted(model: ModelConfig, names: str | None) -> ModelConfig:
  """Return the model whose named matrices are parameter tokens, or all that can be.

  `names` are separated by commas. The sizes of the model are filled in.
  """
  reasons = {
    projection_name(layer, path): _reason(path, part, config.mixer)
    for layer, config in model.layers.items()
    for path, part in parts(config)
    if isinstance(part, DenseConfig | MLPConfig)
  }
  chosen = [name for name, reason in reasons.items() if not reason]
  if names is not None:
    chosen = [name.strip() for name in names.split(',')]
    for name in chosen:
      if name not in reasons:
        raise UserError(f'{arg.matrices} names {name!r}{nearest(name, reasons)}')
      if reason := reasons[name]:
        raise UserError(f'{name} cannot become parameter tokens: {reason}')
  if not chosen:
    why = next(iter(reasons.values()), 'it has no matrix')
    raise UserError(f'no matrix of this model can become parameter tokens: {why}')

  def changed(layer: str, config: Any) -> Any:
    heads = getattr(config.mixer, 'heads', 1) * width_of_heads(config.mixer, model.width)

    def other(path: str, part: Any) -> Any:
      name = projection_name(layer, path)
      if not isinstance(part, DenseConfig | MLPConfig) or name not in chosen:
        return part
      if isinstance(part, MLPConfig):
        return _tokens(part, hidden_width(part, model))
      return _tokens(part, 2 * (heads if path.endswith('proj') else model.width))

    return map_parts(config, other)

  return model.map_layers(changed)


def _reason(path: str, part: DenseConfig | MLPConfig, mixer: Any) -> str:
  """Return why a matrix cannot become tokens, or ''."""
  if path.startswith('mixer.') and not isinstance(mixer, SoftmaxConfig | LinearConfig):
    return f'it belongs to a mixer of kind {mixer.kind}'
  if path.endswith(('.expert', '.shared')):
    return 'it belongs to experts'
  if part.bias:
    return 'it has a bias'
  if isinstance(part, MLPConfig) and isinstance(part.each, PattentionConfig):
    return 'it has parameter tokens beside each matrix'
  if isinstance(part, MLPConfig) and part.gated:
    return 'a gate multiplies two products, and a token has one'
  if isinstance(part, MLPConfig) and part.activation not in _ACTIVATIONS:
    return f'its activation is {part.activation}, and there is no such score'
  return ''


def _tokens(part: DenseConfig | MLPConfig, count: int) -> PattentionConfig:
  """Return the tokens in the place of a matrix, before those beside it."""
  form: GELU = _ACTIVATIONS[part.activation] if isinstance(part, MLPConfig) else 'exact'
  score = GELUScore(gelu=form)
  others = part.beside.groups if isinstance(part.beside, PattentionConfig) else ()
  groups = (TokenGroup(count, count, score), *others)
  return from_groups(groups)


class MatricesToTokens(Step):
  """Makes parameter tokens of matrices."""

  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    """Return an array of the tokens; nothing is drawn."""
    del keys
    return self._made(path, old, 1)

  def moment(self, path: Path, old: Arrays, order: int) -> jax.Array:
    """Return a mean of gradients: that of a neuron stays, that of pairs of tokens is zero."""
    del order
    return self._made(path, old, 0)

  def _made(self, path: Path, old: Arrays, pairs: int) -> jax.Array:
    """Return an array of tokens, where those of pairs are times `pairs`."""
    if self.had(path):
      return old(path)
    *module, end = path
    is_key = end.key == 'keys'
    neurons = (*module, DictKey('up' if is_key else 'down'), _KERNEL)
    if self.had(neurons):
      made = old(neurons).swapaxes(-1, -2) if is_key else old(neurons)
    else:
      matrix = old((*module, _KERNEL))
      width = matrix.shape[-2]
      one = jnp.broadcast_to(jnp.eye(width, dtype=matrix.dtype), (*matrix.shape[:-1], width))
      half = pairs * (one if is_key else matrix)
      made = jnp.concatenate([half, -half], axis=-2)
    others = (*module, _BESIDE, end)
    return jnp.concatenate([made, old(others)], axis=-2) if self.had(others) else made
