"""Map checkpoints of the released TPU code to our parameters, and infer their model.

That code (a fork of MaxText, with layers scanned along axis 1) differs from the released PyTorch
code in the tanh form of GELU, an epsilon added to the norm of a row of scores, no positions, logits
divided by √width, and embeddings drawn with a standard deviation of 1. Its final norm stores the
scale minus one. One array holds the keys of query, key and value.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from tokenformer_jax.config import InitConfig, LMConfig, ModelConfig, NoPositionsConfig
from tokenformer_jax.config.pattention import SCORES
from tokenformer_jax.convert import released_torch
from tokenformer_jax.convert.tensor_files import DTYPES
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Params
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.storage import paths

# All models of that code, except for sizes and scores.
_RELEASED = LMConfig(scaled_logits=True)
_ROW_EPSILON = {'l2_norm_gelu': 1e-5, 'gelu_l2_norm': 1e-8, 'softmax': 0.0}  # by score
_EMBEDDING = 'token_embedder/embedding'  # [V, D]
_ATTENTION, _MLP = 'decoder/layers/self_attention', 'decoder/layers/mlp'
_NORM = 'decoder/decoder_norm'

_MOST_PACKED = 16  # bytes of float32 for a byte in the files; weights hardly compress

Take = Callable[[np.ndarray], np.ndarray]


def _keys(array_DxLxN: np.ndarray) -> np.ndarray:
  return array_DxLxN.transpose(1, 2, 0)


def _values(array_NxLxD: np.ndarray) -> np.ndarray:
  return array_NxLxD.swapaxes(0, 1)


def _third(i: int) -> Take:
  return lambda array_DxLx3xN: _keys(array_DxLx3xN[:, :, i])


def _whole(array: np.ndarray) -> np.ndarray:
  return array


# Path of our parameter → name of their array, and the function from theirs to ours.
_ARRAYS: dict[tuple[str, ...], tuple[str, Take]] = {
  ('embedding',): (_EMBEDDING, _whole),
  ('final_norm', 'scale'): (f'{_NORM}/scale', lambda scale: scale + 1),
  ('final_norm', 'bias'): (f'{_NORM}/bias', _whole),
  ('blocks', 'attention', 'proj', 'keys'): (f'{_ATTENTION}/proj_key_slot', _keys),
  ('blocks', 'attention', 'proj', 'values'): (f'{_ATTENTION}/proj_value_slot', _values),
  ('blocks', 'ffn', 'keys'): (f'{_MLP}/wi', _keys),
  ('blocks', 'ffn', 'values'): (f'{_MLP}/wo', _values),
  **{
    ('blocks', 'attention', name, 'keys'): (f'{_ATTENTION}/qkv_key_slot', _third(i))
    for i, name in enumerate(('query', 'key', 'value'))
  },
  **{
    ('blocks', 'attention', name, 'values'): (f'{_ATTENTION}/{name[0]}_value_slot', _values)
    for name in ('query', 'key', 'value')
  },
}


@dataclasses.dataclass(frozen=True)
class Array:
  """An array of a checkpoint, not read yet."""

  directory: Path
  path: tuple[str, ...]  # in the checkpoint's tree
  shape: tuple[int, ...]

  def read(self) -> np.ndarray:
    """Read the array as float32.

    Raises:
      UserError: it cannot be read.
    """
    alone: Any = 0
    for key in reversed(self.path):
      alone = {key: alone}
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), alone)
    wanted = ocp.args.PyTreeRestore(item=alone, restore_args=as_numpy, partial_restore=True)
    try:
      with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        found = reader.restore(self.directory.absolute(), args=wanted)
    except Exception as error:  # of TensorStore, Orbax or the file system
      raise UserError(
        f'the array {"/".join(self.path)} of {self.directory} cannot be read '
        f'({paths.reason(error):.200}); fetch the checkpoint again'
      ) from error
    for key in self.path:
      found = found[key]
    return np.asarray(found, np.float32)


def find_directory(source: Path) -> Path | None:
  """Return the directory of the arrays, `source` or one in it; None without an Orbax checkpoint."""
  for directory in (source, source / 'items', source / 'default'):
    if (directory / '_METADATA').is_file():
      return directory
  return None


def find(directory: Path) -> dict[str, Array]:
  """Return the model's arrays by name. A name is the end of a path in the checkpoint's tree.

  Raises:
    UserError: the checkpoint cannot be read, or an array is missing or found more than once.
  """
  try:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
      tree = reader.metadata(directory.absolute()).item_metadata.tree
  except Exception as error:
    raise UserError(
      f'{directory} is not an Orbax checkpoint that can be read ({paths.reason(error):.200})'
    ) from error
  arrays: dict[str, Array] = {}
  for path, array in jax.tree_util.tree_flatten_with_path(tree)[0]:
    keys = tuple(str(getattr(key, 'key', key)) for key in path)
    if keys[0] != 'params':  # the optimizer's moments have the same names
      continue
    if any('/' in key or not key.isprintable() for key in keys):
      raise UserError(
        f'{directory} names an array {list(keys)!r:.200}; a name is part of the path of a file, so '
        'it must not lead elsewhere'
      )
    for name in {name for name, _ in _ARRAYS.values()}:
      if '/'.join(keys).removesuffix('/kernel').endswith(f'/{name}'):
        if name in arrays:
          raise UserError(f'{directory} has {name} more than once; it must be one model')
        arrays[name] = Array(directory, keys, tuple(array.shape))
        _check_chunks(directory, name, array)
  for name, _ in _ARRAYS.values():
    if name not in arrays:
      raise UserError(
        f'the array params/…/{name} is missing in {directory}: this is not a TokenFormer of the '
        'released TPU code with scanned layers (scan_layers=True)'
      )
  _check_held(directory, arrays.values())
  return arrays


def _check_chunks(directory: Path, name: str, array: Any) -> None:
  """Check that no stored piece of an array is larger than the array: pieces are read whole."""
  chunk = getattr(array.storage, 'chunk_shape', None) or ()
  if math.prod(chunk) > max(1, math.prod(array.shape)):
    raise UserError(
      f'{directory} stores {name} in pieces of {list(chunk)}, and the array has the shape '
      f'{list(array.shape)}; fetch the checkpoint again'
    )


def _check_held(directory: Path, arrays: Iterable[Array]) -> None:
  """Check that the files can hold the arrays: missing bytes would be read as zeros."""
  held = sum(path.stat().st_size for path in directory.rglob('*') if path.is_file())
  wanted = sum(4 * math.prod(array.shape) for array in arrays)
  if wanted > _MOST_PACKED * held:
    raise UserError(
      f'{directory} has {held} bytes in its files, and the arrays of its model take {wanted}; '
      'weights cannot be packed so far, so fetch the checkpoint again'
    )


def infer_model(
  arrays: Mapping[str, Array],
  *,
  heads: int | None = None,
  zoom_dim: int = 0,
  score: str = released_torch.SCORE,
) -> ModelConfig:
  """Return the model whose checkpoint has arrays of these names and shapes.

  `arrays` come from `find`. `heads` is None for a head for every 64 entries of the width, as
  released. The root of `zoom_dim`, a setting of the training, is the scale of the attention's
  Pattentions, and the root of 4 · zoom_dim that of the feed-forward ones; if it is 0, the numbers
  of parameter tokens replace it. `score` is one of `released_torch.SCORES`.

  Raises:
    UserError: a shape does not fit the others, the heads do not divide the width, or the score has
      no zoom_dim.
  """
  if zoom_dim and score == 'softmax':
    raise UserError(
      f'--zoom_dim={zoom_dim} has no meaning with --score=softmax, which the released TPU code '
      'scales by the number of tokens; leave one of them out'
    )
  ranks = {_EMBEDDING: 2, f'{_ATTENTION}/proj_key_slot': 3, f'{_MLP}/wi': 3}
  for name, rank in ranks.items():
    if len(arrays[name].shape) != rank:
      raise UserError(
        f'the array {name} has the shape {list(arrays[name].shape)}; it must have {rank} axes'
      )
  vocab_size, width = arrays[_EMBEDDING].shape
  _, layers, slots = arrays[f'{_ATTENTION}/proj_key_slot'].shape
  ffn = arrays[f'{_MLP}/wi'].shape[-1]
  heads = _guess_heads(width) if heads is None else heads
  released_torch.check_heads(width, heads)
  scale = zoom_dim or slots
  score_keys = {'row_epsilon': _ROW_EPSILON[score]} | (
    {} if score == 'softmax' else {'gelu': 'tanh'}
  )
  model = released_torch.sized(
    dataclasses.replace(
      _RELEASED,
      width=width,
      vocab_size=vocab_size,
      init=InitConfig(std=width**-0.5, embedding_std=1.0),
    ),
    layers=layers,
    heads=heads,
    positions=NoPositionsConfig(),
    tokens={'qkv': slots, 'proj': slots, 'ffn': ffn},
    references={'qkv': scale, 'proj': scale, 'ffn': 4 * zoom_dim or ffn},
    score=SCORES[score](**score_keys),
  )
  _check_fit(arrays, vocab_size, width, layers, slots, ffn)
  return model


def _guess_heads(width: int) -> int:
  """Return the number of heads of a released model of a width."""
  if width % 64:
    raise UserError(
      f'the width {width} is not a multiple of 64, so the number of heads cannot be guessed; give '
      'it as --heads=N'
    )
  return width // 64


def _check_fit(
  arrays: Mapping[str, Array], vocab_size: int, width: int, layers: int, slots: int, ffn: int
) -> None:
  """Check that the arrays have the shapes of a model; attention has `slots` tokens, a FFN `ffn`."""
  expected = {
    _EMBEDDING: (vocab_size, width),
    f'{_NORM}/scale': (width,),
    f'{_NORM}/bias': (width,),
    f'{_ATTENTION}/qkv_key_slot': (width, layers, 3, slots),
    f'{_ATTENTION}/proj_key_slot': (width, layers, slots),
    **{f'{_ATTENTION}/{x}_value_slot': (slots, layers, width) for x in ('q', 'k', 'v', 'proj')},
    f'{_MLP}/wi': (width, layers, ffn),
    f'{_MLP}/wo': (ffn, layers, width),
  }
  for name, shape in expected.items():
    if arrays[name].shape != shape:
      raise UserError(
        f'the array {name} has the shape {list(arrays[name].shape)}; by {_EMBEDDING}, '
        f'{_ATTENTION}/proj_key_slot and {_MLP}/wi it must be {list(shape)}'
      )


def deferred(model: ModelConfig, arrays: Mapping[str, Array], dtype: str = 'float32') -> Params:
  """Return the parameters of `model`; each is read only when it is written."""

  def array(path: tuple, abstract: jax.ShapeDtypeStruct) -> checkpoint.Deferred:
    name, take = _ARRAYS[tuple(key.key for key in path)]

    def read(layer: None) -> np.ndarray:
      del layer  # Its layers lie side by side in the source, so the array is made whole.
      return np.ascontiguousarray(take(arrays[name].read()).astype(DTYPES[dtype], copy=False))

    return checkpoint.Deferred(abstract.shape, DTYPES[dtype], read)

  return jax.tree.map_with_path(array, define_lm(model).abstract)
