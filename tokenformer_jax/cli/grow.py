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
from typing import Self

from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli import signatures
from tokenformer_jax.config import GrowConfig, MeshConfig
from tokenformer_jax.config.arguments import Path, Text
from tokenformer_jax.config.section import Bool, Int, Str
from tokenformer_jax.convert import export
from tokenformer_jax.errors import UserError, nearest
from tokenformer_jax.grow.actions import ACTIONS, Growable
from tokenformer_jax.grow.derivation import Derivation, start
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.storage import paths

Counts = Mapping[Str, Int]
_ACTIONS = signatures.Actions(ACTIONS, default='grow')


class _Source(Growable):
  """The run of a command line."""

  def __init__(self, source: Text, *, mesh: Counts | None = None, dry_run: Bool = False):
    """Keep the run and how to read it.

    Args:
      source: The run to start from: DIR, or DIR@STEP.
      mesh: The sizes replica=N,fsdp=N,experts=N,tokens=N; default: the source's.
      dry_run: Print the table and stop.
    """
    super().__init__(source)
    self._mesh, self._dry_run = mesh, dry_run

  def _start(self, target: Path, config: GrowConfig) -> Derivation:
    return start(
      self.source,
      paths.parse_path(target),
      config,
      mesh_config=None if self._mesh is None else _mesh_config(self._mesh),
      dry_run=self._dry_run,
      show=lambda text: print(text, flush=True),
    )

  def _finish(self, new: Derivation, step: int | None) -> Self:
    if step is not None:
      made = checkpoint.open_source(f'{new.target}@{step}').meta
      if made.config.model.kind == 'lm':
        messages.say(export.way_out(made.config.model, made.family))
      messages.say(f'wrote {new.target}, step {step}; to go on training it:')
      planned = new.meta.config.train.steps
      steps = max(planned, step) + planned
      print(f'tokenformer train --workdir={new.target} --config.train.steps={steps}')
    return super()._finish(new, step)


def _unused(name: str) -> tuple[str, ...]:
  """Return the arguments of the source that an action does not need, which writes nothing."""
  writes = 'target' in inspect.signature(ACTIONS[name]).parameters
  return () if writes else ('mesh', 'dry_run')


def define_flags(argv: Sequence[str]) -> str:
  """Define the flags of the action that the first word names; return its description."""
  name = _ACTIONS.name(argv)
  signatures.define(_Source.__init__, without=_unused(name))
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
  source = _Source(**signatures.given(_Source.__init__, without=_unused(name)))
  result = inspect.unwrap(ACTIONS[name])(source, **given)
  if isinstance(result, str):
    print(result, flush=True)


def _mesh_config(sizes: Mapping[str, int]) -> MeshConfig:
  names = [field.name for field in dataclasses.fields(MeshConfig)]
  for name in sizes:
    if name not in names:
      raise UserError(f'--mesh names {name!r}{nearest(name, names)}')
  return MeshConfig(**{**dict.fromkeys(names, 1), **sizes})
