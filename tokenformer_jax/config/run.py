"""The config of a whole run."""

from typing import Literal

from tokenformer_jax.config.data import Data, TextConfig
from tokenformer_jax.config.growth import GrowConfig
from tokenformer_jax.config.model import LMConfig, Model
from tokenformer_jax.config.optim import AdamWConfig, Optim
from tokenformer_jax.config.section import Str, key, section
from tokenformer_jax.config.sections import (
  DistillConfig,
  MeshConfig,
  PreferenceConfig,
  TrainConfig,
)


@section
class Config:
  """The config of a whole run."""

  model: Model = key(LMConfig(), 'what is trained')
  data: Data = key(TextConfig(), 'what it is trained on')
  optim: Optim = key(AdamWConfig(), 'the optimizer: see steps/optimizers.py')
  train: TrainConfig = TrainConfig()
  mesh: MeshConfig = MeshConfig()
  dtype: Literal['auto', 'float32', 'bfloat16'] = key(
    'auto', 'dtype of activations. auto: bfloat16 on TPU and GPU, float32 on CPU'
  )
  init_from: Str = key('', "another run's directory, DIR or DIR@STEP, grown to this model")
  grow: GrowConfig = GrowConfig()
  distill: DistillConfig = DistillConfig()
  preference: PreferenceConfig = PreferenceConfig()
