"""Map the tensors of a file to our parameters, and back.

A format of files is a list of rules, from which `layout` makes an entry for each tensor of a model.
`released_torch`, `hub_folder` and the families of `hub` have rules; checking, reading and writing
are the same for all.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from tokenformer_jax.config import ModelConfig, SoftmaxConfig
from tokenformer_jax.convert.tensor_files import DTYPES, Shape, Tensor
from tokenformer_jax.errors import UserError, misspelt
from tokenformer_jax.grow import grow_run
from tokenformer_jax.model import trunk
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Params, Path
from tokenformer_jax.parallel.rules import Axes
from tokenformer_jax.runs.checkpoint import Deferred

Names = tuple[str, ...]  # the keys of an array in our nested dict


class Rule(NamedTuple):
  """A tensor of a file, and the arrays that hold its numbers.

  Attributes:
    name: of the tensor, with {layer} and {expert} where there are several.
    paths: those of the arrays: in a layer if the name has {layer}, else in the model. Several
      arrays are side by side in the tensor, along their last axis. A model without them has no such
      tensor.
    how: `same`; `transposed`; `row`: as a matrix of one row; or `heads`: transposed, and the arrays
      of each head in turn.
  """

  name: str
  paths: tuple[str, ...]
  how: str = 'same'


class Entry(NamedTuple):
  """A tensor of a model in a file, and the arrays that hold its numbers."""

  paths: tuple[Names, ...]
  indices: tuple[int, ...]  # of the layer and the expert in those arrays
  how: str  # as in `Rule`
  shapes: tuple[Shape, ...]  # of the arrays at the indices
  heads: int

  @property
  def shape(self) -> Shape:
    """The shape of the tensor."""
    first = self.shapes[0]
    if not first:
      return ()
    joined = (*first[:-1], sum(shape[-1] for shape in self.shapes))
    match self.how:
      case 'same':
        return joined
      case 'row':
        return (1, *joined)
    return joined[::-1] if self.how == 'transposed' else (joined[-1], *joined[:-1])

  def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the tensor that holds the arrays."""
    if self.how == 'heads':
      by_head = [array.T.reshape(self.heads, -1, *array.shape[:-1]) for array in arrays]
      return np.stack(by_head, axis=1).reshape(self.shape)
    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)
    joined = joined[None] if self.how == 'row' else joined
    return joined.T if self.how == 'transposed' else joined

  def split(self, tensor: np.ndarray, number: int) -> np.ndarray:
    """Return one of the arrays that the tensor holds: the inverse of `join`."""
    if self.how == 'heads':
      by_head = tensor.reshape(self.heads, len(self.paths), -1, *tensor.shape[1:])[:, number]
      return by_head.reshape(-1, *tensor.shape[1:]).T
    joined = tensor[0] if self.how == 'row' else tensor
    joined = joined.T if self.how == 'transposed' else joined
    if len(self.paths) == 1:
      return joined
    ends = np.cumsum([shape[-1] for shape in self.shapes])
    return np.split(joined, ends[:-1], axis=-1)[number]


Layout = Mapping[str, Entry]  # by the name of the tensor, in the order of a file


def layout(model: ModelConfig, rules: Iterable[Rule], first_layer: int = 0) -> Layout:
  """Return every tensor of a model by name; allocate nothing.

  The tensors of the layers are together, layer by layer. `first_layer` is the number of the first
  one in names.
  """
  leaves = jax.tree_util.tree_leaves_with_path(define_lm(model).abstract)
  abstract = {tuple(key.key for key in path): leaf for path, leaf in leaves}
  entries: dict[str, Entry] = {}

  def add(rule: Rule, number: int, prefix: Names, indices: tuple[int, ...], heads: int) -> None:
    paths = tuple((*prefix, *path.split('/')) for path in rule.paths)
    if paths[0] not in abstract:
      return
    has_experts = '{expert}' in rule.name
    experts = range(abstract[paths[0]].shape[len(indices)]) if has_experts else [None]
    for expert in experts:
      own = indices if expert is None else (*indices, expert)
      shapes = tuple(abstract[path].shape[len(own) :] for path in paths)
      name = rule.name.format(layer=number, expert=expert)
      entries[name] = Entry(paths, own, rule.how, shapes, heads)

  rules = list(rules)
  in_layers = [rule for rule in rules if '{layer}' in rule.name]
  for rule in rules:
    if rule not in in_layers:
      add(rule, 0, (), (), 0)
    elif rule is in_layers[0]:
      paths = trunk.layer_paths(model.repeats)
      for number, (layer, path) in enumerate(zip(model.in_order, paths, strict=True), first_layer):
        heads = layer.mixer.heads if isinstance(layer.mixer, SoftmaxConfig) else 0
        prefix = ('blocks', path.stack) if path.stack else ('blocks',)
        for own in in_layers:
          add(own, number, prefix, (path.row,), heads)
  left = set(abstract) - {path for entry in entries.values() for path in entry.paths}
  assert not left, f'no rule has {left}'
  return entries


class Weights(NamedTuple):
  """A model and its tensors in files, which are not read yet."""

  model: ModelConfig
  layout: Layout
  tensors: Mapping[str, Tensor]
  family: str = ''  # the kind of a `Family`
  in_class: Mapping[str, str] = {}  # names of a whole folder in the class of transformers, by ours

  def check(self, what: str) -> None:
    """Check that the tensors are those of the layout; `what` is the model in the sentence."""
    for name, entry in self.layout.items():
      if name not in self.tensors:
        some = ', '.join(list(self.tensors)[:3]) or 'none at all'
        raise UserError(
          f'the tensor {name} is missing, which {what} must have; fetch all of its files again (it '
          f'has {some} …)'
        )
      if self.tensors[name].shape != entry.shape:
        raise UserError(
          f'the tensor {name} has the shape {list(self.tensors[name].shape)}; in {what} it must be '
          f'{list(entry.shape)}'
        )
    for name in self.tensors:
      if name not in self.layout:
        layer, depth = re.search(r'\.(\d+)\.', name), self.model.depth
        if self.family and layer and int(layer[1]) >= depth:
          count = 'n_layer' if self.family == 'gpt2' else 'num_hidden_layers'
          raise UserError(
            f'the tensor {name} is of a layer too many: {what} has {count}={depth}, layers 0 to '
            f'{depth - 1}; correct {count}, or fetch all of its files again'
          )
        near = misspelt(name, self.layout) if len(self.layout) < 1000 else None
        hint = f'; did you mean {near!r}?' if near else ''
        raise UserError(f'the tensor {name} is none of {what}{hint}')

  def params(self, dtype: str = 'float32') -> Params:
    """Return parameters to store in a dtype; each is read when it is written, layer by layer."""
    sources: dict[tuple[Names, int | None], list[tuple[str, int]]] = {}
    for name, entry in self.layout.items():
      for number, path in enumerate(entry.paths):
        layer = entry.indices[0] if entry.indices else None
        sources.setdefault((path, layer), []).append((name, number))

    def array(path: Path, abstract: jax.ShapeDtypeStruct, axes: Axes) -> Deferred:
      names, stacked = tuple(key.key for key in path), axes[:1] == ('layers',)

      def read(layer: int | None) -> np.ndarray:
        grow_run.return_freed_memory()  # of the array before
        made = np.empty(abstract.shape[int(stacked) :], DTYPES[dtype])
        for name, number in sources[names, layer]:
          entry = self.layout[name]
          made[entry.indices[1:]] = entry.split(self.tensors[name].read(), number)
        return made

      return Deferred(abstract.shape, DTYPES[dtype], read, stacked)

    definition = define_lm(self.model)
    return jax.tree.map_with_path(array, definition.abstract, definition.axes)


def stream(layout: Layout, read: Callable[[Names], np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
  """Yield each tensor of a layout with its name, those of the same arrays together.

  `read` returns the parameter at a path; each is read once, and one tensor's arrays are in memory.
  """
  groups: dict[tuple[Names, ...], list[str]] = {}
  for name, entry in layout.items():
    groups.setdefault(entry.paths, []).append(name)
  for paths, names in groups.items():
    arrays = [read(path) for path in paths]
    for name in names:
      entry = layout[name]
      # Copy the layer: a view of it, held by the consumer, would keep all layers in memory.
      own = [array[entry.indices].copy() if entry.indices else array for array in arrays]
      yield name, entry.join(own)
    del arrays  # before the next ones are read
    grow_run.return_freed_memory()
