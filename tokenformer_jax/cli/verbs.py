"""Define the console command `tokenformer`; a verb's module is imported when the verb runs."""

import importlib
import sys

import tokenformer_jax
from tokenformer_jax.errors import nearest

_HELP = ('--help', '-help', '-h', '--helpshort', 'help')


# A verb is a module of its name in this folder, and a line here for the help.
VERBS = {
  'train': 'train a model, or go on with a run',
  'grow': 'make a trained model larger, exactly',
  'plan': 'check whether a run fits on TPUs, and how fast it is, without a TPU',
  'generate': 'write text with a model',
  'evaluate': 'measure a model on tasks and on texts',
  'convert': 'bring models of the hub (transformers, PEFT adapters) and PyTorch weights, and back',
  'inspect': 'show what the parameter tokens respond to, and which are used',
  'sweep': 'train the grid of runs that a scaling law needs',
  'family': 'train models of several sizes for less than each apart',
  'laws': 'fit scaling laws to runs, predict by them, and plan growth',
  'plot': 'draw the curves of runs',
  'report': 'write a page about runs: curves, lineage, costs, samples, parameter tokens',
  'prepare': 'tokenize the text of a run beforehand, on all cores and without accelerators',
  'verify': 'compare a token store with the digests recorded when it was built',
}


def main() -> None:
  """Run the verb that the first argument names."""
  verb, *rest = sys.argv[1:] or ['--help']
  if verb in _HELP:
    print(_render())
    return
  if verb == '--version':
    print(f'tokenformer_jax {tokenformer_jax.__version__}')
    return
  if verb not in VERBS:
    print(f'error: {verb!r} is not a command of tokenformer{nearest(verb, VERBS)}', file=sys.stderr)
    sys.exit(2)
  sys.argv = [f'tokenformer {verb}', *rest]
  importlib.import_module(f'tokenformer_jax.cli.{verb}').run()


def _render() -> str:
  """Return the help, with a line for each verb."""
  lines = [f'  {name:10}{summary}' for name, summary in VERBS.items()]
  return '\n'.join(
    [
      'Train TokenFormers and grow them without changing what they compute.\n',
      *lines,
      '\ntokenformer VERB --help lists the flags of a verb.',
      'tokenformer --version prints the version.',
    ]
  )
