"""Open text sources, one or several: each form has its own file, and a line in `SOURCES`."""

import dataclasses
import functools
from collections.abc import Iterator

from tokenformer_jax.data.text import ROWS, Source, digest
from tokenformer_jax.data.text_files import open_files, open_stdlib
from tokenformer_jax.data.text_hf import open_hf
from tokenformer_jax.data.text_parquet import open_parquet
from tokenformer_jax.data.tfds_sets import Tfds
from tokenformer_jax.errors import UserError

# What opens a source, by the word before the colon. It takes the rest of the spec and
# the other arguments of `open_source`.
SOURCES = {
  'stdlib': open_stdlib,
  'files': open_files,
  'parquet': open_parquet,
  'hf': open_hf,
  'tfds': Tfds,
}
PLUS = ' + '  # between the sources of a list
_WITHOUT_CHAT = ('stdlib', 'tfds')


def open_source(
  spec: str,
  text_field: str,
  setting: str = 'config.data.source',
  splits: tuple[str, ...] = ('train',),
) -> Source:
  """Open the source `stdlib`, one of a form FORM:NAME with FORM in `SOURCES`, or several.

  Several are separated by ' + ', and their documents come one source after another.
  The document is in the field `text_field` of a row or an example; for `CHAT` the row is a
  conversation, for `PAIRS` two. Messages call the source `setting`. `splits` are splits of a set in
  order of preference; the first existing one is read.
  """
  if PLUS in spec:
    one = functools.partial(open_source, text_field=text_field, setting=setting, splits=splits)
    return Sources(tuple(one(name.strip()) for name in spec.split(PLUS)))
  form, _, name = spec.partition(':')
  if spec != 'stdlib' and not (form in SOURCES and name and form != 'stdlib'):
    raise UserError(
      f'{setting} is {spec!r}; it must be stdlib, files:GLOB, parquet:GLOB, hf:NAME or tfds:NAME'
    )
  if text_field in ROWS and form in _WITHOUT_CHAT:
    raise UserError(
      f'{setting} is {spec}, which has no rows of chat (config.data.rows); name JSON lines or '
      'arrays as files:GLOB, Parquet files as parquet:GLOB, or a set as hf:NAME'
    )
  return SOURCES[form](name, text_field, setting, splits)


@dataclasses.dataclass(frozen=True)
class Sources(Source):
  """The documents of several sources, one source after another."""

  sources: tuple[Source, ...]

  def members(self) -> tuple[Source, ...]:
    return self.sources

  def parted(self, separator: str) -> Source:
    return Sources(tuple(source.parted(separator) for source in self.sources))

  def fingerprint(self) -> str:
    return digest([source.fingerprint() for source in self.sources])

  def files(self) -> Iterator[str]:
    for source in self.sources:
      yield from source.files()

  def divide(self, size: int) -> Iterator[tuple[Source, int]]:
    for source in self.sources:
      yield from source.divide(size)

  def _texts(self) -> Iterator[str | UserError]:
    for source in self.sources:
      yield from source._texts()
