"""Projections as values of a config: Pattention with a score function, a matrix, or none."""

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import PlainValidator
from pydantic_core import ArgsKwargs, PydanticCustomError

from tokenformer_jax.config.section import Bool, Int, OneOf, Str, adapter, key, section, table
from tokenformer_jax.errors import UserError, nearest

_GROUP = re.compile(
  r'([0-9]{1,13})(?::([0-9]{1,13}|(?=:)))?'  # tokens and τ²
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

  With tokens=0 there is one empty group. Comparisons ignore where tokens were born.
  """

  tokens: Int = key(0, 'N, the number of parameter tokens', least=0)
  reference: Int = key(0, 'τ² of the score; 0: open, see `with_references`', least=0)
  score: Score = key(L2NormGELU(), 'Θ, from scores to weights')
  modality: Modality = key('all', 'the positions that see the tokens')
  # In the order of the tokens. Those behind them were born in the run itself: `groups.with_births`.
  born: tuple[Birth, ...] = dataclasses.field(default=(), compare=False)
  frozen: Bool = key(False, 'training leaves the tokens as they are')

  @property
  def unborn(self) -> int:
    """The number of the last tokens that no saved run has."""
    return self.tokens - sum(birth.tokens for birth in self.born)

  @property
  def scale_count(self) -> int:
    """τ² of the score.

    Raises:
      UserError: the count is open.
    """
    if self.tokens and not self.reference:
      raise UserError('a group of parameter tokens has no reference count; see with_references')
    return self.reference

  def __repr__(self) -> str:
    return groups_as_text([self]) + (' (frozen)' if self.frozen else '')


_Records = tuple[TokenGroup, ...]


def _as_given(value: Any) -> Any:
  """Return the short text of groups, and records validated."""
  return value.strip() if isinstance(value, str) else adapter(_Records).validate_python(value)


@section
class PattentionKeys:
  """A projection by attention to parameter tokens, as people write it.

  The records in `groups` are all of it. The other keys are a short form of one group, and agree
  with the records: `reference` is 0 beside several groups, and `score` that of the first.
  """

  tokens: Int = key(128, 'N, the number of parameter tokens', least=0)
  reference: Int = key(
    0, 'τ² of the score. 0: equal to tokens. Growth keeps it: see grow.method.scale', least=0
  )
  score: Score = key(L2NormGELU(), 'Θ, from scores to weights: see pattention.py')
  groups: Annotated[str | _Records, PlainValidator(_as_given)] = key(
    '',
    "tokens of each group with a norm of its own, as in '576 1728' or '64*4', or with the τ² of "
    "each, as in '576:576 1728:1728', and a score of its own kind, as in '576 64::gelu'. '': one "
    'group',
  )

  def records(self, written: Collection[str]) -> _Records:
    """Return the groups that the keys describe. Keys that are not in `written` are defaults."""
    if isinstance(self.groups, str) and self.groups:
      groups = _parse_groups(self.groups, self)
      _check_agrees(groups, self.groups, self, written)
      return groups
    if len(self.groups) > 1 and isinstance(self.groups, tuple):
      _check_agrees(self.groups, groups_as_text(self.groups), self, written)
      return self.groups
    first, *_ = self.groups or (TokenGroup(self.tokens, self.reference, self.score),)
    assert isinstance(first, TokenGroup)
    one = _resized_group(first, self.tokens if 'tokens' in written else first.tokens)
    changed = {name: getattr(self, name) for name in ('reference', 'score') if name in written}
    return (dataclasses.replace(one, **changed),)


@section
class PattentionConfig:
  """A projection by attention to parameter tokens: its groups, in the order of the tokens.

  It is made from the keys of `PattentionKeys`, which it is written as.
  """

  kind: ClassVar[str] = 'pattention'
  written_as: ClassVar[type] = PattentionKeys

  groups: _Records = dataclasses.field(default=(TokenGroup(128),))

  if TYPE_CHECKING:

    def __init__(
      self,
      tokens: int = 128,
      reference: int = 0,
      score: ScoreConfig = ...,
      groups: str | Sequence[TokenGroup] = '',
    ): ...

  @pydantic.model_validator(mode='before')
  @classmethod
  def _read(cls, given: Any) -> Any:
    """Return the groups that the given keys describe."""
    if isinstance(given, ArgsKwargs):
      names = [field.name for field in dataclasses.fields(PattentionKeys)]
      written = {*names[: len(given.args)], *(given.kwargs or {})}
    elif isinstance(given, Mapping):
      written = given.keys()
    else:
      return given
    try:
      return {'groups': adapter(PattentionKeys).validate_python(given).records(written)}
    except UserError as error:
      raise PydanticCustomError('groups', '{text}', {'text': str(error)}) from None

  def as_written(self) -> PattentionKeys:
    """Return the keys that describe the projection; no groups while its only count is open."""
    is_open = len(self.groups) == 1 and not self.reference
    return PattentionKeys(self.tokens, self.reference, self.score, '' if is_open else self.groups)

  @property
  def tokens(self) -> int:
    """N, of all groups."""
    return sum(group.tokens for group in self.groups)

  @property
  def reference(self) -> int:
    """τ² of the only group; 0 if it is open, and beside several groups."""
    return self.groups[0].reference if len(self.groups) == 1 else 0

  @property
  def score(self) -> ScoreConfig:
    """Θ of the first group."""
    return self.groups[0].score


def from_groups(groups: Iterable[TokenGroup]) -> PattentionConfig:
  """Return the projection with these groups of tokens; none are a group of no tokens."""
  return PattentionConfig(groups=tuple(groups) or (TokenGroup(),))


def _parse_groups(text: str, keys: PattentionKeys) -> tuple[TokenGroup, ...]:
  """Return the groups of a text; scores that it leaves out are that of the keys."""
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
    score = score_like(keys.score, kind or keys.score.kind)
    group = TokenGroup(int(tokens), int(reference or 0) or int(tokens), score)
    groups += [group] * int(count or 1)
  return tuple(groups)


def _check_agrees(
  groups: Sequence[TokenGroup], text: str, keys: PattentionKeys, written: Collection[str]
) -> None:
  """Check that the keys beside groups, which say more, agree with them."""
  total = sum(group.tokens for group in groups)
  if 'tokens' in written and total != keys.tokens:
    raise UserError(
      f'groups={text!r} has {total} tokens, and tokens is {keys.tokens}; set tokens={total}, or '
      'other groups'
    )
  if keys.reference:
    raise UserError(
      f'reference={keys.reference} is for one group, and groups={text!r} has {len(groups)}; set '
      'it to 0, and write TOKENS:REFERENCE in groups'
    )
  if isinstance(keys.groups, tuple) and 'score' in written and keys.score != groups[0].score:
    raise UserError(
      f'score is for one group, and groups={text!r} has {len(groups)}; write '
      'TOKENS:REFERENCE:SCORE in groups'
    )


def score_like(score: ScoreConfig, kind: str) -> ScoreConfig:
  """Return a score of another kind with the options that both kinds have."""
  names = [field.name for field in dataclasses.fields(SCORES[kind]) if hasattr(score, field.name)]
  return SCORES[kind](**{name: getattr(score, name) for name in names})


def groups_as_text(groups: Sequence[TokenGroup]) -> str:
  """Return groups in the short form, with the scores that are not the first one's."""
  first = groups[0].score if len(groups) > 1 else L2NormGELU()
  texts = []
  for group, equal in itertools.groupby(groups):
    own = [_score_as_text(group.score)] if group.score != first else []
    text = ':'.join([str(group.tokens), str(group.reference), *own])
    count = len(list(equal))
    texts.append(f'{text}*{count}' if count > 1 else text)
  return ' '.join(texts)


def _score_as_text(score: ScoreConfig) -> str:
  """Return the kind of a score, and its options that are not the kind's defaults."""
  default = SCORES[score.kind]()
  fields = dataclasses.fields(score)
  values = {field.name: getattr(score, field.name) for field in fields}
  options = [f'{name}={value}' for name, value in values.items() if value != getattr(default, name)]
  return f'{score.kind}({",".join(options)})' if options else score.kind


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


_AddedTokens = NoProjectionConfig | PattentionConfig
AddedTokens = Annotated[_AddedTokens, OneOf(table(_AddedTokens))]


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


_Projections = PattentionConfig | DenseConfig
_MaybeProjections = PattentionConfig | DenseConfig | NoProjectionConfig
Projection = Annotated[_Projections, OneOf(table(_Projections))]
MaybeProjection = Annotated[_MaybeProjections, OneOf(table(_MaybeProjections))]
