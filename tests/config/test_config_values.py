"""Values that a key may not have, and the sentence about each kind of them."""

import pytest
from changing import refusal, resolved

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.errors import UserError


@pytest.mark.parametrize(
  ('path', 'value', 'allowed'),
  [
    ('model.kind', 'lstm', 'be one of lm, vit'),
    ('model.layer.mixer.proj.kind', 'linear', 'be one of pattention, dense, none'),
    ('model.layer.ffn.score.gelu', 'erf', "be 'exact' or 'tanh'"),
    ('optim.schedule.kind', 'step', 'be one of cosine, linear, wsd, constant'),
    ('dtype', 'half', "be 'auto', 'float32' or 'bfloat16'"),
    ('model.width', 0, 'be greater than 0'),
    ('model.layer.ffn.reference', -1, 'be greater than or equal to 0'),
    ('optim.learning_rate', 0.0, 'be greater than 0'),
    ('optim.schedule.final_fraction', 1.5, 'be less than or equal to 1'),
    ('optim.beta1', 1.0, 'be less than 1'),
    ('optim.beta1', float('nan'), 'be less than 1'),
    ('optim.learning_rate', float('inf'), 'be a finite number'),
    ('train.steps', 2**31, 'be less than 2147483648'),
    ('train.examples', 2**63, 'be less than 9223372036854775808'),
    ('train.trackers', 'wandb', 'be a list'),
    ('train.trackers', ['wandb', 'wandb'], 'name wandb once'),
  ],
)
def test_a_value_that_is_not_allowed_is_refused_with_those_that_are(path, value, allowed):
  want = f'config.{path} is {value!r}; it must {allowed}'
  assert refusal(**{path.replace('.', '__'): value}) == want


def test_the_entry_of_a_list_that_is_unknown_is_named():
  sentence = refusal(train__trackers=['mlflow', 'wandbb'])
  assert sentence.startswith("config.train.trackers has 'wandbb'; it must be 'tensorboard', ")
  assert sentence.endswith("; did you mean 'wandb'?")


@pytest.mark.parametrize(
  ('path', 'value', 'needed'),
  [
    ('model.width', 2.0, 'be a valid integer'),
    ('model.width', 10**400, 'be less than 2147483648'),
    ('model.kind', 3, 'be one of lm, vit'),
    ('optim.learning_rate', '1e-3', 'be a valid number'),
    ('train.seed', None, 'be a valid integer'),
    ('model.layer.ffn', 8, 'be a section of keys'),
    ('model.variants.local', 8, 'be a section of keys'),
    ('model.layer.ffn.kind', ['mlp'], 'be one of pattention, mlp, experts, none'),
    ('model.layer.ffn.groups', 8, 'be a list'),
  ],
)
def test_a_value_of_the_wrong_type_is_refused(path, value, needed):
  # Not by way of a ConfigDict, which converts or refuses some values itself.
  changes = value
  for name in reversed(path.split('.')):
    changes = {name: changes}
  with pytest.raises(UserError) as error:
    config_lib.from_dict(Config, changes)
  assert str(error.value) == f'config.{path} is {value!r}; it must {needed}'


@pytest.mark.parametrize('value', [1, 0])
def test_an_integer_passes_for_a_float(value):
  got = resolved(optim__weight_decay=value).optim.weight_decay
  assert (got, type(got)) == (value, float), '--config.optim.weight_decay=0 is refused'


def test_examples_are_counted_in_64_bits():
  assert resolved(train__examples=2**40).train.examples == 2**40


@pytest.mark.parametrize('value', [('wandb', 'mlflow'), ['wandb', 'mlflow']])
def test_names_may_be_a_list_or_a_tuple(value):
  assert resolved(train__trackers=value).train.trackers == ('wandb', 'mlflow')


def test_a_mistake_in_a_record_of_groups_is_named():
  for record, sentence in (
    ({'tokens': 'a'}, "groups.0.tokens is 'a'; it must be a valid integer"),
    ({'tokenz': 3}, 'groups.0.tokenz is unknown'),
    ({'tokens': 3, 'score': 'softmx'}, "groups.0.score.kind is 'softmx'; it must be one of "),
  ):
    with pytest.raises(UserError) as error:
      config_lib.from_dict(Config, {'model': {'layer': {'ffn': {'groups': [record]}}}})
    assert str(error.value).startswith(f'config.model.layer.ffn.{sentence}')


def test_the_values_of_a_growth_are_checked():
  with pytest.raises(UserError, match=r'^noise is -1\.0; it must be greater than or equal to 0$'):
    config_lib.growth(noise=-1.0)
