"""Choose groups of parameter tokens by their numbers.

Groups are counted from 1 in each projection, in the order of its tokens. A projection that did not
grow has fewer groups than the others. A `Choice` maps the number of groups of a projection to the
numbers of those that stay, in their new order. The same choice is made of a model here, and of its
arrays in `model/group_trees.py`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence

from tokenformer_jax.config import matching
from tokenformer_jax.config.model import ModelConfig
from tokenformer_jax.config.pattention import (
  Birth,
  NoProjectionConfig,
  PattentionConfig,
  TokenGroup,
  births_of,
  from_groups,
)
from tokenformer_jax.config.projections import (
  beside_matrices,
  pattentions,
  token_counts,
  with_pattentions,
)
from tokenformer_jax.errors import UserError

Choice = Callable[[int], Sequence[int]]


def in_order(numbers: Collection[int], where: str, what: str = 'groups') -> tuple[int, ...]:
  """Return numbers of groups in rising order.

  `where` and `what` name the numbers and the numbered things in messages.
  """
  if not numbers:
    raise UserError(f'{where} is empty; name {what} by their numbers, counted from 1')
  if len(set(numbers)) < len(numbers):
    twice = next(number for number in sorted(numbers) if list(numbers).count(number) > 1)
    noun = what.removesuffix('s')
    raise UserError(f'{where} names {noun} {twice} twice; name every {noun} once')
  return tuple(sorted(numbers))


def as_text(numbers: Collection[int]) -> str:
  """Return numbers as text: '1 2'."""
  return ' '.join(map(str, sorted(numbers)))


def named_groups(model: ModelConfig) -> dict[str, tuple[TokenGroup, ...]]:
  """Return the groups of each projection with parameter tokens, by name."""
  return {name: config.groups for name, config in pattentions(model).items()}


def most_groups(model: ModelConfig) -> int:
  """Return the largest number of groups of a projection; 0 for a model without tokens."""
  return max(map(len, named_groups(model).values()), default=0)


def first(count: int) -> Choice:
  """Return the choice of the first `count` groups of each projection, or all that it has."""
  return lambda groups: range(1, min(count, groups) + 1)


def only(numbers: Collection[int]) -> Choice:
  """Return the choice of the named groups, as far as a projection has them."""
  return lambda groups: [i for i in range(1, groups + 1) if i in numbers]


def without(numbers: Collection[int]) -> Choice:
  """Return the choice of all groups but the named ones."""
  return lambda groups: [i for i in range(1, groups + 1) if i not in numbers]


def at_the_end(numbers: Collection[int]) -> Choice:
  """Return the choice of all groups, with the named ones behind the others."""
  return lambda groups: [*without(numbers)(groups), *only(numbers)(groups)]


def choose(model: ModelConfig, choice: Choice) -> ModelConfig:
  """Return the model with the chosen groups of each projection."""
  changed, beside = {}, beside_matrices(model)
  for name, projection in pattentions(model).items():
    groups = projection.groups
    chosen = [groups[i - 1] for i in choice(len(groups))]
    if not chosen and name in beside:
      changed[name] = NoProjectionConfig()
      continue
    if not chosen:
      raise UserError(
        f'{name} would keep none of its groups of parameter tokens, of which it has {len(groups)}; '
        'every projection must keep one'
      )
    changed[name] = from_groups(chosen)
  return with_pattentions(model, changed)


def adds_groups(before: ModelConfig, after: ModelConfig) -> bool:
  """Return whether a model differs from another one by more groups of parameter tokens alone."""
  old = named_groups(before)
  known = {
    name: from_groups(groups[: len(old[name])]) if name in old else NoProjectionConfig()
    for name, groups in named_groups(after).items()
  }
  same = without_records(with_pattentions(after, known)) == without_records(before)
  return same and token_counts(before) != token_counts(after)


def frozen_numbers(model: ModelConfig) -> tuple[int, ...]:
  """Return the numbers of the groups that are frozen in some projection."""
  groups = itertools.chain.from_iterable(
    enumerate(groups, start=1) for groups in named_groups(model).values()
  )
  return tuple(sorted({number for number, group in groups if group.frozen}))


def _map_groups(model: ModelConfig, change: Callable[[int, TokenGroup], TokenGroup]) -> ModelConfig:
  """Return the model with each group of tokens changed, given its number."""
  changed = {
    name: from_groups(itertools.starmap(change, enumerate(groups, start=1)))
    for name, groups in named_groups(model).items()
  }
  return with_pattentions(model, changed)


def with_frozen(model: ModelConfig, numbers: Collection[int]) -> ModelConfig:
  """Return the model in which these groups are frozen, and no others."""
  return _map_groups(
    model, lambda number, group: dataclasses.replace(group, frozen=number in numbers)
  )


def with_births(model: ModelConfig, run: str, path: str, step: int) -> ModelConfig:
  """Return the model whose unborn tokens were born in a run that began at a step."""

  def born(_: int, group: TokenGroup) -> TokenGroup:
    if not group.unborn:
      return group
    return dataclasses.replace(group, born=(*group.born, Birth(run, path, step, group.unborn)))

  return _map_groups(model, born)


def without_records(model: ModelConfig) -> ModelConfig:
  """Return the model as nobody trained it: without births, and with no frozen group."""
  return _map_groups(model, lambda _, group: dataclasses.replace(group, born=(), frozen=False))


def with_records_of(model: ModelConfig, source: ModelConfig) -> ModelConfig:
  """Return a model with the births and the freezing of the groups of the one it was made from.

  Groups are matched by their projection and number. One of them has the first tokens of the other.
  """
  old = named_groups(matching.routed(source, model))

  def like(name: str, groups: tuple[TokenGroup, ...]) -> PattentionConfig:
    known = old.get(name, ())
    kept = [
      dataclasses.replace(new, born=births_of([was], 0, new.tokens), frozen=was.frozen)
      for new, was in zip(groups, known, strict=False)
    ]
    return from_groups([*kept, *groups[len(known) :]])

  return with_pattentions(
    model, {name: like(name, own) for name, own in named_groups(model).items()}
  )


def check_new_tokens_train(before: ModelConfig, after: ModelConfig) -> None:
  """Check that no tokens that a growth or merge adds join a frozen group."""
  old = named_groups(before)
  for name, groups in named_groups(after).items():
    for number, (was, now) in enumerate(zip(old.get(name, ()), groups, strict=False), start=1):
      if was.frozen and now.tokens > was.tokens:
        raise UserError(
          f'new tokens of {name} would be in group {number}, which is frozen; choose other groups '
          'first (tokenformer grow freeze --groups=…)'
        )
