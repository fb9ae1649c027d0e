"""Texts longer than those of training: the sentence about a model, and clipped distances."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny_trained
from architectures import hybrid
from tiny import gated_model, large_params, linear, tiny_model, with_mixer

from tokenformer_jax.config import (
  Layers,
  ModelConfig,
  PositionScaleConfig,
  RotaryConfig,
)
from tokenformer_jax.decoding.length import describe_length, with_clip
from tokenformer_jax.decoding.texts import TextRequest
from tokenformer_jax.decoding.writer import Writer
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Params

PROMPT = np.random.default_rng(0).integers(0, 64, 30).tolist()


def _mixed(pattern: str, full: ModelConfig, *, window: int = 16, **local) -> ModelConfig:
  """Return a model whose `layer` is that of `full`, with `local` layers in windows."""
  mixer = dataclasses.replace(full.layer.mixer, window=window, positions=RotaryConfig(1.0))
  mixer = dataclasses.replace(mixer, **local)
  variants = Layers({'local': dataclasses.replace(full.layer, mixer=mixer)})
  return dataclasses.replace(full, pattern=pattern, variants=variants)


ROTARY, NONE = tiny_model(), tiny_model(rotary=0)
CLIPPED = with_mixer(ROTARY, positions=RotaryConfig(clip=256))
BY_POSITION = with_mixer(NONE, length_scale=PositionScaleConfig(length=512))
UNTRAINED = 'rotary positions beyond the 512 of training are untrained'
CLIP = '; clip_positions=W below 512 limits distances as ReRoPE does'
MASK = 'only the causal mask tells positions, and those beyond 512 are untrained'
UNLIMITED = 'layers without positions see more tokens than the 512 of training'

SENTENCES = {
  'learned, too few': (
    tiny_model(rotary=0, position_embedding='learned', max_length=600),
    'learned positions end at 600',
  ),
  'learned': (
    tiny_model(rotary=0, position_embedding='learned', max_length=1024),
    'learned positions beyond the 512 of training are untrained',
  ),
  'rotary': (ROTARY, UNTRAINED + CLIP),
  'clipped': (CLIPPED, ''),
  'windows without positions': (tiny_model(window=16, rotary=0), ''),
  'too wide windows': (tiny_model(window=513), UNTRAINED),
  'HWFA': (_mixed('local*3 layer', BY_POSITION), ''),
  'HWFA without a factor': (_mixed('local*3 layer', NONE), UNLIMITED),
  'no positions': (NONE, MASK),
  'two untrained kinds': (
    dataclasses.replace(
      ROTARY, pattern='layer other', variants=Layers({'other': linear(ROTARY).layer})
    ),
    f'{UNTRAINED}{CLIP}; {UNTRAINED}',
  ),
}


@pytest.mark.parametrize('name', SENTENCES)
def test_the_warning_names_each_untrained_kind_of_layer(name):
  model, sentence = SENTENCES[name]
  assert describe_length(model, 512, 1024) == sentence
  assert describe_length(model, 512, 512) == '', 'a length of training needs a sentence'


# Clipped distances

HWFA2 = _mixed('local full local', tiny_model(), window=9)
HWFA2 = dataclasses.replace(HWFA2, variants=Layers({**HWFA2.variants, 'full': HWFA2.layer}))
CLIPPABLE = {
  'rotary': tiny_model(layers=1, tied_head=False),
  'gated': gated_model(layers=1, tied_head=False),
}


@functools.cache
def _params(model: ModelConfig) -> Params:
  """Return large parameters; those of gated units have scores in which positions matter."""

  def larger(path, array: jax.Array) -> jax.Array:
    names = jax.tree_util.keystr(path)
    return array * 20 if 'attention' in names and 'scale' in names else array

  return jax.tree_util.tree_map_with_path(larger, large_params(model))


@functools.cache
def _logits(model: ModelConfig) -> np.ndarray:
  ids = np.array([PROMPT])
  definition = define_lm(model)
  return np.asarray(jax.jit(lambda p: definition.bind(p)(ids)[0])(_params(model)))


@pytest.mark.parametrize('name', CLIPPABLE)
def test_a_clip_changes_the_tokens_that_it_reaches_and_no_others(name):
  got, free = _logits(with_clip(CLIPPABLE[name], 12)), _logits(CLIPPABLE[name])
  np.testing.assert_allclose(got[:, :13], free[:, :13], rtol=0, atol=1e-5)
  assert np.abs(got[:, 13:] - free[:, 13:]).max() > 1e-3, 'the clip has no effect'


def test_layers_with_windows_keep_their_distances():
  clipped = with_clip(HWFA2, 12)
  assert clipped.layers['full'].mixer.positions == RotaryConfig(0.5, clip=12)
  assert clipped.layers['local'] == HWFA2.layers['local']
  assert with_clip(clipped, 7) == with_clip(HWFA2, 7), 'a clip of training is kept'


def test_a_model_in_memory_is_clipped_with_its_parameters():
  model = tiny_trained.trained()
  clipped = model.with_clip(12)
  assert clipped.config.model.layer.mixer.positions.clip == 12
  assert model.config.model.layer.mixer.positions.clip == 0
  assert clipped.params is model.params


@pytest.mark.parametrize('model', [NONE, hybrid()], ids=['no positions', 'HWFA'])
def test_a_model_without_distances_to_clip_is_refused(model):
  with pytest.raises(UserError) as error:
    with_clip(model, 12)
  assert str(error.value) == (
    'clip_positions is 12, and no layer of this model has full attention with rotary positions; '
    'leave it out'
  )


# The most tokens of a prompt and its text


def test_a_text_ends_at_the_most_tokens():
  tokenizer = tiny_trained.trained().tokenizer
  request = TextRequest('abc', 10, max_length=7)
  assert request.tokens(tokenizer).length == 3, 'an end of document and the prompt are 4 tokens'
  assert dataclasses.replace(request, max_length=100).tokens(tokenizer).length == 10
  assert dataclasses.replace(request, max_length=None).tokens(tokenizer).length == 10


def test_a_text_without_a_length_is_no_longer_than_those_of_training():
  model = tiny_trained.trained()

  def asked(trained, prompt='abc', **changes):
    return TextRequest(prompt, **changes).tokens(model.tokenizer, trained).length

  assert [asked(trained) for trained in (64, 1024, None)] == [60, 256, 256]
  assert asked(64, length=100) == 100, 'a length is not what the user asked for'
  assert asked(64, max_length=100) == 96, 'the most tokens are not what the user asked for'
  assert asked(4) == 256, 'a prompt of the whole length is followed by nothing'
  length = Writer.from_trained(model).config.data.sequence_length
  assert describe_length(model.config.model, length, 4 + asked(length)) == ''


def test_a_prompt_without_room_for_a_text_is_refused():
  with pytest.raises(UserError, match='max_length is 4, and a prompt is 4 tokens'):
    TextRequest('abc', 10, max_length=4).tokens(tiny_trained.trained().tokenizer)


def test_a_length_is_positive():
  with pytest.raises(UserError, match='max_length is -1; it must be at least 1'):
    tiny_trained.trained().context_length(-1)
