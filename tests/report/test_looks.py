"""A look into a model shows every Pattention, by group, on text; plain MLPs as well."""

import dataclasses

import pytest
import tiny_trained
from tiny import tiny_model

from tokenformer_jax.config import MLPConfig, ViTConfig
from tokenformer_jax.report import looks

TOKENS = ('query', 'key', 'value', 'proj', 'ffn')


def dense_feed_forward():
  layer = tiny_model().layer
  return dataclasses.replace(layer, ffn=MLPConfig(width=48, activation='gelu'))


@pytest.mark.parametrize(
  'changes', [{}, pytest.param({'layer': dense_feed_forward()}, marks=pytest.mark.slow)]
)
def test_a_look_has_a_map_and_usage_of_every_part(changes, tmp_path):
  model = tiny_trained.trained(**changes)
  assert looks.can_look(model.meta, tmp_path)
  found = looks.look(model)
  layers = [*range(model.config.model.depth)]
  assert len(found['labels']) == 48 and found['labels'][0] == '⟨end⟩'
  assert [*found['maps']] == layers
  assert all(tuple(kinds) == TOKENS for kinds in found['maps'].values())
  assert [(row['layer'], row['kind']) for row in found['usage']] == [
    (layer, kind) for layer in layers for kind in TOKENS
  ]
  assert all(row['share'] == pytest.approx(1) and row['part'] == '' for row in found['usage'])
  assert 'load' not in found


def test_there_is_nothing_to_look_into_without_a_checkpoint_or_in_a_classifier(tmp_path):
  meta = tiny_trained.trained().meta
  model = ViTConfig(channels=3, classes=10)
  config = dataclasses.replace(meta.config, model=model)
  assert not looks.can_look(None, tmp_path)
  assert not looks.can_look(dataclasses.replace(meta, config=config), tmp_path)
