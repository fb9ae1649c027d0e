"""All families of models in the hub's layout, and the family of a model."""

import dataclasses

from tokenformer_jax.config import ExpertsConfig, LayerConfig, ModelConfig
from tokenformer_jax.convert.family import Family
from tokenformer_jax.convert.gpt_families import GPT_FAMILIES
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.convert.llama_families import LLAMA_FAMILIES
from tokenformer_jax.errors import UserError

FAMILIES = {family.kind: family for family in (*LLAMA_FAMILIES, *GPT_FAMILIES)}


def match(model: ModelConfig) -> Family | None:
  """Return the first family that a model is exactly of, or None.

  It is exactly of a family if it is the model of the keys that the family writes for it.
  """
  for family in FAMILIES.values():
    try:
      same = family.to_model(Keys(family.to_keys(model), 'the model'))
    except (AttributeError, KeyError, UserError):  # It has other parts, or sizes they cannot have.
      continue
    if _without_balance(same) == _without_balance(model):
      return family
  return None


def _without_balance(model: ModelConfig) -> ModelConfig:
  """Return the model without what acts in training only, which no file records."""

  def plain(name: str, layer: LayerConfig) -> LayerConfig:
    del name
    if not isinstance(layer.ffn, ExpertsConfig):
      return layer
    ffn = layer.ffn
    router = dataclasses.replace(ffn.router, jitter=0.0, z_loss=0.0)
    kept = ExpertsConfig(count=ffn.count, expert=ffn.expert, shared=ffn.shared, router=router)
    return dataclasses.replace(layer, ffn=dataclasses.replace(kept, dispatch=ffn.dispatch))

  return model.map_layers(plain)
