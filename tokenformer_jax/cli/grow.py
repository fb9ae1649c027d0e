r"""Make a trained model larger without changing what it computes.

  tokenformer grow --source=DIR[@STEP] --target=DIR --param_tokens=qkv=N,proj=N,ffn=N
  tokenformer grow --source=DIR --target=DIR --layers=N --place=PLACE
  tokenformer grow --source=DIR --target=DIR --experts=N [--top_k=K] …
  tokenformer grow --source=DIR --target=DIR --method=net2net --width=N

New layers and experts add zero at first. Layers are copies of the layer before, or drawn `between`
the old ones or `behind` them. --pattern='local*10 full' is for rows that differ, --experts=NAME=N
for one kind of layer. The last form widens a Transformer.

A word before the flags names another action; groups of tokens are counted from 1:

  extract  write only the tokens that the last growth added, or those of --groups=2
  merge    append the tokens of --added, from extract or another run, to those of --source
  remove   take out what the last growth or merge added, or --groups=2,3, or --experts=2,3
  shrink   keep the most important tokens (--param_tokens), or the most used experts (--experts=N)
  groups   print a table of the groups and of where they come from; needs no --target
  slice    keep the first --groups=N groups of each projection
  scale    multiply the values of --groups=2 by --factor=0.5
  freeze   train all groups but --groups=1,2 from here on; --groups= trains all
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

from absl import flags

from tokenformer_jax import config
from tokenformer_jax.cli import flag_uses, help_text
from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli.flag_uses import Use
from tokenformer_jax.config import GrowConfig, MeshConfig, choices, fields
from tokenformer_jax.config.groups import parse_numbers
from tokenformer_jax.errors import UserError, nearest
from tokenformer_jax.grow import actions, expert_actions, experts, group_actions, state, wanted
from tokenformer_jax.grow.actions import Source, Target
from tokenformer_jax.parallel import messages
from tokenformer_jax.storage import paths

_MOST = 10**12  # the largest number that a flag may have
_KEYS = {leaf.path: leaf.key for leaf in fields.leaves(GrowConfig())}

# The flags that ask for a change, by its name in `config.sections.CHANGES`.
_CHANGES = {
  'more_tokens': 'param_tokens',
  'wider': 'width or heads or ffn_width',
  'more_experts': 'experts',
  'deeper': 'layers or pattern',
}
_WHYS = {'place': 'is of new layers; say how many: --layers=N or --pattern=PATTERN'}
_OF_EXPERTS = 'is of new experts; say how many: --experts=N'
_ANYWHERE = Use('target mesh')
# The flags that have an effect in each action, and when.
_USES = {
  'grow': (
    _ANYWHERE,
    Use('param_tokens layers pattern width heads ffn_width experts dry_run'),
    Use('expert_tokens top_k', 'experts', _OF_EXPERTS),
    *(Use(name, key.growth, _WHYS.get(name, '')) for name, key in _KEYS.items()),
  ),
  'extract': (_ANYWHERE, Use('groups')),
  'merge': (_ANYWHERE, Use('added scale moments step dry_run')),
  'remove': (_ANYWHERE, Use('groups experts moments step dry_run')),
  'shrink': (
    _ANYWHERE,
    Use('param_tokens experts moments step examples dry_run'),
    Use('scale', 'param_tokens'),
  ),
  'groups': (),
  'slice': (_ANYWHERE, Use('groups moments step dry_run')),
  'scale': (_ANYWHERE, Use('groups factor')),
  'freeze': (_ANYWHERE, Use('groups')),
}


def define_flags() -> None:
  """Define the command's flags."""
  values = GrowConfig()
  flags.DEFINE_string('source', None, 'The run to start from: DIR, or DIR@STEP.', required=True)
  flags.DEFINE_string('target', None, 'The new work directory.')
  flags.DEFINE_string(
    'param_tokens',
    None,
    'New counts: qkv=N,proj=N,ffn=N; NAME.ffn=N for one kind.',
  )
  flags.DEFINE_integer('layers', None, 'The new number of layers, all of the rows that there are.')
  flags.DEFINE_string('pattern', None, "The new pattern of layers, such as 'local*10 full'.")
  flags.DEFINE_enum('place', values.place, choices('grow.place'), 'Where layers go.')
  flags.DEFINE_string('experts', None, 'How many, N or NAME=N; for remove: which, as 2,3.')
  flags.DEFINE_integer(
    'expert_tokens', None, 'Tokens of each new expert; default: as the Pattention has.'
  )
  flags.DEFINE_integer(
    'top_k', None, 'The experts of a token; default: as before; 1 beside a Pattention, 2 of MLPs.'
  )
  flags.DEFINE_integer('width', None, 'For a Transformer: the new width.')
  flags.DEFINE_integer('heads', None, 'For a Transformer: the new number of heads.')
  flags.DEFINE_integer('ffn_width', None, 'For a Transformer: the new feed-forward width.')
  flags.DEFINE_enum('method', values.method, choices('grow.method'), 'How new weights are made.')
  flags.DEFINE_enum('scale', values.scale, choices('grow.scale'), 'Reference counts.')
  flags.DEFINE_enum(
    'new_keys', values.new_keys, choices('grow.new_keys'), 'The keys of new tokens.'
  )
  flags.DEFINE_enum(
    'new_values', values.new_values, choices('grow.new_values'), 'The values of new tokens.'
  )
  flags.DEFINE_enum('moments', values.moments, choices('grow.moments'), "Optimizer's moments.")
  flags.DEFINE_enum('step', values.step, choices('grow.step'), 'Steps made.')
  flags.DEFINE_float('noise', values.noise, 'Noise on copies, in units of RMS.', lower_bound=0)
  flags.DEFINE_float(
    'rate', values.rate, 'Factor on the learning rate; 0: by size.', 0, _KEYS['rate'].most
  )
  flags.DEFINE_integer('seed', values.seed, 'Seed of the draws.', lower_bound=0)
  flags.DEFINE_string('mesh', None, "replica=N,fsdp=N,experts=N,tokens=N; default: the source's.")
  flags.DEFINE_string('added', None, 'The run whose tokens are appended, DIR[@STEP].')
  flags.DEFINE_integer('examples', 16, 'Calibration sequences or images.', lower_bound=1)
  flags.DEFINE_string('groups', '', 'Numbers of groups, as 2,3.')
  flags.DEFINE_float('factor', None, 'The factor of the values.')
  flags.DEFINE_bool('dry_run', False, 'Print the table and stop.')
  flag_uses.declare(_USES, default='grow', named=_CHANGES)


def run() -> None:
  """Run the command with the arguments of this process."""
  define_flags()
  cli.run(main, positional=True)


def main(argv: Sequence[str]) -> None:
  """Run the action that the first word names."""
  known: dict[str, Callable[[Source, GrowConfig, Target], int | None]] = {
    'grow': _grow,
    'extract': _extract,
    'merge': _merge,
    'remove': _remove,
    'shrink': _shrink,
    'slice': _slice,
    'scale': _scale,
    'freeze': _freeze,
  }
  action = argv[1] if len(argv) > 1 else 'grow'
  if action not in _USES:
    raise UserError(f'unknown command {action!r}{nearest(action, _USES)}')
  if len(argv) > 2:
    raise UserError(f'{argv[2]!r} after {action!r} is one word too many; name one action')
  values = flags.FLAGS
  for name, most in (('seed', 2**31 - 1), ('examples', 2**16)):
    if values[name].value > most:
      raise UserError(f'--{name} is {values[name].value}; it must be at most {most}')
  if values['groups'].present and not values.groups.strip() and action != 'freeze':
    raise UserError('--groups is empty; name groups by their numbers, for example --groups=2,3')
  if action == 'groups':
    print(group_actions.table(values.source), flush=True)
    return
  if values.target is None:
    raise UserError('--target is missing: the new work directory')
  target = Target(
    paths.parse_path(values.target), values.dry_run, lambda text: print(text, flush=True)
  )
  config = GrowConfig(
    **{field.name: getattr(values, field.name) for field in dataclasses.fields(GrowConfig)}
  )
  mesh = None
  if values.mesh is not None:
    names = [field.name for field in dataclasses.fields(MeshConfig)]
    mesh = MeshConfig(**{**dict.fromkeys(names, 1), **_numbers('mesh', names, least=-1)})
  with actions.open_source(values.source, target, mesh) as source:
    step = known[action](source, config, target)
    planned = source.meta.config.train.steps
  if step is not None:
    messages.say(f'wrote {values.target}, step {step}; to go on training it:')
    steps = max(planned, step) + planned
    print(
      f'{help_text.spell_command("train")} --workdir={values.target} --config.train.steps={steps}'
    )


def _grow(source: Source, config: GrowConfig, target: Target) -> int | None:
  values = flags.FLAGS
  sizes = {name: getattr(values, name) for name in ('layers', 'width', 'heads', 'ffn_width')}
  of_experts = {'expert_tokens': values.expert_tokens, 'top_k': values.top_k}
  for name, value in {**sizes, **of_experts}.items():
    if value is not None and not 1 <= value <= _MOST:
      raise UserError(f'--{name} is {value}; it must be at least 1 and at most {_MOST}')
  deeper = values.layers is not None or values.pattern is not None
  more = None
  if values.experts is not None:
    more = experts.Wanted(_expert_counts(source), values.expert_tokens, values.top_k)
  if config.method in state.TOKEN_METHODS and not deeper and more is None:
    state.check_method(source.model, config.method)
  counts = None if values.param_tokens is None else _counts(source)
  after = wanted.larger_model(
    source.model, config, param_tokens=counts, pattern=values.pattern, more=more, **sizes
  )
  return actions.grow(source, after, config, target)


def _extract(source: Source, config: GrowConfig, target: Target) -> None:
  del config
  actions.extract(source, target, _groups())
  which = f'groups {flags.FLAGS.groups}' if _groups() else 'the added tokens'
  messages.say(f'wrote {flags.FLAGS.target}: {which} of {source.directory}')


def _remove(source: Source, config: GrowConfig, target: Target) -> int | None:
  if flags.FLAGS['experts'].present:
    if flags.FLAGS['groups'].present:
      raise UserError('--experts and --groups both say what to take out; give one of them')
    numbers = parse_numbers(flags.FLAGS.experts, '--experts', 'experts')
    if not numbers:
      raise UserError('--experts is empty; name experts by their numbers, as --experts=2,3')
    return expert_actions.remove(source, numbers, config, target)
  if flags.FLAGS['groups'].present:
    return group_actions.remove(source, _groups(), config, target)
  return actions.remove(source, config, target)


def _slice(source: Source, config: GrowConfig, target: Target) -> int | None:
  text = flags.FLAGS.groups
  if not re.fullmatch('-?[0-9]{1,6}', text):
    raise UserError(
      f'slice needs --groups=N, the number of groups to keep, and --groups is {_short(text)!r}'
    )
  return group_actions.keep_first(source, int(text), config, target)


def _scale(source: Source, config: GrowConfig, target: Target) -> int | None:
  if flags.FLAGS.factor is None:
    raise UserError('scale needs --factor=X, the factor of the values of --groups')
  return group_actions.scale(source, _groups(), flags.FLAGS.factor, config, target)


def _freeze(source: Source, config: GrowConfig, target: Target) -> int | None:
  if not flags.FLAGS['groups'].present:
    raise UserError('freeze needs --groups=N,…, or --groups= to train all groups')
  return group_actions.freeze(source, _groups(), config, target)


def _groups() -> tuple[int, ...]:
  return parse_numbers(flags.FLAGS.groups, '--groups')


def _merge(source: Source, config: GrowConfig, target: Target) -> int | None:
  if flags.FLAGS.added is None:
    raise UserError('merge needs --added=DIR, the run or the extracted tokens to append')
  return actions.merge(source, flags.FLAGS.added, config, target)


def _shrink(source: Source, config: GrowConfig, target: Target) -> int | None:
  values = flags.FLAGS
  if values.experts is not None:
    if values.param_tokens is not None:
      raise UserError('--experts and --param_tokens both say what to keep; give one of them')
    counts = _expert_counts(source, dense=False)
    return expert_actions.shrink(source, counts, values.examples, config, target)
  return actions.shrink(source, _counts(source), flags.FLAGS.examples, config, target)


def _counts(source: Source) -> dict[str, int]:
  """Return the counts of --param_tokens, and the model's for projections that it leaves out."""
  config.named_counts(source.model, {}, '--param_tokens')  # refuses a model without tokens
  numbers = _numbers('param_tokens', config.count_names(source.model), least=1)
  return config.named_counts(source.model, numbers, '--param_tokens')


def _expert_counts(source: Source, *, dense: bool = True) -> dict[str, int]:
  """Return the numbers of --experts by the name of the layer: see `experts.named_counts`."""
  text = flags.FLAGS.experts
  if re.fullmatch('-?[0-9]{1,6}', text):
    return experts.named_counts(source.model, int(text), '--experts', dense=dense)
  numbers = _numbers('experts', list(source.model.layers), least=1)
  return experts.named_counts(source.model, numbers, '--experts', dense=dense)


def _numbers(flag: str, allowed: Sequence[str], least: int) -> dict[str, int]:
  """Read the numbers of a flag such as --param_tokens=qkv=128,ffn=512."""
  numbers = {}
  text = flags.FLAGS[flag].value
  for part in [] if text is None else text.split(','):
    name, _, number = part.partition('=')
    if name not in allowed:
      raise UserError(f'--{flag} names {name!r}{nearest(name, allowed)}')
    if name in numbers:
      raise UserError(f'--{flag} names {name} twice, as {text!r}; give every name once')
    digits = re.fullmatch('-?[0-9]{1,13}', number)
    if not digits or not least <= int(number) <= _MOST:
      raise UserError(
        f'--{flag} has {_short(part)!r}; it must be {name}=N, with N at least {least} and at most '
        f'{_MOST}'
      )
    numbers[name] = int(number)
  return numbers


def _short(text: str) -> str:
  return text if len(text) <= 40 else f'{text[:40]}…'
