"""The kinds of models that `model.kind` selects, each imported on first use."""

import pkgutil

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.model.compute import DEFAULT, Compute
from tokenformer_jax.model.params import Definition

# By `model.kind`: the function that defines the model of a config.
_DEFINE = {
  'lm': 'tokenformer_jax.model.lm:define_lm',
  'vit': 'tokenformer_jax.model.vit:define_vit',
}


def define(config: ModelConfig, compute: Compute = DEFAULT) -> Definition:
  """Return the parameters and functions of a model; `config` has every size filled in."""
  return pkgutil.resolve_name(_DEFINE[config.kind])(config, compute)
