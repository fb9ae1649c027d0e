"""Choose groups of parameter tokens by their numbers.

Groups are counted from 1 in each projection, in the order of its tokens. A projection that did not
grow has fewer groups than the others. A `Choice` maps the number of groups of a projection to the
numbers of those that stay, in their new order. The same choice is made of a model here, and of its
arrays in `model/group_trees.py`.
"""

import re
from collections.abc import Callable, Collection, Sequence

from tokenformer_jax.config.model import ModelConfig
from tokenformer_jax.config.optim import OptimConfig
from tokenformer_jax.config.pattention import (
  NoProjectionConfig,
  TokenGroup,
  token_groups,
  with_groups,
)
from tokenformer_jax.config.projections import (
  beside_matrices,
  former_names,
  pattentions,
  with_pattentions,
)
from tokenformer_jax.errors import UserError

Choice = Callable[[int], Sequence[int]]
_NUMBERS = re.compile(r'[1-9][0-9]{0,5}([ ,]+[1-9][0-9]{0,5})*')


def parse_numbers(text: str, where: str, what: str = 'groups') -> tuple[int, ...]:
  """Return the numbers of groups in a text such as '2,3' or '2 3', in rising order; '' has none.

  `where` and `what` name the text and the numbered things in messages.
  """
  text = text.strip()
  if not text:
    return ()
  if not _NUMBERS.fullmatch(text):
    raise UserError(
      f"{where} is {text[:40]!r}; it must be numbers of {what}, counted from 1, for example '2,3'"
    )
  return in_order([int(number) for number in re.split('[ ,]+', text)], where, what)


def in_order(numbers: Collection[int], where: str, what: str = 'groups') -> tuple[int, ...]:
  """Return numbers of groups in rising order; for `where` and `what` see `parse_numbers`."""
  if not numbers:
    raise UserError(f'{where} is empty; name {what} by their numbers, counted from 1')
  if len(set(numbers)) < len(numbers):
    twice = next(number for number in sorted(numbers) if list(numbers).count(number) > 1)
    noun = what.removesuffix('s')
    raise UserError(f'{where} names {noun} {twice} twice; name every {noun} once')
  return tuple(sorted(numbers))


def frozen_groups(optim: OptimConfig) -> tuple[int, ...]:
  """Return the numbers of the groups that do not train."""
  return parse_numbers(optim.frozen_groups, 'config.optim.frozen_groups')


def as_text(numbers: Collection[int]) -> str:
  """Return numbers in the form of `optim.frozen_groups`: '1 2'."""
  return ' '.join(map(str, sorted(numbers)))


def named_groups(model: ModelConfig) -> dict[str, tuple[TokenGroup, ...]]:
  """Return the groups of each projection with parameter tokens, by name."""
  return {name: token_groups(config) for name, config in pattentions(model).items()}


def most_groups(model: ModelConfig) -> int:
  """Return the largest number of groups of a projection; 0 for a model without tokens."""
  return max(map(len, named_groups(model).values()), default=0)


def check_numbers(most: int, numbers: Collection[int], where: str) -> None:
  """Check that a model whose projections have `most` groups has groups of these numbers."""
  if numbers and not most:
    raise UserError(f'{where} names groups of parameter tokens, and this model has none')
  for number in numbers:
    if not 1 <= number <= most:
      known = 'one group' if most == 1 else f'the groups 1 to {most}'
      raise UserError(f'{where} names group {number}; each projection has {known} at most')


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
    groups = token_groups(projection)
    chosen = [groups[i - 1] for i in choice(len(groups))]
    if not chosen and name in beside:
      changed[name] = NoProjectionConfig()
      continue
    if not chosen:
      raise UserError(
        f'{name} would keep none of its groups of parameter tokens, of which it has {len(groups)}; '
        'every projection must keep one'
      )
    changed[name] = with_groups(projection, chosen)
  return with_pattentions(model, changed)


def choose_frozen(optim: OptimConfig, model: ModelConfig, choice: Choice) -> str:
  """Return `optim.frozen_groups` with the numbers that the groups have after a choice.

  The optimizer and the model are those before the choice, which keeps the order of the groups.
  """
  new_numbers = {old: new for new, old in enumerate(choice(most_groups(model)), start=1)}
  return as_text([new_numbers[number] for number in frozen_groups(optim) if number in new_numbers])


def check_new_tokens_train(optim: OptimConfig, before: ModelConfig, after: ModelConfig) -> None:
  """Check that no tokens that a growth or merge adds belong to a frozen group."""
  old, new, frozen = named_groups(before), named_groups(after), frozen_groups(optim)
  for name, groups in new.items():
    was = next((old[former] for former in former_names(name, new) if former in old), ())
    for number in frozen:
      place = number - 1
      if place < len(groups) and groups[place].tokens > sum(
        group.tokens for group in was[place : place + 1]
      ):
        raise UserError(
          f'new tokens of {name} would be in group {number}, which config.optim.frozen_groups='
          f'{optim.frozen_groups!r} freezes; choose other groups first '
          '(tokenformer grow freeze --groups=…)'
        )
