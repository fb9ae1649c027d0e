"""Paths in file systems, and in buckets of Google Cloud Storage, `gs://BUCKET/…`.

A bucket holds objects, each written as a whole, whose names contain slashes. An object cannot be
appended to, and a directory is renamed object by object. `etils.epath` provides the methods of
pathlib for both; this module has the operations that differ.
"""

import contextlib
import errno
import importlib.util
import logging as std_logging
import os
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any

from absl import logging
from etils import epath

from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.storage import retry

Path = pathlib.Path | epath.Path

PICTURES = ('.png', '.pdf', '.svg')  # endings of the pictures that the package writes

_BUCKET = 'gs://'
_PUBLISH_SECONDS = 60  # between copies of growing files


def parse_path(path: str | os.PathLike[str]) -> Path:
  """Return the path of a work directory, in a file system or in a bucket."""
  if isinstance(path, Path):
    return path  # An earlier call checked it.
  if not re.match(r'[a-z][a-z0-9+.-]*://', text := os.fspath(path)):
    return pathlib.Path(path)
  if not text.startswith(_BUCKET):
    raise UserError(
      f'{text} is neither a path in a file system nor gs://BUCKET/…; mount other storage on every '
      'host, and give the path of the mount'
    )
  if importlib.util.find_spec('gcsfs') is None:
    raise UserError(f'{text} is in a bucket, which needs gcsfs; run pip install -e ".[gcs]"')
  std_logging.getLogger('gcsfs').setLevel(std_logging.CRITICAL)  # gcsfs also raises its errors.
  import fsspec.config as fsspec_config  # noqa: PLC0415 (only buckets need it)

  # A cached listing would hide the writes of other hosts.
  fsspec_config.conf.setdefault('gs', {})['use_listings_cache'] = False
  try:
    retry.retried(lambda: _reach(text), f'reaching {text}')
  except TransientError:
    raise
  except Exception as error:  # Storage libraries raise exceptions of many types.
    raise UserError(
      f'{text} cannot be reached ({reason(error)}); check the name and the network, and log in '
      'with `gcloud auth application-default login`'
    ) from error
  return epath.Path(text)


def _reach(url: str) -> None:
  with contextlib.suppress(FileNotFoundError):  # The run may create the directory.
    _bucket().ls(url)


def split_source(source: str | os.PathLike[str]) -> tuple[Path, int | None]:
  """Split `DIR` or `DIR@STEP` into a path and a step (None: the newest)."""
  directory, at, step = os.fspath(source).rpartition('@')
  if not at:
    return parse_path(source), None
  if not step.isdecimal():  # isdigit would accept '²', which int does not.
    raise UserError(f'source {source!r} does not end in a step; give DIR or DIR@STEP')
  return parse_path(directory), int(step)


def local(path: str | os.PathLike[str]) -> pathlib.Path:
  """Return a path in a file system; refuse a URL, which would become a directory `gs:`."""
  if '://' in (text := os.fspath(path)):
    raise UserError(
      f'{text} is not a path in a file system; mount the bucket on every host, for example with '
      'gcsfuse (docs/pods.md), and give the path of the mount'
    )
  return pathlib.Path(path)


def check_ending(path: str | os.PathLike[str], endings: Sequence[str], name: str) -> None:
  """Check the ending of a file to write; `name` is its flag or argument."""
  if pathlib.PurePath(path).suffix.lower() not in endings:
    allowed = ' or '.join(filter(None, (', '.join(endings[:-1]), endings[-1])))
    raise UserError(f'{name}={os.fspath(path)} must end in {allowed}')


def in_bucket(path: str | os.PathLike[str]) -> bool:
  """Return whether a path is in a bucket."""
  return os.fspath(path).startswith(_BUCKET)


def absolute(path: Path) -> Path:
  """Return the absolute path. A path in a bucket is always absolute."""
  return path if in_bucket(path) else path.absolute()


def errors(path: str | os.PathLike[str]) -> type[Exception]:
  """Return the exception type that covers all errors of reading and writing a path."""
  return Exception if in_bucket(path) else OSError


def reason(error: BaseException) -> str:
  """Return the reason of a failed read or write in one line."""
  message = getattr(error, 'strerror', None)
  if isinstance(error, FileNotFoundError) and not message:
    message = 'it does not exist'  # The error of a bucket's object has only a URL.
  return ' '.join(str(message or error or type(error).__name__).split())


def exists(path: Path) -> bool:
  """Return whether a path exists. A failed check does not count as absence."""

  def look() -> bool:
    try:
      _bucket().info(os.fspath(path)) if in_bucket(path) else os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
      return False
    return True

  return retry.retried(look, f'looking for {path}')


def steps(directory: Path) -> list[int]:
  """Return the steps of the complete checkpoints in a directory; none if it does not exist.

  Any other error passes through.
  """
  if not in_bucket(directory):
    with contextlib.suppress(FileNotFoundError):
      return [int(name) for name in os.listdir(directory) if name.isdigit()]
    return []
  markers = _bucket().glob(f'{os.fspath(directory)}/*/commit_success.txt')
  names = [path.split('/')[-2] for path in markers]
  return [int(name) for name in names if name.isdigit()]


def make_writable(directory: Path) -> None:
  """Create a directory and write a probe file into it. Raise any error that retries do not cure."""

  def once() -> None:
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / f'.probe-{os.getpid()}'
    probe.write_text('')
    probe.unlink(missing_ok=True)  # A process of another host may have the same number.

  retry.retried(once, f'writing to {directory}')


def write(path: Path, text: str) -> None:
  """Write a file atomically, with retries: a reader sees either the old or the new content."""
  retry.retried(lambda: overwrite(path, text), f'writing {path}')


def overwrite(path: Path, text: str) -> None:
  """Write a file atomically as `write` does, but try only once."""
  if in_bucket(path):
    path.write_text(text)
    return
  temporary = path.with_suffix('.tmp')
  temporary.write_text(text)
  os.replace(temporary, path)


def create(path: Path, text: str) -> None:
  """Create a new file in one operation, so that only one of two writers succeeds.

  Raises:
    FileExistsError: the file exists.
  """
  if in_bucket(path):
    _bucket().pipe_file(os.fspath(path), text.encode(), mode='create')
    return
  try:
    with open(path, 'x') as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
  except OSError as error:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
      pathlib.Path(path).unlink(missing_ok=True)  # `open` created the file, but it is empty.
    if error.errno == errno.ESTALE:  # A mounted bucket detects a conflict only at the upload.
      raise FileExistsError(error.errno, error.strerror, os.fspath(path)) from error
    raise


def rename(source: Path, target: Path) -> None:
  """Rename a directory. In a bucket this moves object by object, so it is not atomic."""

  def once() -> None:
    if in_bucket(source):
      _bucket().mv(os.fspath(source), os.fspath(target), recursive=True)
    else:
      os.rename(source, target)

  retry.retried(once, f'moving {source} to {target}')


def remove(directory: Path) -> None:
  """Remove a directory and its content as far as possible; ignore errors."""
  if not in_bucket(directory):
    for _ in range(10):  # A write that Orbax has abandoned goes on for a moment.
      shutil.rmtree(directory, ignore_errors=True)
      if not os.path.lexists(directory):
        return
      time.sleep(0.1)
    return
  with contextlib.suppress(Exception):
    epath.Path(directory).rmtree()


def objects(pattern: str) -> dict[str, tuple[Any, ...]]:
  """Return the `identity` of each file in a bucket that matches a pattern, from one listing.

  ** also matches subfolders.
  """
  matches = _bucket().glob(os.fspath(parse_path(pattern)), detail=True)
  return {
    _BUCKET + name: _object_identity(_BUCKET + name, info)
    for name, info in matches.items()
    if info['type'] == 'file'
  }


def identity(path: str) -> tuple[Any, ...]:
  """Return a tuple that changes when a file's content changes: its name, its size and another."""
  if in_bucket(path):
    return _object_identity(path, _bucket().info(path))
  stat = os.stat(path)
  return path, stat.st_size, stat.st_mtime_ns


def _object_identity(path: str, info: dict[str, Any]) -> tuple[Any, ...]:
  return path, info['size'], info['etag']


def listed(directory: Path) -> dict[str, int | None]:
  """Return the names of the files in a directory with their bytes, and of folders with None.

  A bucket has none in a directory that does not exist.

  Raises:
    FileNotFoundError: the directory of a file system does not exist.
  """

  def once() -> dict[str, int | None]:
    if in_bucket(directory):
      try:
        listing = _bucket().ls(os.fspath(directory), detail=True)
      except FileNotFoundError:
        return {}
      names = {entry['name'].rstrip('/').rpartition('/')[2]: entry for entry in listing}
      return {name: e['size'] if e['type'] == 'file' else None for name, e in names.items()}
    with os.scandir(directory) as entries:
      return {e.name: e.stat().st_size if e.is_file() else None for e in entries}

  return retry.retried(once, f'listing {directory}')


def put(file: pathlib.Path, target: Path) -> None:
  """Move a file of this host to a path, where it appears as a whole."""

  def once() -> None:
    if in_bucket(target):
      _bucket().put_file(os.fspath(file), os.fspath(target))
      file.unlink()
    else:
      os.replace(file, target)

  retry.retried(once, f'writing {target}')


def open_to_read(path: str) -> IO[bytes]:
  """Open a file for reading bytes."""
  return _bucket().open(path, 'rb') if in_bucket(path) else open(path, 'rb')


def _bucket() -> Any:
  import fsspec  # noqa: PLC0415

  return fsspec.filesystem('gs')


class Growing:
  """Files of a work directory that a run appends to.

  In a file system these files are in the work directory itself. For a bucket they are in a
  temporary directory, and are copied to the bucket once a minute and on request.
  """

  def __init__(self, workdir: Path):
    self._bucket = workdir if in_bucket(workdir) else None
    self._published, self._copied = time.monotonic(), {}
    local = tempfile.mkdtemp(prefix='tokenformer-') if self._bucket else workdir
    self.directory = pathlib.Path(local)

  def fetch(self, name: str) -> pathlib.Path:
    """Return the local path of a file, and copy its content from the bucket if there is any."""
    path = self.directory / name
    if self._bucket and (self._bucket / name).exists():
      path.write_bytes((self._bucket / name).read_bytes())
    return path

  def publish_sometimes(self) -> None:
    """Copy changed files to the bucket unless the last copy was less than a minute ago."""
    if self._bucket and time.monotonic() - self._published > _PUBLISH_SECONDS:
      self.publish()

  def publish(self, pauses: Sequence[float] = ()) -> bool:
    """Copy changed files to the bucket. Return whether that succeeded; log a warning if not.

    `pauses` are the seconds between tries.
    """
    if not self._bucket:
      return True
    self._published = time.monotonic()
    try:
      retry.retried(self._copy, f'copying figures to {self._bucket}', pauses)
    except Exception as error:  # Storage libraries raise exceptions of many types.
      logging.warning(
        'some files in %s are not copied to %s: %s', self.directory, self._bucket, reason(error)
      )
      return False
    return True

  def close(self) -> None:
    """Copy the rest with retries, and remove the temporary directory if all was copied."""
    if self.publish(retry.PAUSES) and self._bucket:
      shutil.rmtree(self.directory, ignore_errors=True)

  def _copy(self) -> None:
    for path in sorted(p for p in self.directory.rglob('*') if p.is_file()):
      stat = path.stat()
      version = stat.st_size, stat.st_mtime_ns
      if self._copied.get(path) != version:
        target = f'{self._bucket}/{path.relative_to(self.directory)}'
        _bucket().put_file(os.fspath(path), target)
        self._copied[path] = version
