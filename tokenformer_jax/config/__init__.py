"""The configuration of a run: frozen dataclasses, and the `ConfigDict` that config files change.

A file in `configs/` starts from `defaults()`, a `ConfigDict` with the keys of the chosen kinds, and
changes some. `resolve` merges changes as nested dicts, validates the result once, and checks
everything that can be known before data is read or a device is touched. A run stores the config as
JSON, and `from_dict` reads it.

A section is a frozen pydantic dataclass (`section.section`), whose fields have defaults, meanings
and bounds. A field of several kinds of section (`section.OneOf`) has a `kind` and the keys of its
kind. `check_config.check` checks the conditions that involve several fields.
"""

from tokenformer_jax.config.batch_sizes import Stage, at_stage, stages, stages_after
from tokenformer_jax.config.data import DataConfig, ImagesConfig, SourceConfig, Sources, TextConfig
from tokenformer_jax.config.feed_forward import (
  BiasBalanceConfig,
  CapacityConfig,
  ExpertsConfig,
  GroupedConfig,
  LossBalanceConfig,
  MLPConfig,
  NoBalanceConfig,
  NoFeedForwardConfig,
  RouterConfig,
)
from tokenformer_jax.config.growth import TOKEN_METHODS, GrowConfig, growth
from tokenformer_jax.config.layer import (
  LayerConfig,
  ParallelConfig,
  PostNormConfig,
  PreNormConfig,
  SandwichConfig,
  SkiplessConfig,
  map_parts,
  parts,
)
from tokenformer_jax.config.mixers import (
  MIXERS,
  AsKeyConfig,
  GatedUnitConfig,
  LengthScaleConfig,
  LinearConfig,
  LinearScalingConfig,
  Llama3ScalingConfig,
  NoPositionsConfig,
  PositionScaleConfig,
  RotaryConfig,
  RotaryScalingConfig,
  SeenScaleConfig,
  SoftmaxConfig,
  YarnScalingConfig,
  has_own_values,
  width_of_heads,
)
from tokenformer_jax.config.model import (
  InitConfig,
  Layers,
  LMConfig,
  Model,
  ModelConfig,
  ViTConfig,
  draws,
)
from tokenformer_jax.config.names import any_of, keys_named, type_of
from tokenformer_jax.config.optim import (
  OPTIMIZERS,
  AdamWConfig,
  ConstantSchedule,
  CosineSchedule,
  OptimConfig,
  WSDSchedule,
  as_wsd,
  old_token_rate,
  restarts_schedule,
  skip_window,
)
from tokenformer_jax.config.pattention import (
  DenseConfig,
  NoProjectionConfig,
  PattentionConfig,
  ScoreConfig,
  TokenGroup,
  from_groups,
  groups_as_text,
  resized,
)
from tokenformer_jax.config.projections import (
  counts_as_text,
  grown_model,
  is_of_experts,
  matrices,
  named_counts,
  pattentions,
  token_counts,
  with_pattentions,
  with_references,
  with_token_counts,
)
from tokenformer_jax.config.run import Config, MeshConfig, TrainConfig, profile_range
from tokenformer_jax.config.section import differences
from tokenformer_jax.config.values import (
  defaults,
  from_dict,
  from_dotted,
  resolve,
  to_config_dict,
  to_json,
)
