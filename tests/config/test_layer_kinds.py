"""Layers of a config: kinds with their own keys, variants by name, and projections by name."""

import dataclasses
from typing import Annotated

import pytest
import tiny
from changing import refusal, resolved
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import (
  Config,
  DenseConfig,
  InitConfig,
  LayerConfig,
  Layers,
  LMConfig,
  MLPConfig,
  ModelConfig,
  PattentionConfig,
  SoftmaxConfig,
)
from tokenformer_jax.config.pattention import ExpL2Norm, SoftmaxScore
from tokenformer_jax.config.section import choices_of, field_types, kinds_of
from tokenformer_jax.errors import UserError, nearest

LOCAL = LayerConfig(SoftmaxConfig(window=8), MLPConfig(96), norm='bias')
TWO = LMConfig(pattern='local*2 layer', variants=Layers({'local': LOCAL}))


# Every kind


def _groups(cls):
  """Yield each field of several kinds in a section or in what its fields can hold."""
  for name, field in field_types(cls).items():
    if (kinds := kinds_of(field)) is not None:
      yield name, kinds
      for kind in kinds.values():
        yield from _groups(kind)


GROUPS = {f'{name}: {", ".join(kinds)}': kinds for name, kinds in _groups(LayerConfig)}


@pytest.mark.parametrize('name', GROUPS)
def test_kinds_of_one_group_agree_about_their_keys(name):
  variants = GROUPS[name]
  assert {kind: one.kind for kind, one in variants.items()} == {kind: kind for kind in variants}, (
    'a kind is listed under the name of another one'
  )
  types = {}
  for kind, variant in variants.items():
    assert isinstance(variant(), variant), f'{kind} has a key without a default'
    for name, field in field_types(variant).items():
      held = kinds_of(field)
      want = types.setdefault(name, (field.annotation, held and list(held)))
      assert want == (field.annotation, held and list(held)), (
        f'{name} of {kind} has another type than of the kinds before it: a flag has one type'
      )


def sections(cls) -> st.SearchStrategy:
  """Draw a section with values that its fields allow."""
  return st.builds(cls, **{name: values(field) for name, field in field_types(cls).items()})


def values(field) -> st.SearchStrategy:
  """Draw a value of a field; texts, lists and sections by name have their defaults."""
  if kinds := kinds_of(field):
    return st.one_of([sections(kind) for kind in kinds.values()])
  if dataclasses.is_dataclass(field.annotation):
    return sections(field.annotation)
  if choices := choices_of(field):
    return st.sampled_from(choices)
  if field.annotation not in (bool, int, float):
    return st.just(field.get_default(call_default_factory=True))
  allowed = (True, False) if field.annotation is bool else (0, 1, 2, 7, 0.5, field.default)
  return st.sampled_from([value for value in allowed if _fits(field, value)])


def _fits(field, value) -> bool:
  try:
    TypeAdapter(Annotated[field.annotation, *field.metadata]).validate_python(value)
  except ValidationError:
    return False
  return True


LAYER, INIT = sections(LayerConfig), sections(InitConfig)
OPTIM = values(field_types(Config)['optim'])


@st.composite
def configs(draw) -> Config:
  variants = draw(st.dictionaries(st.sampled_from(['local', 'x_1']), LAYER, max_size=1))
  pattern = ' '.join(draw(st.permutations(['layer', *variants])))
  model = LMConfig(pattern, layer=draw(LAYER), variants=Layers(variants), init=draw(INIT))
  return dataclasses.replace(Config(), model=model, optim=draw(OPTIM))


CONFIGS = settings(deadline=None, max_examples=20)


@CONFIGS
@given(config=configs())
def test_any_config_is_the_same_after_it_was_stored_and_after_flags_could_change_it(config):
  stored = config_lib.to_json(config)
  again = config_lib.from_dict(Config, stored)
  assert again == config, 'a checkpoint describes another run'
  assert config_lib.to_json(again) == stored, 'a key that takes no part in comparisons is lost'
  values = config_lib.to_config_dict(config)
  assert config_lib.from_dict(Config, values) == config, 'configs/saved.py gives another run'


@CONFIGS
@given(a=configs(), b=configs())
def test_configs_differ_where_they_are_not_equal(a, b):
  found = list(config_lib.differences(a.model, b.model, 'model.'))
  assert bool(found) == (a.model != b.model), 'models that differ pass for the same, or the reverse'
  for path, ours, theirs in found:
    assert ours != theirs, f'{path} is said to differ'


def test_layers_are_immutable_and_hashable():
  one, same = Layers({'a': LOCAL, 'b': LayerConfig()}), Layers({'b': LayerConfig(), 'a': LOCAL})
  assert one == same and hash(one) == hash(same), 'the order of variants makes another model'
  assert hash(TWO) == hash(dataclasses.replace(TWO)), 'a model cannot be a static argument of jit'


# Differences


def test_differences_name_the_key_in_its_layer():
  other = config_lib.with_token_counts(TWO, {'local.qkv': 9, 'ffn': 8})
  other = dataclasses.replace(other, width=64)
  assert list(config_lib.differences(TWO, other, 'model.')) == [
    ('model.width', 128, 64),
    ('model.layer.ffn.tokens', 512, 8),
    ('model.variants.local.mixer.qkv.tokens', 128, 9),
  ]


def test_groups_of_different_kinds_differ_in_nothing_but_their_kind():
  dense = tiny.with_mixer(TWO, qkv=DenseConfig(bias=True))
  assert list(config_lib.differences(TWO, dense)) == [
    ('layer.mixer.qkv.kind', 'pattention', 'dense')
  ], 'keys that one of the two models does not have are compared'


# Keys of a kind that is not chosen


def test_a_key_of_another_kind_may_have_its_default():
  ffn = resolved(model__layer__ffn__kind='mlp', model__layer__ffn__tokens=512).model.layer.ffn
  assert ffn == MLPConfig(), 'a config file cannot list every key with its default'


def test_keys_of_the_former_kind_go_when_the_kind_changes():
  base = resolved(model__layer__ffn__tokens=64, model__layer__ffn__score__kind='softmax')
  assert resolved(base, model__layer__ffn__kind='mlp').model.layer.ffn == MLPConfig()
  sentence = refusal(base, model__layer__ffn__kind='mlp', model__layer__ffn__tokens=65)
  assert 'ffn.tokens is 65, which has no effect' in sentence, 'a new value without effect is taken'


def test_a_kind_that_comes_back_has_its_default_again():
  base = resolved(model__layer__ffn__kind='mlp', model__layer__ffn__width=64)
  ffn = resolved(base, model__layer__ffn__kind='pattention').model.layer.ffn
  assert ffn == LayerConfig().ffn, 'a flag makes another feed-forward part than a file'


# Variants


def _from_json(model: dict) -> ModelConfig:
  config = config_lib.from_dict(Config, {'model': model})
  config_lib.resolve(config_lib.to_config_dict(config))
  return config.model


def test_a_variant_is_a_version_of_the_layer():
  layer = {'ffn': {'tokens': 64}, 'mixer': {'heads': 2}}
  own = {'mixer': {'window': 8, 'qkv': {'kind': 'dense'}}}
  model = _from_json({'pattern': 'a layer', 'layer': layer, 'variants': {'a': own}})
  want = SoftmaxConfig(heads=2, window=8, qkv=DenseConfig())
  assert model.layers['a'] == LayerConfig(want, PattentionConfig(64)), 'a variant has other keys'
  assert model.layers['layer'].mixer.window == 0, 'a variant changes model.layer'


@pytest.mark.parametrize(
  ('model', 'sentence'),
  [
    (
      {'pattern': 'été', 'variants': {'été': {}}},
      "config.model.variants has 'été', which cannot be the name of a layer; take a word of "
      "letters, digits and _ that is not 'layer'",
    ),
    (
      {'pattern': 'locl*2', 'variants': {'local': {}}},
      "config.model.pattern is 'locl*2', and 'locl' is not a layer; did you mean 'local'?",
    ),
    (
      {'pattern': 'a layer', 'variants': {'a': {'mixer': {'heads': 3}}}},
      'config.model.width is 128, which is not a multiple of model.variants.a.mixer.heads=3',
    ),
  ],
)
def test_an_impossible_variant_of_a_layer_is_refused(model, sentence):
  with pytest.raises(UserError) as error:
    _from_json(model)
  assert str(error.value) == sentence, 'the sentence does not name the layer'


def test_only_layers_of_the_pattern_are_checked():
  model = _from_json(
    {'pattern': 'a', 'layer': {'mixer': {'heads': 3}}, 'variants': {'a': {'mixer': {'heads': 4}}}}
  )
  assert model.heads == (4,), 'a layer that never runs is checked'


# Projections by name


def test_projections_are_named_by_their_place_and_their_layer():
  assert config_lib.token_counts(TWO) == {
    'local.qkv': 128,
    'local.proj': 128,
    'qkv': 128,
    'proj': 128,
    'ffn': 512,
  }, 'a projection has another name, or a matrix is counted'


@pytest.mark.parametrize(
  ('given', 'want'),
  [
    ({'ffn': 600}, {'ffn': 600, 'local.ffn': 600}),
    ({'local.ffn': 600}, {'ffn': 512, 'local.ffn': 600}),
    ({'local.ffn': 600, 'ffn': 700}, {'ffn': 700, 'local.ffn': 600}),
    ({'ffn': 700, 'local.ffn': 600}, {'ffn': 700, 'local.ffn': 600}),
  ],
)
def test_a_count_is_for_every_layer_or_for_the_one_that_it_names(given, want):
  both = dataclasses.replace(TWO, variants=Layers({'local': LayerConfig()}))
  found = config_lib.named_counts(both, given, 'param_tokens')
  assert {name: found[name] for name in want} == want, 'another layer grows'
  assert found['local.qkv'] == found['qkv'] == 128, 'a projection that is not named grows'


def test_a_count_of_a_projection_that_there_is_not_names_the_nearest():
  with pytest.raises(UserError) as error:
    config_lib.named_counts(TWO, {'local.qvk': 5}, 'param_tokens')
  assert str(error.value) == "param_tokens names 'local.qvk'; did you mean 'local.qkv'?"
  with pytest.raises(UserError) as error:
    config_lib.named_counts(TWO, {'local.ffn': 5}, 'param_tokens')
  said = nearest('local.ffn', ['qkv', 'proj', 'ffn', 'local.qkv', 'local.proj'])
  assert str(error.value) == f"param_tokens names 'local.ffn'{said}", 'an MLP has tokens'
  dense = tiny.tiny_model(dense=True)
  with pytest.raises(UserError, match=r'^here counts parameter tokens, and this model has none$'):
    config_lib.named_counts(dense, {'ffn': 5}, 'here')


def test_references_of_zero_become_the_counts():
  model = config_lib.with_token_counts(TWO, {'local.qkv': 7})
  filled = config_lib.with_references(model)
  references = {n: one.reference for n, one in config_lib.pattentions(filled).items()}
  assert references == config_lib.token_counts(model), 'τ changes when the model grows'
  again = config_lib.with_references(config_lib.with_token_counts(filled, {'local.qkv': 9}))
  assert config_lib.pattentions(again)['local.qkv'].reference == 7, 'a reference is overwritten'


def test_a_projection_is_replaced_in_its_layer_only():
  score = SoftmaxScore()
  changed = config_lib.with_pattentions(TWO, {'local.proj': PattentionConfig(5, 6, score)})
  found = config_lib.pattentions(changed)
  assert found['local.proj'] == PattentionConfig(5, 6, score)
  assert found['proj'] == config_lib.pattentions(TWO)['proj'], 'another layer was changed'
  assert ExpL2Norm.zero_at_zero is SoftmaxScore.zero_at_zero is False, 'zero keys are not exact'
