"""Mixers as values of a config: how a layer moves information between positions."""

import dataclasses
from typing import Any, ClassVar

from tokenformer_jax.config.fields import key, one_of, table
from tokenformer_jax.config.pattention import (
  MAYBE_PROJECTIONS,
  PROJECTIONS,
  DenseConfig,
  NoProjectionConfig,
  PattentionConfig,
)


@dataclasses.dataclass(frozen=True)
class RotaryScalingConfig:
  """Planes turn as the base says."""

  kind: ClassVar[str] = 'none'


@dataclasses.dataclass(frozen=True)
class LinearScalingConfig(RotaryScalingConfig):
  """Every plane turns more slowly by a factor."""

  kind = 'linear'

  factor: float = key(1.0, 'by which planes turn more slowly', least=1)


@dataclasses.dataclass(frozen=True)
class Llama3ScalingConfig(LinearScalingConfig):
  """Planes with few turns over a length turn more slowly by a factor, as in Llama 3.1."""

  kind = 'llama3'

  low_frequency: float = key(
    1.0, 'planes with fewer turns over the length are slowed by the whole factor', above=0
  )
  high_frequency: float = key(
    4.0, 'planes with more turns over the length keep their speed', above=0
  )
  length: int = key(8192, 'the length that the model was first trained with', above=0)


@dataclasses.dataclass(frozen=True)
class YarnScalingConfig(LinearScalingConfig):
  """The same by the number of a plane, and larger scores (YaRN, arXiv 2309.00071)."""

  kind = 'yarn'

  fast: float = key(32.0, 'planes with more turns over the length keep their speed', above=0)
  slow: float = key(
    1.0, 'planes with fewer turns over the length are slowed by the whole factor', above=0
  )
  length: int = key(8192, 'the length that the model was first trained with', above=0)
  gain: float = key(
    0.0, 'of rotated queries and keys, each. 0: 1 + log(factor) / 10, as in YaRN', least=0
  )


ROTARY_SCALINGS = table(
  RotaryScalingConfig, LinearScalingConfig, Llama3ScalingConfig, YarnScalingConfig
)


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
  """Rotation of queries and keys by their positions."""

  kind: ClassVar[str] = 'rotary'

  fraction: float = key(0.25, "part of each head's width that is rotated", least=0, most=1)
  base: float = key(10000.0, 'the longest wavelength is 2π times this', above=0)
  layout: str = key(
    'half_split',
    'entries that are rotated together: i and i + r/2, or 2i and 2i + 1',
    choices=('half_split', 'interleaved'),
  )
  clip: int = key(
    0, 'the largest distance that counts, as in ReRoPE; 0: no limit. Softmax attention', least=0
  )
  scaling: RotaryScalingConfig = one_of(
    RotaryScalingConfig(), ROTARY_SCALINGS, 'how planes turn for longer texts'
  )


@dataclasses.dataclass(frozen=True)
class NoPositionsConfig:
  """Queries and keys without positions; only a causal mask distinguishes positions."""

  kind: ClassVar[str] = 'none'


POSITIONS = table(RotaryConfig, NoPositionsConfig)
Positions = RotaryConfig | NoPositionsConfig


@dataclasses.dataclass(frozen=True)
class LengthScaleConfig:
  """Scores do not depend on the number of keys."""

  kind: ClassVar[str] = 'none'


@dataclasses.dataclass(frozen=True)
class SeenScaleConfig(LengthScaleConfig):
  """Scores times log(max(l, least)) / log(base), with l keys that a query sees (GAU-alpha)."""

  kind = 'seen'

  least: int = key(16, 'the smallest number of keys that counts', above=1)
  base: float = key(512.0, 'the number of keys with a factor of 1', above=1)


@dataclasses.dataclass(frozen=True)
class PositionScaleConfig(LengthScaleConfig):
  """Scores times max(1, log(i + 1) / log(length)) for a query at position i."""

  kind = 'position'

  length: int = key(0, 'N, up to which the factor is 1. 0: data.sequence_length', least=0)


LENGTH_SCALES = table(LengthScaleConfig, SeenScaleConfig, PositionScaleConfig)


@dataclasses.dataclass(frozen=True)
class AsKeyConfig:
  """The value has its own projection, of the same kind and size as the key's."""

  kind: ClassVar[str] = 'as_key'


VALUES = table(AsKeyConfig, PattentionConfig, DenseConfig, NoProjectionConfig)
_UNIT_HEAD = 128
_WINDOW = 'positions that a token attends to, itself included. 0: all before it'


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig:
  """Multi-head softmax attention."""

  kind: ClassVar[str] = 'softmax'

  heads: int = key(4, 'H, heads of the attention', above=0)
  window: int = key(0, _WINDOW, least=0, only='lm')
  positions: Positions = one_of(
    RotaryConfig(), POSITIONS, 'how queries and keys depend on their positions'
  )
  qkv: PattentionConfig | DenseConfig = one_of(
    PattentionConfig(), PROJECTIONS, 'query, key and value, each'
  )
  proj: PattentionConfig | DenseConfig | NoProjectionConfig = one_of(
    PattentionConfig(), MAYBE_PROJECTIONS, "the attention's output"
  )
  value: AsKeyConfig | PattentionConfig | DenseConfig | NoProjectionConfig = one_of(
    AsKeyConfig(), VALUES, 'value: made as the key, by a projection of its own, or the input itself'
  )
  value_skip: bool = key(
    False,
    'add the input to the value, each with a learned gain; the projection starts at zero',
    when='value.kind=as_key|pattention|dense',
  )
  proj_skip: bool = key(
    False,
    'add the heads to their projection by proj, each with a learned gain; it starts at zero',
    when='proj.kind=pattention|dense',
  )
  length_scale: LengthScaleConfig = one_of(
    LengthScaleConfig(), LENGTH_SCALES, 'a factor of scores that grows with the length'
  )
  shaped: bool = key(
    False,
    'shaped attention, α I + β A − γ C with learned gains a head and C the uniform attention; '
    'queries start at zero, which makes it the identity',
  )
  kv_heads: int = key(
    0, 'G, heads of keys and values, each for H / G heads of queries. 0: heads', least=0
  )
  head_width: int = key(0, 'K, the width of a head. 0: model.width / heads', least=0)
  qk_norm: str = key(
    'none',
    'RMSNorm of the queries and keys of each head, with a scale for all heads, before rotation',
    choices=('none', 'rms'),
  )

  @property
  def key_heads(self) -> int:
    """G, the heads of keys and values."""
    return self.kv_heads or self.heads


@dataclasses.dataclass(frozen=True)
class GatedUnitConfig:
  """A gated attention unit, (U ⊙ A V) W of one head, which needs no feed-forward part."""

  kind: ClassVar[str] = 'gated_unit'

  width: int = key(0, 'e, of U and V. 0: 2 · model.width', least=0)
  head_width: int = key(0, 's, of queries and keys. 0: 128', least=0)
  window: int = key(0, _WINDOW, least=0, only='lm')
  positions: Positions = one_of(
    RotaryConfig(), POSITIONS, 'how queries and keys depend on their positions'
  )
  normalise: str = key(
    'softmax',
    'from scores to weights: softmax, or relu² / l for l keys that a query sees. The softmax_plus '
    'of GAU-alpha is softmax with length_scale.kind=seen',
    choices=('softmax', 'squared_relu'),
  )
  length_scale: LengthScaleConfig = one_of(
    LengthScaleConfig(), LENGTH_SCALES, 'a factor of scores that grows with the length'
  )
  offset: bool = key(False, 'add an offset to the scaled queries and keys')
  uvq: PattentionConfig | DenseConfig = one_of(
    PattentionConfig(), PROJECTIONS, 'of U, V and what queries and keys are scaled from, together'
  )
  out: PattentionConfig | DenseConfig = one_of(PattentionConfig(), PROJECTIONS, 'the output')


@dataclasses.dataclass(frozen=True)
class LinearConfig:
  """Linear attention, whose rotation is in the numerator only (RoFormer, eq. 19)."""

  kind: ClassVar[str] = 'linear'

  heads: int = key(4, 'H, heads of the attention', above=0)
  positions: Positions = one_of(
    RotaryConfig(), POSITIONS, 'how queries and keys depend on their positions'
  )
  feature: str = key('elu', 'φ: elu + 1, relu, or softplus', choices=('elu', 'relu', 'softplus'))
  qkv: PattentionConfig | DenseConfig = one_of(
    PattentionConfig(), PROJECTIONS, 'query, key and value, each'
  )
  proj: PattentionConfig | DenseConfig | NoProjectionConfig = one_of(
    PattentionConfig(), MAYBE_PROJECTIONS, "the attention's output"
  )


# A mixer is named here and in `blocks.MIXERS`.
MIXERS = table(SoftmaxConfig, GatedUnitConfig, LinearConfig)


def width_of_heads(mixer: Any, width: int) -> int:
  """Return K, the width of a head of queries and keys, in a model of this width."""
  own = getattr(mixer, 'head_width', 0)
  return own or (_UNIT_HEAD if isinstance(mixer, GatedUnitConfig) else width // mixer.heads)


def is_plain(mixer: Any) -> bool:
  """Return whether a mixer is softmax attention with projections of the model's width alone."""
  if not has_own_values(mixer):
    return False
  return mixer.key_heads == mixer.heads and not mixer.head_width and mixer.qk_norm == 'none'


def has_own_values(mixer: Any) -> bool:
  """Return whether a mixer is softmax attention whose values and output are projections alone."""
  if not isinstance(mixer, SoftmaxConfig) or mixer.shaped or mixer.value_skip or mixer.proj_skip:
    return False
  return not any(isinstance(part, NoProjectionConfig) for part in (mixer.value, mixer.proj))
