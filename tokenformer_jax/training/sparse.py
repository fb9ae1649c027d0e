"""Choose the parameter tokens that a run trains: those that the new text uses and the old does not.

Lin et al. 2025 (arXiv 2510.15103) train the slots of a memory layer with the largest TF-IDF: many
accesses in the new text, in few batches of a background text. A Pattention uses all its tokens at
every position, more or less. So the use u of a token is its importance for the loss
(`grow/importance.py`) divided by the mean of its Pattention, and tokens are ranked by

  u_new · log(u_new / u_old),

their part of the divergence between the uses on the two texts.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterable

import jax
import numpy as np
from jax.sharding import Mesh

from tokenformer_jax.config import OptimConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import importance
from tokenformer_jax.model.params import Definition, ParamInfo, Params, Role
from tokenformer_jax.parallel import messages, sharding
from tokenformer_jax.steps import sparse
from tokenformer_jax.tasks import Batch, Task, validation

_BATCHES = 16  # of each text
_LEAST = 1e-6  # in the place of a use of zero


def check(optim: OptimConfig, definition: Definition, *, is_trained: bool) -> None:
  """Check that `optim.sparse_tokens` is a number of tokens of a trained model."""
  if not optim.sparse_tokens:
    return
  setting = f'config.optim.sparse_tokens is {optim.sparse_tokens:g}'
  total = _total(definition)
  if not total:
    raise UserError(f'{setting}, and this model has no parameter tokens that train; set it to 0')
  if not is_trained:
    raise UserError(f'{setting}, and a new model uses no token yet; set config.init_from=DIR')
  if not 1 <= (count := _count(optim, total)) <= total:
    raise UserError(
      f'{setting}, which makes {count:,} of {total:,} parameter tokens; take a number from 1 on, '
      'or a share below 1'
    )


def choose(task: Task, optim: OptimConfig, params: Params, mesh: Mesh) -> Params:
  """Return which parameter tokens train, a tree as of `sparse.no_tokens`, on the mesh.

  The new text is that of the first training batches of a task whose data is open, the old one the
  held-out part of the source `optim.background`.
  """
  definition, rows = task.definition, range(task.config.data.batch_size)
  with contextlib.closing(task.train_batches(rows, 0, _BATCHES)) as batches:
    new = _measure(task, params, batches, mesh)
  old = _measure(task, params, task.validation_parts(rows)[optim.background], mesh)
  total = _total(definition)
  messages.say(
    f'{_count(optim, total):,} of {total:,} parameter tokens train, and nothing else: those that '
    f'the first batches use most beside {optim.background}'
  )
  chosen = choose_tokens(definition, optim, new, old)
  return jax.device_put(chosen, sharding.tree_shardings(mesh, sparse.axes(definition)))


def choose_tokens(definition: Definition, optim: OptimConfig, new: Params, old: Params) -> Params:
  """Return which tokens train, given the importance of each on both texts, float32 [..., N]."""

  def rank(info: ParamInfo, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    if info.role is not Role.VALUE:
      return np.full(np.shape(new), -np.inf)
    use, old_use = (
      np.maximum(x / np.maximum(x.mean(-1, keepdims=True), _LEAST), _LEAST)
      for x in (np.float64(new), np.float64(old))
    )
    return np.where(_trains(info, use.shape), use * np.log(use / old_use), -np.inf)

  arrays, tree = jax.tree.flatten(jax.tree.map(rank, definition.info, new, old))
  ranks = np.concatenate([np.ravel(array) for array in arrays])
  chosen = np.zeros(ranks.size, np.uint8)
  best = np.argsort(-ranks, kind='stable')  # the first of equal ones
  chosen[best[: _count(optim, _total(definition))]] = 1
  ends = np.cumsum([array.size for array in arrays])[:-1]
  values = [x.reshape(a.shape) for x, a in zip(np.split(chosen, ends), arrays, strict=True)]
  return importance.share_with_keys(definition.info, jax.tree.unflatten(tree, values))


def _measure(task: Task, params: Params, batches: Iterable[Batch], mesh: Mesh) -> Params:
  """Return the importance of each token for the nats of some batches, on every host."""
  size, info = task.config.data.batch_size, task.definition.info

  def nats(params: Params, example: Batch) -> jax.Array:
    return task.sums(params, example).task.nats

  @functools.partial(jax.jit, out_shardings=sharding.replicated(mesh))
  def measure(params: Params, batch: Batch) -> Params:
    return importance.score_tokens(nats, params, info, batch)

  scores = [
    jax.device_get(measure(params, validation.to_devices(batch, size, range(size), mesh)))
    for batch in itertools.islice(batches, _BATCHES)
  ]
  return jax.tree.map(lambda *x: np.mean(x, axis=0), *scores)


def _trains(info: ParamInfo, shape: tuple[int, ...]) -> np.ndarray:
  """Return which tokens of an array [..., N, D] of values are in no frozen group."""
  frozen = np.repeat(info.frozen, info.groups) if any(info.frozen) else False
  return np.broadcast_to(np.logical_not(frozen), shape)


def _total(definition: Definition) -> int:
  """Return the number of parameter tokens that may train."""
  counts = jax.tree.map(
    lambda info, array: _trains(info, array.shape[:-1]).sum() if info.role is Role.VALUE else 0,
    definition.info,
    definition.abstract,
  )
  return int(sum(jax.tree.leaves(counts)))


def _count(optim: OptimConfig, total: int) -> int:
  """Return the number of tokens that `optim.sparse_tokens` names."""
  return round(optim.sparse_tokens * total if optim.sparse_tokens < 1 else optim.sparse_tokens)
