"""Run the `main` of a command.

No module of `cli` imports JAX before `main` has its arguments, so that help and mistakes come at
once: what computes is imported inside the functions that use it.
"""

import contextlib
import functools
import inspect
import logging as std_logging
import os
import select
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

from tokenformer_jax.cli import help_text, hosts_flags, signatures
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.parallel import exit_status, messages

_HELP = ('--help', '-help', '-h', '--helpshort', '--help=')
_UNREAD = 141  # a shell's exit status for a command that SIGPIPE ended


def command(
  function: Callable[..., int | None],
  like: Callable[..., Any] | None = None,
  without: Sequence[str] = (),
  **options: Any,
) -> None:
  """Run a function with the command line as its arguments: see `signatures`, and `run`.

  Its `**options` are the arguments of `like` that it does not have itself and `without` some.
  """
  signatures.define(function, like, without=without)

  @functools.wraps(function)
  def main(argv: Sequence[str], **given: Any) -> int | None:
    return function(*argv[1:], **given)

  read = functools.partial(signatures.given, function, like, without=without)
  run(main, positional=signatures.takes_words(function), read=read, **options)


@arg.as_flags()
def run(
  main: Callable[..., int | None],
  *,
  read: Callable[[], dict[str, Any]] = dict,
  positional: bool = False,
  on_all_hosts: bool = True,
  stops: bool = False,
  more_help: Callable[[str], str] | None = None,
  define: Callable[[Sequence[str]], str] | None = None,
) -> None:
  """Parse the flags and run `main`; report a `UserError` in one line and exit with status 2.

  A `TransientError` becomes one line as well, with exit status 75. Uncaught storage errors are
  reported as one of the two.

  Args:
    main: takes the program's name with, if allowed, the positional arguments, and what `read`
      returns. It may return an exit status, which this process uses after all processes have
      finished.
    read: returns arguments of `main` from the flags; it runs before JAX and other processes.
    positional: whether positional arguments are allowed.
    on_all_hosts: whether the command computes on the devices of all hosts together.
    stops: whether the command saves and exits on SIGTERM (`hosts.StopRequest`).
    more_help: returns the text that `--help` prints after the flags. Its argument is the WORD of
      `--help=WORD`, for which the text may be empty, or an empty string for all of it.
    define: defines the flags of the action that the first word of a command line names, and returns
      its description for `--help`, instead of the docstring of the module of `main`.
  """
  if on_all_hosts:
    hosts_flags.define()

  def guarded(argv: Sequence[str]) -> int | None:
    if len(argv) > 1 and not positional:
      is_config = argv[1].endswith('.py') and 'config' in flags.FLAGS
      hint = f'did you mean --config={argv[1]}?' if is_config else 'flags look like --name=value'
      raise UserError(f'unexpected argument {argv[1]!r}; {hint}')
    quiet = not flags.FLAGS['verbosity'].present  # --verbosity=0 also shows the log of Orbax.
    if quiet:
      logging.set_verbosity(logging.WARNING)
      quiet_orbax()
    given = read()
    with _joined(stops) if on_all_hosts else contextlib.nullcontext():
      if quiet and not messages.is_first():
        logging.set_verbosity(logging.ERROR)
      status = _until_unread(functools.partial(main, **given), argv)
    return status

  flags.FLAGS.set_gnu_getopt(True)  # A flag after a word is read.
  try:
    app.run(guarded, flags_parser=_flags_parser(main, more_help, define))
  except KeyboardInterrupt:
    sys.exit(exit_status.INTERRUPTED_STATUS)
  except Exception as error:
    reported = exit_status.as_reported(error)
    if reported is None:
      raise
    messages.say(f'error: {reported}')
    sys.exit(exit_status.exit_status(reported))


def _joined(stops: bool) -> contextlib.AbstractContextManager[None]:
  """Return `hosts.joined`, with JAX imported."""
  from tokenformer_jax.parallel import hosts

  return hosts.joined(stops=stops)


@functools.cache
def quiet_orbax() -> None:
  """Keep Orbax from printing its warnings, and errors that it raises as well, in this process."""
  for logger in (logging.get_absl_logger(), std_logging.getLogger('asyncio')):
    logger.addFilter(_is_wanted)
  # A failed save or read leaves others that never began, or that find their event loop closed.
  warnings.filterwarnings('ignore', 'coroutine .* was never awaited', RuntimeWarning)
  sys.unraisablehook = functools.partial(_report_unraisable, sys.unraisablehook)


def _report_unraisable(otherwise: Callable[[Any], None], report: Any) -> None:
  """Drop reports of reads and writes that Orbax and TensorStore abandoned."""
  codes = [frame.f_code for frame, _ in traceback.walk_tb(report.exc_traceback)][-1:]
  if inspect.iscoroutine(report.object):  # A coroutine that never started has no frame.
    codes.append(report.object.cr_code)
  from_orbax = any('orbax' in code.co_filename for code in codes)
  if not from_orbax and str(report.exc_value) != 'Event loop is closed':
    otherwise(report)


def _is_wanted(record: std_logging.LogRecord) -> bool:
  from_orbax = 'orbax' in record.pathname or record.name == 'asyncio'
  return record.levelno < std_logging.WARNING or not from_orbax


def _until_unread(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int | None:
  """Run `main`. Exit without an error if the reader closes standard output (`… | head -1`)."""
  try:
    status = main(argv)
    sys.stdout.flush()
    return status
  except BrokenPipeError:
    output = select.poll()
    output.register(sys.stdout, select.POLLOUT)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
      raise  # Another pipe or socket broke.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _UNREAD


def _print_help(text: str) -> NoReturn:
  """Print a help text, and exit."""
  sys.exit(_until_unread(lambda _: print(text), sys.argv))


def _flags_parser(
  main: Callable[[Sequence[str]], int | None],
  more_help: Callable[[str], str] | None,
  define: Callable[[Sequence[str]], str] | None,
) -> Callable[[Sequence[str]], list[str]]:
  """Return a parser of flags that prints the help of the module of `main` on `--help`.

  On `--help=WORD` it prints the flags and keys that have the word.
  """

  def parse(argv: Sequence[str]) -> list[str]:
    doc = sys.modules[main.__module__].__doc__ or '' if define is None else define(argv)
    if any(argument in _HELP for argument in argv[1:]):
      _print_help(help_text.render(doc, more_help('') if more_help else ''))
    for argument in argv[1:]:
      name, _, word = argument.lstrip('-').partition('=')
      if name == 'help' and word and argument.startswith('-'):
        _print_help(help_text.render_matches(word, more_help(word) if more_help else ''))
    return signatures.parse(argv)

  return parse
