"""The config's keys in `train.py --help`."""

from tokenformer_jax.cli import help_text
from tokenformer_jax.config import names

ALL = names.keys()


def _listed(word: str = '') -> list[str]:
  lines = help_text.render_keys(word).splitlines()
  return [line[2:].partition('=')[0] for line in lines if line.startswith('  ') and line[2] != ' ']


def test_every_key_has_a_meaning():
  silent = [path for path, leaf in ALL.items() if not leaf.meaning]
  assert not silent, f'`section.key` beside the field has the meaning: {silent}'


def test_a_key_has_its_default_its_choices_and_its_meaning():
  schedule, window = ALL['optim.schedule.kind'], ALL['model.layer.mixer.window']
  assert (schedule.value, schedule.choices) == (
    'cosine',
    ('cosine', 'linear', 'wsd', 'constant'),
  )
  assert 'warm-up' in schedule.meaning, 'a field has the meaning of another one'
  assert window.meaning.startswith('positions that a token')
  assert ALL['model.layer.ffn.kind'].choices == ('pattention', 'mlp', 'experts', 'none')
  assert ALL['model.layer.ffn.tokens'].value == 512


def test_every_key_is_in_the_list_of_its_kind():
  for path in ('train.steps', 'model.width', 'data.mixture.NAME.weight', 'mesh.fsdp', 'dtype'):
    assert path in _listed(), f'{path} is not in --help'
  for section, key in (
    ('model.vit', 'model.patch'),
    ('data.images', 'data.flip'),
    ('optim.muon', 'optim.momentum'),
    ('optim.schedule.wsd', 'optim.schedule.decay_share'),
    ('model.layer.mixer', 'model.layer.mixer.kv_heads'),
    ('model.layer.mixer.linear', 'model.layer.mixer.heads'),
    ('model.layer.ffn.experts.balance.bias', 'model.layer.ffn.balance.rate'),
  ):
    assert key in _listed(section), f'{key} is not in --help={section}'


def test_the_keys_of_a_model_fit_on_a_screen():
  assert len(help_text.render_keys('model').splitlines()) < 50
  assert len(help_text.render_keys('optim').splitlines()) < 50
  lines = help_text.render_keys().splitlines()
  assert max(map(len, lines)) <= 100, 'a line is wider than 100 columns'
  assert any(line.startswith('  train.steps=1000 ') for line in lines), lines


def test_a_word_narrows_the_list_to_the_keys_of_all_kinds_that_have_it():
  assert all('.mixer.' in path for path in _listed('mixer.'))
  assert 'optim.schedule.kind' in _listed('WSD') and 'train.decay_from' in _listed('wsd')
  assert 'model.patch' in _listed('patch')
  assert help_text.render_keys('frobnicate') == ''
