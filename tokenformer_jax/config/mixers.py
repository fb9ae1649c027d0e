"""Mixers as values of a config: how a layer moves information between positions."""

from typing import Annotated, Any, ClassVar, Literal

from tokenformer_jax.config.pattention import (
  DenseConfig,
  MaybeProjection,
  NoProjectionConfig,
  PattentionConfig,
  Projection,
)
from tokenformer_jax.config.section import Bool, Float, Int, OneOf, key, section, table


@section
class RotaryScalingConfig:
  """Plain rotary positions: no change of the frequencies."""

  kind: ClassVar[str] = 'none'


@section
class LinearScalingConfig(RotaryScalingConfig):
  """Every plane turns more slowly by a factor."""

  kind = 'linear'

  factor: Float = key(1.0, 'by which planes turn more slowly', least=1)


@section
class Llama3ScalingConfig(LinearScalingConfig):
  """Planes with few turns over a length turn more slowly by a factor, as in Llama 3.1."""

  kind = 'llama3'

  low_frequency: Float = key(
    1.0, 'planes with fewer turns over the length are slowed by the whole factor', above=0
  )
  high_frequency: Float = key(
    4.0, 'planes with more turns over the length keep their speed', above=0
  )
  length: Int = key(8192, 'the length that the model was first trained with', above=0)


@section
class YarnScalingConfig(LinearScalingConfig):
  """The same by the number of a plane, and larger scores (YaRN, arXiv 2309.00071)."""

  kind = 'yarn'

  fast: Float = key(32.0, 'planes with more turns over the length keep their speed', above=0)
  slow: Float = key(
    1.0, 'planes with fewer turns over the length are slowed by the whole factor', above=0
  )
  length: Int = key(8192, 'the length that the model was first trained with', above=0)
  gain: Float = key(
    0.0, 'of rotated queries and keys, each. 0: 1 + log(factor) / 10, as in YaRN', least=0
  )


ROTARY_SCALINGS = table(
  RotaryScalingConfig, LinearScalingConfig, Llama3ScalingConfig, YarnScalingConfig
)
RotaryScaling = Annotated[RotaryScalingConfig, OneOf(ROTARY_SCALINGS)]


@section
class RotaryConfig:
  """Rotation of queries and keys by their positions."""

  kind: ClassVar[str] = 'rotary'

  fraction: Float = key(0.25, "part of each head's width that is rotated", least=0, most=1)
  base: Float = key(10000.0, 'the longest wavelength is 2π times this', above=0)
  layout: Literal['half_split', 'interleaved'] = key(
    'half_split', 'entries that are rotated together: i and i + r/2, or 2i and 2i + 1'
  )
  clip: Int = key(
    0, 'the largest distance that counts, as in ReRoPE; 0: no limit. Softmax attention', least=0
  )
  scaling: RotaryScaling = key(RotaryScalingConfig(), 'how planes turn for longer texts')


@section
class NoPositionsConfig:
  """Queries and keys without positions; only a causal mask distinguishes positions."""

  kind: ClassVar[str] = 'none'


_Positions = RotaryConfig | NoPositionsConfig
Positions = Annotated[_Positions, OneOf(table(_Positions))]


@section
class LengthScaleConfig:
  """Scores do not depend on the number of keys."""

  kind: ClassVar[str] = 'none'


@section
class SeenScaleConfig(LengthScaleConfig):
  """Scores times log(max(l, least)) / log(base), with l keys that a query sees (GAU-alpha)."""

  kind = 'seen'

  least: Int = key(16, 'the smallest number of keys that counts', above=1)
  base: Float = key(512.0, 'the number of keys with a factor of 1', above=1)


@section
class PositionScaleConfig(LengthScaleConfig):
  """Scores times max(1, log(i + 1) / log(length)) for a query at position i."""

  kind = 'position'

  length: Int = key(0, 'N, up to which the factor is 1. 0: data.sequence_length', least=0)


LENGTH_SCALES = table(LengthScaleConfig, SeenScaleConfig, PositionScaleConfig)
LengthScale = Annotated[LengthScaleConfig, OneOf(LENGTH_SCALES)]


@section
class AsKeyConfig:
  """The value has its own projection, of the same kind and size as the key's."""

  kind: ClassVar[str] = 'as_key'


_Values = AsKeyConfig | PattentionConfig | DenseConfig | NoProjectionConfig
Value = Annotated[_Values, OneOf(table(_Values))]
_UNIT_HEAD = 128
_WINDOW = 'positions that a token attends to, itself included. 0: all before it'


@section
class SoftmaxConfig:
  """Multi-head softmax attention."""

  kind: ClassVar[str] = 'softmax'

  heads: Int = key(4, 'H, heads of the attention', above=0)
  window: Int = key(0, _WINDOW, least=0)
  positions: Positions = key(RotaryConfig(), 'how queries and keys depend on their positions')
  qkv: Projection = key(PattentionConfig(), 'query, key and value, each')
  proj: MaybeProjection = key(PattentionConfig(), "the attention's output")
  value: Value = key(
    AsKeyConfig(), 'value: made as the key, by a projection of its own, or the input itself'
  )
  value_skip: Bool = key(
    False, 'add the input to the value, each with a learned gain; the projection starts at zero'
  )
  length_scale: LengthScale = key(
    LengthScaleConfig(), 'a factor of scores that grows with the length'
  )
  shaped: Bool = key(
    False,
    'shaped attention, α I + β A − γ C with learned gains a head and C the uniform attention; '
    'queries start at zero, which makes it the identity',
  )
  kv_heads: Int = key(
    0, 'G, heads of keys and values, each for H / G heads of queries. 0: heads', least=0
  )
  head_width: Int = key(0, 'K, the width of a head. 0: model.width / heads', least=0)
  qk_norm: Literal['none', 'rms', 'rms_offset', 'rms_joint'] = key(
    'none',
    'RMSNorm of the queries and keys of each head, with a scale for all heads, before rotation; '
    'rms_offset with a scale of 1 + w; rms_joint of all heads together, with a scale of each entry',
  )
  score_width: Float = key(0.0, 's, scores are q · k / √s. 0: the width of a head', least=0)
  score_cap: Float = key(
    0.0, 'c, scores become c · tanh(score / c), as in Gemma 2; not by cuDNN. 0: no cap', least=0
  )

  @property
  def key_heads(self) -> int:
    """G, the heads of keys and values."""
    return self.kv_heads or self.heads


@section
class GatedUnitConfig:
  """A gated attention unit, (U ⊙ A V) W of one head, which needs no feed-forward part."""

  kind: ClassVar[str] = 'gated_unit'

  width: Int = key(0, 'e, of U and V. 0: 2 · model.width', least=0)
  head_width: Int = key(0, 's, of queries and keys. 0: 128', least=0)
  window: Int = key(0, _WINDOW, least=0)
  positions: Positions = key(RotaryConfig(), 'how queries and keys depend on their positions')
  normalise: Literal['softmax', 'squared_relu'] = key(
    'softmax',
    'from scores to weights: softmax, or relu² / l for l keys that a query sees. The softmax_plus '
    'of GAU-alpha is softmax with length_scale.kind=seen',
  )
  length_scale: LengthScale = key(
    LengthScaleConfig(), 'a factor of scores that grows with the length'
  )
  offset: Bool = key(False, 'add an offset to the scaled queries and keys')
  uvq: Projection = key(
    PattentionConfig(), 'of U, V and what queries and keys are scaled from, together'
  )
  out: Projection = key(PattentionConfig(), 'the output')


@section
class LinearConfig:
  """Linear attention, whose rotation is in the numerator only (RoFormer, eq. 19)."""

  kind: ClassVar[str] = 'linear'

  heads: Int = key(4, 'H, heads of the attention', above=0)
  positions: Positions = key(RotaryConfig(), 'how queries and keys depend on their positions')
  qkv: Projection = key(PattentionConfig(), 'query, key and value, each')
  proj: MaybeProjection = key(PattentionConfig(), "the attention's output")


# A mixer is named here and in `blocks.MIXERS`.
_Mixers = SoftmaxConfig | GatedUnitConfig | LinearConfig
MIXERS = table(_Mixers)
Mixer = Annotated[_Mixers, OneOf(MIXERS)]


def width_of_heads(mixer: Any, width: int) -> int:
  """Return K, the width of a head of queries and keys, in a model of this width."""
  own = getattr(mixer, 'head_width', 0)
  return own or (_UNIT_HEAD if isinstance(mixer, GatedUnitConfig) else width // mixer.heads)


def has_own_values(mixer: Any) -> bool:
  """Return whether a mixer is softmax attention whose values and output are projections alone."""
  if not isinstance(mixer, SoftmaxConfig) or mixer.shaped or mixer.value_skip:
    return False
  return not any(isinstance(part, NoProjectionConfig) for part in (mixer.value, mixer.proj))
