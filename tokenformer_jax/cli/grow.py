r"""Make a trained model larger without changing what it computes.

  tokenformer grow --source=DIR[@STEP] --target=DIR --param_tokens=qkv=N,proj=N,ffn=N
  tokenformer grow --source=DIR --target=DIR --layers=N --place=PLACE
  tokenformer grow --source=DIR --target=DIR --experts=N [--top_k=K] …
  tokenformer grow --source=DIR --target=DIR --method=net2net --width=N

New layers and experts add zero at first. Tokens of a Transformer are beside its matrices; the last
form widens them. A word before the flags names another action, whose flags
`tokenformer grow ACTION --help` lists:
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli import signatures
from tokenformer_jax.config import MeshConfig
from tokenformer_jax.config.arguments import Text
from tokenformer_jax.config.section import Bool, Int, Str
from tokenformer_jax.errors import UserError, nearest
from tokenformer_jax.grow.actions import ACTIONS
from tokenformer_jax.parallel import messages

if TYPE_CHECKING:
  from tokenformer_jax.grow.derivation import Parent

Counts = Mapping[Str, Int]
_ACTIONS = signatures.Actions(ACTIONS, default='grow', without=['parent', 'dry_run'])


def _parent(source: Text, *, mesh: Counts | None = None, dry_run: Bool = False) -> 'Parent':
  """Return the run of a command line.

  Args:
    source: The run to start from: DIR, or DIR@STEP.
    mesh: The sizes replica=N,fsdp=N,experts=N,tokens=N; default: the source's.
    dry_run: Print the table, for a growth also whether it pays, and stop.
  """
  from tokenformer_jax.grow.derivation import Parent

  sizes = None if mesh is None else _mesh_config(mesh)
  return Parent(source, sizes, dry_run, show=lambda text: print(text, flush=True))


def _unused(name: str) -> tuple[str, ...]:
  """Return the arguments of the source that an action does not need, which writes nothing."""
  return () if _writes(name) else ('mesh', 'dry_run')


def _writes(name: str) -> bool:
  return 'target' in inspect.signature(ACTIONS[name]).parameters


def define_flags(argv: Sequence[str]) -> str:
  """Define the flags of the action that the first word names; return its description."""
  name = _ACTIONS.name(argv)
  signatures.define(_parent, without=_unused(name))
  _ACTIONS.define(name)
  if name == _ACTIONS.default:
    return f'{__doc__}\n{_ACTIONS.summaries()}'
  return f'{signatures.description(ACTIONS[name])}\n\n  tokenformer grow {name} --source=DIR …'


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.run(main, positional=True, define=define_flags)


def main(argv: Sequence[str]) -> None:
  """Run the action that the first word names."""
  given, name = _ACTIONS.given(argv), _ACTIONS.name(argv)
  parent = _parent(**signatures.given(_parent, without=_unused(name)))
  made = ACTIONS[name](parent, **given)
  if not _writes(name):
    print(made, flush=True)
  elif made is not None:
    _say_made(made)


def _say_made(made: str) -> None:
  """Print how to go on with a run that an action wrote."""
  from tokenformer_jax.convert import export
  from tokenformer_jax.grow import payoff
  from tokenformer_jax.runs import checkpoint

  opened = checkpoint.open_source(made)
  config, step = opened.meta.config, opened.meta.step
  if config.model.kind == 'lm':
    messages.say(export.way_out(config.model, opened.meta.family))
  messages.say(f'wrote {opened.directory}, step {step}; to go on training it:')
  steps = payoff.next_end(config.train.steps, step)
  print(f'tokenformer train --workdir={opened.directory} --config.train.steps={steps}')


def _mesh_config(sizes: Mapping[str, int]) -> MeshConfig:
  names = [field.name for field in dataclasses.fields(MeshConfig)]
  for name in sizes:
    if name not in names:
      raise UserError(f'--mesh names {name!r}{nearest(name, names)}')
  return MeshConfig(**{**dict.fromkeys(names, 1), **sizes})
