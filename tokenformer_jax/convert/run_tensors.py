"""Read the parameters of a run as tensors with names, array by array."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tokenformer_jax.config import MeshConfig, ModelConfig
from tokenformer_jax.convert import tensor_files
from tokenformer_jax.convert.tensor_files import Shape, Tensor
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import grow_run
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Params, Path
from tokenformer_jax.parallel import messages, sharding
from tokenformer_jax.parallel.rules import Axes
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Meta

_CHUNK = 2**22  # numbers to check at once


class Place(NamedTuple):
  """The place of a tensor among our parameters."""

  path: tuple[str, ...]
  layer: int | None  # in a stacked array
  shape: Shape  # of the tensor


def read(
  checkpoints: checkpoint.Checkpoints, meta: Meta, places: Mapping[str, Place]
) -> Iterator[tuple[str, np.ndarray]]:
  """Yield every tensor with its name; one array of the checkpoint is in memory at a time."""
  names: dict[tuple[str, ...], list[str]] = {}
  for name, place in places.items():
    names.setdefault(place.path, []).append(name)
  for path, layer_names in names.items():
    array = read_array(checkpoints, meta, path)
    for name in layer_names:
      layer = places[name].layer
      # Copy the layer: a view of it, held by the consumer, would keep all layers in memory.
      yield name, array if layer is None else array[layer].copy()
    del array  # before the next one is read
    grow_run.return_freed_memory()


def deferred(
  model: ModelConfig,
  fill: Callable[[tuple[str, ...], int | None, np.ndarray], None],
  dtype: str = 'float32',
) -> Params:
  """Return the parameters of a model; each is made only when it is written, layer by layer.

  `fill(path, layer, array)` writes the numbers of the array at a path into it: of one layer if the
  array is stacked, else of None. `dtype` is that of the stored arrays.
  """

  def array(path: Path, abstract: jax.ShapeDtypeStruct, axes: Axes) -> checkpoint.Deferred:
    names, stacked = tuple(key.key for key in path), axes[:1] == ('layers',)

    def read(layer: int | None) -> np.ndarray:
      grow_run.return_freed_memory()  # of the array before
      made = np.empty(abstract.shape[int(stacked) :], tensor_files.DTYPES[dtype])
      fill(names, layer, made)
      return made

    return checkpoint.Deferred(abstract.shape, tensor_files.DTYPES[dtype], read, stacked)

  definition = define_lm(model)
  return jax.tree.map_with_path(array, definition.abstract, definition.axes)


def deferred_at(
  model: ModelConfig, places: Mapping[str, Place], tensors: Mapping[str, Tensor], dtype: str
) -> Params:
  """Return `deferred` parameters from tensors, given their places."""
  names = {(place.path, place.layer): name for name, place in places.items()}

  def fill(path: tuple[str, ...], layer: int | None, array: np.ndarray) -> None:
    array[...] = tensors[names[path, layer]].read()

  return deferred(model, fill, dtype)


def read_array(checkpoints: checkpoint.Checkpoints, meta: Meta, path: Sequence[str]) -> np.ndarray:
  """Return one array of the parameters in a checkpoint."""
  mesh = sharding.make_mesh(MeshConfig(), jax.local_devices()[:1])
  alone: Any = at(define_lm(meta.config.model).abstract, path)
  for key in reversed(path):
    alone = {key: alone}
  return np.asarray(at(grow_run.read_params(checkpoints, meta, mesh, alone), path))


def at(tree: Any, path: Sequence[str]) -> Any:
  """Return the array at a path in a nested dict."""
  for key in path:
    tree = tree[key]
  return tree


class NonFinite:
  """Counts the weights that are NaN or infinite."""

  def __init__(self, source: str, allowed: bool):
    self._source, self._allowed = source, allowed
    self._number, self._first = 0, ''

  def count(self, name: str, numbers: np.ndarray) -> None:
    """Count the weights of a tensor, or of a part of it."""
    flat = numbers.reshape(-1)
    for chunk in np.split(flat, range(_CHUNK, len(flat), _CHUNK)):
      wrong = len(chunk) - int(np.count_nonzero(np.isfinite(chunk)))
      self._first = self._first or (name if wrong else '')
      self._number += wrong

  def counted(self, stream: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the stream; raise at its end if a number in it is not allowed."""
    for name, array in stream:
      self.count(name, array)
      yield name, array
    self.report()

  def report(self) -> None:
    """Print the number of such weights, if there are any."""
    if not self._number:
      return
    message = (
      f'{self._source} has {self._number:,} weights that are NaN or infinite, the first of them in '
      f'the tensor {self._first}'
    )
    if not self._allowed:
      raise UserError(
        f'{message}: a model with them computes nothing but NaN; fetch the weights again, or name '
        'an earlier checkpoint (--allow_nonfinite takes them as they are)'
      )
    messages.say(f'{message}; they are taken as they are (--allow_nonfinite)')
