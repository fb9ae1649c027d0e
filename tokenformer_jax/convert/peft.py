"""Read adapters of the library PEFT as groups of parameter tokens, and write groups as adapters.

LoRA adds s B A x to the product of a matrix (arXiv 2106.09685). A group with the score `linear`
beside the matrix adds the same, with A [r, D_in] as keys and s Bᵀ [r, D_out] as values. The layout
of the base (`tensor_layout`) names its matrices, and knows those that hold several of ours.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import ModelConfig, pattern
from tokenformer_jax.config.groups import choose, most_groups, named_groups, without
from tokenformer_jax.config.pattention import Birth, LinearScore, TokenGroup, from_groups
from tokenformer_jax.config.projections import beside_matrices, matrices, projection_name
from tokenformer_jax.convert import (
  export,
  families,
  hub,
  hub_download,
  run_tensors,
  tensor_files,
  tensor_layout,
)
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.convert.tensor_files import Tensor
from tokenformer_jax.convert.tensor_layout import Entry, Layout, Names, Weights
from tokenformer_jax.data.reading import read_json
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.grow import grow_run
from tokenformer_jax.model import trunk
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import new_run_id
from tokenformer_jax.storage import paths

CONFIG, _WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
_PREFIX = 'base_model.model.'
_TENSOR = re.compile(r'base_model\.model\.(.+)\.lora_([AB])\.weight')
_ALLOWED = {
  'bias': ('none',),
  # The other ways to begin change the matrices of the base.
  'init_lora_weights': (True, False, 'gaussian', 'eva', 'orthogonal', 'mica'),
}
# Keys that do not change what a trained adapter computes: those of its training and of its tools,
# and the settings of ways to begin that are refused. All others that are set are refused.
_IGNORED = """
  task_type auto_mapping peft_version inference_mode lora_dropout fan_in_fan_out eva_config
  corda_config lora_ga_config loftq_config velora_config megatron_core qalora_group_size
  runtime_config ensure_weight_tying
"""
_FLOAT = np.dtype(np.float32)


class _Matrix(NamedTuple):
  """A matrix of the base: the projection that it belongs to, and its tensor."""

  projection: str
  entry: Entry

  def of_rank(self, rank: int) -> Entry:
    """Return the layout of B [D_out, r], which holds values [r, D_out] as the tensor does ours."""
    how = 'transposed' if self.entry.how == 'same' else self.entry.how
    return self.entry._replace(how=how, shapes=tuple((rank, d) for _, d in self.entry.shapes))

  def tokens(self, number: int, end: str) -> Names:
    """Return the path of the keys or values beside one of our matrices."""
    return (*self.entry.paths[number][:-1], 'beside', end)


Pair = tuple[Tensor, Tensor]  # A [r, D_in] and s B [D_out, r] of a matrix


def _matrices(model: ModelConfig, layout: Layout) -> dict[str, _Matrix]:
  """Return the matrices of layers that can have tokens beside them, by the hub's module names."""
  named_paths = zip(trunk.layer_paths(model.repeats), pattern.names(model.repeats), strict=True)
  layers = {(path.stack, path.row): name for path, name in named_paths}
  known, named = {*matrices(model), *beside_matrices(model)}, {}
  for name, entry in layout.items():
    if entry.paths[0][-1] != 'kernel':
      continue
    names = list(entry.paths[0][1:-1])
    stack = names.pop(0) if next(iter(layers))[0] else ''
    own = '.'.join([*names[:-1], 'each'])
    if names[0] == 'attention':
      own = 'proj' if names[1] == 'proj' else 'qkv'
    projection = projection_name(layers[stack, entry.indices[0]], own)
    if projection in known:
      named[name.removesuffix('.weight')] = _Matrix(projection, entry)
  return named


def with_adapters(
  weights: Weights, folders: Sequence[Path], base: Path, *, allow_nonfinite: bool = False
) -> tuple[Weights, list[ModelConfig]]:
  """Return a base with adapters as groups, and the model before each.

  Every projection that an adapter targets has a group for each of them, so that groups of one
  number belong together. Where an adapter has no tensors or a smaller rank, tokens are zero: they
  add nothing, get no gradient, and `to_peft` leaves them out.
  """
  named = _matrices(weights.model, weights.layout)
  several = Counter(folder.resolve() for folder in folders)
  if twice := [str(folder) for folder, count in several.items() if count > 1]:
    raise UserError(f'{arg.adapters} names {twice[0]} twice, which would double it; name it once')
  adapters = [_read(folder, named, weights, base) for folder in folders]
  for folder, adapter in zip(folders, adapters, strict=True):
    read = ((module, tensor.read()) for module, pair in adapter.items() for tensor in pair)
    for _ in run_tensors.check_finite(read, str(folder), allow_nonfinite):
      pass
  counts: dict[str, list[int]] = {}  # tokens of each adapter, by projection
  for i, adapter in enumerate(adapters):
    for module, (a, _) in adapter.items():
      sizes = counts.setdefault(named[module].projection, [1] * len(adapters))
      sizes[i] = max(sizes[i], a.shape[0])
  layout, tensors = dict(weights.layout), dict(weights.tensors)
  for module, matrix in named.items():
    pairs, name = [adapter.get(module) for adapter in adapters], f'{module}.weight'
    sizes = counts.get(matrix.projection, [])
    for i, end in itertools.product(range(len(matrix.entry.paths)), ('keys', 'values')):
      if sizes:
        read = functools.partial(_tokens, pairs, sizes, matrix, i, end)
        own, shape = f'{name}.{i}.{end}', (sum(sizes), matrix.entry.shapes[i][end == 'values'])
        layout[own] = Entry((matrix.tokens(i, end),), matrix.entry.indices, 'same', (shape,), 0)
        tensors[own] = Tensor(_FLOAT, shape, read)
  births = [Birth(new_run_id(), str(folder.absolute())) for folder in folders]

  def group(number: int, tokens: int) -> TokenGroup:
    born = (dataclasses.replace(births[number], tokens=tokens),)
    return TokenGroup(tokens, tokens, LinearScore(), born=born)

  models = [weights.model]
  for count in range(1, len(folders) + 1):
    groups = {name: itertools.starmap(group, enumerate(n[:count])) for name, n in counts.items()}
    some = {name: from_groups(own) for name, own in groups.items()}
    models.append(config_lib.with_pattentions(weights.model, some))
  return weights._replace(model=models.pop(), layout=layout, tensors=tensors), models


def _tokens(
  pairs: Sequence[Pair | None], sizes: Sequence[int], matrix: _Matrix, number: int, end: str
) -> np.ndarray:
  """Return the keys or values of all groups beside one of our matrices."""
  made = np.zeros((sum(sizes), matrix.entry.shapes[number][end == 'values']), np.float32)
  for pair, first in zip(pairs, itertools.accumulate(sizes, initial=0), strict=False):
    if pair:
      (a, b), rank = pair, pair[0].shape[0]
      own = a.read() if end == 'keys' else matrix.of_rank(rank).split(b.read(), number)
      made[first : first + rank] = own
  return made


def _read(
  folder: Path, named: Mapping[str, _Matrix], weights: Weights, base: Path
) -> dict[str, Pair]:
  """Return the adapter in a folder by module, after a check that it is LoRA and fits the base."""
  if not (file := folder / CONFIG).is_file():
    raise UserError(f'{folder} has no {CONFIG}; name a folder that save_pretrained of peft wrote')
  keys = Keys(read_json(file), str(file))
  if keys.get('peft_type') != 'LORA':
    raise keys.refusal('peft_type', "'LORA'")
  for name, allowed in _ALLOWED.items():
    keys.only(name, *allowed)
  _check_base(keys, folder, base)
  r, alpha, rooted = keys.whole('r'), keys.number('lora_alpha', 8), keys.flag('use_rslora', False)
  ranks, alphas = keys.get('rank_pattern', {}), keys.get('alpha_pattern', {})
  if isinstance(keys.get('target_modules'), str):
    keys.only('layers_to_transform')
  if keys.get('layers_to_transform') is None:
    keys.only('layers_pattern', [], '')
  keys.get('exclude_modules')
  for name in keys.unread(_IGNORED.split()):
    if keys.get(name):
      raise keys.refusal(name, 'absent, null or false')
  stored = folder / _WEIGHTS
  stored = stored if stored.is_file() else stored.with_suffix('.bin')
  tensors: dict[str, dict[str, Tensor]] = {}  # by the module's name in the file
  found = tensor_files.find(stored)
  of_text = {n: t for n, t in found.items() if not hub.IMAGES.match(n.removeprefix(_PREFIX))}
  if len(of_text) < len(found):
    messages.say(f'{folder} has LoRA in parts for images, which is left out, as they are')
  for name, tensor in of_text.items():
    match = _TENSOR.fullmatch(name)
    if match and hub.text_name(match[1]) in named:
      tensors.setdefault(match[1], {})[match[2]] = tensor
    elif not _is_of_base(name, tensor, weights):
      raise UserError(
        f'{stored}: the tensor {name} is not of LoRA beside a matrix of a layer of {base}, nor '
        'equal to one of its tensors; name the model that it was made for, or merge it into that '
        'model (merge_and_unload of peft) and bring the result'
      )
  adapter: dict[str, Pair] = {}
  for module, pair in tensors.items():
    try:
      excluding = _excluding_key(keys, module)
      rank, own = _of_module(ranks, r, module), _of_module(alphas, alpha, module)
      scale = np.float32(own / (math.sqrt(rank) if rooted else rank))
    except (re.error, AttributeError, TypeError, ArithmeticError) as error:
      raise UserError(f'{file}: its targets or patterns are not those of PEFT ({error})') from error
    if excluding:
      raise UserError(
        f'{stored} has tensors of {module}, which {excluding} of {CONFIG} leaves out, so that '
        'PEFT does not use them; correct one of the files'
      )
    shapes = named[hub.text_name(module)].entry.shapes
    for letter, shape in (('A', [rank, shapes[0][0]]), ('B', [sum(d for _, d in shapes), rank])):
      if (has := list(pair[letter].shape) if letter in pair else 'none') != shape:
        raise UserError(
          f'{stored}: the shape of lora_{letter} of {module} is {has}, and must be {shape} by the '
          f'rank {rank} of {CONFIG} and the matrix of {base}; name the model it was made for'
        )
    scaled = functools.partial(_scaled, pair['B'], scale)
    adapter[hub.text_name(module)] = pair['A'], dataclasses.replace(pair['B'], read=scaled)
  return adapter


def _check_base(keys: Keys, folder: Path, base: Path) -> None:
  """Check the base that an adapter names against that of the hub which it is for."""
  asked, revision = keys.get('base_model_name_or_path'), keys.get('revision')
  own, commit = hub_download.origin(str(base / 'config.json')) or ('', '')
  if own and asked != own and re.fullmatch(r'\w[\w.-]*/\w[\w.-]*', str(asked)):
    raise UserError(
      f'{folder} is an adapter of {asked}, and the base is {own}; name the model that it was made '
      f'for, or correct base_model_name_or_path in {folder / CONFIG}'
    )
  if own and revision not in (None, '', 'main', commit):
    reference = base.parents[1] / 'refs' / str(revision)
    if not (reference.is_file() and reference.read_text().strip() == commit):
      raise UserError(
        f'{folder} is an adapter of the revision {revision} of {own}, and the base is the commit '
        f'{commit}; name the base as {own}@{revision}'
      )
  is_same = Path(str(asked)).name.lower() == base.resolve().name.lower() and not revision
  if asked and not (own or is_same):
    named = f'{asked}@{revision}' if revision else asked
    messages.say(f'{folder} names {named} as its base, and is taken for {base}')


def _is_of_base(name: str, tensor: Tensor, weights: Weights) -> bool:
  """Return whether a tensor beside LoRA is one of the base, unchanged, as PEFT may store it."""
  own = hub.text_name(name.removeprefix(_PREFIX)).replace('.base_layer.', '.')
  if own not in weights.tensors and weights.model.tied_head:  # the head
    own = next(n for n, entry in weights.layout.items() if entry.paths == (('embedding',),))
  same = weights.tensors.get(own)
  return same is not None and np.array_equal(tensor.read(), same.read())


def _scaled(tensor: Tensor, scale: np.float32) -> np.ndarray:
  return scale * tensor.read().astype(np.float32)


def _excluding_key(keys: Keys, module: str) -> str:
  """Return the key of an adapter's config by which PEFT leaves a module out; '': it takes it."""

  def named_by(names: Any) -> bool:
    if isinstance(names, str):
      return bool(re.fullmatch(names, module))
    return any(f'.{module}'.endswith(f'.{end}') for end in names or ())

  targets, layers = keys.get('target_modules'), keys.get('layers_to_transform')
  if named_by(keys.get('exclude_modules')):
    return 'exclude_modules'
  is_linear = isinstance(targets, str) and targets.lower() == 'all-linear'
  if not (is_linear or named_by(targets)):
    return 'target_modules'
  if layers is None or layers == [] or module in targets:
    return ''
  patterns = keys.get('layers_pattern') or ['[^.]*']
  patterns = [patterns] if isinstance(patterns, str) else patterns
  matches = (re.match(rf'(?:^|.*?\.){pattern}\.(\d+)\.', module) for pattern in patterns)
  numbers = [int(match[1]) for match in matches if match]
  allowed = layers if isinstance(layers, list) else [layers]
  return '' if numbers and numbers[0] in allowed else 'layers_to_transform'


def _of_module(table: Mapping[str, Any], default: Any, module: str) -> Any:
  """Return the value of the first pattern that the end of a module's name matches."""
  return next((v for key, v in table.items() if re.match(rf'(.*\.)?({key})$', module)), default)


def to_peft(
  source: str,
  target: Path,
  base: str,
  groups: Sequence[int] = (),
  *,
  allow_nonfinite: bool = False,
) -> None:
  """Write groups of a run, by default all, as one adapter with a scale of 1.

  All other parameters must be those of `base`, a folder or a name of the hub, bit for bit.
  """
  base = hub_download.of_page(base)
  grow_run.check_target(target)
  origin = checkpoint.open_source(source, checkpoint.check_is_language_model)
  model, folder = origin.meta.config.model, hub_download.find(base)
  weights = hub.find(folder)
  named, counts = _matrices(weights.model, weights.layout), named_groups(model)
  _check(model, weights.model, {matrix.projection for matrix in named.values()}, groups, base)
  read = functools.partial(run_tensors.read_array, origin)
  for name, array in tensor_layout.stream(weights.layout, read):
    if not np.array_equal(array, weights.tensors[name].read().astype(np.float32)):
      raise UserError(
        f'{name} of {base} is not what {source} has in its place, and an adapter changes no '
        'matrix; train new groups with optim.old_tokens=freeze, or write the whole model (to-hf)'
      )
  read, tensors, ranks = functools.cache(read), {}, {}
  for module, matrix in named.items():
    sizes = [group.tokens for group in counts.get(matrix.projection, ())]
    chosen = np.repeat([not groups or i + 1 in groups for i in range(len(sizes))], sizes)
    if not chosen.any():
      continue
    (row,), numbers = matrix.entry.indices, range(len(matrix.entry.paths))
    keys, values = (
      [read(matrix.tokens(number, end))[row][chosen] for number in numbers]
      for end in ('keys', 'values')
    )
    if len(a := _join(keys, values)):
      name = weights.in_class[f'{module}.weight'].removesuffix('.weight')
      ranks[name], b = len(a), matrix.of_rank(len(a)).join(values)
      tensors[f'{_PREFIX}{name}.lora_A.weight'] = np.ascontiguousarray(a)
      tensors[f'{_PREFIX}{name}.lora_B.weight'] = np.ascontiguousarray(b)
  if not ranks:
    raise UserError(f'{source} has no groups to write, or all of their tokens are zero')
  for _ in run_tensors.check_finite(iter(tensors.items()), source, allow_nonfinite):
    pass
  described = _describe(ranks, weights, folder, base)
  with export.new_folder(target) as made:
    paths.write(made / CONFIG, json.dumps(described, indent=2) + '\n')
    (made / _WEIGHTS).write_bytes(safetensors.numpy.save(tensors, {'format': 'pt'}))
    _read(made, named, weights, folder)  # as PEFT finds its modules


def _check(
  model: ModelConfig, base: ModelConfig, names: Collection[str], groups: Sequence[int], folder: str
) -> None:
  """Check that a model is a base and groups, and that those to write are LoRA beside matrices."""
  for name, own in named_groups(model).items():
    for number, group in enumerate(own, start=1):
      reason = f'its score is {group.score.kind} and not linear (grow --new_score=linear)'
      if name not in names:
        reason = 'it is not beside a matrix (tokens of ffn.each are beside those of an MLP)'
      is_lora = name in names and isinstance(group.score, LinearScore)
      if not is_lora and (not groups or number in groups):
        raise UserError(
          f'group {number} of {name} is not LoRA: {reason}; to-hf writes it with code of its own'
        )
  bare = choose(model, without(range(1, most_groups(model) + 1)))
  ours, theirs = map(families.without_training, (bare, base))
  for path, one, other in config_lib.differences(ours, theirs, 'model.'):
    raise UserError(
      f'{path} is {one!r} in the run and {other!r} in {folder}, and an adapter changes products '
      'with matrices alone; name the folder that was brought, or write the whole model (to-hf)'
    )


def _join(keys: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
  """Return A [r, D_in] of matrices in one tensor, and give their values [r, D_out] this rank.

  Keys that differ lie one behind the other, each with zeros in the values of the other matrices.
  Tokens that are zero are left out.
  """
  if all(np.array_equal(keys[0], other) for other in keys):
    keys = keys[:1]
  else:
    ends = [(i * len(v), (len(keys) - 1 - i) * len(v)) for i, v in enumerate(values)]
    values[:] = [np.pad(v, (end, (0, 0))) for v, end in zip(values, ends, strict=True)]
  a = np.concatenate(keys)
  used = np.any([array.any(axis=1) for array in (a, *values)], axis=0)
  values[:] = [array[used] for array in values]
  return a[used]


def _describe(
  ranks: Mapping[str, int], weights: Weights, folder: Path, base: str
) -> dict[str, Any]:
  """Return the config of an adapter, given the rank of each module; all scales are 1.

  `folder` is that of the base, and `base` its path or name, with a revision or without.
  """
  r = Counter(ranks.values()).most_common(1)[0][0]
  others = {module: rank for module, rank in ranks.items() if rank != r}
  ends = {module.rpartition('.')[2] for module in ranks}
  modules = {name.removesuffix('.weight') for name in weights.in_class.values()}
  targeted = {module for module in modules if module.rpartition('.')[2] in ends}
  name, _ = hub_download.origin(str(folder / 'config.json')) or ('', '')
  return {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': name or base,
    'revision': (base.partition('@')[2] or None) if name else None,
    'inference_mode': True,
    'r': r,
    'lora_alpha': r,
    'rank_pattern': others,
    'alpha_pattern': others,
    'target_modules': sorted(ends if targeted == set(ranks) else ranks),
    'lora_dropout': 0.0,
    'bias': 'none',
    'fan_in_fan_out': weights.family == 'gpt2',
  }
