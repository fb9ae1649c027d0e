"""Find when the trunk of a family should grow, by a law of the loss."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tokenformer_jax.family.jobs import Job
from tokenformer_jax.family.ways import BEFORE_DECAY
from tokenformer_jax.laws import formulas, mixing
from tokenformer_jax.laws.formulas import Values

_SHARES = np.arange(0.05, 1, 0.05)


class Outcome(NamedTuple):
  """The costs and losses that the law predicts for several families, one array entry per family.

  Attributes:
    saved: the part of the FLOPs of all sizes apart, each trained to the loss that it has here.
    ahead: how much less a size loses than the one before it with as many FLOPs from scratch, the
      least of all sizes.
  """

  saved: np.ndarray
  ahead: np.ndarray


class Sizes(NamedTuple):
  """The sizes of a family, the smallest first, each trained on `tokens`.

  Attributes:
    counts: parameters as the law counts them.
    costs: FLOPs of a token.
    tokens: those that each size has seen at its end, also those of the trunk.
  """

  counts: Sequence[float]
  costs: Sequence[float]
  tokens: float

  def outcome(self, values: Values, gamma: float, shares: np.ndarray) -> Outcome:
    """Return what becomes of families whose trunk grows at `shares` [growths, families]."""
    counts, costs, starts = self.counts, self.costs, [0 * shares[0], *shares]
    spent = apart = trunk = 0.0 * shares[0]
    ahead = trunk + np.inf
    for n, (count, cost, start) in enumerate(zip(counts, costs, starts, strict=True)):
      own = (1 - start) * cost
      loss = mixing.grown_loss(values, counts[: n + 1], shares[:n], self.tokens, np.float64(gamma))
      spent = spent + own
      apart = apart + formulas.tokens_for_loss(values, count, loss) / self.tokens * cost
      if n:
        trunk = trunk + (start - starts[n - 1]) * costs[n - 1]
        equal = self.tokens * (trunk + own) / costs[n - 1]
        ahead = np.minimum(ahead, formulas.loss(values, counts[n - 1], equal) - loss)
    return Outcome(1 - spent / apart, ahead)


def describe(jobs: Sequence[Job], counts: Sequence[float], values: Values, gamma: float) -> str:
  """Return what a bottom-up family saves by the law, and when it should grow to save most.

  A family that grows later saves more, and its sizes are worth less. So only those count in which
  every size is ahead of the one before it with as many FLOPs.

  Args:
    jobs: those of the family.
    counts: the parameters of its sizes as the law counts them, the smallest first.
    values: the law.
    gamma: its mixing exponent.
  """
  finals = sorted((job for job in jobs if job.final), key=lambda job: job.factor)
  first = {job.factor: job.first for job in jobs if job.stage == 'grow'}
  train, end = finals[-1].config.train, finals[-1].config.train.steps
  sizes = Sizes(counts, [job.size.flops_per_token for job in finals], finals[-1].tokens)
  chosen = np.array([[first[job.factor] / end] for job in finals[1:]])
  now = sizes.outcome(values, gamma, chosen)
  text = f'by the law the family {_saves(now.saved[0])} than its sizes apart at equal loss'
  if now.ahead[0] < 0:
    text += ', but a size is behind the one before it with as many FLOPs'
  warmup, latest = jobs[0].config.optim.warmup_steps / end, BEFORE_DECAY * train.decay_from / end
  allowed = _SHARES[(warmup < _SHARES) & (latest >= _SHARES)]
  found = np.array(list(itertools.combinations(allowed, len(chosen)))).T
  if not found.size:
    return text
  all_ = sizes.outcome(values, gamma, found)
  saved = np.where(all_.ahead >= 0, all_.saved, -np.inf)
  best = int(np.argmax(saved))
  if saved[best] <= 0:
    return f'{text}; no times of growth cost less and keep every size ahead of the one before it'
  shares = ','.join(f'{share:.3g}' for share in found[:, best])
  return (
    f'{text}; --grow_at={shares} {_saves(saved[best])}, the least with every size ahead of the one '
    'before it with as many FLOPs'
  )


def _saves(saved: float) -> str:
  return f'costs {abs(saved):.0%} {"less" if saved >= 0 else "more"}'
