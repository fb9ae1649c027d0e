"""Write and read small JSON files that decide numbers, each with a digest of itself.

The digest is the last entry of the object, so a sealed file is JSON for everyone else:

  {"dtype": "uint16", "seal": "1b0f…"}
"""

import hashlib
import json
import re
from typing import Any

_SEAL = 'seal'  # the name of the entry
_SEALED = re.compile(rf'(?s)(.*), "{_SEAL}": "([0-9a-f]{{32}})"\}}')


class DamagedError(ValueError):
  """A file that is not as it was written, or has no digest of itself."""


def dump(values: dict[str, Any]) -> str:
  """Return an object that is not empty as the text of a file."""
  text = json.dumps(values)
  return f'{text[:-1]}, "{_SEAL}": "{_digest(text)}"}}'


def load(data: bytes) -> dict[str, Any]:
  """Return the object in the bytes of a file.

  Raises:
    DamagedError: the file is not as `dump` made it.
  """
  match = _SEALED.fullmatch(data.decode('utf-8', errors='replace'))
  if not match or _digest(f'{match[1]}}}') != match[2]:
    raise DamagedError('the file is not as it was written')
  return json.loads(f'{match[1]}}}')


def _digest(text: str) -> str:
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
