"""A model with the other rotary layout is the same function, and its run the same run."""

import dataclasses

import jax
import numpy as np
import pytest
import released
from outcomes import assert_same, losses
from tiny import large_params, linear, tiny_model, two_kinds, with_mixer

import tokenformer_jax
from tokenformer_jax import config
from tokenformer_jax.cli import convert as command
from tokenformer_jax.config import LinearConfig, RotaryConfig
from tokenformer_jax.convert import tensor_files
from tokenformer_jax.convert.rotary_layout import convert_layout, convert_run
from tokenformer_jax.convert.to_run import to_jax
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.training import loop

IDS = np.random.default_rng(0).integers(0, 64, (2, 40), np.int32)


def _with_linear_layers(model):
  """Replaces the mixer of the layers of the variant."""
  (name, layer), *_ = model.variants.items()
  old = layer.mixer
  mixer = LinearConfig(old.heads, old.positions, qkv=old.qkv, proj=old.proj)
  changed = {name: dataclasses.replace(layer, mixer=mixer)}
  return dataclasses.replace(model, variants=config.Layers(changed))


MODELS = {
  'pattention': tiny_model(rotary=1.0),
  'partial': tiny_model(rotary=0.5),
  'a plane': tiny_model(rotary=0.25),
  'dense': tiny_model(dense=True, rotary=0.5),
  'dense with bias': tiny_model(dense=True, bias=True, rotary=0.5),
  'linear': linear(tiny_model(rotary=0.75)),
  'two kinds': two_kinds(rotary=0.5),
  'softmax and linear': _with_linear_layers(two_kinds(rotary=0.5)),
  'shaped': with_mixer(tiny_model(rotary=0.5), shaped=True),
  'few key heads': with_mixer(tiny_model(rotary=0.5), kv_heads=2, head_width=12, qk_norm='rms'),
  'clipped': with_mixer(tiny_model(), positions=RotaryConfig(0.5, clip=4)),
}
SLOW = ('pattention', 'a plane', 'dense', 'clipped', 'two kinds', 'softmax and linear', 'shaped')
EACH_MODEL = pytest.mark.parametrize(
  'model',
  [
    pytest.param(model, id=name, marks=[pytest.mark.slow] * (name in SLOW))
    for name, model in MODELS.items()
  ],
)


def _logits(model, params):
  definition = define_lm(model)
  return jax.jit(lambda params: definition.bind(params)(IDS)[0])(params)


@EACH_MODEL
def test_the_model_computes_the_same(model):
  params = large_params(model)
  turned, target = convert_layout(params, model, 'interleaved')
  want = _logits(model, params)
  np.testing.assert_allclose(
    _logits(target, turned), want, atol=1e-5, err_msg='the conversion changes the function'
  )
  assert np.max(np.abs(_logits(target, params) - want)) > 1e-2 or model is MODELS['a plane'], (
    'the layout makes no difference, so that this test shows nothing'
  )


@EACH_MODEL
def test_back_again_bit_for_bit(model):
  params = large_params(model)
  turned, target = convert_layout(params, model, 'interleaved')
  back, again = convert_layout(turned, target, 'half_split')
  assert again == model, 'another model comes back'
  assert_same(back, params, 'other parameters come back')


def test_only_queries_and_keys_change():
  params = large_params(MODELS['two kinds'])
  turned, _ = convert_layout(params, MODELS['two kinds'], 'interleaved')
  paths = jax.tree_util.tree_leaves_with_path(jax.tree.map(np.array_equal, params, turned))
  changed = {tuple(key.key for key in path)[-3:] for path, same in paths if not same}
  assert changed == {('attention', name, 'values') for name in ('query', 'key')}


def test_layers_that_have_the_layout_stay():
  model = MODELS['two kinds']
  (name, local), *_ = model.variants.items()
  mixer = dataclasses.replace(local.mixer, positions=RotaryConfig(0.5, layout='interleaved'))
  mixed = config.Layers({name: dataclasses.replace(local, mixer=mixer)})
  model, params = dataclasses.replace(model, variants=mixed), large_params(model)
  turned, target = convert_layout(params, model, 'interleaved')
  assert {layer.mixer.positions.layout for layer in target.layers.values()} == {'interleaved'}
  np.testing.assert_allclose(_logits(target, turned), _logits(model, params), atol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_as_it_would_have(make, tmp_path, one_device):
  """Moments are in the order of their parameters."""
  wanted = make(train__steps=8, train__checkpoint_every=4, train__log_every=1, train__ema=0.9)
  loop.train(wanted, tmp_path / 'run')
  convert_run(f'{tmp_path}/run@4', tmp_path / 'turned', 'interleaved')
  turned = tokenformer_jax.load(tmp_path / 'turned')
  assert turned.config.model.layer.mixer.positions.layout == 'interleaved' and turned.step == 4
  turned.train()
  want, got = losses(tmp_path / 'run'), losses(tmp_path / 'turned')
  assert sorted(got) == [5, 6, 7, 8], 'it does not start at the step of the source'
  for step, loss in got.items():
    assert loss == pytest.approx(want[step], rel=1e-5), f'another loss at step {step}'


@pytest.mark.slow
def test_growth_can_be_removed_after_the_conversion(make, tmp_path, one_device):
  """The models of a lineage have the layout, so that the way back fits the arrays."""
  loop.train(make(train__steps=2), tmp_path / 'run')
  tokenformer_jax.load(tmp_path / 'run').grow(tmp_path / 'grown', {'qkv': 64, 'ffn': 96})
  convert_run(str(tmp_path / 'grown'), tmp_path / 'turned', 'interleaved')
  removed = tokenformer_jax.load(tmp_path / 'turned').remove(tmp_path / 'removed')
  convert_run(str(tmp_path / 'run'), tmp_path / 'small', 'interleaved')
  small = tokenformer_jax.load(tmp_path / 'small')
  assert removed.config.model == small.config.model, 'another model'
  assert_same(removed.parameters, small.parameters, 'the tokens of before the growth differ')


def test_converted_weights_stay_parameters_alone(tmp_path):
  released.write_tokenizer(tmp_path)
  source = released.write(tmp_path / 'model.bin')
  to_jax(source, tmp_path / 'run', **released.OPTIONS)
  convert_run(str(tmp_path / 'run'), tmp_path / 'turned', 'interleaved')
  turned = tokenformer_jax.load(tmp_path / 'turned')
  assert turned.meta.contents == 'params', 'moments of zero were stored'
  np.testing.assert_allclose(
    turned.logits(released.GOLDEN['input_ids']), released.GOLDEN['logits'], atol=1e-5
  )
  with pytest.raises(UserError, match=r"positions\.layout is 'interleaved'; .* 'half_split' only"):
    command.to_torch(str(tmp_path / 'turned'), tmp_path / 'none.safetensors')
  convert_run(str(tmp_path / 'turned'), tmp_path / 'back', 'half_split')
  command.to_torch(str(tmp_path / 'back'), tmp_path / 'back.safetensors')
  tensors = tensor_files.find(tmp_path / 'back.safetensors')
  for name, array in released.WEIGHTS.items():
    np.testing.assert_array_equal(tensors[name].read(), array, err_msg=f'{name}: other bits')


GATED = dataclasses.replace(
  tiny_model().layer, mixer=config.GatedUnitConfig(), ffn=config.NoFeedForwardConfig()
)


@pytest.mark.parametrize(
  ('model', 'layout', 'match'),
  [
    (tiny_model(), 'half_split', 'is half_split already; nothing would change'),
    (tiny_model(rotary=0), 'interleaved', 'no layer of the model has rotary positions'),
    (tiny_model(), 'neox', "the layout is 'neox'"),
    (
      tiny_model(layer=GATED),
      'interleaved',
      r'model\.layer\.mixer\.kind is gated_unit; .* projections of their own',
    ),
  ],
  ids=['already', 'no rotation', 'unknown', 'gated unit'],
)
def test_impossible_conversions_are_refused_in_one_sentence(model, layout, match):
  with pytest.raises(UserError, match=match):
    convert_layout({}, model, layout)


def test_a_target_that_exists_is_refused(tmp_path):
  with pytest.raises(UserError, match='exists; name a new directory'):
    convert_run(str(tmp_path / 'none'), tmp_path, 'interleaved')
