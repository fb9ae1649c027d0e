"""Read TFDS sets in `array_record` files: text, `tfds:NAME`, and examples of images.

NAME may be NAME/CONFIG:VERSION.
"""

import contextlib
import dataclasses
import errno
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenformer_jax.data.text import Source, digest, field
from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.storage.retry import retried

# array_record reports a failed system call in its message only: 'pread() failed: Input/…; …'.
_SYSTEM_CALL = re.compile(r'\w+\(\) failed: .*')


@dataclasses.dataclass(frozen=True)
class Tfds(Source):
  """A split of a prepared TFDS dataset, read without TensorFlow: see `sources.open_source`."""

  name: str
  text_field: str
  setting: str
  splits: tuple[str, ...]
  separator: str = ''

  @functools.cached_property
  def _examples(self) -> Any:
    import tensorflow_datasets as tfds  # noqa: PLC0415 (slow, and only needed here)

    def open_split() -> Any:
      builder: Any = tfds.builder(self.name, file_format='array_record')
      split = next((name for name in self.splits if name in builder.info.splits), self.splits[0])
      return builder.as_data_source(split)

    with opening(self.setting, self.name):
      return retried(open_split, f'opening tfds:{self.name}')

  def fingerprint(self) -> str:
    """Return a hash of the name, the configuration, the version, and the sizes."""
    info = self._examples.dataset_info
    split = info.splits[self._examples.split]
    return digest((info.full_name, split.num_bytes, tuple(split.shard_lengths)))

  def files(self) -> list[str]:
    examples = self._examples
    return list(map(str, examples.dataset_info.splits[examples.split].filepaths))

  def _texts(self) -> Iterator[str]:
    for i in range(len(self._examples)):
      label = f'tfds:{self.name}, example {i},'
      try:
        example = retried(lambda i=i: read_example(self._examples, i), f'reading tfds:{self.name}')
      except TransientError:
        raise
      except Exception as error:  # array_record raises exceptions of many types.
        raise UserError(f'{label} cannot be read: {error}') from error
      yield field(example, self.text_field, label)


def read_example(examples: Sequence[Any], number: int) -> Any:
  """Return the example with a number.

  Raises:
    OSError: the system cannot read the file now; the example itself may be good.
    Exception: any other error of array_record, unchanged.
  """
  try:
    return examples[number]
  except RuntimeError as error:
    if match := _SYSTEM_CALL.search(str(error)):
      raise OSError(errno.EIO, match[0]) from error
    raise


@contextlib.contextmanager
def opening(setting: str, name: str) -> Iterator[None]:
  """Say what to do where TFDS cannot open the set of a setting `tfds:NAME`."""
  try:
    yield
  except (UserError, TransientError):
    raise
  except Exception as error:  # TFDS raises exceptions of many types.
    reason = str(error).strip().partition('\n')[0]
    raise UserError(
      f'{setting} is tfds:{name}, which cannot be opened ({reason}); prepare it with '
      f'`tfds build {name} --file_format=array_record`, or point the environment variable '
      'TFDS_DATA_DIR at the folder where it is prepared in that format'
    ) from error
