"""Convert stored JSON of an earlier format to today's: configs and the `meta` of checkpoints.

Two files have a format number: the `meta` of a checkpoint, and `config.json` of a work directory,
where no number means 1. Everything read from them passes through here. A config that a user writes
does not: an old name in it is a mistake, which `config.resolve` reports.

To rename a key of the config, a value of a key, or an array of the state, add an entry to
`CHANGES`. `tests/old_runs/` has runs of every format, which must resume and grow as before.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tokenformer_jax.errors import UserError

Json = dict[str, Any]


class LaterFormatError(UserError):
  """Raised for a file that a later version of this package wrote."""


def _unchanged(stored: Json) -> Json:
  return stored


@dataclasses.dataclass(frozen=True)
class Change:
  """The changes from one format to the next, in the order of application.

  Attributes:
    meta: makes the new `meta` of a checkpoint; the config in it has the format before.
    keys: new names of keys, or of whole groups, of the config:
      {'train.scan': 'train.layers', 'mesh': 'devices'}.
    values: new names of values, by the new name of their key:
      {'train.layers': {True: 'scan', False: 'unrolled'}}.
    config: makes the new config where new names are not enough. Groups may be missing: the
      ancestors in a lineage have only `model` and `grow`.
    moved: today's names of keys or groups that `config` replaces, for the message to a user who
      writes the old name.
    arrays: new names of one or more whole parts of the paths of arrays: {'blocks/ffn': 'mlp'}. They
      apply wherever these parts occur, so that parameters, their moments and their average are
      renamed together.
  """

  meta: Callable[[Json], Json] = _unchanged
  keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
  values: Mapping[str, Mapping[Any, Any]] = dataclasses.field(default_factory=dict)
  config: Callable[[Json], Json] = _unchanged
  moved: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
  arrays: Mapping[str, str] = dataclasses.field(default_factory=dict)


Changes = Mapping[int, Change]  # by the format that each change leads to


def _with_seen(meta: Json) -> Json:
  """Add the samples seen, which format 1 may omit if all batches had one size."""
  samples = meta['step'] * meta['config']['data']['batch_size']
  return {'seen': {'samples': samples, 'digest': ''}, **meta}


# The defaults of format 2 for missing keys; keys not listed here have today's default.
_FORMAT_2 = {
  'layers': 4,
  'positions': 'rotary',
  'rotary_fraction': 0.25,
  'rotary_base': 10000.0,
  'projection': 'pattention',
  'bias': False,
  'ffn_width': 0,
  'score': 'l2_norm_gelu',
  'gelu': 'exact',
  'row_epsilon': 0.0,
  'param_tokens.qkv': 128,
  'param_tokens.proj': 128,
  'param_tokens.ffn': 512,
  'reference_tokens.qkv': 0,
  'reference_tokens.proj': 0,
  'reference_tokens.ffn': 0,
}


def _with_layer(config: Json) -> Json:
  """Make `model.layer` from the keys of format 2, which has equal layers and no variants."""
  model = config.get('model')
  if not isinstance(model, dict):
    return config
  old = {**_FORMAT_2, **dict(_flat(model))}
  new = {name: value for name, value in old.items() if name not in _FORMAT_2}
  positions, score = {'kind': 'none'}, {'kind': old['score'], 'row_epsilon': old['row_epsilon']}
  if old['positions'] == 'rotary':
    new['position_embedding'] = 'none'
    positions = {'kind': 'rotary', 'fraction': old['rotary_fraction'], 'base': old['rotary_base']}
  else:
    new['position_embedding'] = old['positions']
  if old['score'] not in ('softmax', 'exp_l2_norm'):
    score['gelu'] = old['gelu']

  def projection(name: str, if_dense: Json) -> Json:
    if old['projection'] == 'dense':
      return if_dense
    tokens, reference = old[f'param_tokens.{name}'], old[f'reference_tokens.{name}']
    return {'kind': old['projection'], 'tokens': tokens, 'reference': reference, 'score': score}

  matrix = {'kind': 'dense', 'bias': old['bias']}
  activation = 'gelu_tanh' if old['gelu'] == 'tanh' else 'gelu'
  mlp = {'kind': 'mlp', 'width': old['ffn_width'], 'bias': old['bias'], 'activation': activation}
  new |= {
    'pattern': f'layer*{old["layers"]}',
    'layer.mixer.kind': 'softmax',
    'layer.mixer.positions': positions,
    'layer.mixer.qkv': projection('qkv', matrix),
    'layer.mixer.proj': projection('proj', matrix),
    'layer.ffn': projection('ffn', mlp),
    'variants': {},
  }
  return {**config, 'model': _nested(new)}


def _with_choice_of_restart(config: Json) -> Json:
  """Make a choice of `optim.restart_schedule`, whose default now depends on the schedule."""
  optim = config.get('optim')
  if not isinstance(optim, dict):
    return config
  new, constant = dict(optim), optim.get('schedule') == 'constant'
  if isinstance(restart := new.get('restart_schedule', True), bool):
    new['restart_schedule'] = ('yes' if constant else '') if restart else 'no'
  if constant:  # It has no floor, and a floor in its config is now refused.
    new.pop('final_fraction', None)
  return {**config, 'optim': new}


_MIXER, _FFN = 'model.layer.mixer', 'model.layer.ffn'
_PROJECTIONS = {'qkv': f'{_MIXER}.qkv', 'proj': f'{_MIXER}.proj', 'ffn': _FFN}
CHANGES: Changes = {
  2: Change(
    meta=_with_seen,
    keys={
      'model.init_std': 'model.init.std',
      'model.embedding_std': 'model.init.embedding_std',
      'train.scan_layers': 'train.layers',
    },
    values={
      'train.layers': {True: 'scan', False: 'unrolled'},
      'train.remat': {'none': 'score_inputs'},
    },
  ),
  3: Change(
    keys={
      'model.heads': f'{_MIXER}.heads',
      'model.window': f'{_MIXER}.window',
      'model.block_norm': 'model.layer.norm',
    },
    config=_with_layer,
    moved={
      'model.layers': ['model.pattern'],
      'model.positions': ['model.position_embedding', f'{_MIXER}.positions.kind'],
      'model.rotary_fraction': [f'{_MIXER}.positions.fraction'],
      'model.rotary_base': [f'{_MIXER}.positions.base'],
      'model.projection': [f'{path}.kind' for path in _PROJECTIONS.values()],
      'model.bias': [f'{path}.bias' for path in _PROJECTIONS.values()],
      'model.ffn_width': [f'{_FFN}.width'],
      'model.score': [f'{path}.score.kind' for path in _PROJECTIONS.values()],
      'model.gelu': [
        *(f'{path}.score.gelu' for path in _PROJECTIONS.values()),
        f'{_FFN}.activation',
      ],
      'model.row_epsilon': [f'{path}.score.row_epsilon' for path in _PROJECTIONS.values()],
      'model.param_tokens': [f'{path}.tokens' for path in _PROJECTIONS.values()],
      'model.reference_tokens': [f'{path}.reference' for path in _PROJECTIONS.values()],
      **{f'model.param_tokens.{one}': [f'{path}.tokens'] for one, path in _PROJECTIONS.items()},
      **{
        f'model.reference_tokens.{one}': [f'{path}.reference'] for one, path in _PROJECTIONS.items()
      },
    },
  ),
  4: Change(config=_with_choice_of_restart),
}
FORMAT = max(CHANGES)  # the format of new files


def check_format(stored: Any, where: str, changes: Changes = CHANGES) -> None:
  """Check that a format is known.

  Args:
    stored: the format.
    where: the name of the file for the error.
    changes: the changes by format.

  Raises:
    LaterFormatError: the format is later than every known one.
    UserError: the value is not a format.
  """
  if type(stored) is not int or stored < 1:
    raise UserError(f'the format {stored!r} in {where} is not a number from 1 on')
  if stored > max(changes):
    raise LaterFormatError(
      f'{where} has the format {stored}, which this version of tokenformer_jax (format '
      f'{max(changes)}) does not know; install a newer one'
    )


def meta(stored: Json, changes: Changes = CHANGES) -> Json:
  """Return the `meta` of a checkpoint in today's format: its config, lineage and checksums.

  Args:
    stored: the `meta` from the file; `check_format` has passed.
    changes: the changes by format.
  """
  new = stored
  for change in _since(stored['format'], changes):
    new = change.meta(new)
    new = {
      **new,
      'config': _changed(new['config'], change),
      'lineage': [{**ancestor, **_of_ancestor(ancestor, change)} for ancestor in new['lineage']],
      'checksums': {_renamed(p, change.arrays, '/'): c for p, c in new['checksums'].items()},
    }
  return {**new, 'format': max(changes)}


def config(stored: Json, stored_format: int, changes: Changes = CHANGES) -> Json:
  """Return a config in today's format.

  Args:
    stored: the groups of keys from the file.
    stored_format: the format of the file; `check_format` has passed.
    changes: the changes by format.
  """
  for change in _since(stored_format, changes):
    stored = _changed(stored, change)
  return stored


def array_path(stored: str, stored_format: int, changes: Changes = CHANGES) -> str:
  """Return the path in today's format of an array of a stored state.

  Args:
    stored: the array's path in the files.
    stored_format: the format of the files; `check_format` has passed.
    changes: the changes by format.
  """
  for change in _since(stored_format, changes):
    stored = _renamed(stored, change.arrays, '/')
  return stored


def renamed_keys(changes: Changes = CHANGES) -> dict[str, list[str]]:
  """Return the earlier names of keys and groups of a config, each with its names of today."""
  names: dict[str, list[str]] = {}
  for number, change in changes.items():
    for old in [*change.keys, *change.moved]:
      names[old] = [old]
      for later in _since(number - 1, changes):
        names[old] = [new for name in names[old] for new in _names_after(later, name)]
  return names


def _names_after(change: Change, path: str) -> Sequence[str]:
  """Return the names of a key of a config after a change."""
  renamed = _renamed(path, change.keys, '.', first=True)
  return change.moved.get(renamed, [renamed])


def _since(stored_format: int, changes: Changes) -> list[Change]:
  """Return the changes after a format, the oldest first."""
  return [changes[number] for number in sorted(changes) if number > stored_format]


def _of_ancestor(ancestor: Json, change: Change) -> Json:
  """Return the changed groups of a config that an entry of a lineage has."""
  groups = {name: ancestor[name] for name in ('model', 'grow')}
  changed = _changed(groups, change)
  return {name: changed[name] for name in groups}


def _changed(config: Json, change: Change) -> Json:
  """Return a config with a change applied."""
  flat = {_renamed(path, change.keys, '.', first=True): v for path, v in _flat(config)}
  for path, names in change.values.items():
    for old, new in names.items():
      if type(flat.get(path)) is type(old) and flat[path] == old:
        flat[path] = new
        break
  return change.config(_nested(flat))


def _renamed(path: str, names: Mapping[str, str], separator: str, *, first: bool = False) -> str:
  """Return a path with whole parts renamed: everywhere, or only at its start (`first`)."""
  if not names:
    return path
  longest_first = '|'.join(map(re.escape, sorted(names, key=len, reverse=True)))
  before = '^' if first else f'(?<![^{separator}])'
  pattern = f'{before}(?:{longest_first})(?![^{separator}])'
  return re.sub(pattern, lambda found: names[found[0]], path)


def _flat(groups: Json, prefix: str = '') -> Iterator[tuple[str, Any]]:
  """Yield each value with its dotted path. An empty group counts as a value."""
  for name, value in groups.items():
    if isinstance(value, dict) and value:
      yield from _flat(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', value


def _nested(flat: Json) -> Json:
  """Return the groups of values given by dotted paths: the inverse of `_flat`."""
  groups: Json = {}
  for path, value in flat.items():
    *outer, name = path.split('.')
    group = groups
    for part in outer:
      if not isinstance(group.get(part), dict):
        group[part] = {}
      group = group[part]
    group[name] = value
  return groups
