"""Describe whether a model works in texts longer than those of training; clip its distances."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenformer_jax.config import (
  Config,
  GatedUnitConfig,
  LayerConfig,
  LengthScaleConfig,
  LinearConfig,
  ModelConfig,
  RotaryConfig,
  SoftmaxConfig,
)
from tokenformer_jax.config.check_model import window_reach
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import messages

CLIP_HELP = (
  'The largest distance that full attention with rotary positions distinguishes, as in ReRoPE '
  "(default: the model's)."
)  # of the flag --clip_positions
_DESIGNED, _WEAKER, _UNTRAINED = range(3)


class _Judgement(NamedTuple):
  """How well layers work in texts longer than those of training."""

  rank: int  # _DESIGNED, _WEAKER or _UNTRAINED
  text: str


def say_length(config: Config, asked: int) -> None:
  """Print the sentence of `describe_length` for a run on standard error, if there is one."""
  if sentence := describe_length(config.model, config.data.sequence_length, asked):
    messages.say(sentence)


def describe_length(model: ModelConfig, trained: int, asked: int) -> str:
  """Return one sentence about why a model works in a text of `asked` tokens, or why it may not.

  The layers that work worst decide. Return '' if the text is not longer than the `trained` tokens
  of training texts.
  """
  if asked <= trained:
    return ''
  if model.position_embedding == 'learned':
    if asked > model.max_length:
      return f'learned positions end at {model.max_length}'
    return f'learned positions beyond the {trained} of training are untrained'
  judged = list(_judge(model, trained))
  worst = max(judgement.rank for judgement in judged)
  texts = list(dict.fromkeys(judgement.text for judgement in judged if judgement.rank == worst))
  if worst == _DESIGNED:
    return f'{" and ".join(texts)}: made for lengths beyond the {trained} of training'
  return '; '.join(texts)


def _judge(model: ModelConfig, trained: int) -> Iterator[_Judgement]:
  """Yield a judgement of each named layer of the pattern, and of the model as a whole."""
  mixers = [layer.mixer for layer in model.layers.values()]
  beyond = f'beyond the {trained} of training'
  for mixer in mixers:
    match mixer:
      case SoftmaxConfig() | GatedUnitConfig() if 0 < mixer.window <= trained:
        units = 'gated units in ' if isinstance(mixer, GatedUnitConfig) else ''
        yield _Judgement(_DESIGNED, f'{units}windows of {mixer.window}')
      case SoftmaxConfig() | GatedUnitConfig():
        yield _judge_attention(mixer, trained, beyond)
      case LinearConfig() if _is_rotary(mixer):
        text = f'linear attention with rotary positions {beyond} is untrained'
        yield _Judgement(_UNTRAINED, text)
      case LinearConfig():
        text = f'linear attention without positions sums over more tokens than the {trained}'
        yield _Judgement(_WEAKER, f'{text} of training')
      case _:
        yield _Judgement(_UNTRAINED, f'layers of the kind {mixer.kind} {beyond} are untrained')
  if not any(_is_rotary(mixer) or getattr(mixer, 'window', 0) for mixer in mixers):
    text = f'only the causal mask distinguishes positions, and those {beyond} are untrained'
    yield _Judgement(_UNTRAINED, text)
  layers, reach = window_reach(model)
  if reach > trained:
    text = f'{layers} layers with windows together reach {reach} positions, {beyond}'
    yield _Judgement(_WEAKER, text)


def _judge_attention(
  mixer: SoftmaxConfig | GatedUnitConfig, trained: int, beyond: str
) -> _Judgement:
  """Return a judgement of attention to more tokens than a training text has."""
  is_unit = isinstance(mixer, GatedUnitConfig)
  name = 'gated units' if is_unit else 'full attention'
  clip = mixer.positions.clip if isinstance(mixer.positions, RotaryConfig) else 0
  if _is_rotary(mixer) and not clip:
    if mixer.window:
      text = f'windows of {mixer.window} with rotary positions {beyond} are untrained'
      return _Judgement(_UNTRAINED, text)
    return _Judgement(
      _UNTRAINED,
      f'rotary positions {beyond} are untrained; --clip_positions=W limits distances as ReRoPE '
      'does',
    )
  if clip >= trained:
    return _Judgement(
      _UNTRAINED,
      f'rotary distances {beyond} are untrained, and they are limited to {clip}; '
      f'--clip_positions=W below {trained} limits them as ReRoPE does',
    )
  if is_unit and mixer.normalise == 'squared_relu':
    text = f'gated units divide relu² by more tokens than the {trained} of training'
    return _Judgement(_WEAKER, text)
  has_factor = type(mixer.length_scale) is not LengthScaleConfig
  factor = ', with a factor for longer texts' if has_factor else ''
  if clip:
    return _Judgement(_DESIGNED, f'{name} with distances up to {clip}{factor}')
  if has_factor:
    return _Judgement(_DESIGNED, f'{name} without positions{factor}')
  verb = 'spread their' if is_unit else 'spreads its'
  return _Judgement(
    _WEAKER,
    f'{name} without positions and without a factor for longer texts {verb} weights over more '
    f'tokens than the {trained} of training',
  )


def with_clip(model: ModelConfig, clip: int) -> ModelConfig:
  """Return a model whose full attention limits distances of rotary positions (ReRoPE).

  `clip` becomes `positions.clip` of softmax attention and gated units that attend to all positions.
  Layers with windows keep their distances.

  Raises:
    UserError: the clip is not positive, or no layer has full attention with rotary positions.
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
