"""The optimizers by `optim.name`: what each makes of a clipped gradient.

  adamw      Adam (Kingma & Ba 2015, arXiv 1412.6980)
  muon       the matrices of layers by orthogonalized momentum, everything else by Adam
  adafactor  mean squares as an outer product of rows and columns, without momentum
  lion       the sign of a momentum (Chen et al. 2023, arXiv 2302.06675)

Rates, their schedule, the decay of weights and growth are the same for all: see `optim.py`.
"""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
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


def scale(config: OptimConfig, info: Params, hidden: Params) -> optax.GradientTransformation:
  """Return the transformation of clipped gradients that `optim.name` selects.

  Args:
    config: the name and its settings.
    info: `Definition.info` of the model.
    hidden: a tree like the parameters, with the number of leading parameter tokens of each array
      whose gradients and statistics are kept at zero, because they are frozen.
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

  These are keys [N, D_in], values [N, D_out] and kernels of layers, each layer by itself. All
  parameter tokens of an array are one matrix, old and new.
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

  The state keeps no coefficients, so that all its arrays are counts and statistics.
  """

  def masked(one: ParamInfo, found: Any) -> Any:
    return optax.MaskedNode() if _matrix(one) is None else found

  numbers = jax.tree.map(lambda one: masked(one, _matrix(one)), info)
  inner = contrib.scale_by_muon(beta=config.momentum, weight_dimension_numbers=numbers)

  def scaled(one: ParamInfo, hidden: int, update: Any) -> Any:
    if is_masked(update):
      return update
    sizes = _visible(one, update.shape, hidden)
    axes = _matrix(one)
    larger = max(1, sizes[axes.reduction_axis], sizes[axes.output_axis])
    return update * (_MUON_RMS * math.sqrt(larger))

  def init(params: Params) -> contrib.MuonState:
    return inner.init(params)._replace(ns_coeffs=optax.EmptyState())

  def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
    coefficients = inner.init({}).ns_coeffs
    updates, new = inner.update(updates, state._replace(ns_coeffs=coefficients), params)
    updates = jax.tree.map(scaled, info, hidden, updates)
    return updates, new._replace(ns_coeffs=optax.EmptyState())

  return optax.GradientTransformation(init, update)


def _visible(one: ParamInfo, shape: tuple[int, ...], hidden: int) -> tuple[int, ...]:
  """Return the shape of an array without its hidden tokens."""
  return tuple(size - hidden * (axis == one.token_axis) for axis, size in enumerate(shape))


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
  are clipped to a root mean square of 1 for each matrix of each layer.
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
  one: ParamInfo, hidden: int, gradient: jax.Array, row: Any, col: Any, whole: Any
) -> jax.Array:
  """Return the clipped update of an array by Adafactor."""
  if is_masked(whole):
    share = row / jnp.mean(row, -1, keepdims=True)
    update = gradient * jax.lax.rsqrt(share)[..., None] * jax.lax.rsqrt(col)[..., None, :]
  else:
    update = gradient * jax.lax.rsqrt(whole)
  over = tuple(i for i, axis in enumerate(one.axes) if axis != 'layers')
  sizes = _visible(one, update.shape, hidden)
  number = max(1, math.prod(sizes[i] for i in over))
  rms = jnp.sqrt(jnp.sum(jnp.square(update), over, keepdims=True) / number)
  return update / jnp.maximum(1, rms)
