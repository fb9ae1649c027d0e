r"""Train a model.

tokenformer train                       the default language model, on a CPU in minutes
tokenformer train --config=vit_digits   another config that comes with the package
tokenformer train --config=FILE.py      a config of your own
tokenformer train --config.KEY=VALUE    another value for any key
tokenformer train --workdir=DIR         an earlier run, with its own config
"""

import functools
import gc
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path as LocalPath
from typing import Annotated

from pydantic import Field

from tokenformer_jax.cli import config_flag, heap, help_text, outputs
from tokenformer_jax.cli import main as cli
from tokenformer_jax.config import Config
from tokenformer_jax.config.arguments import Natural, Path
from tokenformer_jax.errors import FaultyDeviceError, UserError
from tokenformer_jax.parallel import messages

_DEFAULT = 'lm_stdlib'


def main(
  config: Config | None = None,
  *,
  workdir: Path | None = None,
  stopped_status: Annotated[Natural, Field(lt=256)] = 0,
  faulty_hosts: Path | None = None,
) -> int:
  """Run a config in a work directory; go on where an earlier run stopped.

  Args:
    config: The config: FILE, FILE:VARIANT, or the NAME of one that comes with the package (default:
      the config of the run in --workdir, if there is one, or lm_stdlib).
    workdir: The directory for checkpoints and figures (default: runs/NAME_OF_THE_CONFIG).
    stopped_status: Exit status after a stop (SIGTERM, Ctrl-C) before the last step. A separate
      status, such as 75, tells the program that started the run to start it again.
    faulty_hosts: The file to add hosts to whose devices compute wrong
      (--config.train.check_devices), one a line, for the program that starts the run again
      elsewhere. All hosts must share its disk.
  """
  from tokenformer_jax.training import loop

  gc.freeze()  # Scanning the imported modules would take half a second.
  if config is None:
    config = config_flag.read(_default_config(workdir))
  outputs.check_file('faulty_hosts', faulty_hosts)
  if heap.can_keep_freed_memory():
    heap.keep_freed_memory()
  workdir = workdir or os.path.join('runs', config_flag.name(_DEFAULT))
  try:
    _, stopped = loop.train_or_stop(config, workdir)
  except FaultyDeviceError as error:
    if faulty_hosts:
      add = functools.partial(_add_lines, error.hosts)
      outputs.write_file('faulty_hosts', faulty_hosts, add)
    raise
  if not stopped:
    return 0
  messages.say(f'to go on: tokenformer train {shlex.join(sys.argv[1:])}')
  return stopped_status


def _add_lines(lines: Sequence[str], path: LocalPath) -> None:
  with path.open('a', encoding='utf-8') as file:
    file.writelines(f'{line}\n' for line in lines)


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.command(main, stops=True, more_help=_help_of_keys)


def _default_config(workdir: Path | None) -> str:
  """Return the config of the run in the work directory, if there is one, or the package's first."""
  from tokenformer_jax.storage import paths

  try:
    if workdir and (paths.parse_path(workdir) / 'config.json').exists():
      return f'saved:{os.fspath(workdir)}'
  except UserError:  # The run reports the mistake.
    pass
  return _DEFAULT


def _help_of_keys(word: str) -> str:
  """Return the part of --help about the config's keys: see `help_text.render_keys`."""
  title = '\nKeys, with the defaults that config files start from: --config.KEY=VALUE\n'
  if word:
    keys = help_text.render_keys(word)
    return keys and title + keys
  narrower = '--help=optim lists the keys of a group, --help=WORD those that have a word.\n'
  return f'{title}{narrower}\n{help_text.render_keys()}'
