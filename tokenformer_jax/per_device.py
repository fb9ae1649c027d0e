"""Functions that are written for each device: on its rows and its part of a matrix.

Devices exchange what they have by logical axis: `total(x, 'param_tokens')` is the sum over those
that have different parameter tokens, whatever axis of the mesh that is.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from tokenformer_jax.params import Axes
from tokenformer_jax.sharding import mesh_axes, parts, platform, spec

_TWO_STEPS = 16  # devices that split heads, from which on heads are scattered in two steps


def on_each_device(
  f: Callable[[Any, jax.Array], Any],
  rows: Any,
  matrix: jax.Array,
  axes: Axes,
  *,
  split_in: bool = False,
  split_out: Any = False,
  gathered_in: jnp.dtype | None = None,
) -> Any:
  """Apply `f(rows, matrix)` on each device to its rows and the whole width of its part of a matrix.

  A device gathers the width, and gets its part of the gradient, summed over the devices that have
  other rows, by reduce-scatter. Left to XLA, the gradients of a layer would be whole on each device
  first, in one all-reduce of twice the bytes.

  On one device, and where rows or matrix do not divide, f has everything.

  Args:
    f: a function, which sums over the devices of the other axis if that `is_split`.
    rows: arrays [B, …].
    matrix: of two axes, as it is stored.
    axes: its logical axes; one is `width`. The other is split like parameter tokens if no rule
      splits it.
    split_in: whether the other axis is the third axis of the rows, a part on each device.
    split_out: whether it is that of the result, or of each of its arrays.
    gathered_in: the dtype in which the matrix is gathered, for a gradient that is summed in more
      precision: f gets the matrix, and devices sum its gradient, in the dtype of the matrix. By
      default all three have that dtype.

  Returns:
    What f does, arrays [B, …] or of one number for each device that has other rows.
  """
  sizes = jax.sharding.get_abstract_mesh().shape
  if math.prod(sizes.values()) == 1:
    return f(rows, matrix)
  places = [_along(axis) for axis in axes]
  pieces = parts('batch'), *(math.prod(sizes[name] for name in place) for place in places)
  lengths = len(jax.tree.leaves(rows)[0]), *matrix.shape
  if any(length % piece for length, piece in zip(lengths, pieces, strict=True)):
    return f(rows, matrix)
  at_width = axes.index('width')
  # Nothing is summed along an axis of one device, so nothing may seem to differ along it.
  others = tuple(name for name in places[1 - at_width] if sizes[name] > 1) or None
  places[1 - at_width] = others
  (batch,) = spec(('batch',))
  whole, split = PartitionSpec(batch), PartitionSpec(batch, None, others)
  same = tuple(name for name in mesh_axes('batch') if name not in places[at_width])

  def of_device(rows: Any, part: jax.Array) -> Any:
    part = jax.lax.pcast(part, same, to='varying')
    return f(rows, gather(part, 'width', at_width, gathered_in))

  return jax.shard_map(
    of_device,
    in_specs=(split if split_in else whole, PartitionSpec(*places)),
    out_specs=jax.tree.map(lambda is_split: split if is_split else whole, split_out),
  )(rows, matrix)


def _along(axis: str) -> tuple[str, ...]:
  """The axes of the mesh that a logical axis is split over on devices.

  Without a rule (`patch`, `classes`) it is stored whole, and split for products only.
  """
  return mesh_axes(axis) or mesh_axes('param_tokens')


def is_split(axis: str) -> bool:
  """Whether this is traced for one device of several that have parts of a logical axis."""
  mesh = jax.sharding.get_abstract_mesh()
  return bool(mesh.manual_axes) and math.prod(mesh.shape[name] for name in _along(axis)) > 1


def total(x: Any, axis: str) -> Any:
  """Sum arrays over the devices that split a logical axis."""
  return jax.lax.psum(x, _along(axis))


def largest(x: Any, axis: str) -> Any:
  """Take the largest of arrays over the devices that split a logical axis."""
  return jax.lax.pmax(x, _along(axis))


def varying(x: jax.Array, axis: str) -> jax.Array:
  """Give each device its own copy of an array, whose gradients are then summed over devices."""
  return jax.lax.pcast(x, _along(axis), to='varying')


def first_index(axis: str, size: int) -> jax.Array:
  """Return where the part of a logical axis begins that this device has, one of `size`."""
  along = _along(axis)
  # Of one axis in a tuple JAX would multiply the index by 1 and add it to 0.
  return size * jax.lax.axis_index(along[0] if len(along) == 1 else along)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather(part: jax.Array, axis: str, position: int, dtype: jnp.dtype | None = None) -> jax.Array:
  """Put an array together on each device; its gradient is summed and scattered.

  Args:
    part: what a device has.
    axis: the logical axis that is split.
    position: of that axis in the array.
    dtype: that values are rounded to in order to be moved; None: theirs. The gradient moves in the
      dtype of the array.
  """
  moved = part.astype(dtype or part.dtype)
  return jax.lax.all_gather(moved, _along(axis), axis=position, tiled=True).astype(part.dtype)


def _gather_forward(
  part: jax.Array, axis: str, position: int, dtype: jnp.dtype | None
) -> tuple[jax.Array, None]:
  return gather(part, axis, position, dtype), None


def _gather_backward(
  axis: str, position: int, dtype: jnp.dtype | None, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
  del dtype
  gradient = _scatter(jnp.moveaxis(gradient, position, 0), axis)
  return (jnp.moveaxis(gradient, 0, position),)


gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scatter(x: jax.Array, axis: str) -> jax.Array:
  """Sum arrays over devices, each of which gets its part of the first axis.

  Args:
    x: what a device adds to the whole array.
    axis: the logical axis that becomes split, the first one; the gradient is gathered along it.
  """
  return _scatter(x, axis)


def _scatter_forward(x: jax.Array, axis: str) -> tuple[jax.Array, None]:
  return scatter(x, axis), None


def _scatter_backward(axis: str, _: None, gradient: jax.Array) -> tuple[jax.Array]:
  return (jax.lax.all_gather(gradient, _along(axis), tiled=True),)


scatter.defvjp(_scatter_forward, _scatter_backward)


def _scatter(x: jax.Array, axis: str) -> jax.Array:
  """Sum what devices have, each of which gets its part of the first axis.

  On TPUs in two steps, in groups of devices a stride apart and of neighbours, and of an axis whose
  parts are together in memory: XLA writes any other reduce-scatter over all of 16 or 64 devices as
  an all-reduce there. Gradients of weights are told to be laid out so, or it may choose otherwise
  for one of them. Over 4 devices that split heads it keeps one step, if what is split is an axis of
  its own, and makes all-reduces of two.
  """
  along, devices = _along(axis), parts(axis)
  inner = max(d for d in range(1, math.isqrt(devices) + 1) if devices % d == 0)
  if platform() != 'tpu' or inner == 1 or (axis != 'width' and devices < _TWO_STEPS):
    return jax.lax.psum_scatter(x.reshape(devices, -1, *x.shape[1:]), along)
  if axis == 'width':
    x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
  numbers = np.arange(devices).reshape(-1, inner)
  for groups in (numbers.T, numbers):
    x = jax.lax.psum_scatter(x, along, axis_index_groups=groups.tolist(), tiled=True)
  return x
