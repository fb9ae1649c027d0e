"""Write the model of a run as a folder that transformers loads, by itself if it knows the model."""

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.convert import (
  families,
  hub,
  hub_folder,
  hub_tokenizer,
  model_card,
  run_tensors,
  tensor_files,
)
from tokenformer_jax.data import tokenizers
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import grow_run
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.storage import paths

_FILES = ('.safetensors', '.bin', '.pt', '.pth', '.gguf', '.json')
SHARD_BYTES = 5 * 10**9  # of a file of weights; larger models have several files and an index


def convert_run(
  source: str,
  target: Path,
  *,
  dtype: str = 'float32',
  allow_nonfinite: bool = False,
  shard_bytes: int = SHARD_BYTES,
) -> ModelConfig:
  """Write the folder of a run's model, and return the model; `source` is DIR or DIR@STEP."""
  if target.suffix in _FILES:
    raise UserError(
      f'the target {target} is named like a file, and to-hf writes a folder; name a folder, or '
      'take to-torch for one .safetensors file of a TokenFormer'
    )
  grow_run.check_target(target)
  directory, step = paths.split_source(source)
  checkpoints, meta = checkpoint.open_source(directory, step)
  with contextlib.closing(checkpoints):
    checkpoint.check_is_language_model(meta, directory)
    model = meta.config.model
    ids = hub_tokenizer.special_ids(tokenizers.from_json(meta.tokenizer))
    read = functools.partial(run_tensors.read_array, checkpoints, meta)
    if family := families.match(model):  # which transformers computes by itself
      places = {place.name: place for place in hub.layout(model, family)}
      described = hub.describe(model, family, ids, dtype)
      stream, code = hub.tensors(places.values(), read), ()
    else:
      hub_folder.check_can_load(model)
      places = hub_folder.layout(model)
      described = hub_folder.describe(model, ids, dtype)
      stream, code = run_tensors.read(checkpoints, meta, places), hub_folder.CODE
    texts = {
      'config.json': described,
      'generation_config.json': {**ids, 'eos_token_id': hub_tokenizer.end_ids(meta.tokenizer)},
      **hub_tokenizer.to_files(meta.tokenizer, model.max_length),
    }
    found = run_tensors.NonFinite(source, allow_nonfinite)
    stream = found.counted(stream)
    shapes = {name: place.shape for name, place in places.items()}
    with _new_folder(target) as folder:
      _write_texts(folder, texts)
      paths.write(folder / 'README.md', model_card.write(meta, dtype, target.name))
      for name in code:
        paths.write(folder / name, Path(__file__).with_name(name).read_text('utf-8'))
      tensor_files.write_set(folder, dtype, shapes, stream, shard_bytes)
  return model


def _write_texts(folder: Path, texts: Mapping[str, object]) -> None:
  for name, content in texts.items():
    paths.write(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + '\n')


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
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
        'or choose another --target'
      ) from error
    finally:
      paths.remove(partial)
