"""Read several sources one after another: `SOURCE + SOURCE + …`, each of any form."""

import dataclasses
from collections.abc import Callable, Iterator

from tokenformer_jax.data.text import Source, digest
from tokenformer_jax.errors import UserError


def open_list(specs: list[str], open_one: Callable[[str], Source]) -> 'Sources':
  """Return the documents of sources one after another; `open_one` opens each."""
  return Sources(tuple(open_one(spec.strip()) for spec in specs))


@dataclasses.dataclass(frozen=True)
class Sources(Source):
  """The documents of several sources, one source after another."""

  sources: tuple[Source, ...]

  def members(self) -> tuple[Source, ...]:
    return self.sources

  def fingerprint(self) -> str:
    return digest([source.fingerprint() for source in self.sources])

  def files(self) -> Iterator[str]:
    for source in self.sources:
      yield from source.files()

  def parts(self, size: int) -> Iterator[tuple[Source, int]]:
    for source in self.sources:
      yield from source.parts(size)

  def _texts(self) -> Iterator[str | UserError]:
    for source in self.sources:
      yield from source._texts()
