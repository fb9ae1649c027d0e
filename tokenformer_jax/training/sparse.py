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
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tokenformer_jax.config import Config, OptimConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import importance
from tokenformer_jax.model.params import Definition, ParamInfo, Params, Role
from tokenformer_jax.parallel import messages, sharding
from tokenformer_jax.steps.entries import frozen_entries, map_entries
from tokenformer_jax.tasks import Batch, Task, validation

_BATCHES = 16  # of each text
_LEAST = 1e-6  # in the place of a use of zero


def check(config: Config, definition: Definition, *, is_trained: bool) -> None:
  """Check that `optim.sparse_tokens` is a number of tokens of a trained model with an old text."""
  wanted, background = config.optim.sparse_tokens, config.optim.background
  (count, total), reason = _counts(wanted, definition), ''
  if not total:
    reason = 'this model has no parameter tokens; set it to 0'
  elif not is_trained:
    reason = 'a new model uses no token yet; set config.init_from=DIR'
  elif not 1 <= count <= total or (wanted > 1 and wanted % 1):
    reason = f'it is neither a number of the {total:,} parameter tokens nor a share below 1'
  elif background not in config.data.mixture:
    reason = f'config.optim.background={background} is not a source of config.data.mixture; add it'
  elif config.optim.kind not in ('adamw', 'lion'):
    reason = 'set config.optim.kind to adamw or lion, by which each token has its own update'
  if wanted and reason:
    raise UserError(f'config.optim.sparse_tokens is {wanted:g}: {reason}')


def choose(task: Task, optim: OptimConfig, params: Params, mesh: Mesh) -> Params:
  """Return which parameter tokens train, the entry `trained` of the state, on the mesh.

  Uses are those in the first training batches and in the held-out part of `optim.background`.
  """
  definition, rows = task.definition, range(task.config.data.batch_size)

  def nats(params: Params, example: Batch) -> jax.Array:
    return task.sums(params, example).task.nats

  score = functools.partial(importance.score_tokens, nats, info=definition.info)
  program = jax.jit(score, out_shardings=sharding.replicated(mesh))

  def measure(batches: Iterable[Batch]) -> Params:
    batch = np.concatenate(list(itertools.islice(batches, _BATCHES)))
    on_devices = validation.to_devices(batch, len(batch), range(len(batch)), mesh)
    return jax.device_get(program(params, batch=on_devices))

  with contextlib.closing(task.train_batches(rows, 0, _BATCHES)) as new:
    uses = measure(new), measure(task.validation_parts(rows)[optim.background])
  count, total = _counts(optim.sparse_tokens, definition)
  messages.say(f'{count:,} of {total:,} parameter tokens train (optim.sparse_tokens), nothing else')
  return jax.device_put(choose_tokens(definition.info, count, *uses), sharding.replicated(mesh))


def choose_tokens(info: Params, count: int, new: Params, old: Params) -> Params:
  """Return 1 for so many tokens, given the importance of all on both texts, [..., N].

  Tokens of equal rank are chosen together, and those of frozen groups are not.
  """

  def rank(info: ParamInfo, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    if info.token_axis is None:
      return np.full((), -np.inf)
    means = (x / np.maximum(x.mean(-1, keepdims=True), _LEAST) for x in (new, old))
    use, old_use = (np.maximum(x, _LEAST) for x in means)
    return use * np.log(use / old_use)

  ranks = jax.tree.map(rank, info, new, old)
  if (frozen := frozen_entries(info)) is not None:
    ranks = map_entries(lambda is_frozen, x: jnp.where(is_frozen, -jnp.inf, x), frozen, ranks)
  pairs = zip(jax.tree.leaves(info), jax.tree.leaves(ranks), strict=True)
  values = np.concatenate([rank.ravel() for info, rank in pairs if info.role is Role.VALUE])
  least = np.sort(values[values > -np.inf])[-count:][0]
  return jax.tree.map(lambda rank: np.uint8(rank >= least), ranks)


def _counts(wanted: float, definition: Definition) -> tuple[int, int]:
  """Return the number of tokens that `optim.sparse_tokens` means, and that of all."""
  pairs = zip(jax.tree.leaves(definition.info), jax.tree.leaves(definition.abstract), strict=True)
  total = sum(array.size // array.shape[-1] for i, array in pairs if i.role is Role.VALUE)
  return round(wanted * total if wanted < 1 else wanted), total
