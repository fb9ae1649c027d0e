"""Find the tokenizer of weights: in their folder, in a file, or in a run."""

from pathlib import Path
from typing import Any

from tokenformer_jax.config import TextConfig
from tokenformer_jax.convert import hub_tokenizer
from tokenformer_jax.data import chat_template, tokenizers
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.storage import paths

_FILE = 'tokenizer.json'


def find(named: str, weights: Path) -> tuple[str, tokenizers.Tokenizer]:
  """Return the tokenizer of weights in a file or a directory, after its `config.data.tokenizer`.

  `named` is `bytes`, the path of a `tokenizer.json`, or a run, DIR or DIR@STEP, whose tokenizer to
  take; empty: the `tokenizer.json` in the folder of the weights.
  """
  option = arg.tokenizer
  if not named:
    file = (weights if weights.is_dir() else weights.parent) / _FILE
    if not file.is_file():
      raise UserError(
        f'there is no {file}; put it there or name it by {option} ({tokenizers.WHERE_TO_GET}), or '
        f'take {option}=RUN for the tokenizer of a run, {option}=bytes for a model of bytes'
      )
    named = 'bytes' if hub_tokenizer.is_of_bytes(file) else str(file)
  if named == 'bytes':
    return named, tokenizers.load(named)
  file = Path(named).expanduser()
  if file.is_file():
    return str(file.absolute()), tokenizers.load(named, key=option)
  if not paths.exists(paths.split_source(named)[0]):
    raise UserError(
      f'{option}={named} is not a file or a run; it must be bytes, the path of a {_FILE} '
      f'({tokenizers.WHERE_TO_GET}), or a run whose tokenizer to take'
    )
  meta = checkpoint.open_source(named, checkpoint.check_is_language_model).meta
  return meta.config.data.tokenizer, tokenizers.from_json(meta.tokenizer)


def find_chat(data: TextConfig) -> dict[str, Any] | None:
  """Return the chat template in the folder of a tokenizer.json as a checkpoint stores it, or None.

  A template that cannot be used is named in a message.
  """
  try:
    if not chat_template.has_own(data):
      return None
    return chat_template.find_template(data, to_learn=False).to_json()
  except UserError as error:
    messages.say(f'no chat template is taken: {error}')
    return None
