"""The optimizers by `optim.kind`: how each scales a clipped gradient.

  adamw      Adam (Kingma & Ba 2015, arXiv 1412.6980)
  muon       the matrices of layers by orthogonalized momentum, everything else by Adam
  adafactor  mean squares as an outer product of rows and columns, without momentum
  lion       the sign of a momentum (Chen et al. 2023, arXiv 2302.06675)

Rates, their schedule, the decay of weights and growth are the same for all: see `optim.py`.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from tokenformer_jax.config import OptimConfig
from tokenformer_jax.model.params import ParamInfo, Params, Role
from tokenformer_jax.steps.entries import Entries, visible
from tokenformer_jax.steps.statistics import is_masked

WITHOUT_DECAY = (Role.BALANCE, Role.BIAS, Role.GAIN, Role.GATE, Role.VECTOR)
# The root mean square of an update by muon, which is about Adam's, so that both share one learning
# rate and one weight decay (Liu et al. 2025, arXiv 2502.16982).
_MUON_RMS = 0.2
_FACTORED_POWER = 0.8  # The decay of Adafactor's mean squares at update t is 1 − t^−0.8.
_FACTORED_EPSILON = 1e-30


def scale(config: OptimConfig, info: Params, *hidden: Params) -> optax.GradientTransformation:
  """Return the transformation of clipped gradients that `optim.kind` selects.

  The `hidden` are trees of `Entries` whose gradients and statistics are zero. An update that
  depends on the size of a matrix goes by the size of what is visible of it.
  """
  if config.kind == 'lion':
    return optax.scale_by_lion(config.beta1, config.beta2)
  if config.kind == 'adafactor':
    return _scale_by_factored_rms(info, *hidden)
  adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
  if config.kind == 'adamw':
    return adam
  labels = jax.tree.map(lambda array: 'adam' if _matrix(array) is None else 'muon', info)
  return optax.partition({'muon': _scale_by_muon(config, info, *hidden), 'adam': adam}, labels)


def _matrix(info: ParamInfo) -> contrib.MuonDimensionNumbers | None:
  """Return the input and output axes of a matrix that muon orthogonalizes, or None for Adam.

  These are keys [N, D_in], values [N, D_out] and kernels of layers: each layer, each expert and
  each group of parameter tokens by itself. The old and new tokens of one group are one matrix.
  """
  last, tokens = len(info.axes) - 1, info.token_axis
  if not info.in_layers:
    return None
  if info.role is Role.KERNEL:
    return contrib.MuonDimensionNumbers(last - 1, last)
  if tokens is None:
    return None
  if info.role is Role.KEY:
    return contrib.MuonDimensionNumbers(last, tokens)
  return contrib.MuonDimensionNumbers(tokens, last) if info.role is Role.VALUE else None


def _scale_by_muon(
  config: OptimConfig, info: Params, *hidden: Params
) -> optax.GradientTransformation:
  """Return muon for the matrices of layers; the other leaves of its trees are masked.

  Each group of parameter tokens is its own matrix, so the update of a group does not depend on
  other groups. The state keeps no coefficients, so that all its arrays are counts and statistics.
  """

  def dimension_numbers(info: ParamInfo) -> Any:
    axes = _matrix(info)
    if axes is None:
      return optax.MaskedNode()
    return axes if len(info.groups) < 2 else (axes,) * len(info.groups)

  inner = contrib.scale_by_muon(
    beta=config.momentum, weight_dimension_numbers=jax.tree.map(dimension_numbers, info)
  )

  def scaled(info: ParamInfo, masks: Sequence[np.ndarray], update: Any) -> Any:
    if is_masked(update):
      return update
    matrices = update if isinstance(update, tuple) else (update,)
    pairs = zip(matrices, masks, strict=True)
    return _join(info, [matrix * _muon_factor(info, matrix.shape, mask) for matrix, mask in pairs])

  def start(params: Any) -> Any:
    return inner.init(params)

  def init(params: Any) -> Any:
    return start(params)._replace(ns_coeffs=optax.EmptyState())

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    del params
    masks = jax.tree.map(_visible_by_group, info, updates, *hidden)
    updates, mu = (jax.tree.map(_split, info, tree) for tree in (updates, state.mu))
    whole = state._replace(mu=mu, ns_coeffs=start({}).ns_coeffs)
    new: Any
    updates, new = inner.update(updates, whole)
    updates = jax.tree.map(scaled, info, masks, updates)
    mu = jax.tree.map(_join, info, new.mu)
    return updates, new._replace(mu=mu, ns_coeffs=optax.EmptyState())

  return optax.GradientTransformation(init, update)


def _split(info: ParamInfo, array: Any) -> Any:
  """Split an array into its groups of parameter tokens; return one with fewer than two as it is."""
  if is_masked(array) or len(info.groups) < 2:
    return array
  ends = list(itertools.accumulate(info.groups))[:-1]
  return tuple(jnp.split(array, ends, info.axes.index('param_tokens')))


def _join(info: ParamInfo, arrays: Any) -> Any:
  """Join the arrays of groups: the inverse of `_split`."""
  if not isinstance(arrays, (tuple, list)) or is_masked(arrays):
    return arrays
  return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, info.token_axis)


def _visible_by_group(info: ParamInfo, array: Any, *hidden: Entries) -> list[np.ndarray]:
  """Return what is visible of each matrix that `_split` makes of an array: see `visible`."""
  if is_masked(array):
    return []
  mask = visible(array.shape, *hidden)
  if len(info.groups) < 2:
    return [mask]
  shape, axis = list(mask.shape), info.axes.index('param_tokens')
  shape[axis] = sum(info.groups)
  return np.split(np.broadcast_to(mask, shape), np.cumsum(info.groups)[:-1], axis)


def _muon_factor(info: ParamInfo, shape: tuple[int, ...], mask: np.ndarray) -> np.ndarray:
  """Return the factor on an orthogonal matrix, by the longer side of what is visible of it."""
  axes: Any = _matrix(info)
  into, out = axes
  sides = (
    _count(np.any(mask, other, keepdims=True), shape, (axis,))
    for axis, other in ((into, out), (out, into))
  )
  return np.asarray(_MUON_RMS * np.sqrt(np.maximum(*sides)), np.float32)


def _count(mask: np.ndarray, shape: tuple[int, ...], over: tuple[int, ...]) -> np.ndarray:
  """Return the number of true entries over some axes of a mask that broadcasts to a shape.

  It is at least 1: a layer whose entries are all hidden has an update of zero.
  """
  repeats = math.prod(shape[axis] // mask.shape[axis] for axis in over)
  return np.maximum(1, np.sum(mask, over, keepdims=True) * repeats)


def _is_factored(info: ParamInfo) -> bool:
  return info.role not in WITHOUT_DECAY and len(info.axes) - ('layers' in info.axes) >= 2


def is_kept(name: str, info: ParamInfo, known: Iterable[tuple[ParamInfo, bool]]) -> bool:
  """Return whether the optimizer keeps a statistic (`statistics.ORDERS`) for an array.

  `known` are other arrays of the model, and whether the statistic is masked for each.
  """
  if name.startswith('v'):
    return _is_factored(info) == (name != 'v')
  is_matrix = _matrix(info) is not None
  return not any(masked for other, masked in known if (_matrix(other) is not None) == is_matrix)


def _scale_by_factored_rms(info: Params, *hidden: Params) -> optax.GradientTransformation:
  """Return Adafactor's scaling (Shazeer & Stern 2018, arXiv 1804.04235, algorithm 4).

  `optax.scale_by_factored_rms` keeps the two largest axes: one may be `layers`, and a growth may
  change them. This function keeps the last two axes of every matrix, of any size. It clips updates
  to a root mean square of 1 for each matrix of each layer and expert.

  The mean squares of columns are over all tokens. When tokens freeze, their part fades like any old
  gradient; until then the updates of the other tokens are smaller. The state does not hold this
  part, so it cannot be taken out at once.
  """

  def init(params: Any) -> Any:
    def zeros(factored: bool, axis: int | None) -> Params:
      def zero(info: ParamInfo, param: jax.Array) -> Any:
        if _is_factored(info) != factored:
          return optax.MaskedNode()
        return jnp.zeros_like(param if axis is None else jnp.mean(param, axis))

      return jax.tree.map(zero, info, params)

    return optax.FactoredState(
      jnp.zeros((), jnp.int32), v_row=zeros(True, -1), v_col=zeros(True, -2), v=zeros(False, None)
    )

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    del params
    count: Any = optax.safe_increment(state.count)
    weight = count.astype(jnp.float32) ** -_FACTORED_POWER

    def mean(axis: int | None, tree: Params) -> Params:
      def new_mean(gradient: jax.Array, old: Any) -> Any:
        if is_masked(old):
          return old
        square = jnp.square(gradient) + _FACTORED_EPSILON
        square = square if axis is None else jnp.mean(square, axis)
        return (1 - weight) * old + weight * square

      return jax.tree.map(new_mean, updates, tree)

    new = optax.FactoredState(
      count, v_row=mean(-1, state.v_row), v_col=mean(-2, state.v_col), v=mean(None, state.v)
    )
    masks = jax.tree.map(lambda u, *own: visible(u.shape, *own), updates, *hidden)
    updates = jax.tree.map(_factored_update, info, masks, updates, *new[1:])
    return updates, new

  return optax.GradientTransformation(init, update)


def _factored_update(
  info: ParamInfo, mask: np.ndarray, gradient: jax.Array, row: Any, col: Any, whole: Any
) -> jax.Array:
  """Return the update of an array by Adafactor, clipped by the mean over what is visible."""
  if is_masked(whole):
    share = row / jnp.mean(row, -1, keepdims=True)
    update = gradient * jax.lax.rsqrt(share)[..., None] * jax.lax.rsqrt(col)[..., None, :]
  else:
    update = gradient * jax.lax.rsqrt(whole)
  over = tuple(i for i, axis in enumerate(info.axes) if axis not in ('layers', 'experts'))
  number = np.float32(_count(mask, update.shape, over))
  rms = jnp.sqrt(jnp.sum(jnp.square(update), over, keepdims=True) / number)
  return update / jnp.maximum(1, rms)
