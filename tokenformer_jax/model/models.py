"""The kinds of models that `model.kind` selects."""

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.model.execution import DEFAULT, Execution
from tokenformer_jax.model.lm import LM
from tokenformer_jax.model.params import Definition, define_model
from tokenformer_jax.model.vit import ViT

MODELS = {'lm': LM, 'vit': ViT}  # by `model.kind`


def define(config: ModelConfig, execution: Execution = DEFAULT) -> Definition:
  """Return the parameters and functions of a model; `config` has every size filled in."""
  return define_model(MODELS[config.kind], config, execution)
