"""Make runs from another run: the methods of `Run` that are the actions of the command `grow`.

Each hands its arguments to the action of its name in `grow.actions.ACTIONS`, writes a new work
directory and prints what the command prints. None changes the run that it starts from.
"""

import abc
import os
from typing import Any, Self

from tokenformer_jax.config import Config, arguments, configure
from tokenformer_jax.config.arguments import Path
from tokenformer_jax.config.section import Count
from tokenformer_jax.grow import actions, job
from tokenformer_jax.grow.actions import Examples, Numbers
from tokenformer_jax.grow.larger import Counts
from tokenformer_jax.storage import paths


@arguments.checked
class Growable(abc.ABC):
  """A run that can be grown; `Run` has the properties `source` and `config`, and opens targets."""

  source: str
  config: Config

  @abc.abstractmethod
  def _open(self, directory: Path) -> Self:
    """Open the run in a directory that an action wrote."""

  def grow(
    self,
    target: Path,
    param_tokens: Counts | None = None,
    *,
    layers: Count | None = None,
    pattern: str | None = None,
    width: Count | None = None,
    heads: Count | None = None,
    ffn_width: Count | None = None,
    experts: Count | Counts | None = None,
    expert_tokens: Count | None = None,
    top_k: Count | None = None,
    **how: Any,
  ) -> Self:
    """Make a larger model in a new work directory; report what changes and whether it is exact.

      grown = run.grow('runs/grown', {'qkv': 128, 'proj': 128, 'ffn': 512})

    Args:
      target: the new work directory.
      param_tokens: new counts by projection, such as qkv, proj and ffn; others stay. With several
        kinds of layers, `local.ffn` is the count of one kind, and `ffn` that of all.
      layers: the new number of layers, all of the rows that there are.
      pattern: the new pattern of layers, where rows differ: 'local*10 full'.
      width: the new width of a Transformer, for example with method='net2net'.
      heads: the new number of heads of a Transformer.
      ffn_width: the new inner width of a Transformer's feed-forward layers.
      experts: the new number of experts of all layers, or numbers by the name of the layer.
      expert_tokens: the parameter tokens of each new expert; None: as many as the Pattention has.
      top_k: the experts of a token: see `experts.Wanted`.
      **how: keys of the group `grow` of a config, such as method, place and step.

    Returns:
      The larger run, at the same step.

    Raises:
      UserError: the target exists, a size is not allowed, or a growth that must be exact changes
        the outputs. Nothing is written then.
    """
    tokens = {'param_tokens': param_tokens}
    deep = {'layers': layers, 'pattern': pattern}
    wide = {'width': width, 'heads': heads, 'ffn_width': ffn_width}
    routed = {'experts': experts, 'expert_tokens': expert_tokens, 'top_k': top_k}
    return self._act('grow', target, **tokens, **deep, **wide, **routed, **how)

  def extract(self, target: Path, groups: Numbers | None = None) -> None:
    """Write the tokens of some groups, counted from 1, to a new directory, for `merge`.

      run.extract('runs/law_tokens', [2])

    Without groups, write the tokens that the last growth added.
    """
    self._act('extract', target, groups=groups)

  def merge(
    self,
    added: 'Path | Growable',
    target: Path,
    *,
    scale: str = '',
    moments: str = 'pad',
    step: str = 'keep',
  ) -> Self:
    """Append the tokens of another run, or of a directory from `extract`, to this run's.

      both = code.merge('runs/law_tokens', 'runs/both')

    `added` is a run, DIR or DIR@STEP. `scale` keeps or resizes the reference counts; pad or drop
    the optimizer's moments, and keep or restart the number of steps.
    """
    name = added.source if isinstance(added, Growable) else os.fspath(added)
    return self._act('merge', target, added=name, scale=scale, moments=moments, step=step)

  def remove(
    self,
    target: Path,
    groups: Numbers | None = None,
    *,
    experts: Numbers | None = None,
    moments: str = 'pad',
    step: str = 'keep',
  ) -> Self:
    """Take out groups of parameter tokens, or experts, by their numbers from 1 on.

      run.remove('runs/without', [2, 3])

    Without both, take out what the last growth or merge added. Pad or drop the optimizer's moments;
    keep or restart the number of steps.
    """
    return self._act('remove', target, groups=groups, experts=experts, moments=moments, step=step)

  def slice(self, target: Path, groups: Count, *, moments: str = 'pad', step: str = 'keep') -> Self:
    """Keep the first `groups` groups of each projection; for moments and step see `remove`.

    run.slice('runs/small', 1)
    """
    return self._act('slice', target, groups=groups, moments=moments, step=step)

  def as_tokens(self, target: Path, matrices: str | None = None) -> Self:
    """Turn matrices of a Transformer into parameter tokens that compute the same.

      run.as_tokens('runs/tokens', 'qkv,ffn')

    By default all that can be: those without biases and gates.
    """
    return self._act('as_tokens', target, matrices=matrices)

  def scale(self, target: Path, groups: Numbers, factor: float) -> Self:
    """Multiply the values of groups, counted from 1, and so what they add to each output.

    run.scale('runs/half', [2], 0.5)
    """
    return self._act('scale', target, groups=groups, factor=factor)

  def freeze(self, target: Path, groups: Numbers) -> Self:
    """Write a run that trains all groups of parameter tokens but these, counted from 1.

    run.freeze('runs/tuned', [1]).train(1500)
    """
    return self._act('freeze', target, groups=groups)

  def shrink(
    self,
    target: Path,
    param_tokens: Counts | None = None,
    *,
    experts: Count | Counts | None = None,
    examples: Examples = 16,
    scale: str = '',
    moments: str = 'pad',
    step: str = 'keep',
  ) -> Self:
    """Keep the tokens that matter most for held-out examples, or the experts that they use most.

      run.shrink('runs/less', {'ffn': 256})

    Args:
      target: the new work directory.
      param_tokens: the counts to keep by projection; others stay.
      experts: instead, the number of experts to keep, of all layers or by the name of the layer.
      examples: the number of sequences or images to measure importance on.
      scale: keep or resize the reference counts.
      moments: pad or drop the optimizer's moments.
      step: keep or restart the number of steps.
    """
    kept = {'param_tokens': param_tokens, 'experts': experts, 'examples': examples}
    return self._act('shrink', target, **kept, scale=scale, moments=moments, step=step)

  def group_table(self) -> str:
    """Return a table of the groups of parameter tokens, and of the growths that added them."""
    return actions.group_table(self.source)

  def _act(self, name: str, target: Path, **given: Any) -> Self | None:
    """Run an action with arguments and keys of `GrowConfig`; return the new run, if it is one."""
    action = actions.ACTIONS[name]
    keys = {key: given.pop(key) for key in list(given) if key not in action.arguments}
    config = configure.grow_config(keys)
    with job.start(self.source, paths.parse_path(target), config) as work:
      step = action.run(work, **given)
    return None if step is None else self._open(target)
