"""What `train.py --help` says of the config's keys."""

from tokenformer_jax import config, config_keys


def test_every_key_is_listed_once_with_a_comment():
  keys = config_keys.all_keys()
  assert [key.path for key in keys] == config.paths(), 'a key is not in --help'
  silent = [key.path for key in keys if not key.comment]
  assert not silent, f'a comment beside the field in config.py says what it is: {silent}'


def test_a_key_has_its_default_its_choices_and_its_comment():
  keys = {key.path: key for key in config_keys.all_keys()}
  schedule, window = keys['optim.schedule'], keys['model.window']
  assert (schedule.default, schedule.choices) == ('cosine', ('cosine', 'constant'))
  assert 'warm-up' in schedule.comment, 'the comment behind a field is not its own'
  assert window.comment.startswith('How many positions'), 'comments above a field are left out'
  assert 'reference_tokens' in keys['model.reference_tokens.ffn'].comment, 'of a group: the same'
  assert keys['model.patch'].heading == "Only for kind='vit':"
  assert keys['model.init_std'].heading == '' == keys['data.source'].heading, (
    'a heading is for the fields that follow it in its class'
  )


def test_the_list_fits_a_terminal():
  lines = config_keys.render().splitlines()
  assert max(map(len, lines)) <= 100, 'a line is wider than 100 columns'
  assert any(line.startswith('  train.steps=1000 ') for line in lines), lines
