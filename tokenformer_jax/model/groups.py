"""Sums over groups of parameter tokens, each with its own norm, on one or several devices.

The scores of a row are one array [B, T, N], group after group. Devices that split N hold equal
parts of it, and a group may begin or end inside a part. Every part is cut wherever some group ends
in some part, so each piece of a part belongs to one group. Sums over pieces stay on their device,
and cross devices only for a group on several devices.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.config import TokenGroup
from tokenformer_jax.parallel import per_device
from tokenformer_jax.parallel.rules import shard_count
from tokenformer_jax.parallel.sharding import constrain


class OneGroup:
  """The tokens of a row as one group: the model of the paper."""

  def __init__(self, reference: int):
    self.reference = jnp.float32(reference)  # τ², which broadcasts to a statistic

  def total(self, rows_BxTxN: jax.Array) -> jax.Array:
    """Return the sum over each group: a statistic, here [B, T, 1]."""
    return jnp.sum(rows_BxTxN, axis=-1, keepdims=True)

  def largest(self, rows_BxTxN: jax.Array) -> jax.Array:
    """Return the maximum of each group."""
    return jnp.max(rows_BxTxN, axis=-1, keepdims=True)

  def spread(self, statistic: jax.Array) -> jax.Array:
    """Return for every token the statistic of its group; it broadcasts to [B, T, N]."""
    return statistic


class OneGroupOnDevices(OneGroup):
  """One group whose tokens several devices split, inside a function on each device."""

  def total(self, rows_BxTxN: jax.Array) -> jax.Array:
    """Return the sum over the tokens of all devices."""
    return per_device.total(super().total(rows_BxTxN), 'param_tokens')

  def largest(self, rows_BxTxN: jax.Array) -> jax.Array:
    """Return the maximum over the tokens of all devices."""
    return per_device.largest(super().largest(rows_BxTxN), 'param_tokens')


@dataclasses.dataclass(frozen=True)
class Groups:
  """The tokens of a row in several groups, N split in P parts of M pieces.

  A statistic is [B, T, P, G] if every group lies in one part, and G is the most groups of a part;
  else it is [B, T, 1, G] for G groups.
  """

  widths: tuple[int, ...]  # the number of tokens of each of the M pieces of a part
  member: np.ndarray  # whether a piece belongs to a group, [P, M, G]
  references: np.ndarray  # τ² of each group, [P or 1, G]; 1 for a group that a part lacks

  @property
  def reference(self) -> jax.Array:
    """τ² of each group, which broadcasts to a statistic."""
    return jnp.asarray(self.references)[None, None]

  def total(self, rows_BxTxN: jax.Array) -> jax.Array:
    """Return the sum over each group: a statistic."""
    return self._reduced(rows_BxTxN, jnp.sum, 0)

  def largest(self, rows_BxTxN: jax.Array) -> jax.Array:
    """Return the maximum of each group."""
    return self._reduced(rows_BxTxN, jnp.max, -jnp.inf)

  def spread(self, statistic_BxTxPxG: jax.Array) -> jax.Array:
    """Return for every token the statistic of its group, [B, T, N]."""
    own = jnp.where(self.member[None, None], statistic_BxTxPxG[..., None, :], 0)
    pieces = jnp.sum(own, axis=-1)
    split = jnp.split(pieces, len(self.widths), axis=-1)
    shape = pieces.shape[:-1]
    wide = [
      jnp.broadcast_to(piece, (*shape, width))
      for piece, width in zip(split, self.widths, strict=True)
    ]
    rows = jnp.concatenate(wide, axis=-1).reshape(*shape[:2], -1)
    return constrain(rows, 'batch', 'slots', 'param_tokens')

  def _reduced(
    self, rows_BxTxN: jax.Array, reduce: Callable[..., jax.Array], neutral: float
  ) -> jax.Array:
    rows = rows_BxTxN.reshape(*rows_BxTxN.shape[:2], len(self.member), -1)
    rows = constrain(rows, 'batch', 'slots', 'param_tokens', None)
    pieces = jnp.split(rows, list(itertools.accumulate(self.widths))[:-1], axis=-1)
    reduced = jnp.stack([reduce(piece, axis=-1) for piece in pieces], axis=-1)
    candidates = jnp.where(self.member[None, None], reduced[..., None], neutral)
    inside = reduce(candidates, axis=-2)
    if len(self.references) == len(self.member):
      return inside
    return reduce(inside, axis=-2, keepdims=True)


def make(groups: Sequence[TokenGroup], count: int | None = None) -> OneGroup | Groups:
  """Return the groups of a row whose N tokens are split in P = `count` parts.

  The groups are in the order of the tokens. `count` is by default that of the current mesh.
  """
  if len(groups) == 1:
    return OneGroup(groups[0].scale_count)
  return _cut_parts(tuple(groups), shard_count('param_tokens') if count is None else count)


def on_devices(reference: int) -> OneGroup:
  """Return one group of tokens for a function on each device, or on one device."""
  return (OneGroupOnDevices if per_device.is_split('param_tokens') else OneGroup)(reference)


@functools.lru_cache(maxsize=128)
def _cut_parts(groups: tuple[TokenGroup, ...], part_count: int) -> Groups:
  """Return the pieces of P equal parts, and the group of each.

  For example, groups of 6, 2 and 8 tokens in 4 parts:

    tokens     0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15
    groups     0 0 0 0 | 0 0 1 1 | 2 2 2  2  | 2  2  2  2

  A group ends 2 tokens after the beginning of a part, so every part has pieces of the widths
  (2, 2), and their `owner` is [[0, 0], [0, 1], [2, 2], [2, 2]]. Two groups lie in several parts, so
  statistics are by group. Groups of 2, 2, 4, 4 and 4 would each lie in one part; statistics are
  then by the number of a group in its part, [[0, 1], [0, 0], [0, 0], [0, 0]].
  """
  ends = np.cumsum([group.tokens for group in groups])
  part_size = ends[-1] // part_count
  cuts = sorted({0, *(int(end) % part_size for end in ends)})
  widths = tuple(np.diff([*cuts, part_size]).tolist())
  first_token = np.arange(part_count)[:, None] * part_size + np.asarray(cuts)  # [P, M]
  owner = np.searchsorted(ends, first_token, side='right')  # [P, M]
  owners_by_part = map(set, owner.tolist())
  in_one_part = all(a.isdisjoint(b) for a, b in itertools.combinations(owners_by_part, 2))
  number = owner - owner[:, :1] if in_one_part else owner
  count = int(number.max()) + 1
  references = np.ones((part_count if in_one_part else 1, count), np.float32)
  row = np.arange(part_count)[:, None] if in_one_part else np.zeros((part_count, 1), int)
  references[row, number] = np.asarray([group.scale_count for group in groups], np.float32)[owner]
  return Groups(widths, number[..., None] == np.arange(count), references)
