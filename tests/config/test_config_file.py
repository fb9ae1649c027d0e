"""A config file as --config loads it, with values that flags override."""

import sys
from pathlib import Path

import pytest
from absl import flags

from tokenformer_jax import config, flag_mistakes
from tokenformer_jax.config import file as config_file
from tokenformer_jax.errors import UserError

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

  def load(source: str, *arguments: str, variant: str = '') -> config.Config:
    (tmp_path / 'mine.py').write_text(source)
    line = ['train.py', f'--config={tmp_path}/mine.py{variant}', *arguments]
    monkeypatch.setattr(sys, 'argv', line)
    config_file.define('The config.')
    flag_mistakes.parse(line)
    return config_file.read()

  yield load
  for name in set(flags.FLAGS) - known:
    delattr(flags.FLAGS, name)


def test_a_variant_is_an_argument(load):
  assert load(VARIANTS, variant=':large').model.depth == 8
  assert config_file.name() == 'mine_large', 'the default work directory is not told by its name'


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
    ('c.model.init_std = 0.1', "'model.init_std' is unknown; it is called 'model.init.std' now"),
    ('c.model.update(init_std=0.1)', "'model.init_std' is unknown; it is called 'model.init.std'"),
    ('print(c.model.init_std)', "line 5, fails with .*; it is called 'model.init.std' now"),
    ('c.model.heads = 8', "'model.heads' is unknown; it is called 'model.layer.mixer.heads' now"),
    (
      'c.model.param_tokens.update(qkv=64)',
      "line 5, fails with .*; it is called 'model.layer.mixer.qkv.tokens', .* and "
      "'model.layer.ffn.tokens' now",
    ),
  ],
)
def test_a_file_of_an_earlier_version_is_told_the_new_name_of_a_key(line, sentence, load):
  source = VARIANTS.replace('c = config.defaults()', f'c = config.defaults(); {line}')
  with pytest.raises(UserError, match=sentence):
    load(source)


def test_no_bytecode_is_written_beside_a_config(load, tmp_path, monkeypatch):
  monkeypatch.setattr(sys, 'dont_write_bytecode', False)
  load(VARIANTS)
  assert [path.name for path in Path(tmp_path).iterdir()] == ['mine.py']
