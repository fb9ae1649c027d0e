"""Run functions on each device, on its rows and its shard of a matrix.

Devices exchange data by logical axis: `total(x, 'param_tokens')` sums over the devices that hold
different parameter tokens, for any mesh axis that splits them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from tokenformer_jax.parallel.rules import Axes, mesh_axes, shard_count, spec
from tokenformer_jax.parallel.sharding import platform

_TWO_STEPS = 16  # the least number of devices over which heads are scattered in two steps


def on_each_device(
  f: Callable[..., Any],
  rows: Any,
  matrix: jax.Array,
  axes: Axes,
  *,
  fixed: Sequence[jax.Array] = (),
  split_in: bool = False,
  split_out: Any = False,
  gathered_in: Any = None,
) -> Any:
  """Apply `f(rows, matrix)` on each device to its rows and its shard of a matrix, of whole width.

  Each device gathers the width. It gets its shard of the gradient, summed over the devices with
  other rows, by a reduce-scatter. XLA alone would use one all-reduce of whole gradients, which
  moves twice the bytes.

  On one device, and if the rows or the matrix do not divide, f gets the whole arrays.

  Args:
    f: the function. It must sum over the devices of the other axis if that `is_split`.
    rows: arrays [B, T, …], whose slots T may be split as well; f works on each slot alone.
    matrix: of two axes, as it is stored.
    axes: the logical axes of the matrix; one is `width`. The other is split like parameter tokens
      if no rule splits it.
    fixed: more matrices with these axes, of any width, that have no gradient: f(rows, matrix, …).
    split_in: whether the other axis is also the third axis of the rows, split over devices.
    split_out: whether the other axis is the third axis of the result, for each of its arrays.
    gathered_in: the dtype for gathering the matrix, if its gradient needs more precision. f gets
      the matrix, and devices sum its gradient, in the dtype of the matrix. By default all three
      use that dtype.

  Returns:
    The result of f: arrays [B, T, …], or arrays with one entry instead of B or T for each device
    with other rows or slots.
  """
  sizes, matrices = jax.sharding.get_abstract_mesh().shape, (matrix, *fixed)
  if math.prod(sizes.values()) == 1:
    return f(rows, *matrices)
  at_width, splits = axes.index('width'), [split_axes(axis) for axis in axes]
  counts = [math.prod(sizes[name] for name in names) for names in splits]
  counts = shard_count('batch'), shard_count('slots'), *counts
  shapes = [(*jax.tree.leaves(rows)[0].shape[:2], *array.shape) for array in matrices]
  if any(size % count for shape in shapes for size, count in zip(shape, counts, strict=True)):
    return f(rows, *matrices)
  # Leave out mesh axes of size 1: no sum runs along them, so values must not count as varying.
  others = _larger(splits[1 - at_width]) or None
  stored = [others, others]
  stored[at_width] = splits[at_width]
  (batch,), slots = spec(('batch',)), _larger(mesh_axes('slots'))
  whole = PartitionSpec(batch, slots or None)
  split = PartitionSpec(batch, slots or None, others)
  same = tuple(name for name in (*mesh_axes('batch'), *slots) if name not in splits[at_width])

  def on_shard(rows: Any, *shards: jax.Array) -> Any:
    shards = tuple(jax.lax.pcast(shard, same, to='varying') for shard in shards)
    return f(rows, *(gather(shard, 'width', at_width, gathered_in) for shard in shards))

  return jax.shard_map(
    on_shard,
    in_specs=(split if split_in else whole, *[PartitionSpec(*stored)] * len(matrices)),
    out_specs=jax.tree.map(lambda is_split: split if is_split else whole, split_out),
  )(rows, *matrices)


def split_axes(axis: str) -> tuple[str, ...]:
  """Return the mesh axes that split a logical axis inside `on_each_device`.

  An axis without a rule (`patch`, `classes`) is stored whole, and split for products only. Mesh
  axes of size 1 are left out, but for the first one if all are, along which the batch is split too.
  """
  axes = mesh_axes(axis) or mesh_axes('param_tokens')
  return _larger(axes) or axes[:1]


def is_split(axis: str) -> bool:
  """Return whether the current trace runs on one of several devices that split a logical axis."""
  mesh = jax.sharding.get_abstract_mesh()
  return bool(mesh.manual_axes) and math.prod(mesh.shape[name] for name in split_axes(axis)) > 1


def total(x: Any, axis: str) -> Any:
  """Sum arrays over the devices that split a logical axis."""
  return jax.lax.psum(x, split_axes(axis))


def largest(x: Any, axis: str) -> Any:
  """Return the maximum of arrays over the devices that split a logical axis."""
  return jax.lax.pmax(x, split_axes(axis))


def varying(x: jax.Array, axis: str) -> jax.Array:
  """Mark an array as a copy per device, so that its gradient is summed over devices."""
  return jax.lax.pcast(x, split_axes(axis), to='varying')


def varying_over_rows(x: jax.Array, axes: Axes) -> jax.Array:
  """Mark a device's shard of an array as a copy for its rows, to sum its gradient once."""
  split = {name for axis in axes for name in mesh_axes(axis)}
  rows = (*mesh_axes('batch'), *mesh_axes('slots'))
  others = tuple(name for name in _larger(rows) if name not in split)
  return jax.lax.pcast(x, others, to='varying')


def vary_together(*arrays: jax.Array) -> list[jax.Array]:
  """Mark arrays as copies per device along every mesh axis that one of them varies along."""
  varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
  missing = [tuple(frozenset().union(*varying) - own) for own in varying]
  return [
    jax.lax.pcast(x, axes, to='varying') if axes else x
    for x, axes in zip(arrays, missing, strict=True)
  ]


def split_spec(axes: Axes) -> PartitionSpec:
  """Return the partition of an array, for functions on each device.

  It leaves out mesh axes of size 1: no sum runs along them, so values must not count as varying.
  """
  return PartitionSpec(*[_larger(mesh_axes(axis)) or None for axis in axes])


def _larger(names: tuple[str, ...]) -> tuple[str, ...]:
  """Return the mesh axes among these that have more than one device."""
  sizes = jax.sharding.get_abstract_mesh().shape
  return tuple(name for name in names if sizes.get(name, 1) > 1)


def first_index(axis: str, size: int) -> jax.Array:
  """Return the start of this device's shard of a logical axis, if each shard has `size` entries."""
  names = split_axes(axis)
  # For a tuple of one axis JAX would add operations: multiply the index by 1 and add it to 0.
  return size * jax.lax.axis_index(names[0] if len(names) == 1 else names)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather(shard: jax.Array, axis: str, position: int, dtype: Any = None) -> jax.Array:
  """Gather an array along the logical axis at a position, on each device.

  Values are rounded to `dtype` for the transfer; None keeps their dtype. The backward pass sums the
  gradient and scatters it, in the dtype of the array.
  """
  sent = shard.astype(dtype or shard.dtype)
  return jax.lax.all_gather(sent, split_axes(axis), axis=position, tiled=True).astype(shard.dtype)


def _gather_forward(
  shard: jax.Array, axis: str, position: int, dtype: Any
) -> tuple[jax.Array, None]:
  return gather(shard, axis, position, dtype), None


def _gather_backward(
  axis: str, position: int, dtype: Any, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
  del dtype
  gradient = _scatter(jnp.moveaxis(gradient, position, 0), axis)
  return (jnp.moveaxis(gradient, 0, position),)


gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scatter(x: jax.Array, axis: str) -> jax.Array:
  """Sum arrays over devices, and return to each device its shard of the first axis, `axis`.

  The backward pass gathers the gradient along that axis.
  """
  return _scatter(x, axis)


def _scatter_forward(x: jax.Array, axis: str) -> tuple[jax.Array, None]:
  return scatter(x, axis), None


def _scatter_backward(axis: str, _: None, gradient: jax.Array) -> tuple[jax.Array]:
  return (jax.lax.all_gather(gradient, split_axes(axis), tiled=True),)


scatter.defvjp(_scatter_forward, _scatter_backward)


def _scatter(x: jax.Array, axis: str) -> jax.Array:
  """Sum arrays over devices, and return to each device its shard of the first axis.

  On TPUs the sum runs in two steps: over groups of devices a stride apart, then over groups of
  neighbours. The split axis is contiguous in memory. XLA compiles any other reduce-scatter over 16
  or 64 devices as an all-reduce. A layout constraint makes gradients of weights contiguous, because
  XLA may choose another layout for one of them. Over 4 devices that split heads one step is right:
  XLA keeps a single reduce-scatter if the split axis is an axis of its own, and turns two steps
  into all-reduces.
  """
  along = split_axes(axis)
  if platform() != 'tpu':
    return jax.lax.psum_scatter(x.reshape(shard_count(axis), -1, *x.shape[1:]), along)
  for name in along:
    x = _scatter_along(x, axis, name)
  return x


def _scatter_along(x: jax.Array, axis: str, name: str) -> jax.Array:
  """Apply `_scatter` on TPUs along one of the mesh axes of a logical axis."""
  devices = jax.sharding.get_abstract_mesh().shape[name]
  inner = max(d for d in range(1, math.isqrt(devices) + 1) if devices % d == 0)
  if inner == 1 or (axis != 'width' and devices < _TWO_STEPS):
    return jax.lax.psum_scatter(x.reshape(devices, -1, *x.shape[1:]), (name,))
  if axis == 'width':
    x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
  numbers = np.arange(devices).reshape(-1, inner)
  for members in (numbers.T, numbers):
    x = jax.lax.psum_scatter(x, (name,), axis_index_groups=members.tolist(), tiled=True)
  return x


def exchange(x: jax.Array, axis: str) -> jax.Array:
  """Send part i of the first axis to device i of those that split a logical axis.

  Part i of the result comes from device i. The backward pass is the same.
  """
  return jax.lax.all_to_all(x, split_axes(axis), 0, 0)
