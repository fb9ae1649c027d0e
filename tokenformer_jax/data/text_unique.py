"""Find documents that repeat an earlier one exactly (`data.deduplicate`).

All documents are read once to find the repeated ones, whose numbers are kept, so that processes can
then read the text in units. The first of equal documents stays. The hashes take some 100 bytes a
document.
"""

import hashlib
from collections.abc import Iterable

from tokenformer_jax.data.lone_text import LoneText
from tokenformer_jax.data.text import Source, ignore
from tokenformer_jax.errors import counted
from tokenformer_jax.parallel.messages import say


def find_repeated(
  units: Iterable[Iterable[str]], known: Iterable[Source], name: str
) -> list[tuple[int, ...]]:
  """Return the numbers of the repeated documents of each unit, ascending.

  Documents of the `known` sources count as earlier ones. Messages call the units `name`.
  """
  say(f'looking for documents of {name} that repeat an earlier one')
  hashes = {digest for source in known for digest in _digests(source)}
  held_out, total, repeated = bool(hashes), 0, []
  for documents in units:
    numbers = []
    for number, document in enumerate(documents):
      total += 1
      if (digest := _digest([document])) in hashes:
        numbers.append(number)
      hashes.add(digest)
    repeated.append(tuple(numbers))
  say(
    f'{sum(map(len, repeated))} of {counted(total, "document")} of {name} repeat an earlier one '
    f'and are left out{" (of the validation text as well)" if held_out else ""}'
  )
  return repeated


def _digests(source: Source) -> Iterable[bytes]:
  """Yield the hashes of the documents of a source that can be read."""
  for member in source.members():
    if path := member.lone_file():
      lone = LoneText(path)
      yield _digest(lone.pieces(0, lone.size()))
    else:
      yield from (_digest([document]) for document in member.documents(ignore))


def _digest(pieces: Iterable[str]) -> bytes:
  hashed = hashlib.blake2b(digest_size=16)
  for piece in pieces:
    hashed.update(piece.encode())
  return hashed.digest()
