r"""Make a trained model larger without changing what it computes.

  tokenformer grow --source=DIR[@STEP] --target=DIR --param_tokens=qkv=N,proj=N,ffn=N
  tokenformer grow --source=DIR --target=DIR --layers=N --place=PLACE
  tokenformer grow --source=DIR --target=DIR --experts=N [--top_k=K] …
  tokenformer grow --source=DIR --target=DIR --method=net2net --width=N

New layers and experts add zero at first. Layers are copies of the layer before, or drawn `between`
the old ones or `behind` them. --pattern='local*10 full' is for rows that differ, --experts=NAME=N
for one kind of layer. Tokens of a Transformer are beside its matrices; the last form widens them.

A word before the flags names another action; groups of tokens are counted from 1:
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from absl import flags

from tokenformer_jax.cli import flag_uses, help_text, parse_flags
from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli.flag_uses import Use
from tokenformer_jax.config import GrowConfig, MeshConfig, arguments
from tokenformer_jax.config.groups import parse_numbers
from tokenformer_jax.config.section import leaves
from tokenformer_jax.config.sections import GROWTHS
from tokenformer_jax.errors import UserError, nearest
from tokenformer_jax.grow import job
from tokenformer_jax.grow.actions import ACTIONS, ASK_FOR, MEANINGS, Action
from tokenformer_jax.parallel import messages
from tokenformer_jax.storage import paths

_DEFAULT = 'grow'
_KEYS = {leaf.path: leaf for leaf in leaves(GrowConfig())}
_NUMBER = '-?[0-9]{1,13}'

# `--help` prints the docstring, so the actions of the table are a part of it.
__doc__ += ''.join(
  f'\n  {name:8} {action.summary}' for name, action in ACTIONS.items() if name != _DEFAULT
)


def define_flags() -> None:
  """Define the command's flags from the table of actions and the keys of `GrowConfig`."""
  flags.DEFINE_string('source', None, 'The run to start from: DIR, or DIR@STEP.', required=True)
  flags.DEFINE_string('target', None, 'The new work directory.')
  flags.DEFINE_string('mesh', None, "replica=N,fsdp=N,experts=N,tokens=N; default: the source's.")
  flags.DEFINE_bool('dry_run', False, 'Print the table and stop.')
  for name, meaning in MEANINGS.items():
    _define_flag(name, meaning)
  table = {name: list(_uses(name, action)) for name, action in ACTIONS.items()}
  flag_uses.declare(table, default=_DEFAULT, named=ASK_FOR)


def _define_flag(name: str, meaning: str) -> None:
  """Define the flag of an argument or key, by its type in the table."""
  if name in _KEYS:
    default, allowed = _KEYS[name].default, _KEYS[name].key.choices
    classes = {type(default)}
  else:
    uses = [action.arguments[name] for action in ACTIONS.values() if name in action.arguments]
    classes = set().union(*(arguments.classes(use.annotation) for use in uses)) - {type(None)}
    default, allowed = None if uses[0].default is uses[0].empty else uses[0].default, ()
  if allowed:
    flags.DEFINE_enum(name, default, allowed, meaning)
  elif classes == {int}:
    flags.DEFINE_integer(name, default, meaning)
  elif classes == {float}:
    flags.DEFINE_float(name, default, meaning)
  else:  # An empty list of groups has a meaning, for freeze.
    flags.DEFINE_string(name, '' if name == 'groups' else default, meaning)


def _uses(name: str, action: Action) -> Iterator[Use]:
  """Yield when each flag has an effect in an action."""
  if not action.makes_run:
    return
  yield Use('target mesh dry_run' if action.keys else 'target mesh')
  for argument in action.arguments:
    yield Use(argument, action.when.get(argument, ''))
  for key in action.keys:
    yield Use(key, action.when.get(key, GROWTHS.get(key, '') if name == _DEFAULT else ''))


def run() -> None:
  """Run the command with the arguments of this process."""
  define_flags()
  cli.run(main, positional=True)


def main(argv: Sequence[str]) -> None:
  """Run the action that the first word names."""
  name = argv[1] if len(argv) > 1 else _DEFAULT
  if name not in ACTIONS:
    raise UserError(f'unknown command {name!r}{nearest(name, ACTIONS)}')
  if len(argv) > 2:
    raise UserError(f'{argv[2]!r} after {name!r} is one word too many; name one action')
  action, values = ACTIONS[name], flags.FLAGS
  if not action.makes_run:
    print(action.function(values.source), flush=True)
    return
  if values.target is None:
    raise UserError(parse_flags.missing_flag('target'))
  given = {}
  for argument, parameter in action.arguments.items():
    if values[argument].present:
      given[argument] = _read(argument, parameter.annotation)
    elif parameter.default is parameter.empty:
      raise UserError(f'{name} needs --{argument}, to {action.summary}')
  keys = {key: _read_key(key) for key in action.keys if values[key].present}
  with job.start(
    values.source,
    paths.parse_path(values.target),
    GrowConfig(**keys),
    mesh_config=_read_mesh(),
    dry_run=values.dry_run,
    show=lambda text: print(text, flush=True),
  ) as work:
    step = action.run(work, **given)
    planned = work.meta.config.train.steps
  if step is not None:
    messages.say(f'wrote {values.target}, step {step}; to go on training it:')
    steps = max(planned, step) + planned
    print(
      f'{help_text.spell_command("train")} --workdir={values.target} --config.train.steps={steps}'
    )


def _read(flag: str, annotation: Any) -> Any:
  """Return the value of a flag in the type of an argument."""
  value, classes = flags.FLAGS[flag].value, arguments.classes(annotation)
  if isinstance(value, str):
    if Sequence in classes:
      value = parse_numbers(value, f'--{flag}', what=flag)
    elif int in classes and re.fullmatch(_NUMBER, value):
      value = int(value)
    elif Mapping in classes:
      value = _read_by_name(flag)
  return arguments.convert(annotation, value, f'--{flag}')


def _read_key(key: str) -> Any:
  leaf = _KEYS[key]
  return _read(key, Annotated[type(leaf.default), leaf.key])


def _read_by_name(flag: str) -> dict[str, int]:
  """Return the numbers of a flag such as --param_tokens=qkv=128,ffn=512, by name; '' for none."""
  numbers, text = {}, flags.FLAGS[flag].value
  for part in text.split(','):
    name, equals, number = part.rpartition('=')
    if not re.fullmatch(_NUMBER, number):
      short = part if len(part) <= 40 else f'{part[:40]}…'
      raise UserError(f'--{flag} has {short!r}; it must be {name if equals else "NAME"}=N')
    if name and name in numbers:
      raise UserError(f'--{flag} names {name} twice, as {text!r}; give every name once')
    numbers[name] = int(number)
  return numbers


def _read_mesh() -> MeshConfig | None:
  if flags.FLAGS.mesh is None:
    return None
  names = [field.name for field in dataclasses.fields(MeshConfig)]
  sizes = _read_by_name('mesh')
  for name in sizes:
    if name not in names:
      raise UserError(f'--mesh names {name!r}{nearest(name, names)}')
  return MeshConfig(**{**dict.fromkeys(names, 1), **sizes})
