"""Make a run of ours from weights: a folder of the hub, or those of the released TokenFormers."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, ModelConfig, TextConfig
from tokenformer_jax.convert import (
  hub,
  hub_folder,
  hub_generation,
  released_torch,
  run_tensors,
  tensor_files,
  vocabulary,
)
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import grow_run
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.storage import paths

STORED = ('float32', 'bfloat16')  # dtypes of a run's parameters


def to_jax(
  source: Path,
  target: paths.Path,
  *,
  tokenizer: str = '',
  heads: int | None = None,
  rotary_fraction: float | None = None,
  score: str = released_torch.SCORE,
  sequence_length: int | None = None,
  dtype: str = 'float32',
  allow_nonfinite: bool = False,
) -> Config:
  """Make a work directory, with a checkpoint of step 0, from weights; return its config.

  The source is a path for `tensor_files.find`, or a folder in the hub's layout (`hub`), which has
  no `heads`, `rotary_fraction` or `score`: `released_torch.infer_model` explains these, and
  `vocabulary.find` explains `tokenizer`. The model does not depend on `sequence_length`, by default
  2048 or the fewer positions of a folder. `dtype` is float32 or bfloat16, in which the arrays are
  stored; whoever reads them widens them. `allow_nonfinite` accepts weights that are NaN or
  infinite, with a message.
  """
  if dtype not in STORED:
    raise UserError(f'--dtype is {dtype}; a run stores its parameters as {" or ".join(STORED)}')
  grow_run.check_target(target)
  if is_folder := hub.is_folder(source):
    given = {
      'heads': heads,
      'rotary_fraction': rotary_fraction,
      'score': None if score == released_torch.SCORE else score,
    }
    model, weights = _find_folder(source, given)
  else:
    model, weights = _find(source, heads, rotary_fraction, score)
  spec, loaded = vocabulary.find(tokenizer, source)
  if loaded.size > model.vocab_size:
    raise UserError(
      f'the tokenizer {spec} has {loaded.size} token ids, and the embedding {model.vocab_size} '
      'rows; name the tokenizer of this model by --tokenizer'
    )
  most = model.max_length if is_folder else 2048
  sequence_length = sequence_length or min(2048, most)
  if not is_folder:
    model = dataclasses.replace(model, max_length=sequence_length)
  config = Config(
    model=model,
    data=TextConfig(tokenizer=spec, sequence_length=sequence_length),
  )
  config_lib.resolve(config_lib.to_config_dict(config))
  found = run_tensors.NonFinite(str(source), allow_nonfinite)
  for name, numbers in weights.numbers():
    found.count(name, numbers)
  found.report()
  if dtype != 'float32' and (rounded := sorted(weights.dtypes - {dtype})):
    messages.say(f'numbers of {" and ".join(rounded)} are rounded to {dtype}')
  state = {'params': weights.make_params(dtype)}
  stored = _of_folder(loaded, source, config) if is_folder else loaded.to_json()
  grow_run.write(target, Meta(0, config, stored, contents='params'), state)
  return config


class _Weights(NamedTuple):
  """Weights that were found but not read."""

  dtypes: set[str]  # of the tensors
  # Returns the parameters to store in a dtype. The leaves are `checkpoint.Deferred`.
  make_params: Callable[[str], Params]
  numbers: Callable[[], Iterator[tuple[str, np.ndarray]]]  # in chunks, with the tensor's name


def _of_folder(loaded: Tokenizer, source: Path, config: Config) -> dict[str, Any]:
  """Return the tokenizer of a folder's model to store: with its template, and how texts end."""
  generation = hub_generation.find(source, config.model.vocab_size)
  if generation.unread:
    messages.say(f'left out of {hub_generation.FILE}: {", ".join(generation.unread)}')
  stored = loaded.of_folder(generation.ends).to_json()
  if chat := vocabulary.find_chat(config.data):
    stored['chat'] = chat
  return stored


def _find_folder(source: Path, given: Mapping[str, Any]) -> tuple[ModelConfig, _Weights]:
  """Return the model of a folder in the hub's layout, and its weights."""
  for name, value in given.items():
    if value is not None:
      raise UserError(
        f'--{name} has no meaning for {source}, whose config.json says it; leave it out'
      )
  if model := hub_folder.find_model(source):
    tensors = tensor_files.find(source)
    hub_folder.check_fit(model, tensors, source)
    return model, _of_tensors(tensors, functools.partial(hub_folder.deferred, model, tensors))
  folder = hub.find(source)
  messages.say(
    f'{source} is a {folder.family.architecture}'
    + (f'; not read, because not known: {", ".join(folder.unread)}' if folder.unread else '')
  )
  make_params = functools.partial(hub.deferred, folder)
  return folder.model, _of_tensors(folder.tensors, make_params)


def _find(
  source: Path, heads: int | None, rotary_fraction: float | None, score: str
) -> tuple[ModelConfig, _Weights]:
  """Return the model of a source, and its weights."""
  tensors = tensor_files.find(source)
  shapes = {name: tensor.shape for name, tensor in tensors.items()}
  model = released_torch.infer_model(
    shapes, heads=heads, rotary_fraction=rotary_fraction, score=score
  )
  return model, _of_tensors(tensors, functools.partial(released_torch.deferred, model, tensors))


def _of_tensors(
  tensors: Mapping[str, tensor_files.Tensor], make_params: Callable[[str], Params]
) -> _Weights:
  """Return weights that are the tensors of files."""
  dtypes = {tensor.dtype.name for tensor in tensors.values()}
  return _Weights(dtypes, make_params, lambda: _chunks(tensors))


def _chunks(tensors: Mapping[str, tensor_files.Tensor]) -> Iterator[tuple[str, np.ndarray]]:
  """Yield the numbers of tensors in chunks, with the tensor's name."""
  for name, tensor in tensors.items():
    for chunk in tensor.chunks():
      yield name, chunk
