"""Read and write folders in the hub's layout: config.json, safetensors files, a tokenizer."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tokenformer_jax.config import ModelConfig, pattern
from tokenformer_jax.convert import families, run_tensors, tensor_files
from tokenformer_jax.convert.family import Family, Rule
from tokenformer_jax.convert.hub_keys import Keys, read_json
from tokenformer_jax.convert.tensor_files import Shape, Tensor
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import grow_run
from tokenformer_jax.model import trunk
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Params

_CONFIG = 'config.json'
# Keys of a config.json that do not change what a trained model computes.
_IGNORED = """
  architectures model_type torch_dtype dtype transformers_version _name_or_path tokenizer_class
  use_cache bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id initializer_range
  attention_dropout hidden_dropout classifier_dropout attn_pdrop embd_pdrop resid_pdrop
  resid_dropout embd_dropout summary_activation summary_first_dropout summary_proj_to_labels
  summary_type summary_use_proj task_specific_params gradient_checkpointing pretraining_tp n_ctx
  reorder_and_upcast_attn output_attentions output_hidden_states output_router_logits return_dict
  router_aux_loss_coef router_jitter_noise id2label label2id problem_type chunk_size_feed_forward
  finetuning_task intermediate_size max_window_layers sliding_window rope_theta is_decoder
  tie_encoder_decoder
"""


class Folder(NamedTuple):
  """A folder that was found but not read.

  Attributes:
    family: the kind of its model.
    model: our config of it.
    tensors: those of its parameters, by the names that the family has for them.
    unread: the keys of its config.json that are not known.
  """

  family: Family
  model: ModelConfig
  tensors: dict[str, Tensor]
  unread: list[str]


class Place(NamedTuple):
  """A tensor, and the arrays of one layer that its numbers are in."""

  name: str
  rule: Rule
  paths: tuple[tuple[str, ...], ...]
  at: tuple[int, ...]  # the layer and the expert in those arrays
  heads: int
  shape: Shape

  @property
  def layer(self) -> int | None:
    """Return the number of the layer in those arrays, or None if they are not stacked."""
    return self.at[0] if self.at else None


def is_folder(source: Path) -> bool:
  """Return whether a path is a folder in the hub's layout, by its config.json."""
  file = source / _CONFIG
  return file.is_file() and bool({'model_type', 'architectures'} & set(read_json(file)))


def find(source: Path) -> Folder:
  """Return the model of a folder."""
  file = source / _CONFIG
  values = read_json(file)
  family = _family(values, file)
  keys = Keys(values, str(file), family.defaults)
  keys.only('quantization_config')
  keys.only('is_encoder_decoder', False)
  model = family.to_model(keys)
  tensors = tensor_files.find(source, skipped=lambda name: name.endswith(family.stored))
  tensors = _named(tensors, family)
  _check(tensors, model, family)
  return Folder(family, model, tensors, keys.unread(_IGNORED.split()))


def _family(values: Mapping[str, Any], file: Path) -> Family:
  if values.get('auto_map'):
    raise UserError(
      f'{file} has auto_map: its model is computed by Python code of its author, which is never '
      'run here; convert a model of a family that transformers has itself'
    )
  named = values.get('architectures')
  architecture = named[0] if isinstance(named, list) and named else ''
  known = {family.architecture: family for family in families.FAMILIES.values()}
  # Files of older models have model_type alone.
  family = known.get(architecture) if architecture else None
  if not architecture and isinstance(values.get('model_type'), str):
    family = families.FAMILIES.get(values['model_type'])
  if family is None:
    what = architecture or values.get('model_type')
    raise UserError(
      f'{file} is of a {what!r:.80}, which cannot be converted; it must be one of '
      f'{", ".join(sorted(known))}'
    )
  return family


def _named(tensors: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
  """Return the tensors by the names of the whole model: those of a bare one have no prefix."""
  whole = any(name.startswith(family.prefix) for name in tensors)
  return dict(tensors) if whole else {f'{family.prefix}{k}': t for k, t in tensors.items()}


def layout(model: ModelConfig, family: Family) -> list[Place]:
  """Return the tensors of a model of a family, layer by layer; allocate nothing."""
  abstract = _by_path(define_lm(model).abstract)
  layers = [model.layers[name] for name in pattern.names(model.repeats)]
  places, covered = [], set()

  def add(rule: Rule, name: str, prefix: tuple[str, ...], index: tuple[int, ...], heads: int):
    paths = tuple((*prefix, *path.split('/')) for path in rule.paths)
    if paths[0] not in abstract:
      return
    covered.update(paths)
    experts = range(abstract[paths[0]].shape[len(index)]) if '{expert}' in name else [None]
    for expert in experts:
      at = index if expert is None else (*index, expert)
      whole = name if expert is None else name.replace('{expert}', str(expert))
      shape = _joined_shape(rule.how, [abstract[path].shape[len(at) :] for path in paths])
      places.append(Place(whole, rule, paths, at, heads, shape))

  first = [rule for rule in family.rules if '{layer}' in rule.name]
  for rule in family.rules:
    if '{layer}' not in rule.name:
      add(rule, rule.name, (), (), 0)
    elif rule is first[0]:
      for number, place in enumerate(trunk.layer_paths(model.repeats)):
        prefix = ('blocks', place.stack) if place.stack else ('blocks',)
        for own in first:
          name = own.name.replace('{layer}', str(number))
          add(own, name, prefix, (place.row,), layers[number].mixer.heads)
  if left := sorted(set(abstract) - covered):
    raise UserError(f'{"/".join(left[0])} has no place in a {family.architecture}')
  return places


def _by_path(tree: Params) -> dict[tuple[str, ...], Any]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {tuple(key.key for key in path): leaf for path, leaf in leaves}


def _check(tensors: Mapping[str, Tensor], model: ModelConfig, family: Family) -> None:
  """Check that the tensors are those of the model."""
  places = layout(model, family)
  for place in places:
    if place.name not in tensors:
      some = ', '.join(list(tensors)[:3]) or 'none at all'
      raise UserError(
        f'the tensor {place.name} is missing: by its {_CONFIG} the folder must have it; fetch the '
        f'whole folder (it has {some} …)'
      )
    found = tensors[place.name].shape
    if found != place.shape:
      raise UserError(
        f'the tensor {place.name} has the shape {list(found)}; by {_CONFIG} it must be '
        f'{list(place.shape)}'
      )
  known = {place.name for place in places}
  tied = {rule.name for rule in family.rules if rule.paths == ('head',) and model.tied_head}
  for name in tensors:
    if name not in known | tied:
      raise UserError(
        f'the tensor {name} has no place in a {family.architecture} of {model.depth} layers with '
        f'the options of its {_CONFIG}'
      )


def _joined_shape(how: str, shapes: list[Shape]) -> Shape:
  """Return the shape of the tensor that holds arrays of these shapes."""
  if how == 'same':
    return shapes[0]
  if how == 'transposed':
    return shapes[0][::-1]
  if how == 'row':
    return (1, *shapes[0])
  total = sum(shape[-1] for shape in shapes)
  return (*shapes[0][:-1], total) if how == 'columns' else (total, *shapes[0][:-1])


def _split(tensor: np.ndarray, place: Place, part: int) -> np.ndarray:
  """Return one of the arrays that a tensor holds."""
  how, count = place.rule.how, len(place.paths)
  if how == 'same':
    return tensor
  if how == 'transposed':
    return tensor.T
  if how == 'row':
    return tensor[0]
  if how == 'columns':
    return np.split(tensor, count, axis=-1)[part]
  by_head = tensor.reshape(place.heads, count, -1, *tensor.shape[1:])[:, part]
  return by_head.reshape(-1, *tensor.shape[1:]).T


def join(arrays: list[np.ndarray], place: Place) -> np.ndarray:
  """Return the tensor that holds arrays: the inverse of `_split`."""
  how = place.rule.how
  if how == 'same':
    return arrays[0]
  if how == 'transposed':
    return arrays[0].T
  if how == 'row':
    return arrays[0][None]
  if how == 'columns':
    return np.concatenate(arrays, axis=-1)
  parts = [array.T.reshape(place.heads, -1, *array.shape[:-1]) for array in arrays]
  return np.stack(parts, axis=1).reshape(place.shape)


def deferred(folder: Folder, dtype: str = 'float32') -> Params:
  """Return the parameters; each is read from its tensors when it is written, layer by layer."""
  sources: dict[tuple[tuple[str, ...], int | None], list[tuple[Place, int]]] = {}
  for place in layout(folder.model, folder.family):
    for part, path in enumerate(place.paths):
      sources.setdefault((path, place.layer), []).append((place, part))

  def fill(path: tuple[str, ...], layer: int | None, array: np.ndarray) -> None:
    for place, part in sources[path, layer]:
      array[place.at[1:]] = _split(folder.tensors[place.name].read(), place, part)

  return run_tensors.deferred(folder.model, fill, dtype)


def describe(
  model: ModelConfig, family: Family, ids: Mapping[str, int], dtype: str
) -> dict[str, Any]:
  """Return the config.json of a model of a family; `ids` are its keys of special tokens."""
  return {
    'architectures': [family.architecture],
    'model_type': family.kind,
    **family.to_keys(model),
    **ids,
    'torch_dtype': dtype,
  }


def tensors(
  places: Iterable[Place], read: Callable[[tuple[str, ...]], np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
  """Yield each tensor of a model with its name, those of the same arrays together.

  `read` returns the parameter at a path; each is read once.
  """
  groups: dict[tuple[tuple[str, ...], ...], list[Place]] = {}
  for place in places:
    groups.setdefault(place.paths, []).append(place)
  for paths, own in groups.items():
    arrays = [read(path) for path in paths]
    for place in own:
      yield place.name, join([array[place.at] for array in arrays], place)
    del arrays  # before the next ones are read
    grow_run.return_freed_memory()
