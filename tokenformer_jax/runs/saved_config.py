"""Write and read the config of a run, and drop the key that could make it run foreign programs.

A run may come from a stranger. Most keys describe a computation, and can only make a bad model.
These paths stay, because what is read from them or written to them cannot run programs:

  data.source, data.validation_source, data.tokenizer
                                text, images, a tokenizer.json
  data.store                    tokens
  data.cache_dir                token stores, in folders named by a hash of their content
  data.chat_template            a template, which runs in a sandbox
  init_from, distill.teacher    a checkpoint, whose own config passes through here

`train.compilation_cache` does not stay. JAX loads compiled programs from that directory and runs
them, so whoever chooses the directory controls this process. The user names it by a flag
(--config.train.compilation_cache=DIR), a config file, or JAX_COMPILATION_CACHE_DIR.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config
from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import paths

FORMAT = 7  # of a new `config.json` and of the `meta` of a new checkpoint
# Keys that earlier versions had, with the value that had no effect.
_GONE = {'optim.sparse_tokens': 0, 'optim.background': '', 'train.drop_groups': 0}


class FormatError(UserError):
  """Raised for a file of another format than today's."""


def check_format(stored: Any, where: str) -> None:
  """Check that the format in a file named `where` is the one that this version reads."""
  if stored != FORMAT:
    is_newer = isinstance(stored, int) and stored > FORMAT
    remedy = 'install a newer one' if is_newer else 'use the older one that wrote it'
    raise FormatError(
      f'{where} has the format {stored}, and this version of tokenformer_jax reads format '
      f'{FORMAT} only; {remedy}'
    )


def parse(cls: type, stored: Mapping[str, Any], where: str) -> Any:
  """Return a section with the names of a config's sections from its stored form in `where`.

  Raises:
    UserError: a value is wrong, or a key that this version has no longer changed the computation.
  """
  values = dict(stored)
  for path, harmless in _GONE.items():
    section, _, name = path.rpartition('.')
    if isinstance(keys := values.get(section), Mapping) and name in keys:
      if keys[name] != harmless:
        raise UserError(
          f'{where} has {path}={keys[name]}, a key that this version of tokenformer_jax has no '
          'longer; use the version that wrote it'
        )
      values[section] = {key: value for key, value in keys.items() if key != name}
  return config_lib.from_dict(cls, values)


def to_text(config: Config) -> str:
  """Return the text of `config.json`: the format, and the sections of the config."""
  return f'{json.dumps({"format": FORMAT, **config_lib.to_json(config)}, indent=2)}\n'


def read(path: paths.Path, advice: str, needed_by: str = '') -> Config:
  """Read a `config.json`, with its `train.compilation_cache`.

  `advice` tells the user what to do without the file. `needed_by` is the flag that needs it; '' if
  the user named the file.
  """
  try:
    stored = json.loads(path.read_text())
    if not isinstance(stored, dict):
      raise ValueError(f'it holds a {type(stored).__name__}')
    check_format(stored.pop('format', 1), str(path))  # Files of format 1 have no number.
    return parse(Config, stored, str(path))
  except FormatError:
    raise
  except (paths.errors(path), ValueError, RecursionError, UserError) as error:
    subject = f'{path}, which {needed_by} needs,' if needed_by else path
    reason = paths.reason(error)
    if isinstance(error, FileNotFoundError):
      raise UserError(f'{subject} is not the config of a run ({reason}); {advice}') from error
    raise UserError(
      f'{subject} is damaged: it is not the config of a run ({reason}); mend the file, or {advice}'
    ) from error


def without_programs(saved: Config) -> Config:
  """Return the config of a saved run without the directory of compiled programs."""
  return dataclasses.replace(saved, train=dataclasses.replace(saved.train, compilation_cache=''))
