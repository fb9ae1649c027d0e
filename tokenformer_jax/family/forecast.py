"""Forecast the losses of a family before its runs, by a law."""

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from tokenformer_jax.errors import UserError
from tokenformer_jax.family.jobs import Job
from tokenformer_jax.laws import formulas, mixing
from tokenformer_jax.laws.runs import step_tokens
from tokenformer_jax.parallel.messages import aligned


@dataclasses.dataclass(frozen=True)
class Law:
  """A law of the loss that `laws --json` has written."""

  values: formulas.Values  # E, A, B, alpha and beta
  gamma: float  # the mixing exponent of growth
  measured: bool  # whether the file has the mixing exponent


def read_law(path: str) -> Law:
  """Return the law in the JSON file of `laws`."""
  try:
    with open(path, encoding='utf-8') as file:
      content = json.load(file)
    values = {name: np.float64(content[name]) for name in ('E', 'A', 'B', 'alpha', 'beta')}
    growth = content.get('mixing')
    gamma = mixing.TYPICAL if growth is None else float(growth['value'])
    return Law(values, gamma, growth is not None)
  except OSError as error:
    raise UserError(f'--law={path} cannot be read ({error.strerror})') from error
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise UserError(
      f'--law={path} is not the JSON file of laws; write it by tokenformer laws … --json={path}'
    ) from error


def losses(jobs: Sequence[Job], law: Law) -> dict[str, float]:
  """Return the loss of each final model that the law describes, by the name of its run.

  It describes sizes from scratch and by growth, but not shrunken models, students and prefixes.
  """
  by_name, predicted = {job.name: job for job in jobs}, {}
  for job in jobs:
    path = [job]
    while path[0].needs:
      path.insert(0, by_name[path[0].needs[0]])
    if not job.final or any(one.action or one.stage == 'elastic' for one in path):
      continue
    legs: dict[float, float] = {}  # size → tokens trained at it
    for one in path:
      size = float(one.size.parameters)
      legs[size] = legs.get(size, 0) + one.steps * step_tokens(one.config)
    predicted[job.name] = float(mixing.chain_loss(law.values, list(legs.items()), law.gamma))
  return predicted


def describe(jobs: Sequence[Job], apart: Sequence[Job], law: Law) -> str:
  """Return the losses of a family's sizes by a law, and what it costs beside its sizes `apart`."""
  predicted = losses(jobs, law)
  finals = sorted((job for job in jobs if job.final), key=lambda job: job.factor)
  rows = [('size', 'run', 'loss by the law')]
  for job in finals:
    loss = f'{predicted[job.name]:.4f}' if job.name in predicted else ''
    rows.append((f'{job.factor:g}', job.name, loss))
  source = 'of the law' if law.measured else 'of docs/growth.md, because the law has none'
  text = f'a growth costs what the mixing exponent {law.gamma:.3g} says, {source}'
  if any(job.stage == 'grow' for job in jobs):
    alone = sum(
      formulas.tokens_for_loss(law.values, scratch.size.parameters, predicted[job.name])
      * scratch.size.flops_per_token
      for job, scratch in zip(finals, apart, strict=True)
    )
    saved = 1 - sum(job.flops for job in jobs) / alone
    text += (
      f'; by the law the family costs {abs(saved):.0%} {"less" if saved >= 0 else "more"} than its '
      'sizes apart at equal loss'
    )
  return f'{aligned(rows, left=(1,))}\n\n{text}'
