"""A look into a model has the tables of `inspect`, about parameter tokens and experts."""

import dataclasses
import re
import types

import pytest
import tiny_trained

from tokenformer_jax.config import ViTConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.report import looks


def record_of(directory, meta):
  """A run as `record.read` returns it, of which only the checkpoint counts."""
  return types.SimpleNamespace(name='a<b', directory=directory, meta=meta)


def test_a_look_has_the_usage_of_every_projection(tmp_path):
  model = tiny_trained.trained()
  run = record_of(tmp_path, model.meta)
  body, notes = looks.look([run, run], 1, lambda source: model)
  rows = re.findall(r'<tr><td>(\d)</td><td>(\w+)</td>', body)
  kinds = ('query', 'key', 'value', 'proj', 'ffn')
  assert rows == [(str(i), kind) for i in range(model.config.model.depth) for kind in kinds]
  assert 'a&lt;b, step' in body and 'dead' in body and 'experts</h4>' not in body
  (note,) = notes
  assert 'looks into the 1 model of the last runs, and has 2' in note


def test_only_the_terms_of_the_tables_are_defined(tmp_path):
  model = tiny_trained.trained()
  body, _ = looks.look([record_of(tmp_path, model.meta)], 1, lambda source: model)
  assert 'for 90 %  ' in body and 'of an MLP' not in body and 'max violation' not in body


def test_there_is_nothing_to_look_into_without_a_checkpoint_or_in_a_classifier(tmp_path):
  meta = tiny_trained.trained().meta
  config = dataclasses.replace(meta.config, model=ViTConfig(channels=3, classes=10))
  runs = [record_of(tmp_path, m) for m in (None, dataclasses.replace(meta, config=config))]
  assert looks.look(runs, 3, lambda source: pytest.fail('loaded')) == ('', [])


def test_a_large_model_is_named_instead(tmp_path, monkeypatch):
  monkeypatch.setattr(looks, '_MOST_PARAMETERS', 10)
  run = record_of(tmp_path, tiny_trained.trained().meta)
  body, (note,) = looks.look([run], 3, lambda source: pytest.fail('loaded'))
  assert not body and 'a report looks into models of at most 10' in note


def test_the_checkpoint_of_the_record_is_looked_into_or_the_newest_one(tmp_path):
  run, sources = record_of(tmp_path, tiny_trained.trained().meta), []

  def load(source):
    sources.append(source)
    raise UserError('it was removed')

  assert looks.look([run], 3, load) == ('', ['it was removed'])
  assert sources == [f'{run.directory}@{run.meta.step}', str(run.directory)]
