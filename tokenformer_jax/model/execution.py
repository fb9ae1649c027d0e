"""Choose how a model is computed, apart from the function that it computes."""

import dataclasses

import jax
import jax.numpy as jnp

from tokenformer_jax.config import Config

_FEW_LAYERS = 4


@dataclasses.dataclass(frozen=True)
class Execution:
  """How to run a model; its parameters do not depend on it."""

  dtype: jnp.dtype = jnp.float32  # of activations
  remat: str = 'score_inputs'  # the values kept for the backward pass: see stack.py
  # scan: a loop over stacked layers. unrolled: stacked layers, one after the other. list: layers
  # with arrays of their own, for decoding.
  layers: str = 'scan'
  attention: str = 'auto'  # see kernels.kernel

  @classmethod
  def from_config(cls, config: Config) -> 'Execution':
    """Return the choices of a run; `dtype=auto` is float32 on a CPU and bfloat16 elsewhere.

    `remat=auto` is `everything` on a CPU, whose memory is large, and `score_inputs` elsewhere.
    `layers=auto` is `unrolled` for few layers on a CPU: a loop copies what it saves for its
    backward pass, and few layers compile as fast as the loop. It is `scan` otherwise. On
    accelerators the training step chooses both by the memory of the devices: see
    `steps/remat_plans.py`.
    """
    train, dtype = config.train, config.dtype
    on_cpu = jax.default_backend() == 'cpu'
    if dtype == 'auto':
      dtype = 'float32' if on_cpu else 'bfloat16'
    remat, layers = train.remat, train.layers
    if remat == 'auto':
      remat = 'everything' if on_cpu else 'score_inputs'
    if layers == 'auto':
      layers = 'unrolled' if on_cpu and config.model.depth <= _FEW_LAYERS else 'scan'
    return cls(jnp.dtype(dtype), remat, layers, train.attention)

  @classmethod
  def for_trained(cls, config: Config) -> 'Execution':
    """Return the choices for using a trained model: the run's dtype, with defaults otherwise.

    The run's attention kernel may be for another type of device.
    """
    return cls(cls.from_config(config).dtype)


DEFAULT = Execution()
