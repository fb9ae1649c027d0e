"""Map weights of the released PyTorch code to our parameters, and infer their model."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from tokenformer_jax import config
from tokenformer_jax.config import LMConfig, ModelConfig, PattentionConfig, RotaryConfig
from tokenformer_jax.config.groups import named_groups
from tokenformer_jax.config.model import BASE
from tokenformer_jax.config.pattention import SCORES as SCORE_CONFIGS
from tokenformer_jax.convert import tensor_files, tensor_layout
from tokenformer_jax.convert.family import norm
from tokenformer_jax.convert.tensor_files import Shape
from tokenformer_jax.convert.tensor_layout import Layout, Rule, Weights
from tokenformer_jax.errors import UserError, arg

# The released names (SequentialWrapper of GPT-NeoX): `sequential.I.…` with I = 0 the embedding,
# 2 … L + 1 the layers, L + 3 the final norm. The rest are modules without parameters.
_EMBEDDING = 'sequential.0.word_embeddings.weight'
_FIRST_LAYER, _LAYER = 2, re.compile(r'sequential\.(\d{1,6})\.(?:attention|mlp)\.')
_PATTENTIONS = {  # name in a layer → path in a block
  **{f'attention.{name}': f'attention/{name}' for name in ('query', 'key', 'value', 'proj')},
  'mlp': 'ffn',
}
_ARRAYS = {'key_param_tokens': 'keys', 'value_param_tokens': 'values'}

# The keys that the released layout leaves free.
_FREE = ('width', 'vocab_size', 'max_length')
_FREE += ('tokens', 'reference', 'groups', 'heads', 'fraction')
_HEADS = {768: 12, 1024: 16, 1280: 16, 1536: 16}  # by width, in the released models (Table 9)
_ROTATED = 0.25  # of each head, in all released models
RELEASED = LMConfig()  # all released models, except for the sizes
SCORES = ('l2_norm_gelu', 'gelu_l2_norm', 'softmax')  # all scores of the released code
SCORE = SCORES[0]  # of all released models


def layout(model: ModelConfig) -> Layout:
  """Return every tensor of the released checkpoint of a model, in its order; allocate nothing."""
  rules = [Rule(_EMBEDDING, ('embedding',))]
  for module, path in _PATTENTIONS.items():
    for tensor, array in _ARRAYS.items():
      rules.append(Rule(f'sequential.{{layer}}.{module}.{tensor}', (f'{path}/{array}',)))
  final_norm = f'sequential.{model.depth + _FIRST_LAYER + 1}.norm'
  return tensor_layout.layout(model, [*rules, *norm(final_norm, 'final_norm')], _FIRST_LAYER)


def find(
  source: Path,
  *,
  heads: int | None = None,
  rotary_fraction: float | None = None,
  score: str = SCORE,
) -> Weights:
  """Return the model and the tensors of a released checkpoint; options as of `infer_model`."""
  tensors = tensor_files.find(source)
  shapes = {name: tensor.shape for name, tensor in tensors.items()}
  model = infer_model(shapes, heads=heads, rotary_fraction=rotary_fraction, score=score)
  weights = Weights(model, layout(model), tensors)
  weights.check(f'a TokenFormer of {model.depth} layers with the sizes of the first')
  return weights


def infer_model(
  shapes: Mapping[str, Shape],
  *,
  heads: int | None = None,
  rotary_fraction: float | None = None,
  score: str = SCORE,
) -> ModelConfig:
  """Return the model whose released checkpoint has tensors of these names and shapes.

  The reference counts are the numbers of parameter tokens: the released code takes τ from them.
  `heads` is None for those of the released model of this width, and `rotary_fraction` is None for a
  quarter of each head, as in all released models. `score` is one of `SCORES`.
  """
  width, vocab_size = _sizes(shapes, _EMBEDDING)[::-1]
  layers = {int(match[1]) for match in map(_LAYER.match, shapes) if match}
  first = f'sequential.{_FIRST_LAYER}'
  counts = {
    'qkv': _sizes(shapes, f'{first}.attention.query.key_param_tokens')[0],
    'proj': _sizes(shapes, f'{first}.attention.proj.key_param_tokens')[0],
    'ffn': _sizes(shapes, f'{first}.mlp.key_param_tokens')[0],
  }
  if heads is None and width not in _HEADS:
    raise UserError(
      f'no released model is {width} wide, so the number of heads cannot be guessed; give it as '
      f'{arg.heads}=N'
    )
  heads = _HEADS[width] if heads is None else heads
  if width % heads:
    raise UserError(
      f'the model is {width} wide, which is not a multiple of {heads} heads; change {arg.heads}'
    )
  rotated = _ROTATED if rotary_fraction is None else rotary_fraction
  if not (0 < rotated <= 1 and width // heads * rotated >= 2):
    raise UserError(
      f'{arg.rotary_fraction}={rotated:g} of heads that are {width // heads} wide cannot be '
      'rotated; it must be at most 1, and rotate at least two entries of each head'
    )
  mixer = dataclasses.replace(
    RELEASED.layer.mixer, heads=heads, positions=RotaryConfig(fraction=rotated)
  )
  model = dataclasses.replace(
    RELEASED,
    width=width,
    vocab_size=vocab_size,
    pattern=f'{BASE}*{len(layers)}',  # A gap in the layers shows as missing tensors.
    layer=dataclasses.replace(RELEASED.layer, mixer=mixer),
  )
  projections = {
    name: PattentionConfig(count, count, SCORE_CONFIGS[score]()) for name, count in counts.items()
  }
  return config.with_pattentions(model, projections)


def _sizes(shapes: Mapping[str, Shape], name: str) -> Shape:
  """Return the shape of a matrix that says the sizes of the model."""
  if name not in shapes:
    some = ', '.join(list(shapes)[:3]) or 'none at all'
    raise UserError(
      f'the tensor {name} is missing: this is not a whole TokenFormer as released (it has {some} …)'
    )
  if len(shapes[name]) != 2:
    raise UserError(f'the tensor {name} has the shape {list(shapes[name])}; it must have two axes')
  return shapes[name]


def check_can_compute(model: ModelConfig) -> None:
  """Check that the released code can compute a model; its sizes do not matter."""
  if [repeat.layers for repeat in model.repeats] != [(BASE,)]:
    raise UserError(
      f'model.pattern is {model.pattern!r}; a model of several kinds of layers has no place in the '
      f'released layout, which is for {BASE}*N only'
    )
  for name, groups in named_groups(model).items():
    if len(groups) > 1:
      raise UserError(
        f'{name} has {len(groups)} groups of parameter tokens with a norm each, and the released '
        'code has one norm over all tokens, so it cannot hold this model; convert the model of its '
        'first group: tokenformer grow slice --groups=1'
      )
  like = dataclasses.replace(RELEASED, pattern=model.pattern)
  for path, value, released in config.differences(model, like, 'model.'):
    allowed = SCORES if path.endswith('score.kind') else (released,)
    if path.rpartition('.')[2] not in _FREE and value not in allowed:
      raise UserError(
        f'{path} is {value!r}; the released layout is for models with '
        f'{", ".join(map(repr, allowed))} only'
      )
  scores = [pattention.score.kind for pattention in config.pattentions(model).values()]
  if len(set(scores)) > 1:
    raise UserError(
      f'the projections have different scores ({", ".join(scores)}); the released layout is for '
      'models with one score'
    )
