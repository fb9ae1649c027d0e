"""Draw the next token from the logits, with settings for each row of a batch."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.errors import UserError

# vLLM's limit: below it the likeliest token is taken, because the scaled logits could overflow.
_LOWEST_TEMPERATURE = 1e-5
# Accelerators draw by rejection from this top_p on: of 8 draws all are refused once in 10⁸ tokens.
_REJECTION_FROM = 0.9
_CANDIDATES = 8
_POSITIONS = 2**28  # the positions of a text; those after it number the candidates of a token


@dataclasses.dataclass(frozen=True)
class Sampling:
  """The settings for drawing one text. The same seed gives the same text in any batch."""

  temperature: float = 0.8  # divides the logits; below 1e-5 the likeliest token is taken
  top_k: int = 0  # draw from the k likeliest tokens only; 0: from all
  top_p: float = 0.95  # draw from the fewest likeliest tokens that together reach p; 1: from all
  seed: int = 0

  def __post_init__(self):
    for name in ('top_k', 'seed'):
      if type(value := getattr(self, name)) is not int:
        raise UserError(f'{name} is {value!r}; it must be an integer')
    if not 0 <= self.temperature < float('inf'):
      raise UserError(f'temperature is {self.temperature}; it must be finite and at least 0')
    if not 0 <= self.top_k < 2**31:
      raise UserError(f'top_k is {self.top_k}; it must be from 0 to 2147483647')
    if not 0 < self.top_p <= 1:
      raise UserError(f'top_p is {self.top_p}; it must lie between 0 (excluded) and 1')
    if not 0 <= self.seed < 2**32:
      raise UserError(f'seed is {self.seed}; it must lie between 0 and 2³² (excluded)')

  @property
  def is_greedy(self) -> bool:
    """Return whether the likeliest token is taken."""
    return self.temperature < _LOWEST_TEMPERATURE


def choose(stated: Mapping[str, Any], **given: Any) -> Sampling:
  """Return the settings that are `given`, else those that a folder has `stated`, else ours."""
  return Sampling(**{**stated, **{name: x for name, x in given.items() if x is not None}})


DEFAULT = Sampling()
GREEDY = Sampling(temperature=0)


class Draws(NamedTuple):
  """The settings of a batch, with one entry for each row."""

  temperature_B: Any  # float32
  top_k_B: Any  # int32
  top_p_B: Any  # float32
  seed_B: Any  # uint32

  @classmethod
  def from_samplings(cls, samplings: Sequence[Sampling]) -> 'Draws':
    """Return the settings of several rows as arrays."""
    return cls(
      np.array([0 if s.is_greedy else s.temperature for s in samplings], np.float32),
      np.array([s.top_k for s in samplings], np.int32),
      np.array([s.top_p for s in samplings], np.float32),
      np.array([s.seed for s in samplings], np.uint32),
    )


def needs(samplings: Sequence[Sampling]) -> str:
  """Return the draws that `draw` must support: `likeliest`, `any`, `likely` or `limited`."""
  drawn = [s for s in samplings if not s.is_greedy]
  if any(s.top_k or s.top_p < _REJECTION_FROM for s in drawn):
    return 'limited'
  if any(s.top_p < 1 for s in drawn):
    return 'likely'
  return 'any' if drawn else 'likeliest'


def draw(
  logits_BxV: jax.Array, draws: Draws, position_B: jax.Array, *, need: str = 'limited'
) -> jax.Array:
  """Draw one token id for each row from float32 logits; return token ids [B].

  A row's seed and the position of the token in its text determine the draw. `need` is a static
  result of `needs`, which avoids looking for a limit if no row has one.
  """
  likeliest_B = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
  if need == 'likeliest':
    return likeliest_B
  greedy_B = draws.temperature_B == 0
  scaled_BxV = logits_BxV / jnp.where(greedy_B, 1, draws.temperature_B)[:, None]
  if need == 'any':
    drawn_B = _draw_all(scaled_BxV, draws, position_B)
  else:
    drawn_B = jax.lax.platform_dependent(
      scaled_BxV,
      draws,
      position_B,
      cpu=draw_by_bisection,
      default=draw_by_rejection if need == 'likely' else draw_by_rejection_or_sort,
    )
  return jnp.where(greedy_B, likeliest_B, drawn_B)


def _draw_all(logits_BxV: jax.Array, draws: Draws, position_B: jax.Array) -> jax.Array:
  """Draw from all tokens whose logits are finite."""
  return _draw_candidates(logits_BxV, draws, position_B, 1)[:, 0]


def _draw_candidates(
  logits_BxV: jax.Array, draws: Draws, position_B: jax.Array, count: int
) -> jax.Array:
  """Return independent draws from all tokens [B, C]; the first ones do not depend on C."""

  def draw_one(logits_V: jax.Array, seed: jax.Array, number: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), number)
    return jax.random.categorical(key, logits_V).astype(jnp.int32)

  numbers_BxC = position_B[:, None] + _POSITIONS * jnp.arange(count)[None]
  draw_row = jax.vmap(draw_one, in_axes=(None, None, 0))
  return jax.vmap(draw_row)(logits_BxV, draws.seed_B, numbers_BxC)


def draw_by_bisection(logits_BxV: jax.Array, draws: Draws, position_B: jax.Array) -> jax.Array:
  """Draw from the tokens that top_k and top_p leave, on a CPU."""
  return _draw_from(lowest_by_bisection(logits_BxV, draws), logits_BxV, draws, position_B)


def draw_by_rejection(logits_BxV: jax.Array, draws: Draws, position_B: jax.Array) -> jax.Array:
  """Draw from the tokens that top_p leaves, without a sort: 9 kernels on a GPU instead of 17.

  Of eight draws from all tokens this is the first one whose likelier tokens do not reach p. If
  there is none, with a probability of (1 − p)⁸ at most, it is the likeliest token.
  """
  candidates_BxC = _draw_candidates(logits_BxV, draws, position_B, _CANDIDATES)
  p_Bx1, top_Bx1 = draws.top_p_B[:, None], jnp.max(logits_BxV, axis=-1, keepdims=True)
  own_BxC = jnp.take_along_axis(logits_BxV, candidates_BxC, axis=-1)
  exps_BxV = jnp.exp(logits_BxV - top_Bx1)
  is_likelier_BxCxV = logits_BxV[:, None] > own_BxC[..., None]
  likelier_BxC = jnp.sum(jnp.where(is_likelier_BxCxV, exps_BxV[:, None], 0), axis=-1)
  stays_BxC = likelier_BxC < p_Bx1 * jnp.sum(exps_BxV, axis=-1, keepdims=True)
  stays_BxC |= p_Bx1 == 1
  first_Bx1 = jnp.argmax(stays_BxC, axis=-1)[:, None]
  drawn_B = jnp.take_along_axis(candidates_BxC, first_Bx1, axis=-1)[:, 0]
  likeliest_B = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
  return jnp.where(jnp.any(stays_BxC, axis=-1), drawn_B, likeliest_B)


def draw_by_rejection_or_sort(
  logits_BxV: jax.Array, draws: Draws, position_B: jax.Array
) -> jax.Array:
  """Draw rows with top_k, or a small top_p, from the tokens that a sort finds, others as above.

  So the settings of a row alone decide how it is drawn.
  """
  drawn_B = _draw_from(lowest_by_sort(logits_BxV, draws), logits_BxV, draws, position_B)
  suits_B = (draws.top_k_B == 0) & (draws.top_p_B >= _REJECTION_FROM)
  return jnp.where(suits_B, draw_by_rejection(logits_BxV, draws, position_B), drawn_B)


def _draw_from(
  lowest_Bx1: jax.Array, logits_BxV: jax.Array, draws: Draws, position_B: jax.Array
) -> jax.Array:
  """Draw from the tokens whose logits are at least the lowest one."""
  limited_BxV = jnp.where(logits_BxV < lowest_Bx1, -jnp.inf, logits_BxV)
  return _draw_all(limited_BxV, draws, position_B)


def lowest_by_sort(logits_BxV: jax.Array, draws: Draws) -> jax.Array:
  """Return the lowest logit [B, 1] that top_k and top_p leave."""
  ordered_BxV = jnp.sort(logits_BxV, axis=-1, descending=True)
  vocabulary = logits_BxV.shape[-1]
  in_top_k = jnp.arange(vocabulary)[None] < _top_k(draws, vocabulary)
  probabilities = jax.nn.softmax(jnp.where(in_top_k, ordered_BxV, -jnp.inf), axis=-1)
  # A token stays if the likelier ones do not reach p; the likeliest one stays if p rounds to 0.
  before = jnp.cumsum(probabilities, axis=-1) - probabilities
  in_top_p = (before < draws.top_p_B[:, None]) | (draws.top_p_B == 1)[:, None] | (before == 0)
  stays = in_top_k & in_top_p
  return jnp.min(jnp.where(stays, ordered_BxV, jnp.inf), axis=-1, keepdims=True)


def lowest_by_bisection(logits_BxV: jax.Array, draws: Draws) -> jax.Array:
  """Return what `lowest_by_sort` does, in 32 or 64 passes: on a CPU a sort takes ten times as long.

  A sum over a row rounds less than a cumulative one, so the cut is the one of exact sums.
  """
  top_Bx1 = jnp.max(logits_BxV, axis=-1, keepdims=True)
  k_Bx1, p_Bx1 = _top_k(draws, logits_BxV.shape[-1]), draws.top_p_B[:, None]

  def count_above(limit_Bx1: jax.Array) -> jax.Array:
    return jnp.sum(logits_BxV > limit_Bx1, axis=-1, keepdims=True)

  in_top_k_Bx1 = jax.lax.cond(  # the lowest logit of the k likeliest
    jnp.any(draws.top_k_B > 0),
    lambda: _least(lambda limit_Bx1: count_above(limit_Bx1) < k_Bx1, top_Bx1),
    lambda: jnp.full_like(top_Bx1, -jnp.inf),
  )
  exps_BxV = jnp.exp(logits_BxV - top_Bx1)

  def mass_above(limit_Bx1: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(logits_BxV > limit_Bx1, exps_BxV, 0), axis=-1, keepdims=True)

  # Of equal logits at the end of the k likeliest, as many count as are left of k.
  equal_Bx1 = k_Bx1 - count_above(in_top_k_Bx1)
  mass_Bx1 = mass_above(in_top_k_Bx1) + equal_Bx1 * jnp.exp(in_top_k_Bx1 - top_Bx1)
  in_top_p_Bx1 = _least(lambda limit_Bx1: mass_above(limit_Bx1) < p_Bx1 * mass_Bx1, top_Bx1)
  return jnp.maximum(in_top_k_Bx1, jnp.where(p_Bx1 == 1, -jnp.inf, in_top_p_Bx1))


def _least(holds: Callable[[jax.Array], jax.Array], most_Bx1: jax.Array) -> jax.Array:
  """Return the least float32 in each row from which on `holds` is true, or `most` if there is none.

  Floats are compared as integers in the same order, so that 32 halvings find it.
  """

  def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    low, high = bounds
    middle = (low & high) + ((low ^ high) >> 1)  # the mean, which does not overflow
    true = holds(_to_float(middle))
    return jnp.where(true, low, middle + 1), jnp.where(true, middle, high)

  least = jnp.full(most_Bx1.shape, -jnp.inf, jnp.float32)
  return _to_float(jax.lax.fori_loop(0, 32, halve, (_to_int(least), _to_int(most_Bx1)))[1])


def _to_int(floats: jax.Array) -> jax.Array:
  """Return int32 in the order of float32."""
  return _in_order(jax.lax.bitcast_convert_type(floats, jnp.int32))


def _to_float(ints: jax.Array) -> jax.Array:
  """Invert `_to_int`."""
  return jax.lax.bitcast_convert_type(_in_order(ints), jnp.float32)


def _in_order(bits: jax.Array) -> jax.Array:
  return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _top_k(draws: Draws, vocabulary: int) -> jax.Array:
  """Return the number of tokens [B, 1] that top_k leaves."""
  top_k_Bx1 = draws.top_k_B[:, None]
  return jnp.where(top_k_Bx1 == 0, vocabulary, jnp.minimum(top_k_Bx1, vocabulary))
