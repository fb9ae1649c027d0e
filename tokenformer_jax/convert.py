r"""Turns released TokenFormer weights into a run of ours, and back, tensor by tensor.

  python -m tokenformer_jax.convert to-jax --source=pytorch_model.bin --target=RUN
      [--tokenizer=tokenizer.json] [--heads=N] [--rotary_fraction=F] [--sequence_length=N]
  python -m tokenformer_jax.convert to-jax --source=CHECKPOINT --target=RUN [--zoom_dim=N] …
  python -m tokenformer_jax.convert to-torch --source=RUN[@STEP] --target=pytorch_model.bin
      [--dtype=float32|float16|bfloat16]

The source of to-jax is a .bin or .safetensors file, the .index.json of a sharded set, or a
directory with one of them; or an Orbax checkpoint of the released TPU code. The work directory that
it makes can be generated from, grown, trained on and evaluated. It holds the parameters alone,
since the optimizer's moments of a model whose training begins are zero. The suffix of to-torch's
target, .bin or .safetensors, is its format.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import ml_collections
import numpy as np
from absl import flags

from tokenformer_jax import checkpoint, cli, paths, released_tpu, sharding, tensor_files
from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, DataConfig, MeshConfig, ModelConfig, TokenCounts
from tokenformer_jax.data import tokenizers
from tokenformer_jax.errors import UserError, nearest
from tokenformer_jax.grow import files
from tokenformer_jax.lm import define_lm
from tokenformer_jax.params import Params
from tokenformer_jax.tensor_files import Shape, Tensor

# The released names (SequentialWrapper of GPT-NeoX): `sequential.I.…` with I = 0 the embedding,
# 2 … L + 1 the layers, L + 3 the final norm. The rest are modules without parameters.
_EMBEDDING = 'sequential.0.word_embeddings.weight'
_FIRST_LAYER, _LAYER = 2, re.compile(r'sequential\.(\d+)\.(?:attention|mlp)\.')
_PATTENTIONS = {  # name in a layer → path in a block
  'attention.query': ('attention', 'query'),
  'attention.key': ('attention', 'key'),
  'attention.value': ('attention', 'value'),
  'attention.proj': ('attention', 'proj'),
  'mlp': ('ffn',),
}
_ARRAYS = {'key_param_tokens': 'keys', 'value_param_tokens': 'values'}
_NORM = {'norm.weight': 'scale', 'norm.bias': 'bias'}

_HEADS = {768: 12, 1024: 16, 1280: 16, 1536: 16}  # by width, in the released models (Table 9)
_RELEASED = ModelConfig()  # what all of them compute: its keys other than the sizes

_TAKEN = {
  'to-jax': ('heads', 'rotary_fraction', 'zoom_dim', 'tokenizer', 'sequence_length'),
  'to-torch': ('dtype',),
}


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a released tensor is among our parameters."""

  path: tuple[str, ...]
  layer: int | None  # in a stacked array
  shape: Shape  # of the tensor


def layout(model: ModelConfig) -> dict[str, Place]:
  """Every tensor of the released checkpoint of a model, in its order; allocates nothing."""
  abstract = define_lm(model).abstract
  paths = {_EMBEDDING: (('embedding',), None)}
  for layer in range(model.layers):
    for module, block in _PATTENTIONS.items():
      for tensor, array in _ARRAYS.items():
        name = f'sequential.{_FIRST_LAYER + layer}.{module}.{tensor}'
        paths[name] = (('blocks', *block, array), layer)
  for tensor, array in _NORM.items():
    paths[f'sequential.{model.layers + 3}.{tensor}'] = (('final_norm', array), None)

  def place(path: tuple[str, ...], layer: int | None) -> Place:
    shape = _at(abstract, path).shape
    return Place(path, layer, shape if layer is None else shape[1:])

  return {name: place(*where) for name, where in paths.items()}


def model_of(
  shapes: Mapping[str, Shape], *, heads: int | None = None, rotary_fraction: float | None = None
) -> ModelConfig:
  """The model whose released checkpoint has tensors of these names and shapes.

  The reference counts are the numbers of parameter tokens: the released code takes τ from them.

  Args:
    shapes: of all tensors, by their released names.
    heads: H; None: as in the released model of this width.
    rotary_fraction: of each head's width; None: a quarter, as in all released models.

  Raises:
    UserError: a tensor is missing, unknown, or of a shape that does not fit the others, or the
      number of heads is not known.
  """
  width, vocab_size = _sizes(shapes, _EMBEDDING)[::-1]
  layers = {int(match[1]) for match in map(_LAYER.match, shapes) if match}
  first = f'sequential.{_FIRST_LAYER}'
  counts = TokenCounts(
    qkv=_sizes(shapes, f'{first}.attention.query.key_param_tokens')[0],
    proj=_sizes(shapes, f'{first}.attention.proj.key_param_tokens')[0],
    ffn=_sizes(shapes, f'{first}.mlp.key_param_tokens')[0],
  )
  if heads is None and width not in _HEADS:
    raise UserError(
      f'no released model is {width} wide, so how many heads this one has must be said: --heads=N'
    )
  heads = _HEADS[width] if heads is None else heads
  if width % heads:
    raise UserError(f'the model is {width} wide, which {heads} heads do not divide; change --heads')
  model = dataclasses.replace(
    _RELEASED,
    layers=len(layers),  # one that is left out shows as missing tensors
    width=width,
    heads=heads,
    vocab_size=vocab_size,
    param_tokens=counts,
    reference_tokens=counts,
    rotary_fraction=_RELEASED.rotary_fraction if rotary_fraction is None else rotary_fraction,
  )
  expected = layout(model)
  for name, place in expected.items():
    if _sizes(shapes, name) != place.shape:
      raise UserError(
        f'the tensor {name} has the shape {list(shapes[name])}; by {_EMBEDDING} and the first '
        f'layer it must be {list(place.shape)}'
      )
  for name in shapes:
    if name not in expected:
      raise UserError(
        f'the tensor {name} has no place in a TokenFormer of {model.layers} layers'
        f'{nearest(name, expected) if len(expected) < 1000 else ""}'
      )
  return model


def _sizes(shapes: Mapping[str, Shape], name: str) -> Shape:
  """The shape of a tensor that must be there; of two axes, except in the final norm."""
  if name not in shapes:
    some = ', '.join(list(shapes)[:3]) or 'none at all'
    raise UserError(
      f'the tensor {name} is missing: this is not a whole TokenFormer as released (it has {some} …)'
    )
  if '.norm.' not in name and len(shapes[name]) != 2:
    raise UserError(f'the tensor {name} has the shape {list(shapes[name])}; it must have two axes')
  return tuple(shapes[name])


def to_jax(
  source: Path,
  target: paths.Path,
  *,
  tokenizer: str = '',
  heads: int | None = None,
  rotary_fraction: float | None = None,
  zoom_dim: int | None = None,
  sequence_length: int = 2048,
) -> Config:
  """Makes a work directory, with a checkpoint of step 0, of released weights.

  Args:
    source: see `tensor_files.find`; or an Orbax checkpoint, see `released_tpu`.
    target: the new work directory.
    tokenizer: the path of a `tokenizer.json`, or `bytes`; empty: the one beside the source.
    heads: see `model_of`, or `released_tpu.model_of`.
    rotary_fraction: see `model_of`; an Orbax checkpoint has none.
    zoom_dim: see `released_tpu.model_of`; only an Orbax checkpoint has one.
    sequence_length: for what is trained or evaluated later; nothing of the model depends on it.

  Returns:
    The config of the run.

  Raises:
    UserError: the source is not what `model_of` and `tensor_files.find` expect, the tokenizer does
      not fit, or the target exists or cannot be written. Nothing is left of the target then.
  """
  files.check_target(target)
  model, params = _read(source, heads, rotary_fraction, zoom_dim)
  spec = tokenizer or _tokenizer_beside(source)
  loaded = _load_tokenizer(spec)
  if loaded.size > model.vocab_size:
    raise UserError(
      f'the tokenizer {spec} has {loaded.size} token ids, and the embedding {model.vocab_size} '
      'rows; name the tokenizer of this model by --tokenizer'
    )
  config = Config(
    model=dataclasses.replace(model, max_length=sequence_length),
    data=DataConfig(
      tokenizer=spec if spec == 'bytes' else str(Path(spec).expanduser().absolute()),
      sequence_length=sequence_length,
    ),
  )
  config_lib.resolve(ml_collections.ConfigDict(dataclasses.asdict(config)))
  state = {'params': params}
  files.write(target, state, config, loaded.to_json(), lineage=(), contents='params', step=0)
  return config


def _read(
  source: Path, heads: int | None, rotary_fraction: float | None, zoom_dim: int | None
) -> tuple[ModelConfig, Params]:
  """The model of a source, and its parameters, none of which is read yet."""
  if directory := released_tpu.directory_of(source):
    if rotary_fraction is not None:
      raise UserError(
        f'--rotary_fraction has no meaning for {source}, a checkpoint of the released TPU code, '
        'whose models have no positions; leave it out'
      )
    arrays = released_tpu.find(directory)
    model = released_tpu.model_of(arrays, heads=heads, zoom_dim=zoom_dim or 0)
    return model, released_tpu.deferred(model, arrays)
  if zoom_dim is not None:
    raise UserError(
      f'--zoom_dim has no meaning for {source}, which is no checkpoint of the released TPU code; '
      'leave it out'
    )
  tensors = tensor_files.find(source)
  shapes = {name: tensor.shape for name, tensor in tensors.items()}
  model = model_of(shapes, heads=heads, rotary_fraction=rotary_fraction)
  return model, _deferred(model, tensors)


def _tokenizer_beside(source: Path) -> str:
  beside = (source if source.is_dir() else source.parent) / 'tokenizer.json'
  if not beside.is_file():
    raise UserError(
      f'there is no {beside}; name the tokenizer.json of the model (of GPT-NeoX-20B for the '
      'released ones) by --tokenizer, or take --tokenizer=bytes for a model of bytes'
    )
  return str(beside)


def _load_tokenizer(spec: str) -> tokenizers.Tokenizer:
  if spec != 'bytes' and not Path(spec).expanduser().is_file():
    raise UserError(
      f'--tokenizer={spec} is not a file; it must be bytes or the path of a tokenizer.json'
    )
  return tokenizers.load(spec)


def _deferred(model: ModelConfig, tensors: Mapping[str, Tensor]) -> Params:
  """The parameters, each of them put together from its tensors only when it is written."""
  parts: dict[tuple[str, ...], list[Tensor]] = {}
  for name, place in layout(model).items():
    parts.setdefault(place.path, []).append(tensors[name])

  def array(path: tuple, abstract: jax.ShapeDtypeStruct) -> checkpoint.Deferred:
    sources = parts[tuple(key.key for key in path)]

    def read() -> np.ndarray:
      files.return_freed_memory()  # of the array before
      if path[0].key != 'blocks':
        return sources[0].read().astype(np.float32, copy=False)
      layers = np.empty(abstract.shape, np.float32)
      for layer, tensor in zip(layers, sources, strict=True):
        layer[...] = tensor.read()
      return layers

    return checkpoint.Deferred(abstract.shape, np.dtype(np.float32), read)

  return jax.tree.map_with_path(array, define_lm(model).abstract)


def to_torch(source: str, target: Path, *, dtype: str = 'float32') -> ModelConfig:
  """Writes the parameters of a run as released: the exact inverse of `to_jax`.

  Args:
    source: the run, DIR or DIR@STEP.
    target: a new file; its suffix, `.bin` or `.safetensors`, is the format.
    dtype: of the tensors; what came from this dtype goes back to it bit for bit.

  Returns:
    The model.

  Raises:
    UserError: the run cannot be read, its model is none that the released code can compute, or the
      target exists or cannot be written. Nothing is left of the target then.
  """
  files.check_target(target)
  if target.suffix not in tensor_files.SUFFIXES:
    raise UserError(f'the target {target} must end in {" or ".join(tensor_files.SUFFIXES)}')
  directory, step = cli.split_source(source)
  checkpoints, meta = checkpoint.open_source(directory, step)
  with contextlib.closing(checkpoints):
    checkpoint.check_is_model(meta, directory)
    model = meta.config.model
    _check_released(model)
    places = layout(model)
    shapes = {name: place.shape for name, place in places.items()}
    tensor_files.write(target, dtype, shapes, _tensors(checkpoints, meta, places))
  return model


def _check_released(model: ModelConfig) -> None:
  """Checks that the released code can compute a model, whatever its sizes."""
  for field in dataclasses.fields(ModelConfig):
    name = field.name
    free = ('layers', 'width', 'heads', 'vocab_size', 'param_tokens', 'reference_tokens')
    if name in (*free, 'rotary_fraction', 'ffn_width', 'max_length', 'init_std'):
      continue
    if getattr(model, name) != getattr(_RELEASED, name):
      raise UserError(
        f'model.{name} is {getattr(model, name)!r}; the released layout is for models with '
        f'{getattr(_RELEASED, name)!r} only'
      )


def _tensors(
  checkpoints: checkpoint.Checkpoints, meta: checkpoint.Meta, places: Mapping[str, Place]
) -> Iterator[tuple[str, np.ndarray]]:
  """Every tensor with its name, array by array of the checkpoint."""
  abstract = define_lm(meta.config.model).abstract
  mesh = sharding.make_mesh(MeshConfig(), jax.local_devices()[:1])
  names: dict[tuple[str, ...], list[str]] = {}
  for name, place in places.items():
    names.setdefault(place.path, []).append(name)
  for path, of_layers in names.items():
    alone = _at(abstract, path)
    for key in reversed(path):
      alone = {key: alone}
    array = np.asarray(_at(files.read_params(checkpoints, meta, mesh, alone), path))
    for name in of_layers:
      layer = places[name].layer
      # A copy of a layer, so that whoever still holds the last one does not hold all of them.
      yield name, array if layer is None else array[layer].copy()
    del array  # before the next one is read
    files.return_freed_memory()


def _at(tree: Params, path: Sequence[str]) -> jax.Array | jax.ShapeDtypeStruct:
  for key in path:
    tree = tree[key]
  return tree


def _define_flags() -> None:
  flags.DEFINE_string('source', None, 'Weights (to-jax) or a run (to-torch).', required=True)
  flags.DEFINE_string('target', None, 'The new work directory, or file.', required=True)
  flags.DEFINE_integer(
    'heads', None, 'Attention heads. Default: by the width, as released.', lower_bound=1
  )
  flags.DEFINE_float(
    'rotary_fraction', None, 'Of each head, how much is rotated. Default: 0.25, as released.'
  )
  flags.DEFINE_integer(
    'zoom_dim', None, 'Of the config of a TPU checkpoint, if it was not 0.', lower_bound=0
  )
  flags.DEFINE_string(
    'tokenizer', '', 'A tokenizer.json, or bytes. Default: the tokenizer.json beside the source.'
  )
  flags.DEFINE_integer('sequence_length', 2048, 'For later training.', lower_bound=1)
  flags.DEFINE_enum('dtype', 'float32', tensor_files.DTYPES, 'Of the tensors that are written.')


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  # Nothing is computed, so an accelerator, which other processes may hold, is left alone.
  jax.config.update('jax_platforms', 'cpu')
  action, *rest = argv[1:] or ['']
  if action not in _TAKEN or rest:
    wrong = rest[0] if action in _TAKEN else action
    raise UserError(f'{wrong!r} is not something to do{nearest(wrong, _TAKEN)}')
  values = flags.FLAGS
  for name in {*_TAKEN['to-jax'], *_TAKEN['to-torch']} - {*_TAKEN[action]}:
    if values[name].present:
      raise UserError(f'--{name} has no meaning for {action}; leave it out')
  options = {name: values[name].value for name in _TAKEN[action]}
  target = paths.of(values.target) if action == 'to-jax' else paths.local(values.target)
  if action == 'to-jax':
    model = to_jax(paths.local(values.source), target, **options).model
  else:
    model = to_torch(values.source, target, **options)
  rotated = model.rotary_fraction if model.positions == 'rotary' else 0
  heads = f'{model.heads} heads, of each of which {rotated:g} is rotated'
  cli.say(f'{model.layers} layers, width {model.width}, {heads}, {model.param_tokens}')
  if action == 'to-jax':
    cli.say(f'wrote {target}; to try it:')
    print(f"python -m tokenformer_jax.generate --source={target} --prompt='Once upon a time'")
    return
  cli.say(f'wrote {target}')
  if model.reference_tokens != model.param_tokens:
    cli.say(
      'the released code takes the scale from the number of tokens, so it will not compute what '
      f'this model does, whose reference counts are {model.reference_tokens}; a model grown with '
      '--scale=resize (as --method=duplicate is) computes the same there'
    )


if __name__ == '__main__':
  _define_flags()
  cli.run(main, positional=True, on_all_hosts=False)
