"""Add parameter tokens, behind the old ones along the axis `param_tokens`."""

import abc
import dataclasses
import functools

import jax
import jax.numpy as jnp

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import (
  PattentionConfig,
  groups_as_text,
  pattentions,
  token_counts,
)
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow.steps.remove import KeepFirst
from tokenformer_jax.grow.steps.step import Arrays, Keys, Step, owners, with_noise, with_zeros
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Params, Path, Role, lookup


class _MoreTokens(Step):
  """A step that puts tokens behind those of projections, or beside a matrix that has none."""

  def _added(self, path: Path) -> tuple[int | None, int]:
    """Return the axis of the tokens of the array at `path`, and the number of new ones."""
    axis = self.info(path).token_axis
    if axis is None:
      return None, 0
    old = lookup(models.define(self.before).abstract, path).shape[axis] if self.had(path) else 0
    return axis, self.like(path).shape[axis] - old

  def moment(self, path: Path, old: Arrays, order: int) -> jax.Array:
    """Return a mean of gradients or of their squares; those of new tokens are zero."""
    del order
    if not self.had(path):
      return jnp.zeros(self.like(path).shape, jnp.float32)
    axis, count = self._added(path)
    return old(path) if axis is None else with_zeros(old(path), count, axis)

  def inverse(self) -> Step | None:
    return KeepFirst(self.after, self.before)


class _GrownTokens(_MoreTokens):
  """A growth of each projection by itself."""

  method: str

  def check(self) -> None:
    new = pattentions(self.after)
    for name, old in pattentions(self.before).items():
      if new[name].tokens < old.tokens:
        raise UserError(
          f'{name} has {old.tokens} parameter tokens in the source, and {new[name].tokens} are '
          'fewer; growth only adds (tokenformer grow shrink drops the least important ones)'
        )
      self._check_projection(name, old, new[name])
      check_groups(name, old, new[name], self.method)

  @abc.abstractmethod
  def _check_projection(self, name: str, old: PattentionConfig, new: PattentionConfig) -> None:
    """Check that the method can add the new tokens of a projection."""

  def inexact(self) -> str:
    old = pattentions(self.before)
    new = pattentions(self.after).items()
    return next(filter(None, (self._inexact(name, old.get(name), one) for name, one in new)), '')

  @abc.abstractmethod
  def _inexact(self, name: str, old: PattentionConfig | None, new: PattentionConfig) -> str:
    """Return why a projection computes something else, or ''."""


@dataclasses.dataclass(frozen=True)
class AddTokens(_GrownTokens):
  """Adds drawn tokens, or tokens with zero keys or values, in the last group or in a new one.

  Attributes:
    method: 'group', 'zero_keys' or 'random'.
    new_keys: see `GrowConfig`.
    zero_values: whether the values of new tokens are zero.
    noise: of copied keys.
  """

  method: str
  new_keys: str = 'init'
  zero_values: bool = False
  noise: float = 0.0

  def _check_projection(self, name: str, old: PattentionConfig, new: PattentionConfig) -> None:
    if self.method == 'group' and config_lib.is_of_experts(name) and new.tokens > old.tokens:
      raise UserError(
        f'{name} has {old.tokens} parameter tokens in the source and {new.tokens} in the target, '
        'and growth by group would add a second norm, but each expert is one group; use '
        'method=zero_keys, or add experts'
      )

  def _inexact(self, name: str, old: PattentionConfig | None, new: PattentionConfig) -> str:
    if self.method == 'random':
      return 'the scores of random keys enter the norm of every row, and their values the output'
    before = () if old is None else old.groups
    for was, now in zip(before, new.groups, strict=False):
      if was.reference != now.reference:
        return (
          f'the reference count of {name} changes from {was.reference} to {now.reference}, and '
          'with it the scale of every old token; use scale=keep'
        )
    if new.tokens == sum(group.tokens for group in before):
      return ''
    if self.method == 'group' or old is None:
      return '' if self.zero_values else f'the values of the new tokens of {name} are not zero'
    score = old.groups[-1].score
    if score.zero_at_zero:
      return ''
    return (
      f'the score {score.kind} of {name} gives a new token, whose key is zero, the weight of '
      'exp(0) and not 0; use method=group or duplicate, which are exact for it'
    )

  @functools.cached_property
  def _new_info(self) -> Params:
    """The metadata of a model with the new tokens alone, which draws them."""
    old = token_counts(self.before)
    new = {name: count - old.get(name, 0) for name, count in token_counts(self.after).items()}
    return models.define(config_lib.with_token_counts(self.after, new)).info

  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    axis, count = self._added(path)
    if axis is None or not count:
      return old(path)
    info, like = lookup(self._new_info, path), self.like(path)
    array = old(path) if self.had(path) else None
    is_key = info.role is Role.KEY
    shape = (*like.shape[:axis], count, *like.shape[axis + 1 :])
    if (self.method == 'zero_keys') if is_key else self.zero_values:
      fresh = jnp.zeros(shape, like.dtype)
    elif is_key and self.new_keys != 'init' and array is not None:
      fresh = self._like_trained(array, shape, axis, keys(path))
    else:
      fresh = info.initializer(keys(path), shape, like.dtype)
    return fresh if array is None else jnp.concatenate([array, fresh], axis)

  def _like_trained(
    self, old: jax.Array, shape: tuple[int, ...], axis: int, key: jax.Array
  ) -> jax.Array:
    """Return keys [..., N, D] of the size of trained ones: drawn, or copied in order with noise."""
    scale = jnp.sqrt(jnp.mean(jnp.square(old), axis=(axis, -1), keepdims=True))
    normal = jax.random.normal(key, shape, old.dtype)
    if self.new_keys == 'trained':
      return scale * normal
    copied = jnp.take(old, jnp.arange(shape[axis]) % old.shape[axis], axis=axis)
    return copied + self.noise * scale * normal


@dataclasses.dataclass(frozen=True)
class DuplicateTokens(_GrownTokens):
  """Copies all tokens of projections, and divides the values among the copies."""

  noise: float = 0.0
  method = 'duplicate'
  permanent = (
    'the last growth duplicated the tokens and divided the values of the old ones among the '
    'copies; taking the copies out would not give back what was there'
  )

  def _check_projection(self, name: str, old: PattentionConfig, new: PattentionConfig) -> None:
    if new.tokens % old.tokens:
      times = max(2, round(new.tokens / old.tokens))
      raise UserError(
        f'{name}={new.tokens} is not a multiple of the {old.tokens} parameter tokens that the '
        f'source has; duplicate copies every token as often as the others: take '
        f'{old.tokens * times}, or method=zero_keys'
      )
    if (count := len(old.groups)) > 1 and new.tokens > old.tokens:
      raise UserError(
        f'{name} has {count} groups of tokens, and duplicate copies those of one group only; '
        'use method=group, which adds a group, or zero_keys, which adds tokens to the last one'
      )

  def inexact(self) -> str:
    return f'noise={self.noise} is added to the copies' if self.noise else super().inexact()

  def _inexact(self, name: str, old: PattentionConfig | None, new: PattentionConfig) -> str:
    assert old is not None, f'{name} has no tokens to copy'
    before, after = old.groups[0], new.groups[0]
    times = new.tokens // old.tokens
    if before.reference * new.tokens != after.reference * old.tokens:
      return (
        f'{name} gets every token {times} times, and its reference count changes from '
        f'{before.reference} to {after.reference} instead of {before.reference * times}; use '
        'scale=resize'
      )
    return ''

  def inverse(self) -> None:
    """Return None: the copies have shares of the values, so the first ones are not the base."""

  def _copies(self, path: Path) -> tuple[int | None, int]:
    axis, count = self._added(path)
    if axis is None:
      return None, 1
    size = self.like(path).shape[axis]
    return axis, size // (size - count)

  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    array, (axis, copies) = old(path), self._copies(path)
    if axis is None or copies == 1:
      return array
    if self.info(path).role is Role.KEY:
      first, *others = [array] * copies
    else:
      owner = owners(keys(path), array.shape, copies)
      first, *others = (jnp.where(owner == copy, array, 0) for copy in range(copies))
    noisy = jnp.concatenate(others, axis)
    if self.noise:
      noisy = with_noise(noisy, self.noise, keys(path))
    return jnp.concatenate([first, noisy], axis)

  def moment(self, path: Path, old: Arrays, order: int) -> jax.Array:
    """Return a mean of gradients, or of their squares.

    The value of a copy has the whole gradient of the old value, so it has the same moments. The
    gradient of its key is a sum over the entries of the value that the copy has, 1/c of them for c
    copies. So it has 1/c of the old mean and, as terms of random signs add up, 1/c of the old mean
    square.
    """
    del order
    array, (axis, copies) = old(path), self._copies(path)
    if axis is None or copies == 1:
      return array
    copy = array / copies if self.info(path).role is Role.KEY else array
    return jnp.concatenate([copy] * copies, axis)


@dataclasses.dataclass(frozen=True)
class AppendTokens(_MoreTokens):
  """Appends trained tokens, `data`, as groups of their own or in the last group."""

  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    del keys
    axis, count = self._added(path)
    if axis is None or not count:
      return old(path)
    added = self.own(path)
    return jnp.concatenate([old(path), added], axis) if self.had(path) else added


def check_groups(name: str, old: PattentionConfig, new: PattentionConfig, method: str) -> None:
  """Check that a method can make the groups of the larger projection from the old groups."""
  before, after = old.groups, new.groups
  kept = len(before) if method == 'group' else len(before) - 1
  extra = len(after) - len(before)
  for number, (was, now) in enumerate(zip(before, after, strict=False), start=1):
    if was.score != now.score:
      raise UserError(
        f'group {number} of {name} has the score {was.score} in the source and {now.score} in the '
        'target; growth changes no score'
      )
  sizes = [[group.tokens for group in groups[:kept]] for groups in (before, after)]
  if sizes[0] != sizes[1] or (extra and method != 'group'):
    raise UserError(
      f'{name} has the groups {groups_as_text(before)!r} in the source and '
      f'{groups_as_text(after)!r} in the target; growth by {method} '
      + ('adds groups behind them' if method == 'group' else 'adds tokens to the last group')
    )
