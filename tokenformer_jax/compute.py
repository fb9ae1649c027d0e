"""How a model is computed, apart from what it computes."""

import dataclasses

import jax
import jax.numpy as jnp

from tokenformer_jax.config import Config


@dataclasses.dataclass(frozen=True)
class Compute:
  """How a model is computed; nothing of it changes what the parameters are."""

  dtype: jnp.dtype = jnp.float32  # of activations
  remat: str = 'score_inputs'  # what is kept for the backward pass: see stack.py
  # One program for stacked layers, in a loop (scan), or one for each (unrolled); or layers with
  # parameters of their own (list), for decoding.
  layers: str = 'scan'
  attention: str = 'auto'  # see attention.kernel

  @classmethod
  def of(cls, config: Config) -> 'Compute':
    """The choices of a run; `dtype=auto` is float32 on a CPU and bfloat16 elsewhere."""
    name = config.dtype
    if name == 'auto':
      name = 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'
    train = config.train
    remat = remat_on(train.remat, jax.default_backend())
    return cls(jnp.dtype(name), remat, train.layers, train.attention)

  @classmethod
  def of_trained(cls, config: Config) -> 'Compute':
    """How to use what a run trained: not by its kernel of attention, which may not be here."""
    return cls(cls.of(config).dtype)


def remat_on(name: str, platform: str) -> str:
  """Return what `config.train.remat` stands for on a platform: see `stack.py`.

  `auto` is `everything` on a CPU, whose memory is large, and `score_inputs` elsewhere.
  """
  if name != 'auto':
    return name
  return 'everything' if platform == 'cpu' else 'score_inputs'


DEFAULT = Compute()
