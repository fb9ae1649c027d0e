"""What JAX compiles, for tests that count it."""

import contextlib
import logging
import re
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
  """The names of the functions that JAX compiles meanwhile."""
  names = []

  class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
      names.extend(re.findall(r'^Compiling jit\((\w+)\)', record.getMessage()))

  handler = Handler()
  logging.getLogger('jax').addHandler(handler)
  with jax.log_compiles():
    yield names
  logging.getLogger('jax').removeHandler(handler)
