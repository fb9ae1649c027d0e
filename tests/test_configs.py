"""Every config file resolves, alone and from anywhere, to the model that it says it is."""

import dataclasses
import math
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tokenformer_jax import config, sharding
from tokenformer_jax.errors import UserError
from tokenformer_jax.lm import define_lm
from tokenformer_jax.params import Definition

ROOT = Path(__file__).parents[1]

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
}
VARIANTS = [(name, variant) for name, counts in COUNTS.items() for variant in counts]


def _resolve(name: str, *variant: str) -> config.Config:
  get_config = runpy.run_path(str(ROOT / 'configs' / f'{name}.py'))['get_config']
  return config.resolve(get_config(*variant))


def _define(resolved: config.Config, **changes: int) -> Definition:
  length = resolved.model.max_length or resolved.data.sequence_length
  return define_lm(dataclasses.replace(resolved.model, max_length=length, **changes))


@pytest.mark.parametrize(
  'path',
  sorted(set((ROOT / 'configs').glob('*.py')) - {ROOT / 'configs/saved.py'}),  # that of a run
  ids=lambda path: path.name,
)
def test_every_file_resolves_without_a_variant(path):
  _resolve(path.stem)


@pytest.mark.parametrize(('name', 'variant'), VARIANTS)
def test_parameters_are_counted_exactly_and_split_over_64_chips(name, variant):
  resolved = _resolve(name, variant)
  definition = _define(resolved)
  assert definition.count == COUNTS[name][variant]
  table = (ROOT / 'configs' / f'{name}.py').read_text().split('"""')[1]
  rows = [line.split()[:2] for line in table.splitlines()]
  assert [variant, f'{definition.count:,}'] in rows, 'the table on top of the file is out of date'

  mesh = jax.sharding.AbstractMesh((1, 64, 1), sharding.MESH_AXES)
  sharding.check_divides(mesh, definition.abstract, definition.axes)
  sharding.check_divisible(mesh, 'batch', resolved.data.batch_size, 'of the batch')


@pytest.mark.parametrize('name', COUNTS)
def test_an_unknown_variant_is_told_all_there_are(name):
  with pytest.raises(UserError) as error:
    _resolve(name, 'nope')
  assert str(error.value).endswith(f'must be one of {", ".join(COUNTS[name])}')


def test_the_command_line_finds_a_shared_file_from_anywhere_and_gives_one_sentence(tmp_path):
  # The error comes from lm_pile.py, which transformer_pile.py builds on.
  path = ROOT / 'configs' / 'transformer_pile.py'
  command = [sys.executable, str(ROOT / 'train.py'), f'--config={path}:nope']
  done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
  assert done.returncode == 2
  last_line = done.stderr.splitlines()[-1]
  assert last_line.startswith("error: config variant is 'nope'"), done.stderr
  assert 'Traceback' not in done.stderr


@pytest.mark.parametrize('variant', COUNTS['lm_pile'])
def test_pile_models_train_as_in_the_paper(variant):
  resolved = _resolve('lm_pile', variant)
  model, optim = resolved.model, resolved.optim
  width = model.width
  assert model.param_tokens == config.TokenCounts(qkv=width, proj=width, ffn=4 * width)
  assert (resolved.data.batch_size, resolved.data.sequence_length) == (1024, 2048)
  assert (resolved.train.steps, optim.warmup_steps) == (143_000, 1430)
  assert (optim.learning_rate, optim.final_fraction) == (6e-4, 0.1)
  _check_optimizer(optim)


@pytest.mark.parametrize('variant', COUNTS['lm_openwebtext'])
def test_growth_changes_only_the_parameter_tokens(variant):
  first, grown = _resolve('lm_openwebtext', '124m'), _resolve('lm_openwebtext', variant)
  same_but_for_growth = dataclasses.replace(grown.model, param_tokens=first.model.param_tokens)
  assert same_but_for_growth == first.model, 'the larger model would not compute what this one does'
  assert grown.model.reference_tokens == config.TokenCounts(qkv=576, proj=576, ffn=2304)
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
  assert (resolved.optim.learning_rate, resolved.optim.final_fraction) == (6e-4, 0)
  assert resolved.optim.warmup_steps == 2000
  assert resolved.model.width == 64 * resolved.model.heads
  _check_optimizer(resolved.optim)


def _check_optimizer(optim: config.OptimConfig) -> None:
  assert (optim.beta1, optim.beta2, optim.weight_decay, optim.clip_norm) == (0.9, 0.95, 0.1, 1)


@pytest.mark.parametrize('variant', COUNTS['transformer_pile'])
def test_a_transformer_on_the_pile_is_a_twin_of_the_tokenformer(variant):
  ours, theirs = _resolve('lm_pile', variant), _resolve('transformer_pile', variant)
  dense = {'projection': 'dense', 'bias': True, 'block_norm': 'affine', 'tied_head': False}
  assert theirs == dataclasses.replace(ours, model=dataclasses.replace(ours.model, **dense))


def test_the_dense_twin_of_the_default_has_as_many_parameters():
  counts = [
    _define(_resolve(name), vocab_size=4096).count for name in ('lm_stdlib', 'transformer_stdlib')
  ]
  assert math.isclose(*counts, rel_tol=0.02)
