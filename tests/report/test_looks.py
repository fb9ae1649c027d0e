"""A look into a model has the usage of every group of parameter tokens; plain MLPs as well."""

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
def test_a_look_has_the_usage_of_every_projection(changes, tmp_path):
  model = tiny_trained.trained(**changes)
  assert looks.can_look(model.meta, tmp_path)
  seen = looks.look(model)
  layers = [*range(model.config.model.depth)]
  assert [(row['layer'], row['kind']) for row in seen['usage']] == [
    (layer, kind) for layer in layers for kind in TOKENS
  ]
  assert all(row['share'] == pytest.approx(1) and row['group'] == '' for row in seen['usage'])
  assert 'load' not in seen


def test_groups_are_numbered_and_a_grown_group_is_old_and_new():
  assert looks._groups([4, 2], 4) == [('1', 0, 4), ('2', 4, 6)]
  assert looks._groups([6], 4) == [('old', 0, 4), ('new', 4, 6)]
  assert looks._groups([6], 0) == looks._groups([6], 6) == [('', 0, 6)]


def test_there_is_nothing_to_look_into_without_a_checkpoint_or_in_a_classifier(tmp_path):
  meta = tiny_trained.trained().meta
  config = dataclasses.replace(meta.config, model=ViTConfig(channels=3, classes=10))
  assert not looks.can_look(None, tmp_path)
  assert not looks.can_look(dataclasses.replace(meta, config=config), tmp_path)
