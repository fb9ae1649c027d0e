"""Every config file resolves, alone and from anywhere, to the model that it says it is."""

import dataclasses
import math
import runpy
from pathlib import Path

import pytest

from tokenformer_jax import config
from tokenformer_jax.config import file
from tokenformer_jax.convert import families
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import flops
from tokenformer_jax.model.models import define
from tokenformer_jax.model.params import Definition
from tokenformer_jax.parallel import sharding

ROOT = Path(__file__).parents[2]

# The TokenFormers have L·2D·(3·qkv + proj + ffn) + V·D + 2·D parameters, the paper's Table 9 to the
# digits that it prints. Of the Transformers, 162,322,944 and 405,334,016 are published for Pythia-
# 160M and 410M, and 124,475,904 is GPT-2's 124,439,808 with 47 more rows in the vocabulary.
COUNTS = {
  'lm_pile': {
    '150m': 151_881_216,
    '450m': 454_166_528,
    '900m': 903_252_480,
    '1_5b': 1_587_219_456,
  },
  'lm_openwebtext': {
    '124m': 123_569_664,
    '354m': 354_190_848,
    '757m': 753_796_608,
    '1_4b': 1_309_705_728,
  },
  'transformer_pile': {
    '150m': 162_322_944,
    '450m': 405_334_016,
    '900m': 758_458_880,
    '1_5b': 1_287_797_760,
  },
  'transformer_openwebtext': {
    '124m': 124_475_904,
    '354m': 357_967_104,
    '757m': 751_056_768,
    '1_4b': 1_399_642_368,
  },
  'lm_llama': {'8b': 8_030_261_248, '70b': 70_553_706_496},  # published for Llama 3
  # Blocks of L·2D·(3·qkv + proj + ffn); beside them 769 D for the patches, 1001 for each column of
  # the head's matrix, 2 D for the final norm. Of the paper's 86, 109, 307 and 407 million only the
  # first fits its own numbers of tokens. The Transformers are the usual ViTs, 86,567,656 parameters
  # for b16, without the class token and the learned positions: 768 + 197 · 768 less.
  'vit_imagenet': {
    'ti16': 7_418_920,
    's16': 28_992_616,
    'b16_576': 86_295_784,
    'b16': 114_607_336,
    'l16_768': 303_804_392,
    'l16': 404_467_688,
  },
  'transformer_vit_imagenet': {
    'ti16': 5_679_400,
    's16': 21_974_632,
    'b16': 86_415_592,
    'l16': 304_123_880,
  },
}
HYBRIDS = runpy.run_path(str(ROOT / 'configs/lm_hybrid.py'))
FILES = {
  **COUNTS,
  'lm_switch': ('tiny', 'base'),
  'lm_deepseekmoe': ('tiny', '2b', '16b'),
  'lm_sparse_tokenformer': ('tiny', '124m_8x'),
  'lm_hybrid': HYBRIDS['VARIANTS'],
}


def _resolve(name: str, *variant: str) -> config.Config:
  get_config = runpy.run_path(str(ROOT / 'configs' / f'{name}.py'))['get_config']
  return config.resolve(get_config(*variant))


def _define(resolved: config.Config, vocabulary: int = 2048) -> Definition:
  model, length = resolved.model, resolved.data.sequence_length
  if model.kind == 'vit':
    return define(dataclasses.replace(model, classes=1000, channels=3))
  vocabulary = model.vocab_size or vocabulary
  model = dataclasses.replace(model, max_length=model.max_length or length, vocab_size=vocabulary)
  return define(model.with_scale_length(length))


@pytest.mark.parametrize(
  'path',
  sorted(set((ROOT / 'configs').glob('*.py')) - {ROOT / 'configs/saved.py'}),  # that of a run
  ids=lambda path: path.name,
)
def test_every_file_resolves_without_a_variant(path):
  _resolve(path.stem)


@pytest.mark.parametrize(
  ('name', 'variant'), [(name, variant) for name, names in FILES.items() for variant in names]
)
def test_parameters_are_counted_exactly_and_split_over_64_chips(name, variant):
  resolved = _resolve(name, variant)
  definition = _define(resolved)
  if name in COUNTS:
    assert definition.count == COUNTS[name][variant]
  row = [variant, f'{definition.count:,}']
  if definition.active != definition.count:
    row.append(f'{definition.active:,}')
  table = (ROOT / 'configs' / f'{name}.py').read_text().split('"""')[1]
  rows = [line.split()[: len(row)] for line in table.splitlines()]
  assert row in rows, f'the table on top of the file is out of date: {row}'
  if definition.count > 5_000_000:
    mesh = sharding.abstract_mesh(resolved.mesh, 64)
    sharding.check_divides(mesh, definition.abstract, definition.axes)
    sharding.check_divisible(mesh, 'batch', resolved.data.batch_size, 'of the batch')


def test_a_file_finds_the_one_that_it_builds_on_from_anywhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  path = ROOT / 'configs' / 'transformer_pile.py'
  with pytest.raises(UserError, match="config variant is 'nope'"):  # from lm_pile.py
    file.read(f'{path}:nope')


@pytest.mark.parametrize('variant', COUNTS['lm_pile'])
def test_pile_models_train_as_in_the_paper(variant):
  resolved = _resolve('lm_pile', variant)
  model, optim = resolved.model, resolved.optim
  width = model.width
  assert config.token_counts(model) == {'qkv': width, 'proj': width, 'ffn': 4 * width}
  assert (resolved.data.batch_size, resolved.data.sequence_length) == (1024, 2048)
  assert (resolved.train.steps, optim.warmup_steps) == (143_000, 1430)
  assert (optim.learning_rate, optim.schedule.final_fraction) == (6e-4, 0.1)
  _check_optimizer(optim)


@pytest.mark.parametrize('variant', COUNTS['lm_openwebtext'])
def test_growth_changes_only_the_parameter_tokens(variant):
  first, grown = _resolve('lm_openwebtext', '124m'), _resolve('lm_openwebtext', variant)
  same_but_for_growth = config.with_token_counts(grown.model, config.token_counts(first.model))
  assert same_but_for_growth == first.model, 'the larger model would not compute what this one does'
  references = {name: one.reference for name, one in config.pattentions(grown.model).items()}
  assert references == {'qkv': 576, 'proj': 576, 'ffn': 2304}
  assert (grown.data, grown.optim) == (first.data, first.optim)


@pytest.mark.parametrize('variant', COUNTS['lm_openwebtext'])
def test_stages_are_as_long_as_in_the_paper(variant):
  resolved = _resolve('lm_openwebtext', variant)
  stage = ['124m', '354m', '757m', '1_4b'].index(variant)
  assert resolved.train.steps == 600_000 + 60_000 * stage
  before = ['', '124m', '354m', '757m'][stage]
  assert resolved.init_from == (f'runs/lm_openwebtext_{before}' if before else '')


@pytest.mark.parametrize('variant', COUNTS['transformer_openwebtext'])
def test_openwebtext_models_train_as_in_the_paper(variant):
  resolved = _resolve('transformer_openwebtext', variant)
  assert resolved.data == _resolve('lm_openwebtext', variant).data
  assert (resolved.data.batch_size, resolved.data.sequence_length) == (512, 1024)
  assert (resolved.train.steps, resolved.init_from) == (600_000, '')
  assert (resolved.optim.learning_rate, resolved.optim.schedule.final_fraction) == (6e-4, 0)
  assert resolved.optim.warmup_steps == 2000
  assert (resolved.model.width // 64,) == resolved.model.heads
  _check_optimizer(resolved.optim)


def _check_optimizer(optim: config.OptimConfig) -> None:
  assert (optim.beta1, optim.beta2, optim.weight_decay, optim.clip_norm) == (0.9, 0.95, 0.1, 1)


@pytest.mark.parametrize('variant', COUNTS['transformer_pile'])
def test_a_transformer_on_the_pile_is_a_twin_of_the_tokenformer(variant):
  ours, theirs = _resolve('lm_pile', variant), _resolve('transformer_pile', variant)
  twin = dataclasses.replace(_transformer(ours.model), tied_head=False)
  assert theirs == dataclasses.replace(ours, model=twin)


def _transformer(model: config.ModelConfig) -> config.ModelConfig:
  """Return the model with matrices that have biases, and affine norms."""
  matrix = config.DenseConfig(bias=True)
  mixer = dataclasses.replace(model.layer.mixer, qkv=matrix, proj=matrix)
  layer = config.LayerConfig(mixer, config.MLPConfig(bias=True), norm='affine')
  return dataclasses.replace(model, layer=layer)


@pytest.mark.parametrize('variant', COUNTS['lm_llama'])
def test_a_llama_is_one_for_transformers(variant):
  family, _ = families.match(_resolve('lm_llama', variant).model)
  assert family.architecture == 'LlamaForCausalLM'


def test_the_dense_twin_of_the_default_has_as_many_parameters():
  counts = [_define(_resolve(name), 4096).count for name in ('lm_stdlib', 'transformer_stdlib')]
  assert math.isclose(*counts, rel_tol=0.02)


@pytest.mark.parametrize('variant', COUNTS['vit_imagenet'])
def test_vits_train_as_in_the_recipe(variant):
  resolved = _resolve('vit_imagenet', variant)
  model, data, optim, train = resolved.model, resolved.data, resolved.optim, resolved.train
  tokens = config.token_counts(model)
  assert tokens['qkv'] == tokens['proj'] == tokens['ffn'] // 4
  assert (data.image_size, model.patch, data.batch_size, data.rand_augment) == (224, 16, 4096, 9)
  assert (optim.beta1, optim.beta2, optim.weight_decay, optim.clip_norm) == (0.9, 0.95, 0.3, 0)
  assert (data.mixup, data.cutmix, data.label_smoothing) == (0.8, 1.0, 0.1)
  assert (optim.learning_rate, optim.warmup_epochs, train.ema) == (1.6e-3, 20, 0.9999)
  large = variant.startswith('l')
  assert (train.epochs, model.drop_path) == ((200, 0.2) if large else (300, 0.1))


def test_the_rate_of_a_vit_follows_the_batch():
  get_config = runpy.run_path(str(ROOT / 'configs/vit_imagenet.py'))['get_config']
  values = get_config()
  values.data.batch_size = 512
  assert config.resolve(values).optim.learning_rate == pytest.approx(2e-4)


@pytest.mark.parametrize('variant', COUNTS['transformer_vit_imagenet'])
def test_the_usual_vit_is_a_twin_of_the_tokenformer(variant):
  ours = _resolve('vit_imagenet', variant)
  want = dataclasses.replace(ours, model=_transformer(ours.model))
  assert _resolve('transformer_vit_imagenet', variant) == want


def test_the_dense_twin_of_the_digits_has_as_many_parameters():
  counts = [_define(_resolve(name)).count for name in ('vit_digits', 'transformer_vit_digits')]
  assert math.isclose(*counts, rel_tol=0.001)


def test_fine_tuning_starts_from_the_model_of_the_first_run():
  resolved, first = _resolve('vit_finetune'), _resolve('vit_imagenet', 'b16')
  assert resolved.model == first.model and resolved.init_from == 'runs/vit_imagenet_b16'
  assert resolved.data.image_size != first.data.image_size and resolved.optim.layer_decay < 1


@pytest.mark.parametrize('variant', HYBRIDS['LARGE'])
def test_large_hybrids_are_those_of_the_paper(variant):
  resolved = _resolve('lm_hybrid', variant)
  model, mixer = resolved.model, resolved.model.layer.mixer
  assert (model.depth, model.width, resolved.data.sequence_length) == (24, 768, 512)
  assert (mixer.width, mixer.head_width, mixer.normalise) == (1536, 128, 'softmax')
  windows = {name: layer.mixer.window for name, layer in model.layers.items()}
  want = {'gau_24x768': {'layer': 0}, 'hwfa_24x768': {'local': 16, 'full': 0}}
  assert windows == want.get(variant, {'local': 64, 'full': 0})


def test_deepseekmoe_16b_has_the_published_size():
  definition = _define(_resolve('lm_deepseekmoe', '16b'))
  assert round(definition.count / 1e9, 2) == 16.38  # 16.4B
  assert round(definition.active / 1e9, 2) == 2.83  # 2.8B


def test_a_sparse_tokenformer_has_8_times_the_parameters_at_a_third_more_work():
  dense, sparse = _resolve('lm_openwebtext', '124m'), _resolve('lm_sparse_tokenformer', '124m_8x')
  assert _define(sparse).count / _define(dense).count == pytest.approx(8.34, abs=0.01)
  ratio = flops.step_flops(sparse) / flops.step_flops(dense)
  assert ratio == pytest.approx(1.29, abs=0.01)
  shared = config.with_references(dense.model).layer
  assert config.with_references(sparse.model).layer.ffn.shared == shared.ffn
  assert config.with_references(sparse.model).layer.mixer == shared.mixer


@pytest.mark.parametrize('name', FILES)
def test_an_unknown_variant_is_told_all_there_are(name):
  with pytest.raises(UserError, match=f'must be one of {", ".join(FILES[name])}$'):
    _resolve(name, 'nope')
