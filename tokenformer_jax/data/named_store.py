"""Open the token store that `config.data.store` names, in a file system or in a bucket."""

import dataclasses

from tokenformer_jax.config import TextConfig
from tokenformer_jax.data import shards, tokenizers
from tokenformer_jax.data.chat_template import Template, find_template
from tokenformer_jax.data.shards import ChangedError, Store
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.storage import paths


def open_named(config: TextConfig, tokenizer: Tokenizer | None) -> Store:
  """Open the store that `config.store` names, and check that it is of the config's text.

  Raises:
    UserError: there is no store, it has changed, or it is of another text or tokenizer.
    TransientError: reading it kept failing with errors that may pass.
  """
  path, name = folder(config), f'{config.setting("store")} is {config.store}'
  made = 'make it with `tokenformer prepare` from the same config'
  try:
    store = shards.open_store(path)
  except FileNotFoundError as error:
    raise UserError(f'{name}, where there is no complete token store; {made}') from error
  except ChangedError as error:
    raise UserError(f'{name}, and {error}; {made}, in a new folder') from error
  except paths.errors(path) as error:
    if isinstance(error, TransientError):
      raise
    raise UserError(f'{name}, which cannot be read ({paths.reason(error)}); {made}') from error
  template = None if config.rows == 'text' else find_template(config)
  tokenizer = tokenizer or tokenizers.load_unless_bpe(config.tokenizer)
  absent = {'packing': 'cut', 'document_separator': ''}
  absent |= {'rows': 'chat'} if config.has_pairs else {}
  differences = [  # each as it is there, and here
    (f'{config.setting(key)}={value or "empty"}', own or 'empty')
    for key, value in (absent | store.index.made_from).items()
    if (own := getattr(config, key)) != value and (key != 'tokenizer' or tokenizers.bpe_size(own))
  ]
  chat = Template(**store.chat) if store.chat else None
  if (chat and chat.fingerprint) != (template and template.fingerprint):
    differences.append((_rows(chat), _rows(template)))
  stored = store.tokenizer
  if tokenizer and tokenizer.fingerprint != stored.fingerprint:
    differences.append((f'the tokenizer {stored.fingerprint}', tokenizer.fingerprint))
  elif tokenizer and tokenizer.document_fingerprint != stored.document_fingerprint:
    differences.append((_ends(stored), _ends(tokenizer)))
  if differences:
    there, here = differences[0]
    raise UserError(
      f'{name}, which was made with {there}, and here it is {here}; correct the config, or {made}'
    )
  return dataclasses.replace(store, tokenizer=tokenizer or store.tokenizer)


def find_named(config: TextConfig, tokenizer: Tokenizer | None) -> Store | None:
  """Return the store that `config.store` names; None: it is not complete.

  Raises:
    UserError: the folder has files of others, or as `open_named`.
  """
  path = folder(config)
  if other := shards.foreign(path):
    raise UserError(
      f'{path} has {other}, which does not belong to a token store; name a new folder '
      'with --out or config.data.store'
    )
  return open_named(config, tokenizer) if paths.exists(path / 'meta.json') else None


def _rows(template: Template | None) -> str:
  if template is None:
    return 'plain text'
  return f'conversations by {template.name} (fingerprint {template.fingerprint})'


def _ends(tokenizer: Tokenizer) -> str:
  return f'documents as {[*tokenizer.opening, "…", tokenizer.end_of_document]}'


def folder(config: TextConfig) -> paths.Path:
  """Return the folder that `config.store` names."""
  path = paths.parse_path(config.store)
  return path if paths.in_bucket(path) else path.expanduser().absolute()
