"""How a model is computed, apart from what it computes."""

import dataclasses

import jax
import jax.numpy as jnp

from tokenformer_jax.config import Config


@dataclasses.dataclass(frozen=True)
class Compute:
  """How a model is computed; nothing of it changes what the parameters are."""

  dtype: jnp.dtype = jnp.float32  # of activations
  remat: str = 'none'  # see stack.py
  scan_layers: bool = True  # see stack.py
  attention: str = 'auto'  # see attention.kernel
  unroll: bool = False  # layers from a list and not stacked: see stack.py

  @classmethod
  def of(cls, config: Config) -> 'Compute':
    """The choices of a run; `dtype=auto` is float32 on the CPU and bfloat16 elsewhere."""
    name = config.dtype
    if name == 'auto':
      name = 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'
    train = config.train
    return cls(jnp.dtype(name), train.remat, train.scan_layers, train.attention)

  @classmethod
  def of_trained(cls, config: Config) -> 'Compute':
    """How to use what a run trained: not by its kernel of attention, which may not be here."""
    return cls(cls.of(config).dtype)


DEFAULT = Compute()
