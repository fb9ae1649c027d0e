"""Runs to grow, and the command that grows them, within this process or as one of its own."""

import contextlib
import sys
from pathlib import Path

import jax
import tiny_run
import typed
from growing import STEP, mesh_of, state_of
from tiny_run import trainer

from tokenformer_jax.cli import grow as command
from tokenformer_jax.cli import signatures
from tokenformer_jax.config import Config
from tokenformer_jax.data import tokenizers
from tokenformer_jax.grow import grow_run
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Batches, Meta, Seen
from tokenformer_jax.steps.step import State

LARGER = '--param_tokens=qkv=48,ffn=96'
# More samples than its steps have at its last batch size.
SEEN = Seen(1234, batches=(Batches(0, 1234 / STEP, tiny_run.CHANGES['data.sequence_length']),))


def write_run(workdir: Path, text: str, cache: Path, *, seed: int = 0, **changes) -> Config:
  """Writes a work directory as a run leaves it, with a state as after training."""
  config = complete(tiny_run.config(text, cache, **changes))
  tokenizer = tokenizers.load(config.data.tokenizer)
  checkpoints = checkpoint.Checkpoints(workdir, keep=1)
  with contextlib.closing(checkpoints):
    state = state_of(config.model, seed)
    checkpoints.save(Meta(STEP, config, tokenizer.to_json(), seen=SEEN), state)
    checkpoints.wait()
  return config


def grow(*arguments: object) -> None:
  """`python -m tokenformer_jax grow` with these arguments, within this process."""
  argv = ['grow', *map(str, arguments)]
  with typed.own_flags():
    command.define_flags(argv)
    command.main(signatures.parse(argv))


def command_line(*arguments: object) -> list[str]:
  """The same as a command for a process."""
  return [sys.executable, '-m', 'tokenformer_jax', 'grow', *map(str, arguments)]


def meta_of(workdir: Path) -> Meta:
  """What the newest checkpoint says of itself."""
  checkpoints, meta = checkpoint.open_source(workdir, None)
  checkpoints.close()
  return meta


def read(workdir: Path) -> State:
  """The whole state of the newest checkpoint, its checksums compared."""
  source = checkpoint.open_source(workdir, None)
  with contextlib.closing(source.checkpoints):
    return grow_run.read(source, mesh_of())


def first_state(config: Config, workdir: Path) -> tuple[State, int]:
  """What a training run of this config starts from, and its step."""
  run = trainer(config, workdir)
  with jax.set_mesh(run.mesh), contextlib.closing(run.checkpoints):
    return run.first_state()


def contents(directory: Path) -> dict[str, bytes]:
  """Every file below a directory."""
  return {
    str(path.relative_to(directory)): path.read_bytes()
    for path in sorted(directory.rglob('*'))
    if path.is_file()
  }
