"""Make a run of ours from weights: a folder of the hub, or those of the released TokenFormers."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, GrowConfig, ModelConfig, TextConfig
from tokenformer_jax.convert import (
  folder_files,
  hub,
  hub_folder,
  hub_generation,
  peft,
  released_torch,
  run_tensors,
  vocabulary,
)
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.grow import grow_run
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.storage import paths

_LENGTH = 2048  # of sequences, unless the model has fewer positions


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
  adapters: Sequence[Path] = (),
) -> Config:
  """Make a work directory, with a checkpoint of step 0, from weights; return its config.

  The source is a path for `tensor_files.find`, or a folder in the hub's layout (`hub`), which has
  no `heads`, `rotary_fraction` or `score`: `released_torch.infer_model` explains these, and
  `vocabulary.find` explains `tokenizer`. The model does not depend on `sequence_length`, by default
  2048 or the fewer positions of a folder. `dtype` is float32 or bfloat16, in which the arrays are
  stored; whoever reads them widens them. `allow_nonfinite` accepts weights that are NaN or
  infinite, with a message. `adapters` are folders of PEFT: see `peft.with_adapters`.
  """
  grow_run.check_target(target)
  if (source / peft.CONFIG).is_file() and source not in adapters:
    raise UserError(
      f'{source} has an adapter, {peft.CONFIG}; name the model that it is for as '
      f'{arg.source}, and the folder of the adapter by {arg.adapters}'
    )
  if is_folder := hub.is_folder(source):
    given = {'heads': heads, 'rotary_fraction': rotary_fraction, 'score': score}
    _check_not_given(given, source)
    weights = hub_folder.find(source) or hub.find(source)
  else:
    weights = released_torch.find(source, heads=heads, rotary_fraction=rotary_fraction, score=score)
  before: list[ModelConfig] = []
  of_base = weights.tensors
  if adapters:
    if not is_folder:
      raise UserError(f'{source} has no config.json, and adapters are for models of transformers')
    weights, before = peft.with_adapters(weights, adapters, source, allow_nonfinite=allow_nonfinite)
  model = weights.model
  spec, loaded = vocabulary.find(tokenizer, source)
  if loaded.size > model.vocab_size:
    sizes = f'{loaded.size} token ids, and the embedding {model.vocab_size} rows'
    if tokenizer or not is_folder:
      raise UserError(
        f'the tokenizer {spec} has {sizes}; name the tokenizer of this model by {arg.tokenizer}'
      )
    messages.say(f'the tokenizer has {sizes}: a text with another token is refused')
  if is_folder:
    sequence_length = sequence_length or min(_LENGTH, model.max_length)
    if sequence_length > model.max_length:
      messages.say(
        f'{arg.sequence_length}={sequence_length} is above the {model.max_length} positions '
        f'of {source}; those beyond are untrained'
      )
  else:
    sequence_length = sequence_length or _LENGTH
    model = dataclasses.replace(model, max_length=sequence_length)
  data = TextConfig(tokenizer=spec, sequence_length=sequence_length)
  config = Config(model=model, data=data)
  config_lib.resolve(config_lib.to_config_dict(config))
  read = ((name, tensor.read()) for name, tensor in of_base.items())  # one in memory
  for _ in run_tensors.check_finite(read, str(source), allow_nonfinite):
    pass
  dtypes = {tensor.dtype.name for tensor in weights.tensors.values()}
  if dtype != 'float32' and (rounded := sorted(dtypes - {dtype})):
    messages.say(f'numbers of {" and ".join(rounded)} are rounded to {dtype}')
  stored = _of_folder(loaded, source, model.vocab_size, data) if is_folder else loaded.to_json()
  meta = Meta(0, config, stored, contents='params', family=weights.family)
  for folder, one in zip(adapters, before, strict=False):  # each a growth of its own
    base = dataclasses.replace(meta, config=dataclasses.replace(config, model=one))
    lineage = grow_run.descend(base, paths.parse_path(folder), 'merge', GrowConfig())
    meta = dataclasses.replace(meta, lineage=lineage)
  grow_run.write(target, meta, {'params': weights.params(dtype)})
  return config


def _check_not_given(given: Mapping[str, Any], source: Path) -> None:
  """Check that options which a folder's config.json decides have their defaults."""
  for name, value in given.items():
    if value not in (None, released_torch.SCORE):
      raise UserError(
        f'{arg[name]} has no meaning for {source}, whose config.json says it; leave it out'
      )


def _of_folder(
  loaded: Tokenizer, source: Path, vocab_size: int, data: TextConfig
) -> dict[str, Any]:
  """Return the tokenizer of a folder's model to store: with its template, and how texts end."""
  generation = hub_generation.find(source, vocab_size)
  if generation.unread:
    unread = ', '.join(generation.unread)
    messages.say(
      f'of {hub_generation.FILE} these go out again and are without effect here: {unread}'
    )
  file = Path(data.tokenizer).expanduser()
  stored = loaded.of_folder(generation.ends, vocab_size).to_json()
  stored |= folder_files.pack(source, file.parent if file.is_file() else None)
  if chat := vocabulary.find_chat(data):
    stored['chat'] = chat
  return stored
