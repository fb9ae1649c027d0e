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
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Self

from absl import flags

from tokenformer_jax.cli import help_text, signatures
from tokenformer_jax.cli import main as cli
from tokenformer_jax.config import GrowConfig, MeshConfig
from tokenformer_jax.config.arguments import Path
from tokenformer_jax.config.projections import counts_from_text
from tokenformer_jax.errors import UserError, nearest
from tokenformer_jax.grow.actions import ACTIONS, Growable
from tokenformer_jax.grow.derivation import Derivation, start
from tokenformer_jax.parallel import messages
from tokenformer_jax.storage import paths

_ACTIONS = signatures.Actions(ACTIONS, default='grow')


class _Source(Growable):
  """The run of --source, on the mesh of --mesh."""

  def _start(self, target: Path, config: GrowConfig) -> AbstractContextManager[Derivation]:
    return start(
      self.source,
      paths.parse_path(target),
      config,
      mesh_config=_read_mesh(),
      dry_run=flags.FLAGS.dry_run,
      show=lambda text: print(text, flush=True),
    )

  def _finish(self, derivation: Derivation, step: int | None) -> Self:
    if step is not None:
      messages.say(f'wrote {derivation.target}, step {step}; to go on training it:')
      planned = derivation.meta.config.train.steps
      steps = max(planned, step) + planned
      train = help_text.spell_command('train')
      print(f'{train} --workdir={derivation.target} --config.train.steps={steps}')
    return super()._finish(derivation, step)


def define_flags(argv: Sequence[str]) -> str:
  """Define the flags of the action that the first word names; return its description."""
  name = _ACTIONS.name(argv)
  flags.DEFINE_string('source', None, 'The run to start from: DIR, or DIR@STEP.', required=True)
  _ACTIONS.define(name)
  if 'target' in flags.FLAGS:
    flags.DEFINE_string('mesh', None, "replica=N,fsdp=N,experts=N,tokens=N; default: the source's.")
    flags.DEFINE_bool('dry_run', False, 'Print the table and stop.')
  if name == _ACTIONS.default:
    return f'{__doc__}\n{_ACTIONS.summaries()}'
  return f'{signatures.description(ACTIONS[name])}\n\n  tokenformer grow {name} --source=DIR …'


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.run(main, positional=True, define=define_flags)


def main(argv: Sequence[str]) -> None:
  """Run the action that the first word names."""
  given = _ACTIONS.given(argv)
  function = inspect.unwrap(ACTIONS[_ACTIONS.name(argv)])
  result = function(_Source(flags.FLAGS.source), **given)
  if isinstance(result, str):
    print(result, flush=True)


def _read_mesh() -> MeshConfig | None:
  if flags.FLAGS.mesh is None:
    return None
  names = [field.name for field in dataclasses.fields(MeshConfig)]
  sizes = counts_from_text(flags.FLAGS.mesh, '--mesh')
  for name in sizes:
    if name not in names:
      raise UserError(f'--mesh names {name!r}{nearest(name, names)}')
  return MeshConfig(**{**dict.fromkeys(names, 1), **sizes})
