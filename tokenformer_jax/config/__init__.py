"""The configuration of a run: frozen dataclasses, and the `ConfigDict` that config files change.

A file in `configs/` starts from `defaults()`, a `ConfigDict` with every key, and changes some.
`resolve` turns the result into a `Config` and checks everything that can be known before data is
read or a device is touched. A run stores the dataclasses as JSON, and `from_dict` reads them.

A field says everything about its key (`fields.key`): default, meaning, bounds, choices, and which
runs it is for. A function beside its dataclass checks what depends on several fields.
"""

from tokenformer_jax.config.data import DataConfig
from tokenformer_jax.config.grow import GrowConfig
from tokenformer_jax.config.mesh import MeshConfig
from tokenformer_jax.config.model import InitConfig, ModelConfig, TokenCounts
from tokenformer_jax.config.names import check_key, choices, keys_named, lookup, paths
from tokenformer_jax.config.optim import OptimConfig, old_token_rate
from tokenformer_jax.config.run import Config
from tokenformer_jax.config.train import TrainConfig, profile_range
from tokenformer_jax.config.values import defaults, from_dict, resolve

__all__ = [
  'Config',
  'DataConfig',
  'GrowConfig',
  'InitConfig',
  'MeshConfig',
  'ModelConfig',
  'OptimConfig',
  'TokenCounts',
  'TrainConfig',
  'check_key',
  'choices',
  'defaults',
  'from_dict',
  'keys_named',
  'lookup',
  'old_token_rate',
  'paths',
  'profile_range',
  'resolve',
]
