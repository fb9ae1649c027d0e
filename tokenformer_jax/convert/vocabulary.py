"""Read the tokenizer of released weights from beside them or from a run; write it beside them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenformer_jax.config import TextConfig
from tokenformer_jax.convert import hub_tokenizer
from tokenformer_jax.data import chat_template, tokenizers
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.storage import paths

_FILE = 'tokenizer.json'


class Found(NamedTuple):
  """A tokenizer, and the value of `config.data.tokenizer` that names it."""

  spec: str
  tokenizer: tokenizers.Tokenizer


def find(named: str, weights: Path) -> Found:
  """Return the tokenizer of weights in a file or a directory.

  `named` is `bytes`, the path of a `tokenizer.json`, or a run, DIR or DIR@STEP, whose tokenizer to
  take; empty: the `tokenizer.json` beside the weights.
  """
  if not named:
    file = (weights if weights.is_dir() else weights.parent) / _FILE
    if not file.is_file():
      raise UserError(
        f'there is no {file}; put it there or name it by --tokenizer ({tokenizers.WHERE_TO_GET}), '
        'or take --tokenizer=RUN for the tokenizer of a run, --tokenizer=bytes for a model of bytes'
      )
    named = 'bytes' if hub_tokenizer.is_of_bytes(file) else str(file)
  if named == 'bytes':
    return Found(named, tokenizers.load(named))
  file = Path(named).expanduser()
  if file.is_file():
    try:
      return Found(str(file.absolute()), tokenizers.load(named))
    except UserError as error:
      raise UserError(str(error).replace('config.data.tokenizer', '--tokenizer')) from error
  if not paths.exists(paths.split_source(named)[0]):
    raise UserError(
      f'--tokenizer={named} is not a file or a run; it must be bytes, the path of a {_FILE} '
      f'({tokenizers.WHERE_TO_GET}), or a run whose tokenizer to take'
    )
  return _open_run(named)


def find_chat(data: TextConfig) -> dict[str, Any] | None:
  """Return the chat template beside a tokenizer.json as a checkpoint stores it, or None.

  A template that cannot be used is named in a message.
  """
  if not chat_template.has_own(data):
    return None
  try:
    return chat_template.find_template(data, to_learn=False).to_json()
  except UserError as error:
    messages.say(f'no chat template is taken: {error}')
    return None


def _open_run(source: str) -> Found:
  directory, step = paths.split_source(source)
  checkpoints, meta = checkpoint.open_source(directory, step)
  with contextlib.closing(checkpoints):
    checkpoint.check_is_language_model(meta, directory)
  return Found(meta.config.data.tokenizer, tokenizers.from_json(meta.tokenizer))


def check_beside(weights: Path, vocabulary: dict[str, Any]) -> None:
  """Check that no other model's tokenizer is in the directory of a file to write.

  `vocabulary` is the tokenizer of the file's model, from `Tokenizer.to_json`.
  """
  file = weights.parent / _FILE
  if not file.exists():
    return
  with contextlib.suppress(UserError):  # It cannot be read, so it is another one.
    if tokenizers.load(str(file)).fingerprint == tokenizers.from_json(vocabulary).fingerprint:
      return
  raise UserError(
    f'{file} is not the tokenizer of this model, which belongs there; name a --target in another '
    'directory'
  )


@contextlib.contextmanager
def written_beside(weights: Path, vocabulary: dict[str, Any]) -> Iterator[None]:
  """Write `tokenizer.json` beside a file that the `with` block writes; remove it if that fails.

  A model of bytes has no such file; a message says how to name its tokenizer. `check_beside` must
  have passed for the same arguments.
  """
  file = weights.parent / _FILE
  new = vocabulary['kind'] != 'bytes' and not file.exists()
  if new:
    try:
      paths.write(file, json.dumps(vocabulary['tokenizer']))
    except OSError as error:
      raise UserError(
        f'{file} could not be written ({paths.reason(error)}); free space or choose another '
        '--target'
      ) from error
  try:
    yield
  except BaseException:
    if new:
      file.unlink(missing_ok=True)
    raise
  if vocabulary['kind'] == 'bytes':
    messages.say('the tokenizer is bytes, which has no file: to-jax takes --tokenizer=bytes')
  else:
    messages.say(f'its tokenizer is {file}')
