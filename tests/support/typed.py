"""Run a command in this process, with arguments as a user types them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags

from tokenformer_jax.cli import parse_flags, signatures


@contextlib.contextmanager
def own_flags() -> Iterator[None]:
  """Parse flags as a command does, and forget those that are defined inside."""
  known = set(flags.FLAGS)
  flags.FLAGS.set_gnu_getopt(True)
  try:
    yield
  finally:
    flags.FLAGS.set_gnu_getopt(False)
    for name in set(flags.FLAGS) - known:
      delattr(flags.FLAGS, name)


def run(main: Callable[..., Any], *arguments: object, **options: Any) -> Any:
  """Call the function of a command with a command line; `options` are as for `cli.command`."""
  with own_flags():
    signatures.define(main, **options)
    words = parse_flags.parse(['command', *map(str, arguments)])
    return main(*words[1:], **signatures.given(main, **options))
