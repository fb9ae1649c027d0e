"""Projections as values of a config: Pattention with a score function, a matrix, or none."""

import dataclasses
import itertools
import re
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, NamedTuple

from tokenformer_jax.config.section import (
  Bool,
  Float,
  Int,
  OneOf,
  Str,
  field_types,
  key,
  section,
  table,
)
from tokenformer_jax.errors import UserError, nearest

_GROUP = re.compile(
  r'([0-9]{1,13})(?::([0-9]{0,13}))?'  # tokens and τ²
  r'(?::([a-z0-9_]{1,40})(?:\(([a-z0-9_=.,+-]{1,99})\))?)?'  # a score and its options
  r'(?:\*([0-9]{1,4}))?'  # the number of such groups
)


@section
class ScoreConfig:
  """Θ, which maps scores of parameter tokens to weights: see `pattention.parameter_weights`."""

  kind: ClassVar[str]
  # Whether a score of 0 has weight 0: then a parameter token with a zero key adds nothing and
  # changes no other weight.
  zero_at_zero: ClassVar[bool] = False


@section
class _NormedScore(ScoreConfig):
  row_epsilon: Float = key(
    0.0, 'added to the norm of scores; the released TPU code has 1e-5', least=0
  )


GELU = Literal['exact', 'tanh']
_GELU = 'the exact function or its approximation by tanh'


@section
class _GELUNormScore(_NormedScore):
  zero_at_zero = True

  gelu: GELU = key('exact', _GELU)


@section
class L2NormGELU(_GELUNormScore):
  """GELU(τ A / ‖A‖₂), the score of the TokenFormer."""

  kind = 'l2_norm_gelu'


@section
class GELUL2Norm(_GELUNormScore):
  """τ GELU(A) / ‖GELU(A)‖₂ (TokenFormer, Table 4)."""

  kind = 'gelu_l2_norm'


@section
class GELUL1Norm(_GELUNormScore):
  """τ² GELU(A) / ‖GELU(A)‖₁ (TokenFormer, Table 4)."""

  kind = 'gelu_l1_norm'


@section
class SoftmaxScore(_NormedScore):
  """τ² exp(A) / ‖exp(A)‖₁ (TokenFormer, Table 4)."""

  kind = 'softmax'


@section
class ExpL2Norm(_NormedScore):
  """τ exp(A) / ‖exp(A)‖₂."""

  kind = 'exp_l2_norm'


@section
class GELUScore(ScoreConfig):
  """GELU(A): parameter tokens are the two matrices of a Transformer's MLP, word for word."""

  kind = 'gelu'
  zero_at_zero = True

  gelu: GELU = key('exact', _GELU)


@section
class LinearScore(ScoreConfig):
  """A itself: N tokens whose values begin at zero are LoRA of rank N (arXiv 2106.09685)."""

  kind = 'linear'
  zero_at_zero = True


SCORES = table(L2NormGELU, GELUL2Norm, GELUL1Norm, SoftmaxScore, ExpL2Norm, GELUScore, LinearScore)
Score = Annotated[ScoreConfig, OneOf(SCORES)]


@section
class PattentionConfig:
  """A projection by attention to parameter tokens."""

  kind: ClassVar[str] = 'pattention'

  tokens: Int = key(128, 'N, the number of parameter tokens', least=0)
  reference: Int = key(
    0, 'τ² of the score. 0: equal to tokens. Growth keeps it: see grow.method.scale', least=0
  )
  score: Score = key(L2NormGELU(), 'Θ, from scores to weights: see pattention.py')
  groups: Str = key(
    '',
    "tokens of each group with a norm of its own, as in '576 1728' or '64*4', or with the τ² of "
    "each, as in '576:576 1728:1728', and a score of its own, as in '576 64::gelu', with options "
    "that are not the projection's, as in '576 64::gelu(gelu=tanh)'. '': one group",
  )


class TokenGroup(NamedTuple):
  """Parameter tokens that share a norm."""

  tokens: int
  reference: int  # τ² of their score
  score: ScoreConfig = L2NormGELU()


def token_groups(config: PattentionConfig, where: str = '') -> tuple[TokenGroup, ...]:
  """Return the groups of a projection in the order of its tokens; the paper's model has one.

  `where` is the path of the projection for messages.
  """
  if not config.groups.strip():
    return (TokenGroup(config.tokens, config.reference or config.tokens, config.score),)
  groups = []
  for part in config.groups.split():
    match = _GROUP.fullmatch(part)
    tokens, reference, kind, options, count = match.groups('') if match else ('0', '', '', '', '')
    if not int(tokens) or count == '0':
      raise UserError(
        f'{where}groups={config.groups!r} has {part!r}; a group is TOKENS, TOKENS:REFERENCE or '
        "TOKENS:REFERENCE:SCORE, and *N repeats it, for example '576:576 1728:1728' or '64*4'"
      )
    score = _parse_score(kind, options, config, where) if kind else config.score
    group = TokenGroup(int(tokens), int(reference or 0) or int(tokens), score)
    groups += [group] * int(count or 1)
  total = sum(group.tokens for group in groups)
  if total != config.tokens:
    raise UserError(
      f'{where}groups={config.groups!r} has {total} tokens, and tokens is {config.tokens}; set '
      f'tokens={total}, or other groups'
    )
  if config.reference:
    raise UserError(
      f'{where}reference={config.reference} is for one group, and groups={config.groups!r} has '
      f'{len(groups)}; set it to 0, and write TOKENS:REFERENCE in groups'
    )
  return tuple(groups)


def _parse_score(kind: str, options: str, config: PattentionConfig, where: str) -> ScoreConfig:
  """Return the score of a group; options that its text does not name are the projection's."""
  text = f'{where}groups={config.groups!r} has the score {kind!r}'
  if kind not in SCORES:
    raise UserError(f'{text}{nearest(kind, SCORES)}')
  score, values = score_like(config.score, kind), {}
  own = field_types(type(score))
  for option in filter(None, options.split(',')):
    name, _, value = option.partition('=')
    if name not in own:
      raise UserError(f'{text} with the option {name!r}{nearest(name, own)}')
    try:
      values[name] = float(value) if own[name].annotation is float else value
    except ValueError as error:
      raise UserError(f'{text} with {option!r}; {name} must be a number') from error
  try:
    return dataclasses.replace(score, **values)
  except UserError as error:
    raise UserError(f'{text}, and {error}') from None


def score_like(score: ScoreConfig, kind: str) -> ScoreConfig:
  """Return a score of another kind with the options that both kinds have."""
  names = [field.name for field in dataclasses.fields(SCORES[kind]) if hasattr(score, field.name)]
  return SCORES[kind](**{name: getattr(score, name) for name in names})


def _score_text(score: ScoreConfig, projection: ScoreConfig) -> str:
  """Return the score of a group as `_parse_score` reads it; '' for the projection's."""
  if score == projection:
    return ''
  like = score_like(projection, score.kind)
  names = [field.name for field in dataclasses.fields(score)]
  options = [f'{n}={getattr(score, n)}' for n in names if getattr(score, n) != getattr(like, n)]
  return score.kind + (f'({",".join(options)})' if options else '')


def with_groups(config: PattentionConfig, groups: Iterable[TokenGroup]) -> PattentionConfig:
  """Return a projection with these groups of tokens."""
  groups = tuple(groups)
  total = sum(group.tokens for group in groups)
  if len({group.score for group in groups}) == 1:
    config = dataclasses.replace(config, score=groups[0].score)
  if len(groups) == 1:
    return dataclasses.replace(config, tokens=total, reference=groups[0].reference, groups='')
  text = []
  for group, equal in itertools.groupby(groups):
    count = len(list(equal))
    numbers = f'{group.tokens}:{group.reference}'
    own = _score_text(group.score, config.score)
    text.append(':'.join(filter(None, [numbers, own])) + (f'*{count}' if count > 1 else ''))
  return dataclasses.replace(config, tokens=total, reference=0, groups=' '.join(text))


def resized(config: PattentionConfig, tokens: int) -> PattentionConfig:
  """Return a projection with more tokens in its last group, or with its first tokens only."""
  if not config.groups:
    return dataclasses.replace(config, tokens=tokens)
  groups, left = [], tokens
  for group in token_groups(config):
    if left > 0:
      groups.append(group._replace(tokens=min(left, group.tokens)))
    left -= group.tokens
  if left > 0:
    groups[-1] = groups[-1]._replace(tokens=groups[-1].tokens + left)
  return with_groups(config, groups)


@section
class NoProjectionConfig:
  """No projection: the input itself, or no parameter tokens beside a matrix."""

  kind: ClassVar[str] = 'none'


ADDED_TOKENS = table(NoProjectionConfig, PattentionConfig)
AddedTokens = Annotated[NoProjectionConfig | PattentionConfig, OneOf(ADDED_TOKENS)]


@section
class DenseConfig:
  """A projection by a matrix, the Transformer's, and by parameter tokens beside it.

  y = x W + b + Σ_g Θ_g(x K_gᵀ) V_g
  """

  kind: ClassVar[str] = 'dense'

  bias: Bool = key(False, 'add a bias')
  beside: AddedTokens = key(
    NoProjectionConfig(), 'parameter tokens whose output is added to that of the matrix'
  )


PROJECTIONS = table(PattentionConfig, DenseConfig)
MAYBE_PROJECTIONS = table(PattentionConfig, DenseConfig, NoProjectionConfig)
Projection = Annotated[PattentionConfig | DenseConfig, OneOf(PROJECTIONS)]
MaybeProjection = Annotated[
  PattentionConfig | DenseConfig | NoProjectionConfig, OneOf(MAYBE_PROJECTIONS)
]
