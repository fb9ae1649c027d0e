"""Bring the folder of a model from the hub by its name, through the library `huggingface_hub`.

Only the files that a conversion reads are fetched. The library keeps them in its cache, goes on
after a connection that broke, and takes the token of its own login.
"""

import functools
import os
import re
import sys
import urllib.parse
from collections.abc import Callable
from pathlib import Path

from tokenformer_jax.convert import folder_files, hub, hub_folder, tensor_files, vocabulary
from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.parallel import messages
from tokenformer_jax.storage import paths, retry

_NAME = re.compile(r'(\w[\w.-]*/\w[\w.-]*)(?:@(\S+))?')
_HOST = r'(?:https?://)?(?:www\.)?(?:huggingface|hf)\.co/'
_PAGE = re.compile(_HOST + r'(\w[\w.-]*/\w[\w.-]*)(?:/(?:tree|blob|resolve)/([^/?#]+))?')
_SMALL = (*folder_files.PATTERNS, 'adapter_config.json')


def find(source: str | os.PathLike[str], tokenizer: str = '') -> Path:
  """Return the file or folder of a source; fetch `ORG/NAME` or `ORG/NAME@REVISION` of the hub.

  A path that exists wins. A revision is a branch, a tag or a commit. The address of a page of the
  hub stands for its model. A model that cannot be converted, or has no tokenizer while `tokenizer`
  names none, is refused before its weights come.

  Raises:
    UserError: there is no such model or revision, or it may not be read.
    TransientError: the hub cannot be reached, and the model is not in the library's cache.
  """
  source = of_page(os.fspath(source))
  path, named = paths.local(source), _NAME.fullmatch(source)
  if path.exists() or not named or path.suffix in (*tensor_files.SUFFIXES, '.json'):
    return path
  from huggingface_hub import snapshot_download, utils  # noqa: PLC0415 (slow)

  if not sys.stderr.isatty():
    utils.disable_progress_bars()
  download = functools.partial(snapshot_download, named[1], revision=named[2])
  try:
    utils.validate_repo_id(named[1])
    folder = _fetch(named[1], named[2], download, tokenizer)
  except (UserError, TransientError):
    raise
  except Exception as error:  # The library raises exceptions of many types.
    raise _as_user_error(error, source, named[1]) from error
  messages.say(f'{source} is the commit {folder.name} of the hub, in {folder}')
  return folder


def of_page(source: str) -> str:
  """Return the name, and the revision, of the model that a page of the hub shows."""
  if not (page := _PAGE.match(source)):
    return source
  if page[1].startswith(('datasets/', 'spaces/', 'collections/')):
    raise UserError(f'{source} is not the page of a model; name a model of the hub as ORG/NAME')
  return f'{page[1]}@{urllib.parse.unquote(page[2])}' if page[2] else page[1]


def origin(file: str) -> tuple[str, str] | None:
  """Return the name and the commit of the model that a file in the library's cache is of."""
  found = re.search(r'/models--(\w[^/]*?)--([^/]+)/snapshots/(\w+)/[^/]+$', file)
  return (f'{found[1]}/{found[2]}', found[3]) if found else None


def _fetch(name: str, revision: str | None, download: Callable[..., str], tokenizer: str) -> Path:
  """Return the folder with all that a conversion reads."""
  from huggingface_hub import HfApi, errors  # noqa: PLC0415

  try:
    listed = HfApi().model_info(name, revision=revision).siblings or ()
    files = [one.rfilename for one in listed if '/' not in one.rfilename]
  except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
    raise
  except Exception as error:  # The hub is not reached, or does not work.
    download = functools.partial(download, local_files_only=True)
    try:
      files = os.listdir(download(allow_patterns=[*_SMALL]))
      tensor_files.choose(files, name)
    except (FileNotFoundError, UserError):
      raise error from None
    messages.say(f'{name} is taken from the cache of the hub, which cannot be reached')
  weights = tensor_files.choose(files, name)
  is_index = weights.endswith('.index.json')
  wanted = [*_SMALL, weights] if is_index else [*_SMALL]
  folder = Path(download(allow_patterns=wanted))
  if hub.is_folder(folder) and not hub_folder.is_ours(folder):
    hub.find_model(folder)  # which refuses what cannot be converted
  if not tokenizer:
    vocabulary.find('', folder)
  wanted += {*tensor_files.read_index(folder / weights).values()} if is_index else [weights]
  return Path(download(allow_patterns=wanted))


def _as_user_error(error: Exception, source: str, name: str) -> Exception:
  """Return the sentence about an error of the library."""
  from huggingface_hub import constants, errors  # noqa: PLC0415

  absent = f'{source} is no file or folder here'
  page, login = f'{constants.ENDPOINT}/{name}', 'log in by `hf auth login`'
  match error:
    case errors.HFValidationError():
      return UserError(f'{absent}, and no name of a model: {error}')
    case errors.GatedRepoError():
      return UserError(
        f'{name} is gated, and you may not read it yet; ask for access at {page}, and {login}'
      )
    case errors.RepositoryNotFoundError():
      return UserError(
        f'{absent}, and the hub has no model {name} that you may read; check the name, or {login} '
        'if it is private'
      )
    case errors.RevisionNotFoundError():
      return UserError(
        f'{name} has no revision {source.partition("@")[2]!r}; take a branch, a tag or a commit of '
        f'{page}'
      )
    case _ if constants.HF_HUB_OFFLINE:
      return UserError(
        f'{absent} and not whole in the cache of the hub, and HF_HUB_OFFLINE forbids the network; '
        f'fetch it where there is one (hf download {name} --local-dir DIR), and name DIR'
      )
  if retry.is_for_user(error):
    return UserError(
      f'{source} could not be fetched ({retry.one_line(error)}); make room, or check your login'
    )
  return TransientError(
    f'{absent}, and could not be fetched from the hub ({retry.one_line(error)}); run the same '
    'command again, which keeps the files that are complete'
  )
