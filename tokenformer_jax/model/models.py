"""The kinds of models that `model.kind` selects."""

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.model.execution import DEFAULT, Execution
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Definition
from tokenformer_jax.model.vit import define_vit

DEFINE = {'lm': define_lm, 'vit': define_vit}


def define(config: ModelConfig, execution: Execution = DEFAULT) -> Definition:
  """Return the parameters and functions of a model; `config` has every size filled in."""
  return DEFINE[config.kind](config, execution)
