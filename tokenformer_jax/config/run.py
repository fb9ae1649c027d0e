"""The config of a whole run."""

from typing import Literal

from tokenformer_jax.config.growth import GrowConfig
from tokenformer_jax.config.model import ModelConfig
from tokenformer_jax.config.optim import OptimConfig
from tokenformer_jax.config.section import Str, key, section
from tokenformer_jax.config.sections import (
  DataConfig,
  DistillConfig,
  MeshConfig,
  TrainConfig,
)


@section
class Config:
  """The config of a whole run."""

  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  optim: OptimConfig = OptimConfig()
  train: TrainConfig = TrainConfig()
  mesh: MeshConfig = MeshConfig()
  dtype: Literal['auto', 'float32', 'bfloat16'] = key(
    'auto', 'dtype of activations. auto: bfloat16 on TPU and GPU, float32 on CPU'
  )
  init_from: Str = key('', "another run's directory, DIR or DIR@STEP, grown to this model")
  grow: GrowConfig = GrowConfig()
  distill: DistillConfig = DistillConfig()
