"""Make runs from another run: the methods of `Run` that are the actions of the command `grow`.

Each writes a new work directory, as the command does, and prints the same lines. None changes the
run that it starts from.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from tokenformer_jax.config import Config, configure
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import actions, group_actions
from tokenformer_jax.storage import paths

Path = str | os.PathLike[str]


class Growable:
  """A run that can be grown; `Run` has the properties `source` and `config`, and opens targets."""

  source: str
  config: Config

  def _open(self, directory: Path) -> Self:
    """Open the run in a directory that an action wrote."""
    raise NotImplementedError

  def grow(
    self,
    target: Path,
    param_tokens: Mapping[str, int] | None = None,
    *,
    layers: int | None = None,
    pattern: str | None = None,
    width: int | None = None,
    heads: int | None = None,
    ffn_width: int | None = None,
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
      after = actions.wanted_model(source.model, config, param_tokens=counts, **deep, **wide)
      actions.grow(source, after, config, to)
    return self._open(target)

  def extract(self, target: Path, groups: Sequence[int] | None = None) -> None:
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
    groups: Sequence[int] | None = None,
    *,
    moments: str = 'pad',
    step: str = 'keep',
  ) -> Self:
    """Take groups of parameter tokens out, in a new work directory.

      run.remove('runs/without', [2, 3])

    Args:
      target: the new work directory.
      groups: numbers of groups from 1 on; None: the tokens and layers that the last growth or
        merge added.
      moments: pad or drop the optimizer's moments.
      step: keep or restart the number of steps.
    """
    config = configure.grow_config(self.config, {'moments': moments, 'step': step})
    numbers = () if groups is None else _numbers(groups)
    with self._to(target) as (source, to):
      if numbers:
        group_actions.remove(source, numbers, config, to)
      else:
        actions.remove(source, config, to)
    return self._open(target)

  def slice(self, target: Path, groups: int, *, moments: str = 'pad', step: str = 'keep') -> Self:
    """Keep the first groups of each projection, in a new work directory.

      run.slice('runs/small', 1)

    Args:
      target: the new work directory.
      groups: the number of groups to keep.
      moments: pad or drop the optimizer's moments.
      step: keep or restart the number of steps.
    """
    config = configure.grow_config(self.config, {'moments': moments, 'step': step})
    if type(groups) is not int:
      raise UserError(f'groups is {groups!r}; slice needs the number of groups to keep, such as 1')
    with self._to(target) as (source, to):
      group_actions.keep_first(source, groups, config, to)
    return self._open(target)

  def scale(self, target: Path, groups: Sequence[int], factor: float) -> Self:
    """Multiply the values of groups, and with them what the groups add to each output.

      run.scale('runs/half', [2], 0.5)

    Args:
      target: the new work directory.
      groups: numbers of groups from 1 on.
      factor: a finite number.
    """
    if type(factor) not in (int, float):
      raise UserError(f'factor is {factor!r}; it must be a finite number, for example 0.5')
    config, numbers = configure.grow_config(self.config, {}), _numbers(groups)
    with self._to(target) as (source, to):
      group_actions.scale(source, numbers, factor, config, to)
    return self._open(target)

  def freeze(self, target: Path, groups: Sequence[int]) -> Self:
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
    param_tokens: Mapping[str, int],
    *,
    examples: int = 16,
    scale: str = '',
    moments: str = 'pad',
    step: str = 'keep',
  ) -> Self:
    """Keep the most important tokens for held-out examples, in a new work directory.

    Args:
      target: the new work directory.
      param_tokens: the counts to keep by projection; others stay.
      examples: the number of sequences or images to measure importance on.
      scale: keep or resize the reference counts.
      moments: pad or drop the optimizer's moments.
      step: keep or restart the number of steps.
    """
    config = configure.grow_config(self.config, {'scale': scale, 'moments': moments, 'step': step})
    with self._to(target) as (source, to):
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


def _numbers(groups: Any, least: int = 1) -> tuple[int, ...]:
  """Return numbers of groups in rising order.

  Raises:
    UserError: they are not different integers from 1 on, or fewer than `least`.
  """
  numbers = list(groups) if isinstance(groups, (list, tuple, range)) else None
  known = numbers is not None and all(type(one) is int and one >= 1 for one in numbers)
  if not known or len(set(numbers)) < len(numbers) or len(numbers) < least:
    raise UserError(
      f'groups is {groups!r}; it must be a list of different numbers of groups, counted from 1, '
      'for example [2, 3]'
    )
  return tuple(sorted(numbers))
