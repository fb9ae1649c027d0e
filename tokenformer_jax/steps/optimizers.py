"""The optimizers by `optim.name`: what each makes of a clipped gradient.

  adamw      Adam (Kingma & Ba 2015, arXiv 1412.6980)
  muon       the matrices of layers by orthogonalized momentum, everything else by Adam
  adafactor  mean squares as an outer product of rows and columns, without momentum
  lion       the sign of a momentum (Chen et al. 2023, arXiv 2302.06675)

Rates, their schedule, the decay of weights and growth are the same for all: see `optim.py`.
"""

import itertools
import math
from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from tokenformer_jax.config import OptimConfig
from tokenformer_jax.model.params import ParamInfo, Params, Role
from tokenformer_jax.steps.statistics import is_masked

WITHOUT_DECAY = (Role.BALANCE, Role.BIAS, Role.GAIN, Role.VECTOR)
# The root mean square of an update by muon, which is about Adam's, so that both share one learning
# rate and one weight decay (Liu et al. 2025, arXiv 2502.16982).
_MUON_RMS = 0.2
_FACTORED_POWER = 0.8  # The decay of Adafactor's mean squares at update t is 1 − t^−0.8.
_FACTORED_EPSILON = 1e-30


Count = int | np.ndarray  # of an array; or of each of its layers, [layers]


def hidden_tokens(
  one: ParamInfo, frozen: Collection[int] = (), old: Count = 0
) -> tuple[Count, ...]:
  """Return how many tokens of each group of an array are hidden from the optimizer.

  Their gradients and statistics are kept at zero, because they are frozen. An array without
  parameter tokens has no groups.

  Args:
    one: the metadata of the array.
    frozen: the numbers of groups that are hidden as a whole.
    old: the number of leading tokens of the array, or of each of its layers, that are hidden.
  """
  if one.token_axis is None:
    return ()
  if not one.groups:
    return (old,)
  starts = itertools.accumulate(one.groups[:-1], initial=0)
  return tuple(
    size if number in frozen else np.clip(old - start, 0, size)
    for number, (size, start) in enumerate(zip(one.groups, starts, strict=True), start=1)
  )


def scale(config: OptimConfig, info: Params, hidden: Params) -> optax.GradientTransformation:
  """Return the transformation of clipped gradients that `optim.name` selects.

  Args:
    config: the name and its settings.
    info: `Definition.info` of the model.
    hidden: a tree like the parameters, with a tuple for each array: see `hidden_tokens`.
  """
  adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
  if config.name == 'adamw':
    return adam
  if config.name == 'lion':
    return optax.scale_by_lion(config.beta1, config.beta2)
  if config.name == 'adafactor':
    return _scale_by_factored_rms(info, hidden)
  labels = jax.tree.map(lambda one: 'adam' if _matrix(one) is None else 'muon', info)
  return optax.partition({'muon': _scale_by_muon(config, info, hidden), 'adam': adam}, labels)


def _matrix(one: ParamInfo) -> contrib.MuonDimensionNumbers | None:
  """Return the axes in and out of a matrix that muon orthogonalizes, or None for Adam.

  These are keys [N, D_in], values [N, D_out] and kernels of layers: each layer, each expert and
  each group of parameter tokens by itself. The old and new tokens of one group are one matrix.
  """
  if not one.in_layers:
    return None
  last = len(one.axes) - 1
  if one.role is Role.KEY:
    return contrib.MuonDimensionNumbers(last, one.token_axis)
  if one.role is Role.VALUE:
    return contrib.MuonDimensionNumbers(one.token_axis, last)
  return contrib.MuonDimensionNumbers(last - 1, last) if one.role is Role.KERNEL else None


def _scale_by_muon(
  config: OptimConfig, info: Params, hidden: Params
) -> optax.GradientTransformation:
  """Return muon for the matrices of layers; the other places of its trees are masked.

  Each group of parameter tokens is a matrix of its own, so the update of a group does not depend on
  other groups. The state keeps no coefficients, so that all its arrays are counts and statistics.
  """

  def numbers_of(one: ParamInfo) -> Any:
    axes = _matrix(one)
    if axes is None:
      return optax.MaskedNode()
    return axes if len(one.groups) < 2 else (axes,) * len(one.groups)

  inner = contrib.scale_by_muon(
    beta=config.momentum, weight_dimension_numbers=jax.tree.map(numbers_of, info)
  )

  def scaled(one: ParamInfo, hidden: tuple[int, ...], update: Any) -> Any:
    if is_masked(update):
      return update
    axes = _matrix(one)
    # A kernel hides no tokens, and is one matrix.
    for_each = zip(hidden or (0,), update if isinstance(update, tuple) else (update,), strict=True)
    new = []
    for count, matrix in for_each:
      sizes = _visible(one, matrix.shape, count)
      larger = np.maximum(sizes[axes.reduction_axis], sizes[axes.output_axis])
      new.append(matrix * np.float32(_MUON_RMS * np.sqrt(_by_layer(larger, matrix.ndim))))
    return _joined(one, new)

  def init(params: Params) -> contrib.MuonState:
    return inner.init(params)._replace(ns_coeffs=optax.EmptyState())

  def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
    del params
    updates, mu = (jax.tree.map(_by_groups, info, tree) for tree in (updates, state.mu))
    whole = state._replace(mu=mu, ns_coeffs=inner.init({}).ns_coeffs)
    updates, new = inner.update(updates, whole)
    updates = jax.tree.map(scaled, info, hidden, updates)
    mu = jax.tree.map(_joined, info, new.mu)
    return updates, new._replace(mu=mu, ns_coeffs=optax.EmptyState())

  return optax.GradientTransformation(init, update)


def _by_groups(one: ParamInfo, array: Any) -> Any:
  """Return the arrays of an array's groups of parameter tokens; one group stays as it is."""
  if is_masked(array) or len(one.groups) < 2:
    return array
  ends = list(itertools.accumulate(one.groups))[:-1]
  return tuple(jnp.split(array, ends, one.token_axis))


def _joined(one: ParamInfo, arrays: Any) -> Any:
  """Return one array from those of its groups: the inverse of `_by_groups`."""
  if not isinstance(arrays, (tuple, list)) or is_masked(arrays):
    return arrays
  return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, one.token_axis)


def _visible(one: ParamInfo, shape: tuple[int, ...], hidden: Count) -> tuple[Count, ...]:
  """Return the shape of an array without its hidden tokens."""
  return tuple(size - hidden * (axis == one.token_axis) for axis, size in enumerate(shape))


def _by_layer(number: Count, ndim: int) -> np.ndarray:
  """Return a number of an array, or of each of its layers, that broadcasts to `ndim` axes.

  It is at least 1: a layer whose tokens are all hidden has no entries, and an update of zero.
  """
  number = np.maximum(1, number)
  return number.reshape(-1, *[1] * (ndim - 1)) if number.ndim else number


def _is_factored(one: ParamInfo) -> bool:
  return one.role not in WITHOUT_DECAY and len(one.axes) - ('layers' in one.axes) >= 2


def is_kept(name: str, one: ParamInfo, known: Iterable[tuple[ParamInfo, bool]]) -> bool:
  """Return whether a statistic is kept for an array, given the arrays that it is masked for.

  Args:
    name: of the statistic: see `statistics.ORDERS`.
    one: the metadata of the array.
    known: the metadata of other arrays of the model, and whether the statistic is masked for them.
  """
  if name.startswith('v'):
    return _is_factored(one) == (name != 'v')
  is_matrix = _matrix(one) is not None
  return not any(masked for other, masked in known if (_matrix(other) is not None) == is_matrix)


def _scale_by_factored_rms(info: Params, hidden: Params) -> optax.GradientTransformation:
  """Return Adafactor's scaling (Shazeer & Stern 2018, arXiv 1804.04235, algorithm 4).

  `optax.scale_by_factored_rms` keeps the two largest axes, of which one may be `layers`, and keeps
  others after a growth. This function keeps the last two axes of every matrix, of any size. Updates
  are clipped to a root mean square of 1 for each matrix of each layer and expert.

  The mean squares of columns are over all tokens. From the update on at which tokens freeze, their
  part fades from it, with the weight that all old gradients have; until then the updates of the
  others are smaller. The state does not hold their part, so it cannot be taken out at once.
  """

  def init(params: Params) -> optax.FactoredState:
    def zeros(factored: bool, axis: int | None) -> Params:
      def of(one: ParamInfo, param: jax.Array) -> Any:
        if _is_factored(one) != factored:
          return optax.MaskedNode()
        return jnp.zeros_like(param if axis is None else jnp.mean(param, axis))

      return jax.tree.map(of, info, params)

    return optax.FactoredState(
      jnp.zeros((), jnp.int32), v_row=zeros(True, -1), v_col=zeros(True, -2), v=zeros(False, None)
    )

  def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
    del params
    count = optax.safe_increment(state.count)
    weight = count.astype(jnp.float32) ** -_FACTORED_POWER

    def mean(axis: int | None, tree: Params) -> Params:
      def of(gradient: jax.Array, old: Any) -> Any:
        if is_masked(old):
          return old
        square = jnp.square(gradient) + _FACTORED_EPSILON
        square = square if axis is None else jnp.mean(square, axis)
        return (1 - weight) * old + weight * square

      return jax.tree.map(of, updates, tree)

    new = optax.FactoredState(
      count, v_row=mean(-1, state.v_row), v_col=mean(-2, state.v_col), v=mean(None, state.v)
    )
    updates = jax.tree.map(_factored_update, info, hidden, updates, *new[1:])
    return updates, new

  return optax.GradientTransformation(init, update)


def _factored_update(
  one: ParamInfo, hidden: tuple[int, ...], gradient: jax.Array, row: Any, col: Any, whole: Any
) -> jax.Array:
  """Return the clipped update of an array by Adafactor."""
  if is_masked(whole):
    share = row / jnp.mean(row, -1, keepdims=True)
    update = gradient * jax.lax.rsqrt(share)[..., None] * jax.lax.rsqrt(col)[..., None, :]
  else:
    update = gradient * jax.lax.rsqrt(whole)
  over = tuple(i for i, axis in enumerate(one.axes) if axis not in ('layers', 'experts'))
  sizes = _visible(one, update.shape, sum(hidden))
  number = np.float32(_by_layer(math.prod(sizes[i] for i in over), update.ndim))
  rms = jnp.sqrt(jnp.sum(jnp.square(update), over, keepdims=True) / number)
  return update / jnp.maximum(1, rms)
