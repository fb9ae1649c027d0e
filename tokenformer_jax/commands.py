"""The console command `tokenformer`: its verbs, each in a module that is imported when typed."""

import importlib
import sys
from typing import NamedTuple

from tokenformer_jax.errors import nearest

_HELP = ('--help', '-help', '-h', '--helpshort', 'help')


class Verb(NamedTuple):
  """One thing that `tokenformer` does.

  Attributes:
    module: has `run`, which reads the arguments of this process.
    script: how to type it where `tokenformer` is not installed.
    summary: what it does.
  """

  module: str
  script: str
  summary: str


VERBS = {
  'train': Verb('train_command', 'python train.py', 'train a model, or go on with a run'),
  'grow': Verb(
    'grow.command', 'python -m tokenformer_jax.grow', 'make a trained model larger, exactly'
  ),
  'plan': Verb(
    'plan.command',
    'python -m tokenformer_jax.plan',
    'say whether a run fits on TPUs, and how fast it is, without a TPU',
  ),
  'generate': Verb('generate', 'python -m tokenformer_jax.generate', 'write text with a model'),
  'evaluate': Verb(
    'evaluate', 'python -m tokenformer_jax.evaluate', 'measure a model on tasks and on texts'
  ),
  'convert': Verb(
    'convert', 'python -m tokenformer_jax.convert', 'read and write released PyTorch weights'
  ),
  'inspect': Verb(
    'inspect.command',
    'python -m tokenformer_jax.inspect',
    'show what the parameter tokens answer to, and which are used',
  ),
  'plot': Verb('plot', 'python -m tokenformer_jax.plot', 'draw the curves of runs'),
  'verify': Verb(
    'data.verify',
    'python -m tokenformer_jax.data.verify',
    'compare a token store with the digests of its writing',
  ),
}


def main(program: str = 'tokenformer') -> None:
  """Run the verb that the first argument of this process names.

  Args:
    program: how this command was typed.
  """
  verb, *rest = sys.argv[1:] or ['--help']
  if verb in _HELP:
    print(_render(program))
    return
  if verb not in VERBS:
    print(f'error: {verb!r} is not a command of {program}{nearest(verb, VERBS)}', file=sys.stderr)
    sys.exit(2)
  sys.argv = [f'{program} {verb}', *rest]
  importlib.import_module(f'tokenformer_jax.{VERBS[verb].module}').run()


def _render(program: str) -> str:
  """Return the help: each verb in a line."""
  lines = [f'  {name:10}{verb.summary}' for name, verb in VERBS.items()]
  return '\n'.join(
    [
      'Train TokenFormers and grow them without changing what they compute.\n',
      *lines,
      f'\n{program} VERB --help lists the flags of a verb.',
    ]
  )
