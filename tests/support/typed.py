"""Run a command in this process, with arguments as a user types them."""

import contextlib
import io
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from absl import app, flags

from tokenformer_jax.cli import signatures, verbs
from tokenformer_jax.errors import arg

_LIMIT = 120  # seconds for a command, which would train for hours if a mistake went unnoticed


@contextlib.contextmanager
def own_flags() -> Iterator[None]:
  """Parse and name flags as a command does, and forget those that are defined inside."""
  known = set(flags.FLAGS)
  flags.FLAGS.set_gnu_getopt(True)
  try:
    with arg.as_flags():
      yield
  finally:
    flags.FLAGS.set_gnu_getopt(False)
    for name in set(flags.FLAGS) - known:
      delattr(flags.FLAGS, name)


def run(main: Callable[..., Any], *arguments: object, **options: Any) -> Any:
  """Call the function of a command with a command line; `options` are as for `cli.command`."""
  with own_flags():
    signatures.define(main, **options)
    words = signatures.parse(['command', *map(str, arguments)])
    return main(*words[1:], **signatures.given(main, **options))


def command(words: Sequence[str]) -> subprocess.CompletedProcess:
  """Be `tokenformer WORDS`, but for what absl sets up in a process; return its status and text."""

  def stop(number: int, frame: Any) -> None:
    pytest.fail(f'the command still runs after {_LIMIT} s')

  said = io.StringIO(), io.StringIO()
  before = signal.signal(signal.SIGALRM, stop)
  signal.alarm(_LIMIT)
  try:
    with contextlib.redirect_stdout(said[0]), contextlib.redirect_stderr(said[1]):
      status = as_process(verbs.main, words)
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
  return subprocess.CompletedProcess([*words], status, *(text.getvalue() for text in said))


def as_process(main: Callable[[], None], words: Sequence[str]) -> int:
  """Call the `main` of a console command with a command line; return its exit status."""

  def run_app(main: Callable[..., Any], flags_parser: Callable[..., list[str]]) -> None:
    sys.exit(main(flags_parser(sys.argv)))

  with pytest.MonkeyPatch.context() as patch, own_flags():
    patch.setattr(app, 'run', run_app)
    patch.setattr(signatures.Actions, 'current', ('', frozenset()))
    patch.setattr(sys, 'argv', ['tokenformer', *words])
    try:
      main()
    except SystemExit as ended:
      return ended.code or 0
  return 0
