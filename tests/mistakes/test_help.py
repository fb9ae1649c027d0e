"""`--help` of each command: its own flags, within a terminal, exit status 0."""

import re

import commands_server
import pytest

from tokenformer_jax.cli import verbs

VERBS = [name for name in verbs.VERBS if name != 'train']
COMMANDS = {
  'train': ['train.py'],
  **{name: ['-m', 'tokenformer_jax', name] for name in VERBS},
}

WAYS = ('help', '--help')


@pytest.mark.parametrize('name', COMMANDS)
def test_help_is_short_and_of_the_project_only(name, server):
  done = server.run([*COMMANDS[name], '-h' if name == 'plot' else '--help'], commands_server.ROOT)
  lines = done.out.splitlines()
  assert done.status == 0, f'exit status {done.status} for a question:\n{done.err}'
  assert max(map(len, lines)) <= 100, 'a line is wider than 100 columns'
  assert not [word for word in ('orbax', 'grain', 'absl', 'logtostderr') if word in done.out], (
    'flags of other libraries hide those of the command'
  )
  if name != 'train':
    assert len(lines) < 64, 'nobody reads so much to find a flag'


@pytest.mark.parametrize('name', VERBS)
def test_help_gives_an_example_in_the_form_that_was_typed(name, server):
  done = server.run([*COMMANDS[name], '--help'], commands_server.ROOT)
  example = rf'^ *python -m tokenformer_jax {name} '
  assert re.search(example, done.out, re.MULTILINE), done.out


@pytest.mark.parametrize('name', ['inspect', 'grow', 'generate'])
def test_help_lists_the_flags(name, server):
  done = server.run([*COMMANDS[name], '--help'], commands_server.ROOT)
  assert '  --source' in done.out, done.out


def test_help_of_training_lists_the_keys(server):
  """The list itself is in test_config_keys.py."""
  done = server.run(['train.py', '--help'], commands_server.ROOT)
  assert '  --workdir ' in done.out
  assert (
    '  optim.schedule.kind=cosine        cosine | linear | wsd | constant; the rate' in done.out
  )


def test_a_word_narrows_the_help(server):
  for arguments, has, hasnt in (
    (['train.py', '--help=optim'], '  optim.schedule.kind=cosine ', '  train.steps'),
    (['train.py', '--help=workdir'], '  --workdir  ', 'optim.schedule'),
    ([*COMMANDS['grow'], '--help=expert'], '  --expert_tokens  ', '--source'),
  ):
    done = server.run(arguments, commands_server.ROOT)
    assert done.status == 0 and has in done.out and hasnt not in done.out, done.out
    assert len(done.out.splitlines()) < 80
  done = server.run([*COMMANDS['grow'], '--help=frobnicate'], commands_server.ROOT)
  assert done.status == 2 and 'no flag or key has this in its name' in done.err


@pytest.mark.parametrize('name', ['grow', 'plan', 'convert'])
def test_the_word_help_is_the_flag(name, server):
  word, flag = (server.run([*COMMANDS[name], one], commands_server.ROOT) for one in WAYS)
  assert (word.status, word.out) == (0, flag.out), word.err


def test_each_action_has_a_help_of_its_own(server):
  done = server.run([*COMMANDS['grow'], 'shrink', '--help'], commands_server.ROOT)
  assert done.out.startswith('Keep the tokens that matter most'), done.out
  assert '  --examples=16 ' in done.out and '--layers' not in done.out


def test_help_names_the_default_and_the_choices_of_a_flag(server):
  done = server.run([*COMMANDS['grow'], '--help'], commands_server.ROOT)
  assert '  --method=group            group | zero_keys | duplicate' in done.out, done.out
