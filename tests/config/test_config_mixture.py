"""The sources of a mixture in files and flags, and their weights."""

import pytest
from changing import refusal, resolved

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import SourceConfig, Sources, mixture
from tokenformer_jax.errors import UserError


def test_values_survive_json():
  one = resolved(data__mixture={'a': {'source': 'files:a', 'weight': 1.0}})
  assert config_lib.from_dict(config_lib.Config, config_lib.to_json(one)) == one


def test_weights_are_whole_numbers_of_samples_in_a_block():
  for weight in (1 / 3, 0.3333333):
    third = {name: SourceConfig(source=name, weight=weight) for name in 'abc'}
    assert mixture.shares(Sources(third)).counts == ((3334, 3333, 3333),)


def test_weights_over_steps_have_the_points_of_all_sources():
  points = {'a': '0:1 50:0.75 100:0.5', 'b': '0:0 50:0.25 100:0.5'}
  shares = mixture.shares(
    Sources({name: SourceConfig(source=name, weight_by_step=p) for name, p in points.items()})
  )
  assert shares.steps == (0, 50, 100)
  assert shares.counts == ((10_000, 0), (7500, 2500), (5000, 5000))
  assert shares.last == {'a': 0.5, 'b': 0.5}


A, B = {'source': 'files:a', 'weight': 0.5}, {'source': 'files:b', 'weight': 0.5}


@pytest.mark.parametrize(
  ('changes', 'sources', 'sentence'),
  [
    ({}, {'a': A}, 'the weights of config.data.mixture add up to 0.5 (a 0.5); make them'),
    ({}, {'a': A, 'b': {'weight': 0.5}}, "mixture.b.source is '', which names no source"),
    ({}, {'a': A, '': B}, "config.data.mixture has '', which cannot be the name of a source"),
    ({}, {'a': A, 'b': {**B, 'weight_by_step': '0:1'}}, "is '0:1', and config.data.mixture.b.we"),
    (
      {},
      {'a': A, 'b': {'source': 'files:b', 'weight_by_step': '0:0.5 9:-1'}},
      'a weight must be from 0 to 1',
    ),
    ({}, {'a': A, 'b': {'source': 'files:b', 'weight_by_step': '9:1 0:1'}}, 'ascending steps'),
    ({}, {'a': {'source': 'files:a', 'weight_by_step': '0:1.5'}}, 'a weight must be from 0 to 1'),
    ({}, {'a': {**A, 'weight': 5e-5}}, 'a.weight is 5e-05; a weight must be 0 or at least 0.0001'),
    (
      {},
      {'a': A, 'b': {'source': 'files:b', 'weight_by_step': '0:0.5 9:0.4'}},
      'add up to 0.9 at step 9 (a 0.5, b 0.4)',
    ),
    (
      {'data.source': 'files:c'},
      {'a': A, 'b': B},
      'config.data.source is files:c, which is not in config.data.mixture and would not be read',
    ),
    ({'data.validation_source': 'x'}, {'a': A, 'b': B}, 'config.data.validation_source is x, whi'),
    ({'train.epochs': 2.0}, {'a': A, 'b': B}, 'has no effect with data.mixture, whose sources'),
  ],
)
def test_sources_that_do_not_fit_are_refused(changes, sources, sentence):
  assert sentence in refusal(**changes, data__mixture=sources)


def test_the_former_source_of_a_run_may_stay_where_it_is_replayed():
  config = resolved(data__source='files:b', data__mixture={'a': A, 'b': B})
  assert config.data.source == 'files:b'


def test_the_source_of_a_mixture_is_a_section_of_keys():
  assert config_lib.type_of('data.mixture.law.weight') is float
  for path, sentence in (
    ('data.mixture', 'config.data.mixture is a section of sources; set keys of one'),
    (
      'data.mixture.law',
      'set one of source, validation_source, rows, store, weight, ',
    ),
    ('data.mixture..weight', "has '', which cannot be the name of a source"),
    ('data.mixture.law.wieght', "did you mean 'data.mixture.law.weight'"),
  ):
    with pytest.raises(UserError) as error:
      config_lib.type_of(path)
    assert sentence in str(error.value)
