"""`--help` of each command: its own flags, within a terminal, exit status 0."""

import re

import pytest
import typed

from tokenformer_jax.cli import verbs


@pytest.mark.parametrize('name', verbs.VERBS)
def test_help_is_short_with_an_example_and_the_command_s_own_flags(name):
  done = typed.command([name, '-h' if name == 'plot' else '--help'])
  lines = done.stdout.splitlines()
  assert done.returncode == 0, f'exit status {done.returncode} for a question:\n{done.stderr}'
  assert max(map(len, lines)) <= 100, 'a line is wider than 100 columns'
  assert not [word for word in ('orbax', 'grain', 'absl', 'logtostderr') if word in done.stdout], (
    'flags of other libraries hide those of the command'
  )
  if name != 'train':
    assert len(lines) < 64, 'nobody reads so much to find a flag'
    assert re.search(rf'^ *tokenformer {name} ', done.stdout, re.MULTILINE), 'there is no example'
  if name in ('inspect', 'grow', 'generate'):
    assert '  --source' in done.stdout, done.stdout


def test_help_of_training_lists_the_keys():
  """The list itself is in test_config_keys.py."""
  done = typed.command(['train', '--help'])
  assert '  --workdir ' in done.stdout
  assert (
    '  optim.schedule.kind=cosine        cosine | linear | wsd | constant; the rate' in done.stdout
  )


def test_a_word_narrows_the_help():
  for arguments, has, hasnt in (
    (['train', '--help=optim'], '  optim.schedule.kind=cosine ', '  train.steps'),
    (['train', '--help=workdir'], '  --workdir  ', 'optim.schedule'),
    (['grow', '--help=expert'], '  --expert_tokens  ', '--source'),
  ):
    done = typed.command(arguments)
    assert done.returncode == 0 and has in done.stdout and hasnt not in done.stdout, done.stdout
    assert len(done.stdout.splitlines()) < 80
  done = typed.command(['grow', '--help=frobnicate'])
  assert done.returncode == 2 and 'no flag or key has this in its name' in done.stderr


def test_each_action_has_a_help_of_its_own():
  done = typed.command(['grow', '--help'])
  assert '  --method=group            group | zero_keys | duplicate' in done.stdout, done.stdout
  done = typed.command(['grow', 'shrink', '--help'])
  assert done.stdout.startswith('Keep the tokens that matter most'), done.stdout
  assert '  --examples=16 ' in done.stdout and '--layers' not in done.stdout
