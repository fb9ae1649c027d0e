"""Map weights of the released PyTorch code to our parameters, and infer their model."""

import dataclasses
import re
from collections.abc import Mapping

from tokenformer_jax import config
from tokenformer_jax.config import (
  LMConfig,
  ModelConfig,
  NoPositionsConfig,
  PattentionConfig,
  RotaryConfig,
  ScoreConfig,
)
from tokenformer_jax.config.groups import named_groups
from tokenformer_jax.config.model import BASE
from tokenformer_jax.config.pattention import SCORES as SCORE_CONFIGS
from tokenformer_jax.config.pattern import Repeat
from tokenformer_jax.convert import run_tensors
from tokenformer_jax.convert.run_tensors import Place, at
from tokenformer_jax.convert.tensor_files import Shape, Tensor
from tokenformer_jax.errors import UserError, misspelt
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Params

# The released names (SequentialWrapper of GPT-NeoX): `sequential.I.…` with I = 0 the embedding,
# 2 … L + 1 the layers, L + 3 the final norm. The rest are modules without parameters.
_EMBEDDING = 'sequential.0.word_embeddings.weight'
_FIRST_LAYER, _LAYER = 2, re.compile(r'sequential\.(\d{1,6})\.(?:attention|mlp)\.')
_PATTENTIONS = {  # name in a layer → path in a block
  'attention.query': ('attention', 'query'),
  'attention.key': ('attention', 'key'),
  'attention.value': ('attention', 'value'),
  'attention.proj': ('attention', 'proj'),
  'mlp': ('ffn',),
}
_ARRAYS = {'key_param_tokens': 'keys', 'value_param_tokens': 'values'}
_NORM = {'norm.weight': 'scale', 'norm.bias': 'bias'}

_FREE = ('model.width', 'model.vocab_size', 'model.max_length')  # keys that the layout leaves free
_HEADS = {768: 12, 1024: 16, 1280: 16, 1536: 16}  # by width, in the released models (Table 9)
RELEASED = LMConfig()  # all released models, except for the sizes
SCORE = RELEASED.layer.ffn.score.kind
SCORES = ('l2_norm_gelu', 'gelu_l2_norm', 'softmax')  # all scores of the released code


def layout(model: ModelConfig) -> dict[str, Place]:
  """Return every tensor of the released checkpoint of a model, in its order; allocate nothing."""
  abstract = define_lm(model).abstract
  paths = {_EMBEDDING: (('embedding',), None)}
  for layer in range(model.depth):
    for module, block in _PATTENTIONS.items():
      for tensor, array in _ARRAYS.items():
        name = f'sequential.{_FIRST_LAYER + layer}.{module}.{tensor}'
        paths[name] = (('blocks', *block, array), layer)
  for tensor, array in _NORM.items():
    paths[f'sequential.{model.depth + 3}.{tensor}'] = (('final_norm', array), None)

  def place(path: tuple[str, ...], layer: int | None) -> Place:
    shape = at(abstract, path).shape
    return Place(path, layer, shape if layer is None else shape[1:])

  return {name: place(*where) for name, where in paths.items()}


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
  heads = _guess_heads(width) if heads is None else heads
  check_heads(width, heads)
  rotated = RELEASED.layer.mixer.positions.fraction if rotary_fraction is None else rotary_fraction
  if not (0 < rotated <= 1 and width // heads * rotated >= 2):
    raise UserError(
      f'--rotary_fraction={rotated:g} of heads that are {width // heads} wide cannot be rotated; '
      'it must be at most 1, and rotate at least two entries of each head'
    )
  model = sized(
    dataclasses.replace(RELEASED, width=width, vocab_size=vocab_size),
    layers=len(layers),  # A gap in the layers shows as missing tensors.
    heads=heads,
    positions=RotaryConfig(fraction=rotated),
    tokens=counts,
    references=counts,
    score=SCORE_CONFIGS[score](),
  )
  _check_fit(shapes, model)
  return model


def _guess_heads(width: int) -> int:
  """Return the number of heads of the released model of a width."""
  if width not in _HEADS:
    raise UserError(
      f'no released model is {width} wide, so the number of heads cannot be guessed; give it as '
      '--heads=N'
    )
  return _HEADS[width]


def check_heads(width: int, heads: int) -> None:
  """Check that a number of heads divides the width."""
  if width % heads:
    raise UserError(
      f'the model is {width} wide, which is not a multiple of {heads} heads; change --heads'
    )


def _check_fit(shapes: Mapping[str, Shape], model: ModelConfig) -> None:
  """Check that the tensors are those of the model."""
  expected = layout(model)
  for name, place in expected.items():
    if _sizes(shapes, name) != place.shape:
      raise UserError(
        f'the tensor {name} has the shape {list(shapes[name])}; by {_EMBEDDING} and the first '
        f'layer it must be {list(place.shape)}'
      )
  for name in shapes:
    if name not in expected:
      near = misspelt(name, expected) if len(expected) < 1000 else None
      raise UserError(
        f'the tensor {name} has no place in a TokenFormer of {model.depth} layers'
        f'{f"; did you mean {near!r}?" if near else ""}'
      )


def _sizes(shapes: Mapping[str, Shape], name: str) -> Shape:
  """Return the shape of a required tensor; it must have two axes, except in the final norm."""
  if name not in shapes:
    some = ', '.join(list(shapes)[:3]) or 'none at all'
    raise UserError(
      f'the tensor {name} is missing: this is not a whole TokenFormer as released (it has {some} …)'
    )
  if '.norm.' not in name and len(shapes[name]) != 2:
    raise UserError(f'the tensor {name} has the shape {list(shapes[name])}; it must have two axes')
  return tuple(shapes[name])


def deferred(model: ModelConfig, tensors: Mapping[str, Tensor], dtype: str = 'float32') -> Params:
  """Return the parameters; each is read from its tensors only when it is written."""
  return run_tensors.deferred_at(model, layout(model), tensors, dtype)


def sized(
  model: ModelConfig,
  *,
  layers: int,
  heads: int,
  positions: RotaryConfig | NoPositionsConfig,
  tokens: Mapping[str, int],
  references: Mapping[str, int],
  score: ScoreConfig,
) -> ModelConfig:
  """Return a TokenFormer of equal layers; `model` supplies all other keys.

  The numbers of parameter tokens and the reference counts are by projection: qkv, proj and ffn.
  """
  layer = dataclasses.replace(
    model.layer, mixer=dataclasses.replace(model.layer.mixer, heads=heads, positions=positions)
  )
  model = dataclasses.replace(model, pattern=f'{BASE}*{layers}', layer=layer)
  projections = {
    name: PattentionConfig(count, references[name], score) for name, count in tokens.items()
  }
  return config.with_pattentions(model, projections)


def check_can_compute(model: ModelConfig) -> None:
  """Check that the released code can compute a model; its sizes do not matter."""
  if model.repeats != (Repeat((BASE,), model.depth),):
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
  for path, found, released in config.differences(model, like, 'model.'):
    name = path.rpartition('.')[2]
    if path in _FREE or name in ('tokens', 'reference', 'groups', 'heads', 'fraction'):
      continue
    if path.endswith('score.kind') and found in SCORES:
      continue
    allowed = SCORES if path.endswith('score.kind') else [released]
    raise UserError(
      f'{path} is {found!r}; the released layout is for models with '
      f'{", ".join(map(repr, allowed))} only'
    )
  scores = [found.score.kind for found in config.pattentions(model).values()]
  if len(set(scores)) > 1:
    raise UserError(
      f'the projections have different scores ({", ".join(scores)}); the released layout is for '
      'models with one score'
    )
