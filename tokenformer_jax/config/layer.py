"""The section `model.layer`: the parts of one layer, each a variant with its own keys.

A layer is a mixer, which moves information between positions, and a feed-forward part, which works
on each position alone, joined by a wiring. Each dataclass configures one of them; `model/blocks.py`
names the modules of mixers.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from tokenformer_jax.config.feed_forward import FeedForward
from tokenformer_jax.config.mixers import Mixer, SoftmaxConfig
from tokenformer_jax.config.pattention import PattentionConfig
from tokenformer_jax.config.section import Bool, Float, OneOf, key, section, table


@section
class PreNormConfig:
  """x + mixer(norm(x)), then x + ffn(norm(x))."""

  kind: ClassVar[str] = 'pre_norm'


@section
class PostNormConfig:
  """norm(x + mixer(x)), then norm(x + ffn(x))."""

  kind: ClassVar[str] = 'post_norm'


@section
class SkiplessConfig:
  """y = β mixer(norm(x)), then α y + β' ffn(norm(y)) (SAS of Simplified Transformer Blocks)."""

  kind: ClassVar[str] = 'skipless'

  gains: Bool = key(True, 'learn the gains of the branches; without, all are 1')


@section
class ParallelConfig:
  """β mixer(norm(x)) + β' ffn(norm(x)) with one norm (SAS-P), or the same added to x."""

  kind: ClassVar[str] = 'parallel'

  gains: Bool = key(True, 'learn the gains of the branches; without, all are 1')
  skip: Bool = key(False, 'add both branches to x')
  two_norms: Bool = key(False, 'the feed-forward part has a norm of its own, of x (GPT-NeoX)')


@section
class SandwichConfig:
  """x + norm(mixer(norm(x))), then x + norm(ffn(norm(x))), as in Gemma 2."""

  kind: ClassVar[str] = 'sandwich'

  before: Bool = key(True, 'a norm before each part as well; without: x + norm(mixer(x)) (OLMo 2)')


@section
class BoundaryConfig:
  """x becomes norm(x) + α e, then as pre_norm; e is the x of the first such layer, norm(x) 0 there.

  The boundary operator between prelude, cores and coda (arXiv 2609.19107, eq. 3): the norm is
  RMSNorm without a scale.
  """

  kind: ClassVar[str] = 'boundary'

  scale: Float = key(1.0, 'α; the paper has 1 and 0.707', above=0)


Wirings = (
  PreNormConfig | PostNormConfig | SkiplessConfig | ParallelConfig | SandwichConfig | BoundaryConfig
)
Wiring = Annotated[Wirings, OneOf(table(Wirings))]
Norm = Literal['plain', 'bias', 'affine', 'rms', 'rms_plain', 'rms_offset', 'none']


@section
class LayerConfig:
  """The parts of one layer: mixer, feed-forward part, norm and wiring."""

  mixer: Mixer = key(SoftmaxConfig(), 'moves information between positions')
  ffn: FeedForward = key(PattentionConfig(tokens=512), 'works on each position alone')
  norm: Norm = key(
    'plain',
    'LayerNorm without parameters, with a bias, or with both; RMSNorm with a scale, without, or '
    'with a scale of 1 + w, as in Gemma; or no norm',
  )
  wiring: Wiring = key(PreNormConfig(), 'how norm, mixer and feed-forward part are joined')
  ffn_norm: Literal['same', Norm] = key(
    'same',
    'that of the feed-forward part, if another one; a parallel wiring has one norm for both parts',
  )

  @property
  def norm_of_ffn(self) -> str:
    """The norm of the feed-forward part."""
    return self.norm if self.ffn_norm == 'same' else self.ffn_norm


def parts(config: Any, prefix: str = '') -> Iterator[tuple[str, Any]]:
  """Yield each dataclass inside a config and its path, outer ones first."""
  for field in dataclasses.fields(config):
    if dataclasses.is_dataclass(value := getattr(config, field.name)):
      yield f'{prefix}{field.name}', value
      yield from parts(value, f'{prefix}{field.name}.')


def map_parts(config: Any, change: Callable[[str, Any], Any], prefix: str = '') -> Any:
  """Return a config with every dataclass inside it replaced, inner ones first.

  `change` maps a path, which begins with `prefix`, and the dataclass there to the new dataclass.
  """
  changed = {
    field.name: change(path, map_parts(value, change, f'{path}.'))
    for field in dataclasses.fields(config)
    if dataclasses.is_dataclass(value := getattr(config, field.name))
    for path in [f'{prefix}{field.name}']
  }
  return dataclasses.replace(config, **changed)
