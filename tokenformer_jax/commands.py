"""Define the console command `tokenformer`; a verb's module is imported when the verb runs."""

import importlib
import sys
from typing import NamedTuple

from tokenformer_jax.errors import nearest

_HELP = ('--help', '-help', '-h', '--helpshort', 'help')


class Verb(NamedTuple):
  """A verb of `tokenformer`.

  Attributes:
    module: the module whose `run` reads the arguments of this process.
    script: the command to type where `tokenformer` is not installed.
    summary: a line for the help.
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
    'convert.command',
    'python -m tokenformer_jax.convert',
    'read and write released weights; change the rotary layout of a run',
  ),
  'inspect': Verb(
    'inspection.command',
    'python -m tokenformer_jax.inspect',
    'show what the parameter tokens respond to, and which are used',
  ),
  'sweep': Verb(
    'sweep', 'python -m tokenformer_jax.sweep', 'train the grid of runs that a scaling law needs'
  ),
  'laws': Verb(
    'laws.command',
    'python -m tokenformer_jax.laws',
    'fit scaling laws to runs, predict by them, and plan growth',
  ),
  'plot': Verb('plot', 'python -m tokenformer_jax.plot', 'draw the curves of runs'),
  'verify': Verb(
    'data.verify',
    'python -m tokenformer_jax.data.verify',
    'compare a token store with the digests recorded when it was built',
  ),
}


def main(program: str = 'tokenformer') -> None:
  """Run the verb that the first argument of this process names.

  Args:
    program: the name under which this command was typed.
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
  """Return the help, with a line for each verb."""
  lines = [f'  {name:10}{verb.summary}' for name, verb in VERBS.items()]
  return '\n'.join(
    [
      'Train TokenFormers and grow them without changing what they compute.\n',
      *lines,
      f'\n{program} VERB --help lists the flags of a verb.',
    ]
  )
