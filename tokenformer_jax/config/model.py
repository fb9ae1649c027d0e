"""The section `model`: what a model computes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from tokenformer_jax.config import pattern
from tokenformer_jax.config.feed_forward import ExpertsConfig
from tokenformer_jax.config.layer import LayerConfig, Norm, map_parts, parts
from tokenformer_jax.config.mixers import PositionScaleConfig
from tokenformer_jax.config.pattern import Repeat
from tokenformer_jax.config.section import Bool, Float, Int, Named, OneOf, Str, key, section, table

BASE = 'layer'  # the name of `model.layer` in patterns


@section
class InitConfig:
  """How to draw the parameters of a new model and the new parameters of a grown model."""

  std: Float = key(0.02, 'standard deviation of keys, embeddings and dense kernels', above=0)
  embedding_std: Float = key(
    0.0, 'standard deviation of embeddings. 0: init.std. The released TPU code has 1', least=0
  )
  output_std: Float = key(
    0.0, 'that of what is added to the residual stream. 0: 2 / (layers · √width)', least=0
  )
  attention_kernels: Literal['normal', 'orthogonal'] = key(
    'normal', 'kernels of value and output of attention; orthogonal is for V-SkipInit'
  )


class Layers(Named[LayerConfig]):
  """Layers by name; one has the values of `model.layer` that it does not set."""

  of = LayerConfig
  follows: ClassVar[str] = BASE


@section
class ModelConfig:
  """The trunk of every model, `LMConfig` or `ViTConfig`: what it computes, and how it is drawn.

  Equal models compute the same function of their parameters: comparisons ignore `init`.
  """

  kind: ClassVar[str]

  pattern: Str = key(
    'layer*4',
    'the layers in order: layer is model.layer, other names are in model.variants, for example '
    '"local*5 layer" or "(local layer)*6"',
  )
  width: Int = key(128, 'D, the size of a hidden state', above=0)
  layer: LayerConfig = LayerConfig()
  variants: Layers = dataclasses.field(default_factory=Layers)
  norm_epsilon: Float = key(1e-5, 'added to the variance in every norm', above=0)
  norm_epsilon_outside: Bool = key(
    False, 'RMSNorm adds norm_epsilon to the root, not inside it (Simplified Transformer Blocks)'
  )
  final_norm: Norm = key('affine', 'after the last layer, as layer.norm')
  max_length: Int = key(
    0, 'number of learned positions. 0: data.sequence_length, or the number of patches', least=0
  )
  init: InitConfig = dataclasses.field(default=InitConfig(), compare=False)

  if TYPE_CHECKING:  # A checker does not know the kind.

    def __getattr__(self, name: str) -> Any: ...

  @functools.cached_property
  def repeats(self) -> tuple[Repeat, ...]:
    """The repeats of equal rows of layers in the pattern."""
    return pattern.parse(self.pattern, (BASE, *self.variants), 'config.model.pattern')

  @property
  def depth(self) -> int:
    """L, the number of layers."""
    return sum(repeat.size for repeat in self.repeats)

  @property
  def named_layers(self) -> dict[str, LayerConfig]:
    """Every layer that the config names, used or not, by its name."""
    return {BASE: self.layer, **self.variants}

  @property
  def layers(self) -> dict[str, LayerConfig]:
    """The layers of the pattern by name, in the order of their first occurrence."""
    named = self.named_layers
    return {name: named[name] for repeat in self.repeats for name in repeat.layers}

  @property
  def in_order(self) -> list[LayerConfig]:
    """The layers in the order that they run."""
    named = self.layers
    return [named[name] for name in pattern.names(self.repeats)]

  @property
  def experts(self) -> dict[str, ExpertsConfig]:
    """The routed experts of the layers that have some, by the name of the layer."""
    ffns = {name: layer.ffn for name, layer in self.layers.items()}
    return {name: ffn for name, ffn in ffns.items() if isinstance(ffn, ExpertsConfig)}

  @property
  def heads(self) -> tuple[int, ...]:
    """The distinct numbers of heads of the mixers, the smallest first."""
    mixers = (layer.mixer for layer in self.layers.values())
    counts = {getattr(mixer, 'heads', 0) for mixer in mixers} - {0}
    return tuple(sorted(counts))

  @property
  def scale_length(self) -> int | None:
    """The first length of a `length_scale` of kind `position`, or None without one."""
    sections = (one for layer in self.layers.values() for _, one in parts(layer))
    lengths = (one.length for one in sections if isinstance(one, PositionScaleConfig))
    return next(lengths, None)

  def with_scale_length(self, length: int) -> 'ModelConfig':
    """Return the model with a length of 0 of each `length_scale` of kind `position` filled in."""

    def filled(path: str, part: Any) -> Any:
      del path
      is_open = isinstance(part, PositionScaleConfig) and not part.length
      return dataclasses.replace(part, length=length) if is_open else part

    return self.map_layers(lambda name, layer: map_parts(layer, filled))

  def map_layers(self, change: Callable[[str, LayerConfig], LayerConfig]) -> 'ModelConfig':
    """Return the model with every layer replaced: `change` maps its name and config."""
    return dataclasses.replace(
      self,
      layer=change(BASE, self.layer),
      variants=Layers({name: change(name, layer) for name, layer in self.variants.items()}),
    )


@section
class LMConfig(ModelConfig):
  """A language model."""

  kind = 'lm'

  position_embedding: Literal['none', 'learned'] = key(
    'none', 'added to the input of the first layer'
  )
  vocab_size: Int = key(0, '0: the ids of the tokenizer, rounded up to a multiple of 128', least=0)
  embedding_norm: Norm = key('none', 'before the first layer, as layer.norm (GAU-alpha)')
  embedding_scale: Bool = key(False, 'multiply embeddings of tokens by √width, as in Gemma')
  tied_head: Bool = key(True, 'the output embedding is the input embedding')
  scaled_logits: Bool = key(False, 'logits / √width, as in the released TPU code')
  logit_cap: Float = key(
    0.0, 'c, logits become c · tanh(logit / c), as in Gemma 2. 0: no cap', least=0
  )


@section
class ViTConfig(ModelConfig):
  """A vision transformer, which classifies images."""

  kind = 'vit'
  tied_head: ClassVar[bool] = False  # a head of classes has nothing to be tied to

  position_embedding: Literal['none', 'learned', 'sincos'] = key(
    'none', 'added to the input of the first layer'
  )
  patch: Int = key(16, "pixels of a patch's side", above=0)
  channels: Int = key(0, 'channels of an image. 0: as in the data', least=0)
  classes: Int = key(0, 'outputs of the head. 0: as in the data', least=0)
  pool: Literal['mean', 'token'] = key('mean', 'over patches; or a class token')
  drop_path: Annotated[
    Float,
    Field(ge=0, lt=1, description='probability of dropping a branch of the last block in training'),
  ] = dataclasses.field(default=0.0, compare=False)


MODELS = table(LMConfig, ViTConfig)
Model = Annotated[ModelConfig, OneOf(MODELS)]


def layer_path(name: str) -> str:
  """Return the path of the section of keys of a layer, given its name in a pattern."""
  return f'model.{BASE}' if name == BASE else f'model.variants.{name}'


def draws(model: ModelConfig) -> bool:
  """Return whether a router of the model draws random numbers in training."""
  return any(experts.router.jitter > 0 for experts in model.experts.values())
