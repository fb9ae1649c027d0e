"""The group `model.layer`: what one layer computes, as a choice of variants with their own keys.

A layer is a mixer, which moves information between positions, and a feed-forward part, which works
on each position alone. Each dataclass here configures one of them; `model/blocks.py` names the
modules of mixers.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from tokenformer_jax.config.fields import key, one_of, table


@dataclasses.dataclass(frozen=True)
class ScoreConfig:
  """Θ, which maps scores of parameter tokens to weights: see `pattention.parameter_weights`."""

  kind: ClassVar[str]
  # Whether a score of 0 has weight 0: then a parameter token with a zero key adds nothing and
  # changes no other weight.
  zero_at_zero: ClassVar[bool] = False

  row_epsilon: float = key(
    0.0, 'added to the norm of scores; the released TPU code has 1e-5', least=0
  )


@dataclasses.dataclass(frozen=True)
class _GELUScore(ScoreConfig):
  zero_at_zero = True

  gelu: str = key(
    'exact', 'the exact function or its approximation by tanh', choices=('exact', 'tanh')
  )


class L2NormGELU(_GELUScore):
  """GELU(τ A / ‖A‖₂), the score of the TokenFormer."""

  kind = 'l2_norm_gelu'


class GELUL2Norm(_GELUScore):
  """τ GELU(A) / ‖GELU(A)‖₂ (TokenFormer, Table 4)."""

  kind = 'gelu_l2_norm'


class GELUL1Norm(_GELUScore):
  """τ² GELU(A) / ‖GELU(A)‖₁ (TokenFormer, Table 4)."""

  kind = 'gelu_l1_norm'


class SoftmaxScore(ScoreConfig):
  """τ² exp(A) / ‖exp(A)‖₁ (TokenFormer, Table 4)."""

  kind = 'softmax'


class ExpL2Norm(ScoreConfig):
  """τ exp(A) / ‖exp(A)‖₂."""

  kind = 'exp_l2_norm'


SCORES = table(L2NormGELU, GELUL2Norm, GELUL1Norm, SoftmaxScore, ExpL2Norm)


@dataclasses.dataclass(frozen=True)
class PattentionConfig:
  """A projection by attention to parameter tokens."""

  kind: ClassVar[str] = 'pattention'

  tokens: int = key(128, 'N, the number of parameter tokens', above=0)
  reference: int = key(
    0,
    'τ² of the score. 0: equal to tokens. Growth keeps it: see grow.scale',
    least=0,
  )
  score: ScoreConfig = one_of(L2NormGELU(), SCORES, 'Θ, from scores to weights: see pattention.py')


@dataclasses.dataclass(frozen=True)
class DenseConfig:
  """A projection by a matrix: the Transformer's."""

  kind: ClassVar[str] = 'dense'

  bias: bool = key(False, 'add a bias')


PROJECTIONS = table(PattentionConfig, DenseConfig)


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
  """Rotation of queries and keys by their positions."""

  kind: ClassVar[str] = 'rotary'

  fraction: float = key(0.25, "part of each head's width that is rotated", least=0, most=1)
  base: float = key(10000.0, 'the longest wavelength is 2π times this', above=0)


@dataclasses.dataclass(frozen=True)
class NoPositionsConfig:
  """Queries and keys without positions; only a causal mask distinguishes positions."""

  kind: ClassVar[str] = 'none'


POSITIONS = table(RotaryConfig, NoPositionsConfig)


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig:
  """Multi-head softmax attention."""

  kind: ClassVar[str] = 'softmax'

  heads: int = key(4, 'H, heads of the attention', above=0)
  window: int = key(
    0, 'positions that a token attends to, itself included. 0: all before it', least=0, only='lm'
  )
  positions: RotaryConfig | NoPositionsConfig = one_of(
    RotaryConfig(), POSITIONS, 'how queries and keys depend on their positions'
  )
  qkv: PattentionConfig | DenseConfig = one_of(
    PattentionConfig(), PROJECTIONS, 'query, key and value, each'
  )
  proj: PattentionConfig | DenseConfig = one_of(
    PattentionConfig(), PROJECTIONS, "the attention's output"
  )


# A mixer is named here and in `blocks.MIXERS`.
MIXERS = table(SoftmaxConfig)


@dataclasses.dataclass(frozen=True)
class MLPConfig:
  """GELU(x W₁) W₂: the Transformer's."""

  kind: ClassVar[str] = 'mlp'

  width: int = key(0, 'F, the width between the two matrices. 0: 4 · model.width', least=0)
  bias: bool = key(False, 'add a bias to both products')
  gelu: str = key(
    'exact', 'the exact function or its approximation by tanh', choices=('exact', 'tanh')
  )


@dataclasses.dataclass(frozen=True)
class NoFeedForwardConfig:
  """A layer that is a mixer alone."""

  kind: ClassVar[str] = 'none'


FEED_FORWARDS = table(PattentionConfig, MLPConfig, NoFeedForwardConfig)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
  """What one layer computes: x + mixer(norm(x)), then x + ffn(norm(x))."""

  mixer: Any = one_of(SoftmaxConfig(), MIXERS, 'moves information between positions')
  ffn: PattentionConfig | MLPConfig | NoFeedForwardConfig = one_of(
    PattentionConfig(tokens=512), FEED_FORWARDS, 'works on each position alone'
  )
  norm: str = key(
    'plain',
    'before each part: LayerNorm without parameters, with a bias, or with both',
    choices=('plain', 'bias', 'affine'),
  )


def parts(config: Any, prefix: str = '') -> Iterator[tuple[str, Any]]:
  """Yield each dataclass inside a config and its path, outer ones first."""
  for field in dataclasses.fields(config):
    if dataclasses.is_dataclass(value := getattr(config, field.name)):
      yield f'{prefix}{field.name}', value
      yield from parts(value, f'{prefix}{field.name}.')


def map_parts(config: Any, change: Callable[[str, Any], Any], prefix: str = '') -> Any:
  """Return a config with every dataclass inside it replaced, inner ones first.

  Args:
    config: a config dataclass.
    change: maps a path and the dataclass at that path to the new dataclass.
    prefix: the text before each path.
  """
  changed = {
    field.name: change(path, map_parts(value, change, f'{path}.'))
    for field in dataclasses.fields(config)
    if dataclasses.is_dataclass(value := getattr(config, field.name))
    for path in [f'{prefix}{field.name}']
  }
  return dataclasses.replace(config, **changed)
