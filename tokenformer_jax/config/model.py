"""The group `model`: what a model computes, and which of its values fit together."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenformer_jax.config import pattern
from tokenformer_jax.config.fields import KINDS, key
from tokenformer_jax.config.layer import (
  LayerConfig,
  NoPositionsConfig,
  PattentionConfig,
  RotaryConfig,
  map_parts,
  parts,
)
from tokenformer_jax.config.pattern import Group
from tokenformer_jax.errors import UserError, nearest

_EMBEDDINGS = {'lm': ('none', 'learned'), 'vit': ('sincos', 'learned', 'none')}
BASE = 'layer'  # what patterns call `model.layer`


@dataclasses.dataclass(frozen=True)
class InitConfig:
  """How the parameters of a new model, and the new ones of a grown model, are drawn."""

  std: float = key(0.02, 'standard deviation of keys, embeddings and dense kernels', above=0)
  embedding_std: float = key(
    0.0, 'that of embeddings. 0: init.std. The released TPU code has 1', least=0, only='lm'
  )


class Layers(Mapping[str, LayerConfig]):
  """Layers by name; unlike a dict it cannot be changed, and has a hash."""

  def __init__(self, layers: Mapping[str, LayerConfig] | None = None):
    self._layers = dict(layers or {})

  def __getitem__(self, name: str) -> LayerConfig:
    return self._layers[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._layers)

  def __len__(self) -> int:
    return len(self._layers)

  def __hash__(self) -> int:
    return hash(frozenset(self._layers.items()))

  def __repr__(self) -> str:
    return f'Layers({self._layers})'


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """What a model computes, and what its parameters are drawn from.

  Two models that are equal compute the same function of their parameters: `init` takes no part in
  comparisons.
  """

  kind: str = key('lm', 'a language model or a vision transformer', choices=KINDS)
  pattern: str = key(
    'layer*4',
    'the layers in their order: layer is model.layer, other names are in model.variants, for '
    'example "local*5 layer" or "(local layer)*6"',
  )
  width: int = key(128, 'D, the size of a hidden state', above=0)
  layer: LayerConfig = LayerConfig()
  variants: Layers = dataclasses.field(default_factory=Layers)
  norm_epsilon: float = key(1e-5, 'added to the variance in every norm', above=0)
  final_norm: str = key(
    'affine',
    'after the last layer, as layer.norm',
    choices=('none', 'plain', 'affine'),
  )
  position_embedding: str = key(
    'none',
    'added to what the first layer reads; lm: none, learned; vit: sincos, learned, none',
    choices=('none', 'learned', 'sincos'),
  )
  max_length: int = key(
    0, 'of learned positions. 0: data.sequence_length, or the number of patches', least=0
  )
  vocab_size: int = key(
    0, '0: the ids of the tokenizer, rounded up to a multiple of 128', least=0, only='lm'
  )
  tied_head: bool = key(True, 'the output embedding is the input embedding. Language models only')
  scaled_logits: bool = key(False, 'logits / √width, as in the released TPU code', only='lm')
  patch: int = key(16, "pixels of a patch's side", above=0, only='vit')
  channels: int = key(0, 'of the images. 0: as the data has', least=0, only='vit')
  classes: int = key(0, 'outputs of the head. 0: as many as the data has', least=0, only='vit')
  pool: str = key(
    'mean',
    'over patches; or a class token; or attention by a learned query, made as model.layer',
    choices=('mean', 'token', 'attention'),
    only='vit',
  )
  init: InitConfig = dataclasses.field(default=InitConfig(), compare=False)

  @functools.cached_property
  def groups(self) -> tuple[Group, ...]:
    """The pattern, parsed.

    Raises:
      UserError: it is no pattern, or has the name of a layer that is not there.
    """
    return pattern.parse(self.pattern, (BASE, *self.variants), 'config.model.pattern')

  @property
  def depth(self) -> int:
    """L, the number of layers."""
    return sum(group.size for group in self.groups)

  @property
  def layers(self) -> dict[str, LayerConfig]:
    """The layers of the pattern by name, in the order in which they come first."""
    named = {BASE: self.layer, **self.variants}
    return {name: named[name] for group in self.groups for name in group.layers}

  @property
  def heads(self) -> tuple[int, ...]:
    """The different numbers of heads that mixers have."""
    mixers = (layer.mixer for layer in self.layers.values())
    return tuple(sorted({mixer.heads for mixer in mixers if hasattr(mixer, 'heads')}))

  def map_layers(self, change: Callable[[str, LayerConfig], LayerConfig]) -> 'ModelConfig':
    """Return the model with another version of each layer.

    Args:
      change: from the name of a layer and its config to the new config.
    """
    return dataclasses.replace(
      self,
      layer=change(BASE, self.layer),
      variants=Layers({name: change(name, layer) for name, layer in self.variants.items()}),
    )


def pattentions(model: ModelConfig) -> dict[str, PattentionConfig]:
  """Return the projections of the layers that have parameter tokens, by name.

  Those of `model.layer` are called by their place in it, such as `qkv`, `proj` and `ffn`; those of
  a variant have its name before that: `local.ffn`.
  """
  return {name: part for name, _, part in _places(model)}


def key_of(model: ModelConfig, name: str) -> str:
  """Return the path of the group of keys of a projection that `pattentions` names."""
  return next(path for one, path, _ in _places(model) if one == name)


def _places(model: ModelConfig) -> Iterator[tuple[str, str, PattentionConfig]]:
  """Yield the name of every projection with parameter tokens, its path, and itself."""
  for layer, config in _used(model).items():
    for path, part in parts(config):
      if isinstance(part, PattentionConfig):
        yield _name(layer, path), f'{_group(layer)}.{path}', part


def _used(model: ModelConfig) -> dict[str, LayerConfig]:
  """Return the layers whose parameters the model has: the pool is made as `model.layer`."""
  return model.layers | ({BASE: model.layer} if model.pool == 'attention' else {})


def _group(layer: str) -> str:
  return f'model.{BASE}' if layer == BASE else f'model.variants.{layer}'


def _name(layer: str, path: str) -> str:
  own = path.removeprefix('mixer.')
  return own if layer == BASE else f'{layer}.{own}'


def with_pattentions(model: ModelConfig, changed: Mapping[str, PattentionConfig]) -> ModelConfig:
  """Return the model with other projections in the places that `pattentions` names."""

  def of_layer(name: str, layer: LayerConfig) -> LayerConfig:
    def replaced(path: str, part: Any) -> Any:
      return changed.get(_name(name, path), part) if isinstance(part, PattentionConfig) else part

    return map_parts(layer, replaced)

  return model.map_layers(of_layer)


def token_counts(model: ModelConfig) -> dict[str, int]:
  """Return the numbers of parameter tokens of `pattentions`, by name."""
  return {name: one.tokens for name, one in pattentions(model).items()}


def counts_as_text(counts: Mapping[str, int]) -> str:
  """Return counts by name as `--param_tokens` takes them: `qkv=128,proj=128,ffn=512`."""
  return ','.join(f'{name}={count}' for name, count in counts.items())


def with_token_counts(model: ModelConfig, counts: Mapping[str, int]) -> ModelConfig:
  """Return the model with other numbers of parameter tokens, by name; others stay."""
  changed = {
    name: dataclasses.replace(one, tokens=counts.get(name, one.tokens))
    for name, one in pattentions(model).items()
  }
  return with_pattentions(model, changed)


def with_references(model: ModelConfig) -> ModelConfig:
  """Return the model with a number for every reference count that is 0: the number of tokens."""
  filled = {
    name: dataclasses.replace(one, reference=one.reference or one.tokens)
    for name, one in pattentions(model).items()
  }
  return with_pattentions(model, filled)


def named_counts(model: ModelConfig, given: Mapping[str, int], where: str) -> dict[str, int]:
  """Return the token counts of a model with others in the place of some.

  Args:
    model: the model.
    given: counts by name, or by the last part of a name, for all layers that have it: `ffn`.
    where: what gave them, for the message.

  Raises:
    UserError: the model has no such projection.
  """
  counts = token_counts(model)
  if not counts:
    raise UserError(f'{where} counts parameter tokens, and this model has none')
  for name in sorted(given, key=lambda name: '.' in name):  # what names a layer counts more
    matches = [one for one in counts if name in (one, one.rpartition('.')[2])]
    if not matches:
      raise UserError(f'{where} names {name!r}{nearest(name, count_names(model))}')
    counts |= dict.fromkeys(matches, given[name])
  return counts


def count_names(model: ModelConfig) -> list[str]:
  """Return the names that `named_counts` knows."""
  names = list(token_counts(model))
  return list(dict.fromkeys([*(name.rpartition('.')[2] for name in names), *names]))


def check_model(model: ModelConfig) -> None:
  """Check that the values of a model fit together; each fits by itself.

  Raises:
    UserError: they do not.
  """
  if model.position_embedding not in _EMBEDDINGS[model.kind]:
    raise UserError(
      f'config.model.position_embedding is {model.position_embedding!r}; for model.kind='
      f'{model.kind} it must be one of {", ".join(_EMBEDDINGS[model.kind])}'
    )
  if unused := [name for name in model.variants if name not in model.layers]:
    raise UserError(
      f'config.model.variants has {unused[0]!r}, which is not in model.pattern={model.pattern!r}; '
      'name it there, or leave it out'
    )
  if model.kind == 'vit':
    _check_vit(model)
  for name, layer in _used(model).items():
    _check_layer(model, layer, _group(name))


def _check_vit(model: ModelConfig) -> None:
  if model.tied_head:
    raise UserError(
      'config.model.tied_head is True, and the head of a ViT has nothing to be tied to; set it to '
      'False'
    )
  if model.position_embedding == 'sincos' and model.width % 4:
    raise UserError(
      f'config.model.width is {model.width}; it must be a multiple of 4 for '
      'position_embedding=sincos'
    )
  if model.channels not in (0, 1, 3):
    raise UserError(
      f'config.model.channels is {model.channels}; it must be 1 (grey), 3 (colour) or 0 (as the '
      'data)'
    )


def _check_layer(model: ModelConfig, layer: LayerConfig, path: str) -> None:
  heads = getattr(layer.mixer, 'heads', 1)
  if model.width % heads:
    raise UserError(
      f'config.model.width is {model.width}, which is not a multiple of {path}.mixer.heads={heads}'
    )
  rotary = getattr(layer.mixer, 'positions', NoPositionsConfig())
  if not isinstance(rotary, RotaryConfig):
    return
  if model.kind == 'vit':
    raise UserError(
      f'config.{path}.mixer.positions.kind is rotary, and the patches of a ViT are in no order; '
      'set it to none, and model.position_embedding to sincos or learned'
    )
  if model.width // heads * rotary.fraction < 2:
    raise UserError(
      f'config.{path}.mixer.positions.fraction is {rotary.fraction} of heads '
      f'{model.width // heads} wide, which rotates nothing; at least two entries must turn, or set '
      f'{path}.mixer.positions.kind=none'
    )
