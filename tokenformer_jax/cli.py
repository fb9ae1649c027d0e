"""What the command-line entries share: running `main`, and files that flags name."""

import contextlib
import gc
import importlib.util
import os
import select
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import jax
from absl import app, flags, logging

from tokenformer_jax import flag_mistakes, hosts, messages, paths, usage
from tokenformer_jax.errors import UserError

_HELP = ('--help', '-help', '-h', '--helpshort')
_UNREAD = 141  # the exit status of what SIGPIPE ends, in a shell


def run(
  main: Callable[[Sequence[str]], int | None],
  *,
  positional: bool = False,
  on_all_hosts: bool = True,
  stops: bool = False,
  more_help: Callable[[], str] | None = None,
) -> None:
  """Parses flags and runs `main`; a `UserError` becomes one line and exit status 2.

  A `TransientError` becomes one line and exit status 75. So do errors of storage that nothing else
  has caught, by whether they may pass.

  Args:
    main: gets the program's name and, if they are allowed, the arguments that are no flags; may
      return an exit status, with which this process ends after all processes have come to the end.
    positional: whether such arguments are allowed; then flags may also stand after them.
    on_all_hosts: whether the command computes on the devices of all hosts together.
    stops: whether it saves and ends in good order on SIGTERM (`hosts.StopRequest`).
    more_help: gives what `--help` prints after the flags.
  """
  gc.freeze()  # What is imported is never garbage, and looking through it takes half a second.
  join = contextlib.nullcontext()
  if on_all_hosts:
    hosts.define_flags()
    join = hosts.joined(stops=stops)

  def guarded(argv: Sequence[str]) -> int | None:
    if len(argv) > 1 and not positional:
      raise UserError(f'unexpected argument {argv[1]!r}; flags look like --name=value')
    quiet = not flags.FLAGS['verbosity'].present  # --verbosity=0 shows the lines of Orbax, too.
    if quiet:
      logging.set_verbosity(logging.WARNING)
    _leave_out_tpu()
    with join:
      if quiet and not hosts.is_first():
        logging.set_verbosity(logging.ERROR)
      status = _until_unread(main, argv)
    return status

  sys.unraisablehook = _report_unraisable
  flags.FLAGS.set_gnu_getopt(positional)
  try:
    app.run(guarded, flags_parser=_flags_parser(main, more_help))
  except Exception as error:
    told = hosts.as_told(error)
    if told is None:
      raise
    messages.say(f'error: {told}')
    sys.exit(hosts.status_of(told))


def _until_unread(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int | None:
  """Runs `main`, and ends without an error when nobody reads what it prints (`… | head -1`)."""
  try:
    status = main(argv)
    sys.stdout.flush()
    return status
  except BrokenPipeError:
    output = select.poll()
    output.register(sys.stdout, select.POLLOUT)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
      raise  # It was another pipe, or socket.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _UNREAD


def _leave_out_tpu() -> None:
  """Keeps JAX from starting libtpu where it is only there to plan: it would write what it misses.

  Where JAX saw a TPU when it was imported, it chose it; where the user names devices, they count.
  """
  if jax.config.jax_platforms or importlib.util.find_spec('libtpu') is None:
    return
  # JAX looks at the PCI bus, which a container may hide; with another plugin, a GPU's, it is not
  # sure which devices there are.
  files = [*Path('/dev').glob('accel*'), *Path('/dev').glob('vfio/[0-9]*')]
  if not files and not metadata.entry_points(group='jax_plugins'):
    jax.config.update('jax_platforms', 'cpu')


def _report_unraisable(unraisable: 'sys.UnraisableHookArgs') -> None:
  """Reports what cannot be raised, but not the writes that TensorStore gives up after a failed one.

  They find the loop of their save closed; the failure itself has been raised.
  """
  if 'Event loop is closed' not in str(unraisable.exc_value):
    sys.__unraisablehook__(unraisable)


def _flags_parser(
  main: Callable[[Sequence[str]], int | None], more_help: Callable[[], str] | None
) -> Callable[[Sequence[str]], list[str]]:
  """Return what parses the flags, and prints the help of the module of `main` if asked for it."""

  def parse(argv: Sequence[str]) -> list[str]:
    if any(argument in _HELP for argument in argv[1:]):
      doc = sys.modules[main.__module__].__doc__ or ''
      print(usage.render(doc, more_help() if more_help else ''))
      sys.exit(0)
    return flag_mistakes.parse(argv)

  return parse


def output_file(flag: str) -> Path | None:
  """Return the file that a flag names, None if it names none; for use before anything is computed.

  Raises:
    UserError: it is not in a file system, or cannot be written.
  """
  value = flags.FLAGS[flag].value
  if value is None or not hosts.is_first():  # who alone writes
    return value and Path(value)
  path = paths.local(value)
  folder = path.absolute().parent
  reason = ''
  if path.is_dir():
    reason = 'it is a folder'
  elif not folder.is_dir():
    reason = f'there is no folder {path.parent}'
  elif not os.access(path if path.exists() else folder, os.W_OK):
    reason = 'its rights, or those of the file system, do not allow it'
  if reason:
    raise UserError(f'--{flag}={value} cannot be written: {reason}')
  return path
