"""A config file as --config loads it, with values that flags override."""

import sys
from pathlib import Path

import pytest
from absl import flags

from tokenformer_jax import config
from tokenformer_jax.cli import config_flag, signatures
from tokenformer_jax.config import file
from tokenformer_jax.errors import UserError
from tokenformer_jax.runs import saved_config

VARIANTS = """
from tokenformer_jax import config

def get_config(variant='small'):
  c = config.defaults()
  c.model.pattern = {'small': 'layer*2', 'large': 'layer*8'}[variant]
  c.optim.learning_rate = c.data.get_ref('batch_size').to_float() * 1e-4
  return c
"""
PART = """
import dataclasses
from ml_collections import ConfigDict

@dataclasses.dataclass
class Sizes:
  width: 'int' = 64

def get_config():
  return ConfigDict({'model': {'width': Sizes().width}})
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
  """Loads a config file with flags, as a command does; the flags are taken back."""
  known = set(flags.FLAGS)

  def forget():
    for name in set(flags.FLAGS) - known:
      delattr(flags.FLAGS, name)

  def load(source: str, *arguments: str, variant: str = '') -> config.Config:
    forget()
    (tmp_path / 'mine.py').write_text(source)
    line = ['train.py', f'--config={tmp_path}/mine.py{variant}', *arguments]
    monkeypatch.setattr(sys, 'argv', line)
    config_flag.define('The config.')
    signatures.parse(line)
    return config_flag.read()

  yield load
  forget()


def test_a_variant_is_the_argument_of_get_config(load):
  assert load(VARIANTS, variant=':large').model.depth == 8
  assert config_flag.name('') == 'mine_large', 'the default work directory is not told by its name'


@pytest.mark.parametrize(('typed', 'steps'), [('1e4', 10_000), ('20', 20), ('2.5e3', 2500)])
def test_an_integer_may_be_written_in_powers_of_ten(typed, steps, load):
  assert load(VARIANTS, f'--config.train.steps={typed}').train.steps == steps


def test_a_value_follows_the_one_that_it_is_computed_from(load):
  assert load(VARIANTS, '--config.data.batch_size=50').optim.learning_rate == pytest.approx(5e-3)


def test_keys_that_a_file_leaves_out_have_their_defaults_and_can_be_overridden(load):
  got = load(PART, '--config.train.steps=7', '--config.model.pattern=layer*3')
  assert (got.model.width, got.model.depth, got.train.steps) == (64, 3, 7)
  assert got.data == config.Config().data


@pytest.mark.parametrize(
  ('line', 'sentence'),
  [
    ('c.model.heads = 8', "'model.heads' is unknown; did you mean 'model.layer.mixer.heads'?"),
    ('print(c.model.heads)', 'line 5, fails with AttributeError: .*heads'),
  ],
)
def test_a_file_with_an_unknown_key_is_refused(line, sentence, load):
  source = VARIANTS.replace('c = config.defaults()', f'c = config.defaults(); {line}')
  with pytest.raises(UserError, match=sentence):
    load(source)


def test_a_kind_may_be_assigned_in_the_place_of_its_section_as_in_a_flag(load):
  lines = "c.model.layer.ffn = 'mlp'; c.model.layer.ffn.width = 64; c.optim = 'lion'"
  got = load(VARIANTS.replace('c = config.defaults()', f'c = config.defaults(); {lines}'))
  assert got.model.layer.ffn == config.MLPConfig(64) and got.optim.kind == 'lion'


@pytest.mark.parametrize(
  ('path', 'value', 'allowed'),
  [
    ('model', 5, 'one of lm, vit, or a section of keys'),
    ('model.variants', 5, 'a section of layers by name, set by model.variants.NAME.KEY'),
    ('train', 5, 'a section of keys'),
    ('model.pattern', ['layer'], 'text'),
    ('model.layer.mixer.heads', 1.5, 'an integer'),
    ('optim.learning_rate', '1e-3', 'a number'),
    ('train.trackers', 'wandb', 'a list'),
    ('data.deduplicate', 'yes', 'True or False'),
  ],
)
def test_an_assignment_of_another_type_is_refused_at_once(path, value, allowed):
  section, _, name = path.rpartition('.')
  values = config.defaults()
  with pytest.raises(UserError) as error:
    setattr(values[section] if section else values, name, value)
  assert str(error.value) == f'config.{path} is {value!r}; it must be {allowed}'


def test_no_bytecode_is_written_beside_a_config(load, tmp_path, monkeypatch):
  monkeypatch.setattr(sys, 'dont_write_bytecode', False)
  load(VARIANTS)
  assert [path.name for path in Path(tmp_path).iterdir()] == ['mine.py']


# Layers by name

LAYERS = """
from tokenformer_jax import config

def get_config():
  c = config.defaults()
  c.model.pattern = 'local*2 dense layer'
  c.model.layer.ffn.tokens = 384
  c.model.layer.mixer.heads = 2
  c.model.variants.local = {'mixer': {'window': 16}}
  c.model.variants.dense = {'ffn': {'kind': 'mlp', 'width': 64}}
  return c
"""


def test_a_flag_on_model_layer_reaches_the_layers_that_do_not_set_the_key(load):
  flags = ['mixer.heads=8', 'mixer.window=32', 'ffn.tokens=96']
  layers = load(LAYERS, *(f'--config.model.layer.{flag}' for flag in flags)).model.layers
  assert layers['local'].mixer.heads == layers['dense'].mixer.heads == 8, 'a flag is not followed'
  assert (layers['local'].mixer.window, layers['dense'].mixer.window) == (16, 32), (
    'a flag on model.layer does not reach exactly the layers that follow it'
  )
  assert layers['local'].ffn.tokens == 96 and layers['dense'].ffn == config.MLPConfig(64)


def test_a_flag_on_one_layer_changes_no_other(load):
  flag = '--config.model.variants.local.mixer.window=4'
  layers = load(LAYERS, flag, '--config.model.variants.local.mixer.heads=4').model.layers
  assert (layers['local'].mixer.window, layers['local'].mixer.heads) == (4, 4)
  assert (layers['layer'].mixer.window, layers['layer'].mixer.heads) == (0, 2), (
    'a flag on a variant changes model.layer'
  )


def test_flags_may_name_a_layer_that_the_file_does_not_have(load):
  pattern = '--config.model.pattern=(near layer)*2'
  layers = load(VARIANTS, pattern, '--config.model.variants.near.mixer.window=4').model.layers
  assert (layers['near'].mixer.window, layers['layer'].mixer.window) == (4, 0)
  with pytest.raises(UserError, match=r"has 'neer', which is not in model\.pattern"):
    load(VARIANTS, '--config.model.variants.neer.mixer.window=4')


def test_a_change_of_the_layer_reaches_the_variants_of_a_stored_config(load, tmp_path):
  change = {'model.layer.ffn.tokens': 64, 'model.layer.mixer.heads': 2}
  model = {'pattern': 'layer a', 'variants': {'a': {'mixer': {'window': 16}}}}
  stored = config.resolve({'model': model})
  (tmp_path / 'config.json').write_text(saved_config.to_text(stored))
  of_run = [file.read(f'saved:{tmp_path}', change)]
  for one in (stored, config.to_config_dict(stored)):
    of_run.append(file.from_argument(one, **config.from_dotted(change)))
  for changed in of_run:
    variant = changed.model.variants['a']
    assert (variant.ffn.tokens, variant.mixer.heads, variant.mixer.window) == (64, 2, 16)
  own = config.resolve({'model': {**model, 'variants': {'a': {'ffn': {'tokens': 96}}}}})
  with pytest.raises(UserError, match=r'no effect with model.variants.a.ffn.kind=mlp'):
    file.from_argument(own, model={'layer': {'ffn': {'kind': 'mlp'}}})


def test_a_flag_that_chooses_another_kind_leaves_what_the_file_said_of_the_former(load):
  got = load(LAYERS, '--config.model.layer.ffn.kind=mlp').model.layers
  assert got['layer'].ffn == got['local'].ffn == config.MLPConfig(), (
    'a change of kind needs every key of the former kind taken out'
  )
  assert got['dense'].ffn == config.MLPConfig(64)
  back = load(LAYERS, '--config.model.variants.dense.ffn.kind=pattention').model.layers
  assert back['dense'].ffn == config.PattentionConfig(384), 'it is no version of model.layer'


def test_a_flag_for_a_kind_that_another_flag_takes_away_is_a_mistake(load):
  for group in ('layer', 'variants.local'):
    kind, tokens = f'--config.model.{group}.ffn.kind=mlp', f'--config.model.{group}.ffn.tokens=5'
    with pytest.raises(UserError, match=rf'config\.model\.{group}\.ffn\.tokens is 5, which has no'):
      load(LAYERS, kind, tokens)


# Sources by name

SOURCES = """
from tokenformer_jax import config

def get_config():
  c = config.defaults()
  c.data.mixture.law = {'source': 'files:law', 'weight': 0.9}
  c.data.mixture.replay = {'source': 'stdlib', 'weight': 0.1}
  return c
"""


def test_a_new_domain_with_replay_is_two_lines_of_a_file(load):
  found = load(SOURCES).data.mixture
  assert found == config.Sources(
    {
      'law': config.SourceConfig(source='files:law', weight=0.9),
      'replay': config.SourceConfig(source='stdlib', weight=0.1),
    }
  )
  assert hash(found) == hash(config.Sources(dict(sorted(found.items(), reverse=True))))


def test_flags_change_a_source_of_a_file_and_add_others(load):
  flags = ['law.weight=0.5', 'more.source=files:more', 'more.weight=0.4']
  found = load(SOURCES, *(f'--config.data.mixture.{flag}' for flag in flags)).data.mixture
  assert found['law'] == config.SourceConfig(source='files:law', weight=0.5)
  assert found['more'] == config.SourceConfig(source='files:more', weight=0.4)


@pytest.mark.parametrize(
  ('line', 'sentence'),
  [
    ('c.data.mixture.law.wieght = 1.0', r"'data\.mixture\.law\.wieght' is unknown; did you mean"),
    ('c.data.mixture.more = 3', r'config\.data\.mixture\.more is 3; it must be a section'),
    (
      'c.data.mixture.more = {"weight": "1"}',
      r"more\.weight is '1'; it must be a valid number",
    ),
  ],
)
def test_a_mistake_in_a_source_of_a_file_is_named(line, sentence, load):
  text = SOURCES.replace('  return c', f'  {"with c.unlocked(): " + line}\n  return c')
  with pytest.raises(UserError, match=sentence):
    load(text)


def test_a_printed_config_fits_on_a_screen_and_has_every_key():
  lines = str(config.defaults()).splitlines()
  assert len(lines) < 60 and max(map(len, lines)) <= 100
  text = '\n'.join(lines)
  for name in ("kind: 'lm'", 'heads: 4', "schedule: {kind: 'cosine'", 'trackers: ('):
    assert name in text
