"""Warn where a text is longer than those of training; clip distances as ReRoPE does."""

import dataclasses
from typing import Any

from tokenformer_jax.config import (
  Config,
  GatedUnitConfig,
  LayerConfig,
  LengthScaleConfig,
  ModelConfig,
  RotaryConfig,
  SoftmaxConfig,
)
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.parallel import messages


def say_length(config: Config, asked: int, subject: str = '') -> None:
  """Print the warning of `describe_length` for a run on standard error, if there is one.

  `subject` is what the text is called before it.
  """
  if sentence := describe_length(config.model, config.data.sequence_length, asked):
    messages.say(f'{subject} may have {asked} tokens: {sentence}' if subject else sentence)


def describe_length(model: ModelConfig, trained: int, asked: int) -> str:
  """Return a warning that a model may not work in a text of `asked` tokens; '' if it should.

  `trained` is the length of the texts of training.
  """
  if asked <= trained:
    return ''
  if model.position_embedding == 'learned':
    if asked > model.max_length:
      return f'learned positions end at {model.max_length}'
    return f'learned positions beyond the {trained} of training are untrained'
  mixers = [layer.mixer for layer in model.layers.values()]
  if not any(_is_rotary(mixer) or getattr(mixer, 'window', 0) for mixer in mixers):
    return f'only the causal mask tells positions, and those beyond {trained} are untrained'
  warnings = [_warning(mixer, trained) for mixer in mixers]
  return '; '.join(dict.fromkeys(filter(None, warnings)))


def _warning(mixer: Any, trained: int) -> str:
  """Return why a mixer may not work in texts longer than those of training, or ''."""
  if 0 < getattr(mixer, 'window', 0) <= trained:
    return ''
  if _is_rotary(mixer):
    if 0 < mixer.positions.clip < trained:
      return ''
    untrained = f'rotary positions beyond the {trained} of training are untrained'
    if not _has_distances(mixer):
      return untrained
    return f'{untrained}; {arg.clip_positions}=W below {trained} limits distances as ReRoPE does'
  if type(getattr(mixer, 'length_scale', LengthScaleConfig())) is not LengthScaleConfig:
    return ''
  return f'layers without positions see more tokens than the {trained} of training'


def with_clip(model: ModelConfig, clip: int) -> ModelConfig:
  """Return a model whose full attention limits distances of rotary positions (ReRoPE).

  `clip` becomes `positions.clip` of softmax attention and gated units that attend to all positions.
  Layers with windows keep their distances.
  """
  if clip < 1:
    raise UserError(f'clip_positions is {clip}; it must be at least 1')
  if not any(_has_distances(layer.mixer) for layer in model.layers.values()):
    raise UserError(
      f'clip_positions is {clip}, and no layer of this model has full attention with rotary '
      'positions; leave it out'
    )

  def clipped(name: str, layer: LayerConfig) -> LayerConfig:
    del name
    if not _has_distances(layer.mixer):
      return layer
    positions = dataclasses.replace(layer.mixer.positions, clip=clip)
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, positions=positions))

  return model.map_layers(clipped)


def _is_rotary(mixer: Any) -> bool:
  return isinstance(getattr(mixer, 'positions', None), RotaryConfig)


def _has_distances(mixer: Any) -> bool:
  """Return whether a mixer attends to all positions, by scores of rotary positions."""
  is_full = isinstance(mixer, SoftmaxConfig | GatedUnitConfig) and not mixer.window
  return is_full and _is_rotary(mixer)
