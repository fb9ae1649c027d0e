"""Projections as values of a config: Pattention with a score function, a matrix, or none."""

import dataclasses
from typing import ClassVar

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
class NoProjectionConfig:
  """The input itself in the place of a projection."""

  kind: ClassVar[str] = 'none'


MAYBE_PROJECTIONS = table(PattentionConfig, DenseConfig, NoProjectionConfig)
