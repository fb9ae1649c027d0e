"""Write the model of a run as a folder: for transformers, or as the released checkpoints are."""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenformer_jax.config import ModelConfig, NoProjectionConfig, with_pattentions
from tokenformer_jax.config.groups import named_groups
from tokenformer_jax.config.projections import beside_matrices
from tokenformer_jax.convert import (
  families,
  folder_files,
  hub_folder,
  hub_generation,
  hub_tokenizer,
  model_card,
  released_torch,
  run_tensors,
  tensor_files,
  tensor_layout,
)
from tokenformer_jax.convert.tensor_layout import Layout
from tokenformer_jax.data import tokenizers
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.grow import grow_run
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.storage import paths

_SUFFIXES = ('.safetensors', '.bin', '.pt', '.pth', '.gguf', '.json')
_BESIDE_ONE = ('qkv', 'value', 'proj', '.each')  # ends of the names of tokens beside one matrix
_Texts = dict[str, Any]  # texts, bytes, or values to write as JSON, by the name of the file


def to_hf(
  source: str,
  target: Path,
  *,
  dtype: str = 'float32',
  allow_nonfinite: bool = False,
  shard_bytes: int = tensor_files.SHARD_BYTES,
) -> ModelConfig:
  """Write a folder that transformers loads, by itself if it knows the model; return the model.

  `source` is DIR or DIR@STEP. Nothing of the target remains after an error.
  """

  def describe(meta: Meta) -> tuple[Layout, _Texts]:
    model = meta.config.model
    came = folder_files.read(meta.tokenizer, folder_files.CONFIG)
    ids = hub_tokenizer.special_ids(tokenizers.from_json(meta.tokenizer))
    ids |= {name: came[name] for name in ids if name in came}
    if matched := families.match(model, meta.family):
      family, keys = matched
      layout, code = tensor_layout.layout(model, family.rules), {}
      written = {**keys, **ids, 'dtype': dtype}
      values = folder_files.config(meta.tokenizer, family, model, written)
    else:
      hub_folder.check_can_load(model)
      layout, code = hub_folder.layout(model), hub_folder.read_code()
      values = hub_folder.describe(model, ids, dtype)
    return layout, {
      **hub_tokenizer.to_files(meta.tokenizer, model.max_length),
      **hub_generation.to_file(meta.tokenizer, ids),
      folder_files.CONFIG: values,
      'README.md': model_card.write(meta, dtype, target.name),
      **code,
    }

  return _export(source, target, describe, dtype, allow_nonfinite, shard_bytes)


def way_out(model: ModelConfig, family: str = '') -> str:
  """Return a sentence that says how `to_hf` writes a language model, or why it cannot.

  `family` is that of `Meta`.
  """
  begin = '`tokenformer convert to-hf` writes this model '
  if matched := families.match(model, family):
    return f'{begin}as a {matched[0].architecture}, which transformers and vLLM load by themselves'
  try:
    hub_folder.check_can_load(model)
  except UserError as error:
    return str(error)
  alone = {name: NoProjectionConfig() for name in beside_matrices(model)}
  base = families.match(with_pattentions(model, alone), family) if alone else None
  without = f'; without its parameter tokens it is a {base[0].architecture}' if base else ''
  is_lora = all(
    name.endswith(_BESIDE_ONE) and all(group.score.kind == 'linear' for group in groups)
    for name, groups in named_groups(model).items()
  )
  if base and is_lora:
    without += ', and they go out as LoRA for it (to-peft)'
  return f'{begin}with PyTorch files of ours, for trust_remote_code=True in transformers{without}'


def to_torch(
  source: str, target: Path, *, dtype: str = 'float32', allow_nonfinite: bool = False
) -> ModelConfig:
  """Write a folder with the tensors of a released checkpoint and the tokenizer; return the model.

  It is the exact inverse of `to_jax`: weights that came from `dtype` return to it bit for bit.
  `source` is DIR or DIR@STEP. Nothing of the target remains after an error.
  """

  def describe(meta: Meta) -> tuple[Layout, _Texts]:
    released_torch.check_can_compute(meta.config.model)
    stored = meta.tokenizer
    own = hub_tokenizer.to_files(stored, 0) if stored['kind'] == 'bytes' else {}
    content = own.get('tokenizer.json', stored.get('tokenizer'))
    return released_torch.layout(meta.config.model), {'tokenizer.json': content}

  return _export(source, target, describe, dtype, allow_nonfinite)


def _export(
  source: str,
  target: Path,
  describe: Callable[[Meta], tuple[Layout, _Texts]],
  dtype: str,
  allow_nonfinite: bool,
  shard_bytes: int = tensor_files.SHARD_BYTES,
) -> ModelConfig:
  """Write the files that `describe` makes of a checkpoint's meta, and the weights."""
  grow_run.check_target(target)
  origin = checkpoint.open_source(source, checkpoint.check_is_language_model)
  layout, texts = describe(origin.meta)
  if target.suffix in _SUFFIXES:
    raise UserError(f'the target {target} is named like a file, and is a folder; rename it')
  read = functools.partial(run_tensors.read_array, origin)
  stream = tensor_layout.stream(layout, read)
  shapes = {name: entry.shape for name, entry in layout.items()}
  with new_folder(target) as folder:
    for name, content in texts.items():
      if isinstance(content, bytes):  # as it came, line ends and all
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        continue
      is_text = isinstance(content, str)
      written = content if is_text else json.dumps(content, indent=2, ensure_ascii=False) + '\n'
      paths.write(folder / name, written)
    finite = run_tensors.check_finite(stream, source, allow_nonfinite)
    tensor_files.write(folder, dtype, shapes, finite, shard_bytes)
  return origin.meta.config.model


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
  """Yield a folder with another name that becomes the target, or is removed if the block raises."""
  partial = target.with_name(f'.{target.name}.partial')
  with grow_run.alone(target):
    try:
      paths.remove(partial)  # left by a conversion that was killed
      partial.mkdir(parents=True)
      yield partial
      os.rename(partial, target)
    except OSError as error:
      raise UserError(
        f'{target} could not be written ({paths.reason(error)}); nothing is left of it; free space '
        f'or choose another {arg.target}'
      ) from error
    finally:
      paths.remove(partial)
