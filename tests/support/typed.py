"""Run a command in this process, with arguments as a user types them."""

from collections.abc import Callable
from typing import Any

from absl import flags

from tokenformer_jax.cli import parse_flags, signatures


def run(main: Callable[..., Any], *arguments: object, **options: Any) -> Any:
  """Call the function of a command with a command line; `options` are as for `cli.command`."""
  known = set(flags.FLAGS)
  signatures.define(main, **options)
  flags.FLAGS.set_gnu_getopt(True)
  try:
    words = parse_flags.parse(['command', *map(str, arguments)])
    return main(*words[1:], **signatures.given(main, **options))
  finally:
    flags.FLAGS.set_gnu_getopt(False)
    for name in set(flags.FLAGS) - known:
      delattr(flags.FLAGS, name)
