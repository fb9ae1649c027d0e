"""The section `model.layer`: the parts of one layer, each a variant with its own keys.

A layer is a mixer, which moves information between positions, and a feed-forward part, which works
on each position alone, joined by a wiring. Each dataclass configures one of them; `model/blocks.py`
names the modules of mixers.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from tokenformer_jax.config.feed_forward import (
  FEED_FORWARDS,
  ExpertsConfig,
  MLPConfig,
  NoFeedForwardConfig,
)
from tokenformer_jax.config.fields import key, one_of, table
from tokenformer_jax.config.mixers import MIXERS, SoftmaxConfig
from tokenformer_jax.config.pattention import PattentionConfig


@dataclasses.dataclass(frozen=True)
class PreNormConfig:
  """x + mixer(norm(x)), then x + ffn(norm(x))."""

  kind: ClassVar[str] = 'pre_norm'


@dataclasses.dataclass(frozen=True)
class PostNormConfig:
  """norm(x + mixer(x)), then norm(x + ffn(x))."""

  kind: ClassVar[str] = 'post_norm'


@dataclasses.dataclass(frozen=True)
class SkiplessConfig:
  """y = β mixer(norm(x)), then α y + β' ffn(norm(y)) (SAS of Simplified Transformer Blocks)."""

  kind: ClassVar[str] = 'skipless'

  gains: bool = key(True, 'learn the gains of the branches; without, all are 1')


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
  """β mixer(norm(x)) + β' ffn(norm(x)) with one norm (SAS-P), or the same added to x."""

  kind: ClassVar[str] = 'parallel'

  gains: bool = key(True, 'learn the gains of the branches; without, all are 1')
  skip: bool = key(False, 'add both branches to x')
  two_norms: bool = key(False, 'the feed-forward part has a norm of its own, of x (GPT-NeoX)')


WIRINGS = table(PreNormConfig, PostNormConfig, SkiplessConfig, ParallelConfig)
NORMS = ('plain', 'bias', 'affine', 'rms', 'rms_plain', 'rms_offset', 'none')


@dataclasses.dataclass(frozen=True)
class LayerConfig:
  """The parts of one layer: mixer, feed-forward part, norm and wiring."""

  mixer: Any = one_of(SoftmaxConfig(), MIXERS, 'moves information between positions')
  ffn: PattentionConfig | MLPConfig | ExpertsConfig | NoFeedForwardConfig = one_of(
    PattentionConfig(tokens=512), FEED_FORWARDS, 'works on each position alone'
  )
  norm: str = key(
    'plain',
    'LayerNorm without parameters, with a bias, or with both; RMSNorm with a scale, without, or '
    'with a scale of 1 + w, as in Gemma; or no norm',
    choices=NORMS,
  )
  wiring: PreNormConfig | PostNormConfig | SkiplessConfig | ParallelConfig = one_of(
    PreNormConfig(), WIRINGS, 'how norm, mixer and feed-forward part are joined'
  )
  ffn_norm: str = key(
    'same',
    'that of the feed-forward part, if another one; a parallel wiring has one norm for both parts',
    choices=('same', *NORMS),
    when='ffn.kind=pattention|mlp|experts and wiring.kind=pre_norm|post_norm|skipless',
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
