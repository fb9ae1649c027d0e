"""Paths in file systems, and in buckets of Google Cloud Storage, `gs://BUCKET/…`.

A bucket has objects, each written as a whole, under names that hold slashes. There is nothing to
append to, and a directory is renamed object by object. `etils.epath` gives both the methods
of pathlib; here is what differs.
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
from collections.abc import Iterator
from typing import IO, Any

import fsspec
from absl import logging
from etils import epath

from tokenformer_jax import retry
from tokenformer_jax.errors import TransientError, UserError

Path = pathlib.Path | epath.Path

_BUCKET = 'gs://'
_PUBLISH_SECONDS = 60  # between copies of growing files


def of(path: str | os.PathLike[str]) -> Path:
  """The path of a work directory.

  Raises:
    UserError: it is a URL of something else than a bucket of Google's; that cannot be reached; or
      gcsfs is not installed.
    TransientError: it cannot be reached now, however often it was tried.
  """
  if isinstance(path, pathlib.PurePath):
    return path  # made here before: it need not be asked for again
  if not re.match(r'[a-z][a-z0-9+.-]*://', text := os.fspath(path)):
    return pathlib.Path(path)
  if not text.startswith(_BUCKET):
    raise UserError(
      f'{text} is neither a path in a file system nor gs://BUCKET/…; mount other storage on every '
      'host, and give the path that it has there'
    )
  if importlib.util.find_spec('gcsfs') is None:
    raise UserError(f'{text} is in a bucket, which takes gcsfs; pip install -e ".[gcs]"')
  std_logging.getLogger('gcsfs').setLevel(std_logging.CRITICAL)  # Errors are raised, too.
  # Other hosts write, too.
  fsspec.config.conf.setdefault('gs', {})['use_listings_cache'] = False
  try:
    retry.retried(lambda: _reach(text), f'reaching {text}')
  except TransientError:
    raise
  except Exception as error:  # There are many kinds.
    raise UserError(
      f'{text} cannot be reached ({reason(error)}); check the name, the network, and with '
      '`gcloud auth application-default login` who you are'
    ) from error
  return epath.Path(text)


def _reach(url: str) -> None:
  with contextlib.suppress(FileNotFoundError):  # It may be made.
    _bucket().ls(url)


def split_source(source: str | os.PathLike[str]) -> tuple[Path, int | None]:
  """Take `DIR` or `DIR@STEP` apart into a path and a step (None: the newest).

  Raises:
    UserError: what stands after the last @ is not a step; or as `of`.
  """
  directory, at, step = os.fspath(source).rpartition('@')
  if not at:
    return of(source), None
  if not step.isdecimal():  # '²' is a digit and not a number
    raise UserError(f'source {source!r} does not end in a step; it is DIR or DIR@STEP')
  return of(directory), int(step)


def local(path: str | os.PathLike[str]) -> pathlib.Path:
  """A path that has to be in a file system.

  Raises:
    UserError: it is a URL, which would become a directory named `gs:` on this host.
  """
  if '://' in (text := os.fspath(path)):
    raise UserError(
      f'{text} is not a path in a file system; mount the bucket on every host, with gcsfuse say '
      '(docs/pods.md), and give the path that it has there'
    )
  return pathlib.Path(path)


def in_bucket(path: str | os.PathLike[str]) -> bool:
  """Whether a path is one in a bucket."""
  return os.fspath(path).startswith(_BUCKET)


def absolute(path: Path) -> Path:
  """The path from the root; one in a bucket is."""
  return path if in_bucket(path) else path.absolute()


def errors(path: str | os.PathLike[str]) -> type[Exception]:
  """What reading and writing may raise: of a bucket there are many kinds."""
  return Exception if in_bucket(path) else OSError


def reason(error: BaseException) -> str:
  """Why something could not be read or written, in a line."""
  said = getattr(error, 'strerror', None)
  if isinstance(error, FileNotFoundError) and not said:
    said = 'it is not there'  # of an object, whose error names a URL
  return ' '.join(str(said or error or type(error).__name__).split())


def exists(path: Path) -> bool:
  """Return whether something is at a path. An error of looking does not count as absence.

  Raises:
    Exception: it cannot be looked at, also after trying again.
  """

  def look() -> bool:
    try:
      _bucket().info(os.fspath(path)) if in_bucket(path) else os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
      return False
    return True

  return retry.retried(look, f'looking for {path}')


def steps(directory: Path) -> list[int]:
  """Return the numbers that name complete checkpoints in a directory; raise what goes wrong."""
  if not in_bucket(directory):
    return [int(name) for name in os.listdir(directory) if name.isdigit()]
  found = _bucket().glob(f'{os.fspath(directory)}/*/commit_success.txt')
  names = [path.split('/')[-2] for path in found]
  return [int(name) for name in names if name.isdigit()]


def make_writable(directory: Path) -> None:
  """Makes a directory and writes into it; raises what goes wrong, also after trying again."""

  def once() -> None:
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / f'.probe-{os.getpid()}'
    probe.write_text('')
    probe.unlink(missing_ok=True)  # Another host may have the same number for its process.

  retry.retried(once, f'writing to {directory}')


def write(path: Path, text: str) -> None:
  """Writes a file so that a reader sees the old or the new content, whatever happens.

  Raises:
    Exception: it cannot be written, also after trying again.
  """

  def once() -> None:
    if in_bucket(path):
      path.write_text(text)
      return
    temporary = path.with_suffix('.tmp')
    temporary.write_text(text)
    os.replace(temporary, path)

  retry.retried(once, f'writing {path}')


def create(path: Path, text: str) -> None:
  """Write a file that must not be there, in one operation: of two writers one gets an error.

  Raises:
    FileExistsError: it is there.
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
      pathlib.Path(path).unlink(missing_ok=True)  # made, but empty
    if error.errno == errno.ESTALE:  # A mounted bucket finds out when it uploads the file.
      raise FileExistsError(error.errno, error.strerror, os.fspath(path)) from error
    raise


def rename(source: Path, target: Path) -> None:
  """Gives a directory another name; in a bucket object by object, which is not one operation.

  Raises:
    Exception: it cannot be renamed, also after trying again.
  """

  def once() -> None:
    if in_bucket(source):
      _bucket().mv(os.fspath(source), os.fspath(target), recursive=True)
    else:
      os.rename(source, target)

  retry.retried(once, f'moving {source} to {target}')


def remove(directory: Path) -> None:
  """Removes a directory and what is in it, as far as it is there and can be."""
  if not in_bucket(directory):
    shutil.rmtree(directory, ignore_errors=True)
    return
  with contextlib.suppress(Exception):
    directory.rmtree()


def files(pattern: str) -> Iterator[str]:
  """The files in buckets that match a pattern, in which ** reaches into folders."""
  found = _bucket().glob(os.fspath(of(pattern)), detail=True)
  return (_BUCKET + name for name, one in found.items() if one['type'] == 'file')


def identity(path: str) -> tuple[Any, ...]:
  """What changes when a file does."""
  if in_bucket(path):
    found = _bucket().info(path)
    return path, found['size'], found['etag']
  stat = os.stat(path)
  return path, stat.st_size, stat.st_mtime_ns


def open_to_read(path: str) -> IO[bytes]:
  """The bytes of a file."""
  return _bucket().open(path, 'rb') if in_bucket(path) else open(path, 'rb')


def _bucket() -> fsspec.AbstractFileSystem:
  return fsspec.filesystem('gs')


class Growing:
  """Files of a work directory that are appended to.

  In a file system they are in the work directory. For a bucket they are in a temporary directory,
  and copied from there: now and then, and when asked for.
  """

  def __init__(self, workdir: Path):
    self.directory = workdir
    self._workdir, self._copied = None, {}
    if in_bucket(workdir):
      self.directory = pathlib.Path(tempfile.mkdtemp(prefix='tokenformer-'))
      self._workdir, self._published = workdir, time.monotonic()

  def fetch(self, name: str) -> pathlib.Path:
    """A file of the work directory, to go on with."""
    path = self.directory / name
    if self._workdir and (self._workdir / name).exists():
      path.write_bytes((self._workdir / name).read_bytes())
    return path

  def publish_sometimes(self) -> None:
    """Copies, if it was not done within the last minute."""
    if self._workdir and time.monotonic() - self._published > _PUBLISH_SECONDS:
      self.publish()

  def publish(self) -> bool:
    """Copies what has changed. What cannot be copied is warned of, and copied the next time."""
    if not self._workdir:
      return True
    self._published = time.monotonic()
    try:
      self._copy()
    except Exception as error:  # There are many kinds.
      self._warn(error)
      return False
    return True

  def close(self) -> None:
    """Copies the rest, trying again for a while. What cannot be copied stays where it is."""
    if not self._workdir:
      return
    try:
      retry.retried(self._copy, f'copying figures to {self._workdir}')
    except Exception as error:  # There are many kinds.
      self._warn(error)
    else:
      shutil.rmtree(self.directory, ignore_errors=True)

  def _copy(self) -> None:
    for path in sorted(p for p in self.directory.rglob('*') if p.is_file()):
      stat = path.stat()
      version = stat.st_size, stat.st_mtime_ns
      if self._copied.get(path) != version:
        target = self._workdir / path.relative_to(self.directory)
        _bucket().put_file(os.fspath(path), os.fspath(target))
        self._copied[path] = version

  def _warn(self, error: Exception) -> None:
    logging.warning(
      'what is in %s is not all copied to %s: %s', self.directory, self._workdir, reason(error)
    )
