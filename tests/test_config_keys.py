"""What `train.py --help` says of the config's keys."""

from tokenformer_jax.config import Config, fields, keys


def test_every_key_says_what_it_means():
  silent = [leaf.path for leaf in fields.leaves(Config()) if not leaf.key.meaning]
  assert not silent, f'`fields.key` beside the field says what it is: {silent}'


def test_a_key_has_its_default_its_choices_its_meaning_and_its_scope():
  found = {leaf.path: leaf for leaf in fields.leaves(Config())}
  schedule, window = found['optim.schedule'], found['model.layer.mixer.window']
  assert (schedule.value, schedule.key.choices) == ('cosine', ('cosine', 'constant'))
  assert 'warm-up' in schedule.key.meaning, 'a field has the meaning of another one'
  assert window.key.meaning.startswith('how many positions')
  assert 'reference_tokens' in found['model.layer.ffn.reference'].key.meaning, (
    'the meaning of a group is not said of its keys'
  )
  assert (
    found['model.patch'].key.only == 'vit' and found['model.layer.mixer.window'].key.only == 'lm'
  )
  assert found['model.width'].key.only == '' == found['data.source'].key.only, (
    'a key for all models is said to be for one kind'
  )


def test_every_key_is_listed_once():
  listed = [line.partition('=')[0] for line in keys.render().splitlines() if line[2:3].strip()]
  paths = [leaf.path for leaf in fields.leaves(Config())]
  assert [line[2:] for line in listed if line.startswith('  ')] == paths, 'a key is not in --help'


def test_the_list_fits_a_terminal():
  lines = keys.render().splitlines()
  assert max(map(len, lines)) <= 100, 'a line is wider than 100 columns'
  assert any(line.startswith('  train.steps=1000 ') for line in lines), lines


def test_the_list_says_which_model_a_key_is_for():
  lines = keys.render().splitlines()
  assert any(line.startswith('  model.patch=16 ') and '  [vit] ' in line for line in lines)
  assert any(
    line.startswith('  optim.old_tokens=train ') and '  [grown] ' in line for line in lines
  )
  assert '[vit]' in lines[0] and '[grown]' in lines[0], 'nothing says what the marks mean'
