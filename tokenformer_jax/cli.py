"""What the command-line entries share: running `main`, and naming a checkpoint."""

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

from tokenformer_jax import config, hosts, paths
from tokenformer_jax.errors import UserError

_UNREAD = 141  # the exit status of what SIGPIPE ends, in a shell


def run(
  main: Callable[[Sequence[str]], int | None],
  *,
  positional: bool = False,
  on_all_hosts: bool = True,
  stops: bool = False,
) -> None:
  """Parses flags and runs `main`; a `UserError` becomes one line and exit status 2.

  Args:
    main: gets the program's name and, if they are allowed, the arguments that are no flags; may
      return an exit status, with which this process ends after all processes have come to the end.
    positional: whether such arguments are allowed; then flags may also stand after them.
    on_all_hosts: whether the command computes on the devices of all hosts together.
    stops: whether it saves and ends in good order on SIGTERM (`hosts.StopRequest`).
  """
  gc.freeze()  # What is imported is never garbage, and looking through it takes half a second.
  join = contextlib.nullcontext()
  if on_all_hosts:
    hosts.define_flags()
    join = hosts.joined(stops=stops)

  def guarded(argv: Sequence[str]) -> int | None:
    if len(argv) > 1 and not positional:
      raise app.UsageError(f'unexpected argument {argv[1]!r}; flags look like --name=value')
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
    app.run(guarded, flags_parser=_parse_flags)
  except UserError as error:
    say(f'error: {error}')
    sys.exit(2)


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


def _parse_flags(argv: Sequence[str]) -> list[str]:
  """Parses flags; turns what ml_collections raises for a config into sentences."""
  try:
    return app.parse_flags_with_usage(argv)
  except AttributeError:  # from ml_collections, for an unknown key in --config.KEY=VALUE
    for argument in argv:
      if argument.lstrip('-').startswith('config.'):
        config.check_key(argument.partition('=')[0].partition('.')[2])
    raise


def say(text: str) -> None:
  """A line for the person at the terminal, on the standard error of the first process."""
  if hosts.is_first():
    print(text, file=sys.stderr, flush=True)


def split_source(source: str) -> tuple[paths.Path, int | None]:
  """`DIR` or `DIR@STEP` as a path and a step (None: the newest)."""
  directory, at, step = source.rpartition('@')
  if not at:
    return paths.of(source), None
  if not step.isdigit():
    raise UserError(f'source {source!r} does not end in a step; it is DIR or DIR@STEP')
  return paths.of(directory), int(step)
