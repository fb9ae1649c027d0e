"""The group `model`: what a model computes, and which of its values fit together."""

import dataclasses

from tokenformer_jax.config.fields import KINDS, key
from tokenformer_jax.errors import UserError

_POSITIONS = {'lm': ('rotary', 'learned', 'none'), 'vit': ('sincos', 'learned', 'none')}


@dataclasses.dataclass(frozen=True)
class TokenCounts:
  """Numbers of parameter tokens of one Pattention, by kind of projection."""

  qkv: int = key(0, 'query, key and value, each')
  proj: int = key(0, 'output projection of the attention')
  ffn: int = key(0, 'the feed-forward Pattention')


@dataclasses.dataclass(frozen=True)
class InitConfig:
  """How the parameters of a new model, and the new ones of a grown model, are drawn."""

  std: float = key(0.02, 'standard deviation of keys, embeddings and dense kernels', above=0)
  embedding_std: float = key(
    0.0, 'that of embeddings. 0: init.std. The released TPU code has 1', least=0, only='lm'
  )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """What a model computes, and what its parameters are drawn from.

  Two models that are equal compute the same function of their parameters: `init` takes no part in
  comparisons.
  """

  kind: str = key('lm', 'a language model or a vision transformer', choices=KINDS)
  projection: str = key(
    'pattention', 'dense is the Transformer baseline', choices=('pattention', 'dense')
  )
  layers: int = key(4, 'number of blocks', above=0)
  width: int = key(128, 'D, the size of a hidden state', above=0)
  heads: int = key(4, 'H, heads of the attention', above=0)
  vocab_size: int = key(
    0, '0: the ids of the tokenizer, rounded up to a multiple of 128', least=0, only='lm'
  )
  param_tokens: TokenCounts = TokenCounts(qkv=128, proj=128, ffn=512)
  reference_tokens: TokenCounts = key(
    TokenCounts(),
    'τ = √reference_tokens. 0: equal to param_tokens. It stays what it was when a model grows',
  )
  score: str = key(
    'l2_norm_gelu',
    'Θ, from scores to weights: see model/pattention.py',
    choices=('l2_norm_gelu', 'gelu_l2_norm', 'gelu_l1_norm', 'softmax', 'exp_l2_norm'),
  )
  gelu: str = key(
    'exact', 'the exact function or its approximation by tanh', choices=('exact', 'tanh')
  )
  row_epsilon: float = key(
    0.0, 'added to the norm of scores; the released TPU code has 1e-5', least=0
  )
  ffn_width: int = key(0, 'of dense feed-forward layers. 0: 4 · width', least=0)
  bias: bool = key(False, 'add a bias to projections, for dense ones only')
  block_norm: str = key(
    'plain',
    'LayerNorm without parameters, with a bias, or with both',
    choices=('plain', 'bias', 'affine'),
  )
  final_norm: str = key(
    'affine', 'the same, after the last block', choices=('none', 'plain', 'affine')
  )
  norm_epsilon: float = key(1e-5, 'added to the variance', above=0)
  positions: str = key(
    'rotary',
    'lm: rotary, learned, none; vit: sincos, learned, none',
    choices=('rotary', 'sincos', 'learned', 'none'),
  )
  rotary_fraction: float = key(
    0.25, "part of each head's width that is rotated", least=0, most=1, only='lm'
  )
  rotary_base: float = key(10000.0, 'the longest wavelength is 2π times this', above=0, only='lm')
  window: int = key(
    0, 'how many positions one attends to, its own the last. 0: all up to it', least=0, only='lm'
  )
  max_length: int = key(
    0, 'learned positions only. 0: data.sequence_length, or the number of patches', least=0
  )
  tied_head: bool = key(True, 'the output embedding is the input embedding. Language models only')
  scaled_logits: bool = key(False, 'logits / √width, as in the released TPU code', only='lm')
  init: InitConfig = dataclasses.field(default=InitConfig(), compare=False)
  patch: int = key(16, "pixels of a patch's side", above=0, only='vit')
  channels: int = key(0, 'of the images. 0: as the data has', least=0, only='vit')
  classes: int = key(0, 'outputs of the head. 0: as many as the data has', least=0, only='vit')
  pool: str = key(
    'mean',
    'over patches; or a class token; or attention by a learned query',
    choices=('mean', 'token', 'attention'),
    only='vit',
  )


def check_model(model: ModelConfig) -> None:
  """Check that the values of a model fit together; each fits by itself.

  Raises:
    UserError: they do not.
  """
  if model.positions not in _POSITIONS[model.kind]:
    raise UserError(
      f'config.model.positions is {model.positions!r}; for model.kind={model.kind} it must be one '
      f'of {", ".join(_POSITIONS[model.kind])}'
    )
  if model.kind == 'vit':
    _check_vit(model)
  _check_heads(model)
  if model.projection == 'pattention':
    _check_pattention(model)


def _check_vit(model: ModelConfig) -> None:
  if model.tied_head:
    raise UserError(
      'config.model.tied_head is True, and the head of a ViT has nothing to be tied to; set it to '
      'False'
    )
  if model.positions == 'sincos' and model.width % 4:
    raise UserError(
      f'config.model.width is {model.width}; it must be a multiple of 4 for positions=sincos'
    )
  if model.channels not in (0, 1, 3):
    raise UserError(
      f'config.model.channels is {model.channels}; it must be 1 (grey), 3 (colour) or 0 (as the '
      'data)'
    )


def _check_heads(model: ModelConfig) -> None:
  if model.width % model.heads:
    raise UserError(
      f'config.model.width is {model.width}, which is not a multiple of model.heads={model.heads}'
    )
  head_width = model.width // model.heads
  if model.positions == 'rotary' and head_width * model.rotary_fraction < 2:
    raise UserError(
      f'config.model.rotary_fraction is {model.rotary_fraction} of heads {head_width} wide, which '
      'rotates nothing; at least two entries must turn, or set model.positions=none'
    )


def _check_pattention(model: ModelConfig) -> None:
  for kind in ('qkv', 'proj', 'ffn'):
    count, reference = getattr(model.param_tokens, kind), getattr(model.reference_tokens, kind)
    if count <= 0:
      raise UserError(f'config.model.param_tokens.{kind} is {count}; it must be greater than 0')
    if reference < 0:
      raise UserError(
        f'config.model.reference_tokens.{kind} is {reference}; it must be 0 (equal to '
        'param_tokens) or the count that sets the scale'
      )
  if model.bias:
    raise UserError('config.model.bias is for projection=dense; Pattention has no bias')
