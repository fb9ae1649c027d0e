"""Projections as values of a config: Pattention with a score function, a matrix, or none."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError

from tokenformer_jax.config.section import Bool, Int, OneOf, Str, adapter, key, section, table
from tokenformer_jax.errors import UserError, nearest

_GROUP = re.compile(
  r'([0-9]{1,13})(?::([0-9]{0,13}))?'  # tokens and τ²
  r'(?::([a-z0-9_]{1,40}))?'  # the kind of a score
  r'(?:\*([0-9]{1,4}))?'  # the number of such groups
)


@section
class ScoreConfig:
  """Θ, which maps scores of parameter tokens to weights: see `pattention.parameter_weights`."""

  kind: ClassVar[str]
  # Whether a score of 0 has weight 0: then a parameter token with a zero key adds nothing and
  # changes no other weight.
  zero_at_zero: ClassVar[bool] = False


GELU = Literal['exact', 'tanh']


@section
class _ScoreByGELU(ScoreConfig):
  zero_at_zero = True

  gelu: GELU = key('exact', 'the exact function or its approximation by tanh')


@section
class L2NormGELU(_ScoreByGELU):
  """GELU(τ A / ‖A‖₂), the score of the TokenFormer."""

  kind = 'l2_norm_gelu'


@section
class GELUL2Norm(_ScoreByGELU):
  """τ GELU(A) / ‖GELU(A)‖₂ (TokenFormer, Table 4)."""

  kind = 'gelu_l2_norm'


@section
class GELUL1Norm(_ScoreByGELU):
  """τ² GELU(A) / ‖GELU(A)‖₁ (TokenFormer, Table 4)."""

  kind = 'gelu_l1_norm'


@section
class SoftmaxScore(ScoreConfig):
  """τ² exp(A) / ‖exp(A)‖₁ (TokenFormer, Table 4)."""

  kind = 'softmax'


@section
class ExpL2Norm(ScoreConfig):
  """τ exp(A) / ‖exp(A)‖₂."""

  kind = 'exp_l2_norm'


@section
class GELUScore(_ScoreByGELU):
  """GELU(A): parameter tokens are the two matrices of a Transformer's MLP, word for word."""

  kind = 'gelu'


@section
class LinearScore(ScoreConfig):
  """A itself: N tokens whose values begin at zero are LoRA of rank N (arXiv 2106.09685)."""

  kind = 'linear'
  zero_at_zero = True


SCORES = table(L2NormGELU, GELUL2Norm, GELUL1Norm, SoftmaxScore, ExpL2Norm, GELUScore, LinearScore)
Score = Annotated[ScoreConfig, OneOf(SCORES)]


Modality = Literal['all']


@section
class Birth:
  """The run that first trained some parameter tokens of a group."""

  run: Str = key('', 'its id')
  path: Str = key('', 'its work directory then')
  step: Int = key(0, 'its first step', least=0)
  tokens: Int = key(0, 'the number of these tokens', least=0)


@section
class TokenGroup:
  """Parameter tokens that share a norm, a score function and what sees them.

  A projection of zero tokens has one group of zero. Comparisons ignore where tokens were born.
  """

  tokens: Int = key(0, 'N, the number of parameter tokens', least=0)
  reference: Int = key(0, 'τ² of the score', least=0)
  score: Score = key(L2NormGELU(), 'Θ, from scores to weights')
  modality: Modality = key('all', 'the positions that see the tokens')
  # In the order of the tokens. Those behind them were born in the run itself: `groups.with_births`.
  born: tuple[Birth, ...] = dataclasses.field(default=(), compare=False)
  frozen: Bool = key(False, 'training leaves the tokens as they are')

  @property
  def unborn(self) -> int:
    """The number of the last tokens that no saved run has."""
    return self.tokens - sum(birth.tokens for birth in self.born)

  def __repr__(self) -> str:
    return groups_as_text([self]) + (' (frozen)' if self.frozen else '')


def _as_given(value: Any) -> Any:
  """Return the short text of groups as it is, and records validated."""
  return value if isinstance(value, str) else adapter(_Records).validate_python(value)


_Records = tuple[TokenGroup, ...]
_Groups = Annotated[str | _Records, PlainValidator(_as_given)]


@section
class PattentionConfig:
  """A projection by attention to parameter tokens.

  The records in `groups` are all of it, and the other keys are a short form of one group. They
  agree after validation: `reference` is 0 beside several groups, and `score` that of the first.
  """

  kind: ClassVar[str] = 'pattention'

  tokens: Int = key(128, 'N, the number of parameter tokens', least=0)
  reference: Int = key(
    0, 'τ² of the score. 0: equal to tokens. Growth keeps it: see grow.method.scale', least=0
  )
  score: Score = key(L2NormGELU(), 'Θ, from scores to weights: see pattention.py')
  groups: _Groups = key(
    '',
    "tokens of each group with a norm of its own, as in '576 1728' or '64*4', or with the τ² of "
    "each, as in '576:576 1728:1728', and a score of its own kind, as in '576 64::gelu'. '': one "
    'group',
  )

  def __post_init__(self) -> None:
    try:
      groups = self._records()
    except UserError as error:
      raise PydanticCustomError('groups', '{text}', {'text': str(error)}) from None
    reference = groups[0].reference if len(groups) == 1 else 0
    score = groups[0].score if groups else self.score
    for name, value in (('groups', groups or ''), ('reference', reference), ('score', score)):
      object.__setattr__(self, name, value)

  def _records(self) -> tuple[TokenGroup, ...]:
    """Return the groups that the keys describe; none while the reference count is open."""
    groups = self.groups
    if isinstance(groups, str) and groups.strip():
      return _parse_groups(groups, self)
    if isinstance(groups, tuple) and len(groups) > 1:
      text = groups_as_text(groups)
      _check_total(groups, text, self)
      if self.score != groups[0].score:
        raise UserError(
          f'score is for one group, and groups={text!r} has {len(groups)}; write '
          'TOKENS:REFERENCE:SCORE in groups'
        )
      return groups
    if not self.reference:
      return ()
    first, *_ = groups or (TokenGroup(self.tokens),)
    assert isinstance(first, TokenGroup)
    one = _resized_group(first, self.tokens)
    return (dataclasses.replace(one, reference=self.reference, score=self.score),)


def token_groups(config: PattentionConfig) -> tuple[TokenGroup, ...]:
  """Return the groups of a projection in the order of its tokens; the paper's model has one."""
  if isinstance(config.groups, tuple):
    return config.groups
  return (TokenGroup(config.tokens, config.tokens, config.score),)


def from_groups(groups: Iterable[TokenGroup]) -> PattentionConfig:
  """Return the projection with these groups of tokens; none are a group of no tokens."""
  groups = tuple(groups)
  if not groups:
    return PattentionConfig(tokens=0)
  reference = groups[0].reference if len(groups) == 1 else 0
  return PattentionConfig(sum(group.tokens for group in groups), reference, groups[0].score, groups)


def _parse_groups(text: str, config: PattentionConfig) -> tuple[TokenGroup, ...]:
  """Return the groups of a text; scores that it leaves out are the projection's."""
  groups = []
  for entry in text.split():
    match = _GROUP.fullmatch(entry)
    tokens, reference, kind, count = match.groups('') if match else ('0', '', '', '')
    if not int(tokens) or count == '0':
      raise UserError(
        f'groups={text!r} has {entry!r}; a group is TOKENS, TOKENS:REFERENCE or '
        "TOKENS:REFERENCE:SCORE, and *N repeats it, for example '576:576 1728:1728' or '64*4'"
      )
    if kind and kind not in SCORES:
      raise UserError(f'groups={text!r} has the score {kind!r}{nearest(kind, SCORES)}')
    score = score_like(config.score, kind or config.score.kind)
    group = TokenGroup(int(tokens), int(reference or 0) or int(tokens), score)
    groups += [group] * int(count or 1)
  _check_total(groups, text, config)
  return tuple(groups)


def _check_total(groups: Sequence[TokenGroup], text: str, config: PattentionConfig) -> None:
  """Check that `tokens` and `reference` are right beside groups that say more."""
  total = sum(group.tokens for group in groups)
  if total != config.tokens:
    raise UserError(
      f'groups={text!r} has {total} tokens, and tokens is {config.tokens}; set tokens={total}, or '
      'other groups'
    )
  if config.reference:
    raise UserError(
      f'reference={config.reference} is for one group, and groups={text!r} has {len(groups)}; set '
      'it to 0, and write TOKENS:REFERENCE in groups'
    )


def score_like(score: ScoreConfig, kind: str) -> ScoreConfig:
  """Return a score of another kind with the options that both kinds have."""
  names = [field.name for field in dataclasses.fields(SCORES[kind]) if hasattr(score, field.name)]
  return SCORES[kind](**{name: getattr(score, name) for name in names})


def groups_as_text(groups: Sequence[TokenGroup]) -> str:
  """Return groups in the short form, with the kinds of scores that are not the first one's."""
  first = groups[0].score if len(groups) > 1 else L2NormGELU()
  texts = []
  for group, equal in itertools.groupby(groups):
    own = [group.score.kind] if group.score != first else []
    text = ':'.join([str(group.tokens), str(group.reference), *own])
    count = len(list(equal))
    texts.append(f'{text}*{count}' if count > 1 else text)
  return ' '.join(texts)


def births_of(groups: Iterable[TokenGroup], first: int, end: int) -> tuple[Birth, ...]:
  """Return where the tokens from number `first` to before `end` of a projection were born."""
  born, start = [], 0
  for birth in itertools.chain.from_iterable(group.born for group in groups):
    count = min(end, start + birth.tokens) - max(first, start)
    if count > 0:
      born.append(dataclasses.replace(birth, tokens=count))
    start += birth.tokens
  return tuple(born)


def _resized_group(group: TokenGroup, tokens: int) -> TokenGroup:
  """Return a group with more unborn tokens, or with a share of those of each birth."""
  if tokens >= group.tokens:
    return dataclasses.replace(group, tokens=tokens)
  ends = itertools.accumulate((birth.tokens for birth in group.born), initial=0)
  shares = itertools.pairwise(round(end * tokens / group.tokens) for end in ends)
  born = tuple(
    dataclasses.replace(birth, tokens=end - first)
    for birth, (first, end) in zip(group.born, shares, strict=True)
  )
  return dataclasses.replace(group, tokens=tokens, born=born)


def resized(config: PattentionConfig, tokens: int) -> PattentionConfig:
  """Return a projection with more tokens in its last group, or with its first tokens only."""
  if not isinstance(config.groups, tuple):
    return dataclasses.replace(config, tokens=tokens)
  groups, left = [], tokens
  for group in config.groups:
    if left > 0:
      groups.append(_resized_group(group, min(left, group.tokens)))
    left -= group.tokens
  if left > 0:
    groups[-1] = _resized_group(groups[-1], groups[-1].tokens + left)
  return from_groups(groups)


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
