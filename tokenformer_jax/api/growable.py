"""Make runs from another run: the methods of `Run` that are the actions of the command `grow`.

Each writes a new work directory, as the command does, and prints the same lines. None changes the
run that it starts from.
"""

import abc
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from tokenformer_jax.config import Config, ModelConfig, arguments, configure
from tokenformer_jax.config.arguments import Path
from tokenformer_jax.config.fields import Count
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import actions, expert_actions, group_actions, wanted
from tokenformer_jax.grow import experts as experts_lib
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
    param_tokens: Mapping[str, Count] | None = None,
    *,
    layers: Count | None = None,
    pattern: str | None = None,
    width: Count | None = None,
    heads: Count | None = None,
    ffn_width: Count | None = None,
    experts: Count | Mapping[str, Count] | None = None,
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
      expert_tokens: the parameter tokens of each new expert beside a Pattention; None: as many as
        that has.
      top_k: the experts of a token: see `experts.Wanted`.
      **how: keys of the group `grow` of a config, such as method, place and step.

    Returns:
      The larger run, at the same step.

    Raises:
      UserError: the target exists, a size is not allowed, or a growth that must be exact changes
        the outputs. Nothing is written then.
    """
    config = configure.grow_config(self.config, how)
    counts = None if param_tokens is None else configure.counts(self.config.model, param_tokens)
    with self._to(target) as (source, to):
      wide = {'width': width, 'heads': heads, 'ffn_width': ffn_width}
      deep = {'layers': layers, 'pattern': pattern}
      more = _experts(source.model, experts, expert_tokens, top_k)
      after = wanted.larger_model(
        source.model, config, param_tokens=counts, more=more, **deep, **wide
      )
      actions.grow(source, after, config, to)
    return self._open(target)

  def extract(self, target: Path, groups: Sequence[Count] | None = None) -> None:
    """Write only some parameter tokens to a new directory, for `merge`.

      run.extract('runs/law_tokens', [2])

    Args:
      target: the new directory.
      groups: numbers of groups from 1 on; None: the tokens that the last growth added.
    """
    numbers = () if groups is None else _numbers(groups)
    with self._to(target) as (source, to):
      actions.extract(source, to, numbers)

  def merge(
    self,
    added: 'Path | Growable',
    target: Path,
    *,
    scale: str = '',
    moments: str = 'pad',
    step: str = 'keep',
  ) -> Self:
    """Append the tokens of another run, or of `extract`, to this run's in a new work directory.

      both = code.merge('runs/law_tokens', 'runs/both')

    Args:
      added: a run, DIR, DIR@STEP, or a directory from `extract`.
      target: the new work directory.
      scale: keep or resize the reference counts, as in the group `grow` of a config.
      moments: pad or drop the optimizer's moments.
      step: keep or restart the number of steps.
    """
    config = configure.grow_config(self.config, {'scale': scale, 'moments': moments, 'step': step})
    with self._to(target) as (source, to):
      name = added.source if isinstance(added, Growable) else os.fspath(added)
      actions.merge(source, name, config, to)
    return self._open(target)

  def remove(
    self,
    target: Path,
    groups: Sequence[Count] | None = None,
    *,
    experts: Sequence[Count] | None = None,
    moments: str = 'pad',
    step: str = 'keep',
  ) -> Self:
    """Take groups of parameter tokens or experts out, in a new work directory.

      run.remove('runs/without', [2, 3])

    Args:
      target: the new work directory.
      groups: numbers of groups from 1 on. Without groups and experts, what the last growth or merge
        added goes.
      experts: numbers of experts from 1 on.
      moments: pad or drop the optimizer's moments.
      step: keep or restart the number of steps.

    Raises:
      UserError: both are given, or there is nothing to take out.
    """
    if groups is not None and experts is not None:
      raise UserError('remove needs either groups or experts, the numbers to take out')
    config = configure.grow_config(self.config, {'moments': moments, 'step': step})
    numbers = () if groups is None else _numbers(groups)
    of_experts = () if experts is None else _numbers(experts, what='experts')
    with self._to(target) as (source, to):
      if numbers:
        group_actions.remove(source, numbers, config, to)
      elif of_experts:
        expert_actions.remove(source, of_experts, config, to)
      else:
        actions.remove(source, config, to)
    return self._open(target)

  def slice(self, target: Path, groups: Count, *, moments: str = 'pad', step: str = 'keep') -> Self:
    """Keep the first groups of each projection, in a new work directory.

      run.slice('runs/small', 1)

    Args:
      target: the new work directory.
      groups: the number of groups to keep.
      moments: pad or drop the optimizer's moments.
      step: keep or restart the number of steps.
    """
    config = configure.grow_config(self.config, {'moments': moments, 'step': step})
    with self._to(target) as (source, to):
      group_actions.keep_first(source, groups, config, to)
    return self._open(target)

  def scale(self, target: Path, groups: Sequence[Count], factor: float) -> Self:
    """Multiply the values of groups, and with them what the groups add to each output.

      run.scale('runs/half', [2], 0.5)

    Args:
      target: the new work directory.
      groups: numbers of groups from 1 on.
      factor: a finite number.
    """
    config, numbers = configure.grow_config(self.config, {}), _numbers(groups)
    with self._to(target) as (source, to):
      group_actions.scale(source, numbers, factor, config, to)
    return self._open(target)

  def freeze(self, target: Path, groups: Sequence[Count]) -> Self:
    """Write a run that trains all groups of parameter tokens but some.

      run.freeze('runs/tuned', [1]).train(1500)

    Args:
      target: the new work directory.
      groups: numbers of groups from 1 on; empty: all groups train.
    """
    config, numbers = configure.grow_config(self.config, {}), _numbers(groups, least=0)
    with self._to(target) as (source, to):
      group_actions.freeze(source, numbers, config, to)
    return self._open(target)

  def shrink(
    self,
    target: Path,
    param_tokens: Mapping[str, Count] | None = None,
    *,
    experts: Count | Mapping[str, Count] | None = None,
    examples: Count = 16,
    scale: str = '',
    moments: str = 'pad',
    step: str = 'keep',
  ) -> Self:
    """Keep the tokens that matter most for held-out examples, or the experts that they use most.

    Args:
      target: the new work directory.
      param_tokens: the counts to keep by projection; others stay.
      experts: instead, the number of experts to keep, of all layers or by the name of the layer.
      examples: the number of sequences or images to measure importance on.
      scale: keep or resize the reference counts.
      moments: pad or drop the optimizer's moments.
      step: keep or restart the number of steps.

    Raises:
      UserError: both or neither are given, or nothing becomes smaller.
    """
    if (param_tokens is None) == (experts is None):
      raise UserError('shrink needs either param_tokens or experts, the numbers to keep')
    config = configure.grow_config(self.config, {'scale': scale, 'moments': moments, 'step': step})
    with self._to(target) as (source, to):
      if experts is not None:
        kept = experts_lib.named_counts(source.model, experts, 'experts', dense=False)
        expert_actions.shrink(source, kept, examples, config, to)
      else:
        counts = configure.counts(self.config.model, param_tokens)
        actions.shrink(source, counts, examples, config, to)
    return self._open(target)

  def group_table(self) -> str:
    """Return a table of the groups of parameter tokens, and of the growths that added them."""
    return group_actions.table(self.source)

  @contextlib.contextmanager
  def _to(self, target: Path) -> Iterator[tuple[actions.Source, actions.Target]]:
    to = actions.Target(paths.parse_path(target))
    with actions.open_source(self.source, to) as source:
      yield source, to


def _experts(
  model: ModelConfig,
  experts: int | Mapping[str, int] | None,
  expert_tokens: int | None,
  top_k: int | None,
) -> experts_lib.Wanted | None:
  """Return the experts that are wanted, or None."""
  if experts is not None:
    counts = experts_lib.named_counts(model, experts, 'experts')
    return experts_lib.Wanted(counts, expert_tokens, top_k)
  if expert_tokens is not None or top_k is not None:
    raise UserError('expert_tokens and top_k are of new experts; say how many: experts=N')
  return None


def _numbers(groups: Sequence[int], least: int = 1, what: str = 'groups') -> tuple[int, ...]:
  """Return numbers of groups or experts in rising order.

  Raises:
    UserError: a number stands there twice, or there are fewer than `least`.
  """
  if len(set(groups)) < len(groups) or len(groups) < least:
    raise UserError(
      f'{what} is {groups!r}; it must be a list of different numbers of {what}, counted from 1, '
      'for example [2, 3]'
    )
  return tuple(sorted(groups))
