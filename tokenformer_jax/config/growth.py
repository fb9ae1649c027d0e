"""The section `grow`: how a larger model is made from a trained one. See grow/."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ValidationError

from tokenformer_jax.config.section import (
  Float,
  Int,
  OneOf,
  adapter,
  field_types,
  key,
  section,
  sentence,
  table,
)
from tokenformer_jax.errors import UserError

MethodName = Literal[
  'group', 'zero_keys', 'duplicate', 'random', 'neurons', 'net2net', 'net2net_fill', 'hypercloning'
]
Scale = Literal['keep', 'resize']
NewKeys = Literal['init', 'trained', 'copies']
NewValues = Literal['zero', 'init']
NewScore = Literal[
  '', 'l2_norm_gelu', 'gelu_l2_norm', 'gelu_l1_norm', 'softmax', 'exp_l2_norm', 'gelu', 'linear'
]
Place = Literal[
  'copies', 'stacked_copies', 'between', 'behind', 'whole_copies', 'whole_stacked_copies'
]
Moments = Literal['pad', 'drop']
StepNumber = Literal['keep', 'restart']

_SCALES = 'keep or resize the reference counts'
_NOISE = "added to copies, as a fraction of each array's root mean square. 0: exact"
_NEW_KEYS = (
  "the keys of new tokens: drawn as at the start, drawn with the root mean square of each layer's "
  'trained keys, or copied from them with noise'
)


@section
class GrowthMethod:
  """How new weights are made; a method without one of these keys has its constant value."""

  kind: ClassVar[str]
  adds_tokens: ClassVar[bool] = True  # False: it widens a Transformer
  copies: ClassVar[bool] = False  # Without noise its copies differ only in what they add.
  scale = 'keep'
  new_keys = 'init'
  new_values = 'init'
  new_score = ''
  noise = 0.0


@section
class GroupMethod(GrowthMethod):
  """New tokens form a group with a norm and a reference count of their own."""

  kind: ClassVar[str] = 'group'

  new_keys: NewKeys = key('init', _NEW_KEYS)
  new_values: NewValues = key('zero', 'the values of new tokens')
  new_score: NewScore = key(
    '',
    "the score function of the group. '': the projection's; l2_norm_gelu for the first group "
    'beside a matrix',
  )
  noise: Float = key(0.0, f'for new_keys=copies: {_NOISE}', least=0)


@section
class ZeroKeysMethod(GrowthMethod):
  """New tokens join the last group, with keys of zero and drawn values."""

  kind: ClassVar[str] = 'zero_keys'

  scale: Scale = key('keep', _SCALES)


@section
class DuplicateMethod(GrowthMethod):
  """Every token of a group is copied; copies share its value."""

  kind: ClassVar[str] = 'duplicate'
  copies: ClassVar[bool] = True

  scale: Scale = key('resize', _SCALES)
  noise: Float = key(0.0, _NOISE, least=0)


@section
class RandomMethod(GrowthMethod):
  """Drawn tokens join the last group, which is not exact: the released code grows like this."""

  kind: ClassVar[str] = 'random'

  scale: Scale = key('resize', _SCALES)
  new_keys: NewKeys = key('init', _NEW_KEYS)
  new_values: NewValues = key('init', 'the values of new tokens')
  noise: Float = key(0.0, f'for new_keys=copies: {_NOISE}', least=0)


@section
class NeuronsMethod(GrowthMethod):
  """A Transformer with more neurons in its MLPs, drawn, whose outputs are zero at first."""

  kind: ClassVar[str] = 'neurons'
  adds_tokens: ClassVar[bool] = False


@section
class Net2NetMethod(GrowthMethod):
  """A wider Transformer whose new units are copies (arXiv 1511.05641)."""

  kind: ClassVar[str] = 'net2net'
  adds_tokens: ClassVar[bool] = False
  copies: ClassVar[bool] = True

  noise: Float = key(0.0, _NOISE, least=0)


@section
class Net2NetFillMethod(GrowthMethod):
  """A wider Transformer whose new blocks are drawn, which is not exact."""

  kind: ClassVar[str] = 'net2net_fill'
  adds_tokens: ClassVar[bool] = False


@section
class HyperCloningMethod(GrowthMethod):
  """A Transformer of a multiple of the width, tiled from the old one (arXiv 2409.12903)."""

  kind: ClassVar[str] = 'hypercloning'
  adds_tokens: ClassVar[bool] = False
  copies: ClassVar[bool] = True

  noise: Float = key(0.0, _NOISE, least=0)


METHODS = table(
  GroupMethod,
  ZeroKeysMethod,
  DuplicateMethod,
  RandomMethod,
  NeuronsMethod,
  Net2NetMethod,
  Net2NetFillMethod,
  HyperCloningMethod,
)
TOKEN_METHODS = tuple(kind for kind, method in METHODS.items() if method.adds_tokens)


@section
class GrowConfig:
  """How `init_from` or the grow command makes a larger model from a trained one: see grow/."""

  method: Annotated[GrowthMethod, OneOf(METHODS)] = key(
    GroupMethod(),
    'group adds tokens with a norm of their own, the next three add tokens to the last group, and '
    'the others widen a Transformer',
  )
  moments: Moments = key('pad', "the optimizer's moments")
  step: StepNumber = key(
    'keep', 'the step number, which sets the position in the data and the schedule'
  )
  seed: Int = key(0, 'seed of the random draws of growth', least=0)
  place: Place = key(
    'copies',
    'of new layers: copies that add nothing yet, of the layer before, or stacked, of all old '
    'layers in their order behind them; drawn between the old ones or behind them; whole copies '
    'add what their layers add, which is not exact',
  )


def growth(method: str = 'group', **keys: Any) -> GrowConfig:
  """Return the section from the keys of `GrowConfig` and those of a method, side by side.

  Raises:
    UserError: the method has no such key, or a value does not fit.
  """
  if method not in METHODS:
    raise UserError(f'method is {method!r}; it must be one of {", ".join(METHODS)}')
  common = {name: value for name, value in keys.items() if name in field_types(GrowConfig)}
  own = {name: value for name, value in keys.items() if name not in common}
  known = field_types(METHODS[method])
  for name in own:
    if name not in known:
      has = f'it has {", ".join(known)}' if known else 'it has no keys'
      raise UserError(f'{name} has no meaning for method={method}; {has}')
  return _made(GrowConfig, {**common, 'method': _made(METHODS[method], own)})


def _made(cls: type, values: Mapping[str, Any]) -> Any:
  """Return a section from its values, whose names alone are in the message of an error."""
  try:
    return adapter(cls).validate_python(values)
  except ValidationError as error:
    raise UserError(sentence(error, '')) from None
