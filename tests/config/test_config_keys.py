"""What `train.py --help` says of the config's keys."""

import dataclasses

from tokenformer_jax.cli import config_keys as keys
from tokenformer_jax.config import Config, SourceConfig, scope
from tokenformer_jax.config.section import leaves


def test_every_key_says_what_it_means():
  silent = [leaf.path for leaf in leaves(Config(), every=True) if not leaf.key.meaning]
  assert not silent, f'`section.key` beside the field says what it is: {silent}'


def test_a_key_has_its_default_its_choices_its_meaning_and_its_scope():
  found = {leaf.path: leaf for leaf in leaves(Config(), every=True)}
  schedule, window = found['optim.schedule'], found['model.layer.mixer.window']
  assert (schedule.value, schedule.key.choices) == (
    'cosine',
    ('cosine', 'linear', 'wsd', 'constant'),
  )
  assert 'warm-up' in schedule.key.meaning, 'a field has the meaning of another one'
  assert window.key.meaning.startswith('positions that a token')
  assert found['model.layer.ffn.kind'].key.choices == ('pattention', 'mlp', 'experts', 'none')
  assert (found['model.layer.ffn.tokens'].kinds, found['model.layer.ffn.tokens'].value) == (
    ('pattention',),
    512,
  )
  assert (found['model.layer.ffn.width'].kinds, found['model.layer.norm'].kinds) == (('mlp',), ())
  kinds = [
    scope.kind_of_model(path)
    for path in ('model.patch', 'model.layer.mixer.window', 'model.width', 'data.source')
  ]
  assert kinds == ['vit', 'lm', '', ''], 'a key is said to be for another kind of model'


def test_every_key_is_listed_once():
  listed = [line.partition('=')[0] for line in keys.render().splitlines() if line[2:3].strip()]
  paths = [leaf.path for leaf in leaves(Config(), every=True)]
  found = [line[2:] for line in listed if line.startswith('  ')]
  of_a_source = [path for path in found if path.startswith('data.mixture.NAME.')]
  assert [path for path in found if path not in of_a_source] == paths, 'a key is not in --help'
  keys_of_a_source = [
    f'data.mixture.NAME.{field.name}' for field in dataclasses.fields(SourceConfig)
  ]
  assert of_a_source == keys_of_a_source, 'a key of a source is not in --help'


def test_a_group_or_a_word_narrows_the_list():
  def listed(word: str) -> list[str]:
    lines = keys.render(word).splitlines()
    return [
      line[2:].partition('=')[0] for line in lines if line.startswith('  ') and line[2] != ' '
    ]

  of_optim = [leaf.path for leaf in leaves(Config(), every=True) if leaf.path[:6] == 'optim.']
  assert listed('optim') == of_optim and len(keys.render('optim').splitlines()) < 60
  assert listed('model.layer.mixer') and all('.mixer.' in path for path in listed('mixer.'))
  assert 'optim.schedule' in listed('WSD') and 'train.decay_from' in listed('wsd')
  assert 'as model' not in keys.render('ffn.tokens'), 'it refers to a key that is not listed'
  assert keys.render('frobnicate') == ''


def test_the_list_fits_a_terminal():
  lines = keys.render().splitlines()
  assert max(map(len, lines)) <= 100, 'a line is wider than 100 columns'
  assert any(line.startswith('  train.steps=1000 ') for line in lines), lines


def test_the_list_says_which_model_a_key_is_for():
  lines = keys.render().splitlines()
  assert any(line.startswith('  model.patch=16 ') and '  [vit] ' in line for line in lines)
  assert '[vit]' in lines[0], 'nothing says what the marks mean'


def test_the_list_says_which_kind_of_its_group_a_key_is_for():
  text = ' '.join(keys.render().split())
  assert ' model.layer.ffn.width=0 [mlp] F, the width' in text, 'a key of an MLP looks like any'
  assert ' model.layer.mixer.qkv.tokens=128 [pattention] N, the number' in text
  assert ' model.layer.ffn.tokens=512 [pattention] as model.layer.mixer.qkv.tokens ' in text, (
    'the same key of another projection is explained again'
  )
  assert 'model.variants' in text.partition('model.kind=')[0], 'nothing says what variants have'
