"""Make the config of a larger model from the sizes that a user asks for."""

from collections.abc import Mapping

from tokenformer_jax.config import GrowConfig, ModelConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import depth, experts, state, widen


def larger_model(
  model: ModelConfig,
  config: GrowConfig,
  *,
  param_tokens: Mapping[str, int] | None = None,
  layers: int | None = None,
  pattern: str | None = None,
  more: experts.Wanted | None = None,
  **wide: int | None,
) -> ModelConfig:
  """Return the larger model with the given sizes.

  Args:
    model: the model of the source.
    config: its method says which sizes can change.
    param_tokens: the new counts; None keeps the model's.
    layers: the new number of layers; None keeps the model's.
    pattern: the new pattern instead of `layers`.
    more: the new experts, if there are some.
    **wide: `width`, `heads` and `ffn_width` of a Transformer; None keeps the model's, except that
      heads follow the width.

  Raises:
    UserError: the method does not change a size, or a size does not divide.
  """
  grown = _wider(model, config, param_tokens, wide, deeper=bool(layers or pattern or more))
  return depth.wanted(experts.wanted(grown, more) if more else grown, layers, pattern)


def _wider(
  model: ModelConfig,
  config: GrowConfig,
  param_tokens: Mapping[str, int] | None,
  wide: Mapping[str, int | None],
  *,
  deeper: bool,
) -> ModelConfig:
  """Return the model with other sizes of its layers; `deeper`: layers or experts are added too."""
  wide = {name: value for name, value in wide.items() if value is not None}
  if config.method in state.TOKEN_METHODS:
    if wide:
      raise UserError(
        f'--{next(iter(wide))} is for the methods that widen a Transformer; method='
        f'{config.method} adds parameter tokens: --param_tokens=qkv=N,proj=N,ffn=N'
      )
    return state.grown_model(model, param_tokens or {}, config)
  if param_tokens is not None:
    raise UserError(f'--param_tokens is not for method={config.method}, which takes --width=N')
  if deeper and not wide:
    return model
  state.check_method(model, config.method)
  return widen.resized(model, **wide)
