"""Read text from a set of Hugging Face: `hf:NAME[:SPLIT]` or `hf:DIR[:SPLIT]`.

NAME is OWNER/NAME or OWNER/NAME/CONFIG. A set of the hub is downloaded once, to the cache of the
library `datasets`. A folder is read where it is: one in the layout of the hub, whose splits and
configurations the library knows, or one that `save_to_disk` wrote. This package reads the Parquet,
JSON and CSV files of a folder, because `datasets` guesses types, by which NA becomes null and 007
a number.
"""

import dataclasses
import glob
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tokenformer_jax.data import reading
from tokenformer_jax.data.chat_rows import without_nulls
from tokenformer_jax.data.text import Source, columns, digest, document
from tokenformer_jax.data.text_files import Files, field_delimiter, has_rows
from tokenformer_jax.data.text_parquet import Parquet
from tokenformer_jax.errors import TransientError, UserError, check_installed, nearest
from tokenformer_jax.storage import paths, retry

_NUMBERED = re.compile(r'-(\d{5})-of-(\d{5})(?=[^/]*$)')  # in the name of a file


def open_hf(name: str, text_field: str, setting: str, splits: tuple[str, ...]) -> Source:
  """Return the source `hf:NAME`; see `sources.SOURCES`."""
  check_installed('datasets', f'opens {setting}=hf:{name}', 'data')
  import datasets  # noqa: PLC0415 (from an extra, slow, and only needed here)
  from datasets import config  # noqa: PLC0415

  if paths.in_bucket(name):
    raise UserError(
      f'{setting} is hf:{name}, which is in a bucket; name its Parquet files as parquet:{name}'
    )
  split = ''
  if not os.path.isdir(os.path.expanduser(name)) and ':' in name:
    name, _, split = name.rpartition(':')
  if not sys.stderr.isatty():
    datasets.disable_progress_bars()
  one = _Set(name, text_field, f'{setting} is hf:{name}, which', split, splits)
  try:
    return one.open()
  except (UserError, TransientError):
    raise
  except Exception as error:  # `datasets` raises exceptions of many types.
    if retry.is_transient(error) and not os.path.exists(name):
      raise _unreached(one, error, offline=config.HF_HUB_OFFLINE) from error
    reason = f'{type(error).__name__}: {" ".join(str(error).split()):.300}'
    raise UserError(f'{one.which} cannot be opened: {reason}') from error


@dataclasses.dataclass(frozen=True)
class Rows(Source):
  """The Arrow table of a split, or a shard of it. `name` names it in messages."""

  name: str
  rows: Any  # a Dataset
  text_field: str
  identity: Any  # of which the fingerprint is made
  separator: str = ''

  def fingerprint(self) -> str:
    return digest(self.identity)

  def files(self) -> tuple[str, ...]:
    return tuple(file['filename'] for file in self.rows.cache_files)

  def divide(self, size: int) -> Iterator[tuple[Source, int]]:
    count = max(1, min(-(-self.rows.data.nbytes // size), self.rows.num_rows))
    for i in range(count):
      rows = self.rows.shard(num_shards=count, index=i, contiguous=True)
      name, identity = f'{self.name}, shard {i + 1} of {count}', (self.identity, i, count)
      one = dataclasses.replace(self, name=name, rows=rows, identity=identity)
      yield one, self.rows.data.nbytes // count

  def _texts(self) -> Iterator[str | UserError]:
    for number, row in enumerate(self.rows, start=1):
      yield document(without_nulls(row), self.text_field, f'{self.name}, row {number},')


class _Set(NamedTuple):
  """A set that a config names; `which` begins a sentence about it."""

  name: str
  text_field: str
  which: str
  split: str  # or '': the first existing one of `splits`
  splits: tuple[str, ...]

  def open(self) -> Source:
    """Return the reader of the split: of its files, or of the table that `datasets` makes."""
    import datasets  # noqa: PLC0415

    folder = os.path.expanduser(self.name)
    if os.path.isdir(folder) and (saved := self._saved(os.path.abspath(folder))):
      rows: Any = datasets.load_from_disk(saved)
      files = [reading.identity(file['filename']) for file in rows.cache_files]
      return self._rows(rows, (rows._fingerprint, files))
    name, config = self._name_and_config(folder)
    builder = datasets.load_dataset_builder(name, config)
    if os.path.isdir(name):
      data_files: Any = builder.config.data_files
      split = self._choose(data_files)
      files = [*map(str, data_files[split])]
      self._check_complete(files)
      identities = {path: reading.identity(path) for path in files}
      if not _options(builder.config, files[0]):
        if all(path.endswith('.parquet') for path in files):
          return Parquet(identities, self.text_field)
        if all(has_rows(path) for path in files):
          return Files(identities, self.text_field)
    builder.download_and_prepare()
    split = self._choose(builder.info.splits or ())
    return self._rows(builder.as_dataset(split), (builder.hash, config, split))

  def _rows(self, rows: Any, identity: Any) -> Rows:
    name = f'hf:{self.name}'
    used = columns(rows.features, self.text_field, name)
    return Rows(name, rows.select_columns(used), self.text_field, identity)

  def _check_complete(self, files: Iterable[str]) -> None:
    """Check that the folder of a file NAME-00000-of-00002… has the others as well."""
    matches = [(path, match) for path in files if (match := _NUMBERED.search(path))]
    for name, count in dict.fromkeys((path[: match.start()], match[2]) for path, match in matches):
      existing = glob.glob(f'{glob.escape(name)}-*-of-{count}*')
      numbers = {match[1] for path in existing if (match := _NUMBERED.search(path))}
      if len(numbers) < int(count):
        raise UserError(
          f'{self.which} has {len(numbers)} of the {int(count)} files {name}-…-of-{count}; '
          'download the rest, or name those to read as parquet:GLOB or files:GLOB'
        )

  def _saved(self, folder: str) -> str:
    """Return the folder in which `save_to_disk` wrote the split, or '' if it wrote none here."""
    try:
      with open(os.path.join(folder, 'dataset_dict.json')) as file:
        return os.path.join(folder, self._choose(json.load(file)['splits']))
    except FileNotFoundError:
      if not os.path.isfile(os.path.join(folder, 'state.json')):
        return ''
    if self.split:
      raise UserError(f'{self.which} is a set without splits; leave out :{self.split}')
    return folder

  def _choose(self, existing: Iterable[str]) -> str:
    wanted = (self.split,) if self.split else self.splits
    existing = [*map(str, existing)]
    split = next((split for split in wanted if split in existing), None)
    if split is None:
      raise UserError(
        f'{self.which} has no split {wanted[-1]!r}{nearest(wanted[-1], existing)}; name one as '
        f'hf:{self.name}:{existing[0] if existing else "SPLIT"}'
      )
    return split

  def _name_and_config(self, path: str) -> tuple[str, str | None]:
    """Return a folder or the name of a set of the hub, and the configuration or None."""
    parent, _, config = path.rstrip('/').rpartition('/')
    if os.path.isdir(path):
      return path, None
    if parent and _has_metadata(os.path.join(parent, 'README.md')):
      return os.path.abspath(parent), config
    if path.startswith(('/', '.')) or path.count('/') > 2:
      raise UserError(f'{self.which} is no folder; check the path')
    return (parent, config) if parent.count('/') else (path, None)


def _unreached(one: _Set, error: Exception, offline: bool) -> Exception:
  download = f'hf download --repo-type dataset {one.name} --local-dir DIR'
  advice = f'download it where there is a network ({download}), and name it as hf:DIR'
  if offline:
    return UserError(
      f'{one.which} is no folder and not in the cache, and HF_HUB_OFFLINE forbids the network; '
      f'{advice}'
    )
  return TransientError(
    f'{one.which} is no folder, and the hub cannot be reached ({retry.one_line(error)}); run '
    f'the same command again when the network is back, or {advice}'
  )


def _options(config: Any, path: str) -> set[str]:
  default = type(config)()
  names = {one.name for one in dataclasses.fields(config)}
  names -= {'name', 'version', 'data_dir', 'data_files', 'description'}
  if getattr(config, 'sep', None) == field_delimiter(path):
    names -= {'sep', 'delimiter'}
  return {name for name in names if getattr(config, name) != getattr(default, name)}


def _has_metadata(path: str) -> bool:
  """Return whether a README begins with the metadata of a set, which names its configurations."""
  try:
    with open(path, 'rb') as file:
      return file.read(3) == b'---'
  except OSError:
    return False
