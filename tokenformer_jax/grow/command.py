r"""Makes a trained model larger without changing what it computes.

  python -m tokenformer_jax.grow --source=DIR[@STEP] --target=DIR --param_tokens=qkv=N,proj=N,ffn=N
  python -m tokenformer_jax.grow --source=DIR --target=DIR --method=net2net --width=N

The second widens a Transformer. A word before the flags names something else to do:

  extract  write the tokens that the last growth added, alone
  merge    append the tokens of --added, from extract or another run, to those of --source
  remove   take out what the last growth or merge added
  shrink   keep only the most important tokens, to the counts of --param_tokens
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Sequence

import jax
from absl import flags
from jax.sharding import Mesh

from tokenformer_jax import checkpoint, flops, messages, models, paths, sharding, start
from tokenformer_jax.config import (
  Config,
  GrowConfig,
  MeshConfig,
  ModelConfig,
  TokenCounts,
  choices,
)
from tokenformer_jax.errors import UserError, nearest
from tokenformer_jax.grow import files, parts, room, state, table, verify
from tokenformer_jax.params import Params
from tokenformer_jax.tasks import Batch

_MOST = 10**12  # of what a number of the command line may count
_EXAMPLES = 1  # of the batch that compares two models, or the least number that the mesh can split

# The flags that not every action takes, and those that each one does.
_OPTIONS = (
  *('param_tokens', 'width', 'heads', 'ffn_width', 'method', 'scale', 'new_values', 'moments'),
  *('step', 'noise', 'seed', 'added', 'examples', 'dry_run'),
)
_TAKEN = {
  'grow': set(_OPTIONS) - {'added', 'examples'},
  'extract': set(),
  'merge': {'added', 'scale', 'moments', 'step', 'dry_run'},
  'remove': {'moments', 'step', 'dry_run'},
  'shrink': {'param_tokens', 'scale', 'moments', 'step', 'examples', 'dry_run'},
}


@dataclasses.dataclass(frozen=True)
class Source:
  """A checkpoint that something is to be made of, and the mesh to do it on."""

  directory: paths.Path
  checkpoints: checkpoint.Checkpoints
  meta: checkpoint.Meta
  mesh: Mesh
  mesh_config: MeshConfig

  @property
  def model(self) -> ModelConfig:
    return self.meta.config.model


def define_flags() -> None:
  """Defines the command's flags."""
  values = GrowConfig()
  flags.DEFINE_string('source', None, 'The run to start from: DIR, or DIR@STEP.', required=True)
  flags.DEFINE_string('target', None, 'The new work directory.', required=True)
  flags.DEFINE_string(
    'param_tokens', None, 'Counts: qkv=N,proj=N,ffn=N; a kind that is left out keeps its count.'
  )
  flags.DEFINE_integer('width', None, 'For a Transformer: the new width.')
  flags.DEFINE_integer('heads', None, 'For a Transformer: the new number of heads.')
  flags.DEFINE_integer('ffn_width', None, 'For a Transformer: the new feed-forward width.')
  flags.DEFINE_enum('method', values.method, choices('grow.method'), 'How new weights are made.')
  flags.DEFINE_enum(
    'scale', values.scale, choices('grow.scale'), 'The reference counts; empty: what is exact.'
  )
  flags.DEFINE_enum(
    'new_values', values.new_values, choices('grow.new_values'), 'The values of new tokens.'
  )
  flags.DEFINE_enum('moments', values.moments, choices('grow.moments'), "The optimizer's moments.")
  flags.DEFINE_enum('step', values.step, choices('grow.step'), 'The number of steps made.')
  flags.DEFINE_float('noise', values.noise, 'On copies, of their root mean square.', lower_bound=0)
  flags.DEFINE_integer('seed', values.seed, 'Seed of what is drawn.', lower_bound=0)
  flags.DEFINE_string('mesh', None, 'replica=N,fsdp=N,tokens=N; default: as the source.')
  flags.DEFINE_string('added', None, 'For merge: the run whose tokens are appended, DIR[@STEP].')
  flags.DEFINE_integer(
    'examples', 16, 'For shrink: calibration sequences or images.', lower_bound=1
  )
  flags.DEFINE_bool('dry_run', False, 'Print the table and stop.')


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  actions: dict[str, Callable[[Source, GrowConfig], None]] = {
    'grow': _grow,
    'extract': _extract,
    'merge': _merge,
    'remove': _remove,
    'shrink': _shrink,
  }
  action = argv[1] if len(argv) > 1 else 'grow'
  if action not in actions:
    raise UserError(f'unknown command {action!r}{nearest(action, actions)}')
  if len(argv) > 2:
    raise UserError(f'{argv[2]!r} after {action!r} is one word more than one thing to do')
  values = flags.FLAGS
  for name in _OPTIONS:
    if values[name].present and name not in _TAKEN[action]:
      raise UserError(f'--{name} has no meaning for {action}; leave it out')
  directory, step = paths.split_source(values.source)
  if not values.dry_run:
    files.check_target(paths.of(values.target), directory)
  for name, most in (('seed', 2**31 - 1), ('examples', 2**16)):
    if values[name].value > most:
      raise UserError(f'--{name} is {values[name].value}; it must be at most {most}')
  mesh_devices = start.devices()
  checkpoints, meta = checkpoint.open_source(directory, step)
  names = [field.name for field in dataclasses.fields(GrowConfig)]
  checkpoint.check_is_model(meta, directory)
  with contextlib.closing(checkpoints):
    mesh, mesh_config = _mesh(meta.config.mesh, mesh_devices)
    source = Source(directory, checkpoints, meta, mesh, mesh_config)
    actions[action](source, GrowConfig(**{name: getattr(values, name) for name in names}))


def _grow(source: Source, config: GrowConfig) -> None:
  values, before = flags.FLAGS, source.model
  after = _wanted_model(before, config)
  if after == before:
    raise UserError(
      'nothing would grow; say what is to be larger, by --param_tokens=qkv=N,proj=N,ffn=N, or by '
      '--width=N for a Transformer'
    )
  state.check(before, after, config)
  _print_table(source, after)
  _check_room(source, after, config, held=(after,))
  reason = state.inexact(before, after, config)
  messages.say(
    f'not exact: the grown model will not compute what the source does, for {reason}'
    if reason
    else 'exact: the grown model computes what the source does'
  )
  if values.dry_run:
    return
  batch, name = _batch(source, _EXAMPLES)
  programs = [_program(source, model, batch) for model in (before, after)]
  outputs: list[verify.Outputs] = []
  new = files.read_and_grow(
    source.checkpoints,
    source.meta,
    source.mesh,
    after,
    config,
    see=lambda params: outputs.append(programs[len(outputs)](params)),
  )
  _verify(*outputs, name, exact=reason is None)
  _write(source, new, after, config, 'grow')


def _extract(source: Source, config: GrowConfig) -> None:
  del config
  last = parts.last_addition(source.meta, source.directory)
  lineage, found = source.meta.lineage, parts.additions(source.meta, source.directory)
  whole = files.read(source.checkpoints, source.meta, source.mesh)
  files.write(
    paths.of(flags.FLAGS.target),
    parts.extract(whole, source.model, last),
    _new_config(source, source.model, source.meta.config.grow),
    source.meta.tokenizer,
    lineage=(*lineage[:-1], dataclasses.replace(lineage[-1], tokens_of=parts.as_lines(found[-1:]))),
    contents='added_tokens',
    step=source.meta.step,
  )
  messages.say(f'wrote {flags.FLAGS.target}: the added tokens of {source.directory}')


def _merge(source: Source, config: GrowConfig) -> None:
  values = flags.FLAGS
  if values.added is None:
    raise UserError('merge needs --added=DIR, the run or the extracted tokens to append')
  directory, step = paths.split_source(values.added)
  checkpoints, meta = checkpoint.open_source(directory, step)
  parts.check_mergeable(source.model, meta.config.model)
  parts.check_not_twice(source.meta, source.directory, meta, directory)
  with contextlib.closing(checkpoints):
    counts, added = parts.read_added(checkpoints, meta, source.mesh)
  total = TokenCounts(
    *(getattr(source.model.param_tokens, k) + getattr(counts, k) for k in state.KINDS)
  )
  after = state.grown_model(source.model, total, config)
  _print_table(source, after)
  _check_room(source, after, config, held=(source.model, after))
  if note := parts.other_scale(source.model, meta.config.model):
    messages.say(note)
  if values.dry_run:
    return
  batch, name = _batch(source, _EXAMPLES)
  compute, recompute = (_program(source, model, batch) for model in (source.model, after))
  old = files.read(source.checkpoints, source.meta, source.mesh)
  computed = compute(old['params'])
  new = parts.merge(old, added, source.model, config)
  _verify(computed, recompute(new['params']), name, exact=False)
  tokens_of = parts.as_lines(parts.additions(meta, directory))
  _write(source, new, after, config, 'merge', tokens_of)


def _remove(source: Source, config: GrowConfig) -> None:
  last = parts.last_addition(source.meta, source.directory)
  if last.grow.method == 'duplicate' and last.action == 'grow':
    raise UserError(
      'the last growth duplicated the tokens and divided the values of the old ones among the '
      'copies; taking the copies out would not give back what was there'
    )
  _print_table(source, last.model)
  _check_room(source, last.model, config, held=(source.model, last.model))
  if flags.FLAGS.dry_run:
    return
  old = files.read(source.checkpoints, source.meta, source.mesh)
  _write(source, parts.remove(old, source.model, last.model, config), last.model, config, 'remove')


def _shrink(source: Source, config: GrowConfig) -> None:
  values, before = flags.FLAGS, source.model
  after = state.grown_model(before, _counts(before.param_tokens), config)
  parts.check_smaller(before, after)
  _print_table(source, after)
  _check_room(source, after, config, held=(before, after))
  if values.dry_run:
    return
  calibration, calibration_name = _batch(source, values.examples)
  batch, name = _batch(source, values.examples, first=values.examples)
  compute, recompute = (_program(source, model, batch) for model in (before, after))
  old = files.read(source.checkpoints, source.meta, source.mesh)
  computed = compute(old['params'])
  task = verify.exact_task(source.meta.config, before)
  new = parts.shrink(old, task, after, calibration, config)
  messages.say(
    f'importance of a token: mean over examples of |⟨value, ∂loss/∂value⟩|, on {calibration_name}'
  )
  _verify(computed, recompute(new['params']), name, exact=False)
  _write(source, new, after, config, 'shrink')


def _wanted_model(model: ModelConfig, config: GrowConfig) -> ModelConfig:
  """The model that the flags ask for."""
  values = flags.FLAGS
  wide = {name: getattr(values, name) for name in ('width', 'heads', 'ffn_width')}
  wide = {name: value for name, value in wide.items() if value is not None}
  for name, value in wide.items():
    if not 1 <= value <= _MOST:
      raise UserError(f'--{name} is {value}; it must be at least 1 and at most {_MOST}')
  if config.method in state.TOKEN_METHODS:
    if wide:
      raise UserError(
        f'--{next(iter(wide))} is for the methods that widen a Transformer; method='
        f'{config.method} adds parameter tokens: --param_tokens=qkv=N,proj=N,ffn=N'
      )
    return state.grown_model(model, _counts(model.param_tokens), config)
  if values.param_tokens is not None:
    raise UserError(f'--param_tokens is not for method={config.method}, which takes --width=N')
  if 'width' in wide and 'heads' not in wide:
    wide['heads'] = max(1, round(model.heads * wide['width'] / model.width))
  new = dataclasses.replace(model, **wide)
  if new.width % new.heads:
    raise UserError(
      f'width {new.width} is not a multiple of {new.heads} heads; give --heads=N as well'
    )
  return new


def _numbers(flag: str, allowed: Sequence[str], least: int) -> dict[str, int]:
  """The numbers of a flag such as --param_tokens=qkv=128,ffn=512."""
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


def _counts(old: TokenCounts) -> TokenCounts:
  """The counts of --param_tokens."""
  return dataclasses.replace(old, **_numbers('param_tokens', state.KINDS, least=1))


def _mesh(of_source: MeshConfig, devices: list[jax.Device]) -> tuple[Mesh, MeshConfig]:
  """The mesh of --mesh, or that of the source if it makes up the devices here, or all of them."""
  if flags.FLAGS.mesh is not None:
    mesh_config = MeshConfig(**{'fsdp': 1, **_numbers('mesh', sharding.MESH_AXES, least=-1)})
    return sharding.make_mesh(mesh_config, devices), mesh_config
  try:
    return sharding.make_mesh(of_source, devices), of_source
  except UserError:
    return sharding.make_mesh(MeshConfig(), devices), of_source


def _print_table(source: Source, after: ModelConfig) -> None:
  print(table.render(source.model, after, flops.length(source.meta.config)), flush=True)
  for line in table.advice(after):
    messages.say(line)
  definition = models.define(after)
  sharding.check_divides(source.mesh, definition.abstract, definition.axes)
  if -1 not in dataclasses.astuple(source.mesh_config):
    sizes = dataclasses.astuple(source.mesh_config)
    planned = jax.sharding.AbstractMesh(sizes, sharding.MESH_AXES)
    sharding.check_divides(planned, definition.abstract, definition.axes)


def _check_room(
  source: Source, after: ModelConfig, config: GrowConfig, held: Sequence[ModelConfig]
) -> None:
  """Check memory for the models that are held at once, and the target's disk."""
  kept = room.part_kept(source.model, after, config.moments)
  try:
    room.check_memory(source.mesh, held, ema=checkpoint.has(source.meta, 'ema'))
  except UserError as error:
    if not flags.FLAGS.dry_run:
      raise
    messages.say(f'without --dry_run this would end here: {error}')
  if not flags.FLAGS.dry_run:
    room.check_disk(paths.of(flags.FLAGS.target), source.meta, source.directory, kept)


def _batch(source: Source, examples: int, first: int = 0) -> tuple[Batch, str]:
  """Held-out examples, their number rounded up to what the mesh can split, and what they are."""
  multiple = source.mesh.shape['replica'] * source.mesh.shape['fsdp']
  rounded = [-(-count // multiple) * multiple for count in (examples, first)]
  task = verify.exact_task(source.meta.config, source.model)
  return task.held_out(source.meta.tokenizer, *rounded)


def _program(
  source: Source, model: ModelConfig, batch: Batch
) -> Callable[[Params], verify.Outputs]:
  return verify.program(verify.exact_task(source.meta.config, model), batch, source.mesh)


def _verify(before: verify.Outputs, after: verify.Outputs, name: str, *, exact: bool) -> None:
  different, allowed = verify.largest_difference(before, after)
  messages.say(
    f'{name}: the logits differ by at most {different:.2g}, the loss is {before.loss:.6f} before '
    f'and {after.loss:.6f} after'
  )
  if not math.isfinite(different):
    raise UserError(
      'the logits before or after are not finite, so that the result could not be trained; nothing '
      'was written'
    )
  if exact and different > allowed:
    raise UserError(
      f'the grown model is not what it should be: its logits differ by {different:.2g}, and '
      f'{allowed:.2g} is what float32 explains; nothing was written'
    )


def _new_config(source: Source, model: ModelConfig, config: GrowConfig) -> Config:
  return dataclasses.replace(
    source.meta.config, model=model, grow=config, mesh=source.mesh_config, init_from=''
  )


def _write(
  source: Source,
  new: state.State,
  model: ModelConfig,
  config: GrowConfig,
  action: str,
  tokens_of: str = '',
) -> None:
  target = flags.FLAGS.target
  step = int(new['step'])
  files.write(
    paths.of(target),
    new,
    _new_config(source, model, config),
    source.meta.tokenizer,
    lineage=files.descend(source.meta, source.directory, action, config, tokens_of),
    step=step,
    seen=None if config.step == 'restart' else source.meta.seen,
  )
  steps = max(source.meta.config.train.steps, step) + source.meta.config.train.steps
  messages.say(f'wrote {target}, step {step}; to go on training it:')
  print(f'python train.py --workdir={target} --config.train.steps={steps}')
