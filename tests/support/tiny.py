"""Models small enough to be compiled in a second."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax import config
from tokenformer_jax.config import (
  DenseConfig,
  LMConfig,
  MLPConfig,
  ModelConfig,
  NoPositionsConfig,
  PattentionConfig,
  RotaryConfig,
  ViTConfig,
)
from tokenformer_jax.config.pattention import SCORES
from tokenformer_jax.config.section import field_types
from tokenformer_jax.model import models
from tokenformer_jax.model.execution import DEFAULT, Execution
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Definition, Params
from tokenformer_jax.steps import optim, schedules

COUNTS = {'qkv': 24, 'proj': 40, 'ffn': 48}
# Of an optimizer whose rates stand still, so that a test sees one factor at a time.
STEADY = {
  'learning_rate': 0.01,
  'warmup_steps': 0,
  'schedule': 'constant',
  'new_token_warmup': 0,
}
OLD = 3  # tokens of an array before its growth


def tiny_model(
  *,
  layers: int = 2,
  heads: int = 4,
  window: int = 0,
  rotary: float = 0.5,
  tokens: Mapping[str, int] = COUNTS,
  reference: Mapping[str, int] | None = None,
  score: str = 'l2_norm_gelu',
  gelu: str = 'exact',
  dense: bool = False,
  bias: bool = False,
  ffn_width: int = 0,
  norm: str = 'plain',
  **changes: Any,
) -> ModelConfig:
  """Return two layers of width 32 over 64 tokens; every size is filled in and divides by 4.

  The numbers of parameter tokens differ from each other and from every other size, so that no axis
  passes for another. The reference counts are the numbers of parameter tokens unless given.

  Args:
    layers: equal ones.
    heads: of the attention.
    window: of the attention.
    rotary: the part of each head that is rotated; 0: queries and keys know no positions.
    tokens: the numbers of parameter tokens, by projection; those left out are as above.
    reference: the reference counts, by projection.
    score: of all projections.
    gelu: of all scores, or of an MLP.
    dense: whether it is a Transformer.
    bias: of a Transformer's projections.
    ffn_width: of a Transformer.
    norm: of the layers.
    **changes: keys of `ModelConfig`.
  """
  counts = {**COUNTS, **tokens}
  references = {**counts, **(reference or {})}
  has_gelu = {'gelu': gelu} if SCORES[score].zero_at_zero else {}
  of_score = SCORES[score](**has_gelu)
  parts: dict[str, Any] = {
    name: PattentionConfig(count, references[name], of_score) for name, count in counts.items()
  }
  if dense:
    parts = {'qkv': DenseConfig(bias), 'proj': DenseConfig(bias)}
    parts['ffn'] = MLPConfig(ffn_width, bias, {'exact': 'gelu', 'tanh': 'gelu_tanh'}[gelu])
  layer = config.LayerConfig(
    mixer=config.SoftmaxConfig(
      heads,
      window,
      RotaryConfig(rotary) if rotary else NoPositionsConfig(),
      qkv=parts['qkv'],
      proj=parts['proj'],
    ),
    ffn=parts['ffn'],
    norm=norm,
  )
  sizes: dict[str, Any] = {'width': 32, 'vocab_size': 64, 'max_length': 128, 'layer': layer}
  cls = changes.pop('kind', LMConfig)
  sizes = {name: value for name, value in sizes.items() if name in field_types(cls)}
  return cls(**{'pattern': f'layer*{layers}', **sizes, **changes})


def tiny_vit(**changes: Any) -> ModelConfig:
  """Return two layers of width 32 for grey images of 8 × 8 pixels, 4 patches, and ten classes."""
  sizes = {
    'kind': ViTConfig,
    'rotary': 0,
    'position_embedding': 'sincos',
    'patch': 4,
    'channels': 1,
    'classes': 10,
    'max_length': 4 if changes.get('position_embedding') == 'learned' else 0,
  }
  return tiny_model(**{**sizes, **changes})


def two_kinds(*, window: int = 8, **changes: Any) -> ModelConfig:
  """Return five layers in three stacks; `local` ones have a window and no feed-forward part.

  Args:
    window: of the local layers.
    **changes: as for `tiny_model`, for all layers.
  """
  model = tiny_model(**{'pattern': '(local layer)*2 local', **changes})
  mixer = dataclasses.replace(model.layer.mixer, window=window)
  local = dataclasses.replace(model.layer, mixer=mixer, ffn=config.NoFeedForwardConfig())
  return dataclasses.replace(model, variants=config.Layers({'local': local}))


def gated_model(
  *, scores: str = 'softmax', positions: Any = None, length_scale: Any = None, **changes: Any
) -> ModelConfig:
  """Return layers that are a gated attention unit alone, 48 wide inside with a head of 16.

  Args:
    scores: `normalise` of the mixer.
    positions: those of the mixer, in the place of what `rotary` says.
    length_scale: of the mixer.
    **changes: as for `tiny_model`; `uvq` is made as its `qkv`, and a bias adds offsets.
  """
  model = tiny_model(**changes)
  was = model.layer.mixer
  mixer = config.GatedUnitConfig(
    width=48,
    head_width=16,
    window=was.window,
    positions=positions or was.positions,
    normalise=scores,
    length_scale=length_scale or was.length_scale,
    offset=changes.get('bias', False),
    uvq=was.qkv,
    out=was.proj,
  )
  layer = dataclasses.replace(model.layer, mixer=mixer, ffn=config.NoFeedForwardConfig())
  return dataclasses.replace(model, layer=layer)


def with_mixer(model: ModelConfig, **changes: Any) -> ModelConfig:
  """Return a model with other keys of `model.layer.mixer`."""
  mixer = dataclasses.replace(model.layer.mixer, **changes)
  return dataclasses.replace(model, layer=dataclasses.replace(model.layer, mixer=mixer))


def linear(model: ModelConfig) -> ModelConfig:
  """Return a model whose `model.layer` has linear attention with the same projections."""
  old = model.layer.mixer
  mixer = config.LinearConfig(old.heads, old.positions, old.qkv, old.proj)
  return dataclasses.replace(model, layer=dataclasses.replace(model.layer, mixer=mixer))


def normal_params(definition: Definition, std: float = 1.0, seed: int = 0) -> Params:
  """Return parameters of a definition by a normal distribution, whatever starts at 0 or 1."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda p: jax.device_put(np.asarray(rng.normal(size=p.shape) * std, p.dtype)),
    definition.abstract,
  )


@functools.cache
def large_params(model: ModelConfig) -> Params:
  """Return parameters of a model, so large that every part and earlier token matters."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda p: jax.device_put(np.asarray(rng.normal(size=p.shape) * p.shape[-1] ** -0.5, p.dtype)),
    models.define(model).abstract,
  )


@functools.cache
def logits_of(model: ModelConfig, execution: Execution = DEFAULT):
  """Return a compiled function of parameters and ids: the logits."""
  definition = define_lm(model, execution)
  return jax.jit(lambda params, ids: definition.bind(params)(ids)[0])


@functools.cache
def logits_and_gradient(model: ModelConfig):
  """Return a function of parameters and ids: logits, and the gradient of a function of them."""
  definition = define_lm(model, Execution(remat='everything'))

  def loss(params: Params, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = definition.bind(params)(ids)[0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1)), logits

  def execution(params: Params, ids: jax.Array) -> tuple[jax.Array, Params]:
    (_, logits), gradient = jax.value_and_grad(loss, has_aux=True)(params, ids)
    return logits, gradient

  return jax.jit(execution)


def make_optimizer(config, steps, info, growth=None):
  """The optimizer of a run of so many steps."""
  rate = schedules.schedule(config, steps, growth)
  return optim.make_optimizer(config, rate, info, growth)


def with_gradients(f: Callable[..., jax.Array], *arguments: jax.Array) -> tuple[jax.Array, ...]:
  """Return the output of `f`, and the gradients of all arguments for one gradient of the output."""
  out, backward = jax.vjp(f, *arguments)
  return out, *backward(jnp.cos(out))
