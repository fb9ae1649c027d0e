"""Where every array lives: the mesh, the one table of sharding rules, and shardings of any pytree.

Mesh axes: `replica` (copies of the model, between slices), `fsdp` (parameters and optimizer state
split by width, and the batch), `tokens` (parameter tokens, heads and vocabulary).
"""

from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tokenformer_jax.config import MeshConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.params import Axes, Params, is_axes

MESH_AXES = ('replica', 'fsdp', 'tokens')

# Logical axis → mesh axis or axes. None: not split.
RULES = {
  'batch': ('replica', 'fsdp'),
  'width': 'fsdp',
  'param_tokens': 'tokens',  # the axis that grows
  'heads': 'tokens',
  'hidden': 'tokens',  # of the Transformer baseline's feed-forward layer
  'vocab': 'tokens',
  'layers': None,
  'position': None,
  'patch': None,
  'classes': None,
  'norm': None,
}


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
  """The mesh `replica × fsdp × tokens` over all devices, or over those given.

  TPUs of several slices, which are linked by the data centre's network, are different replicas.

  Raises:
    UserError: the sizes do not multiply to the number of devices, or slices would have to share a
      replica.
  """
  devices = jax.devices() if devices is None else devices
  sizes = mesh_sizes(config, len(devices))
  # Other devices have slices, too: one for each host. They are linked as their mesh says.
  # A TPU that a program is only compiled for, in one slice, has no number of it.
  slices = len({getattr(d, 'slice_index', 0) if d.platform == 'tpu' else 0 for d in devices})
  types = (AxisType.Auto,) * len(sizes)
  if slices == 1:
    # `jax.make_mesh` does the same, but knows no mesh of 4 × 64 on 16 × 16 chips of most kinds.
    grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, types)
  replica, *within = sizes
  if replica % slices:
    raise UserError(
      f'config.mesh.replica is {replica}, and the devices are in {slices} slices; it must be a '
      'multiple of that, because only replicas may be in different slices'
    )
  grid = mesh_utils.create_hybrid_device_mesh(
    (replica // slices, *within), (slices, 1, 1), devices, allow_split_physical_axes=True
  )
  return Mesh(grid, MESH_AXES, types)


def mesh_sizes(config: MeshConfig, devices: int) -> tuple[int, int, int]:
  """The sizes of the mesh's axes over so many devices, the −1 filled in.

  Raises:
    UserError: they do not multiply to that number.
  """
  sizes = [config.replica, config.fsdp, config.tokens]
  named = ', '.join(f'{axis}={size}' for axis, size in zip(MESH_AXES, sizes, strict=True))
  if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
    raise UserError(
      f'config.mesh has {named}; sizes are positive, and at most one is -1 (the rest)'
    )
  known = int(np.prod([size for size in sizes if size != -1]))
  if -1 in sizes and devices % known == 0:
    sizes[sizes.index(-1)] = devices // known
  if int(np.prod(sizes)) != devices:
    raise UserError(
      f'config.mesh has {named}, and the product of these sizes must be the number of devices, '
      f'{devices}'
    )
  return tuple(sizes)


def spec(axes: Axes | tuple[str | None, ...]) -> PartitionSpec:
  """The partition of an array with these logical axes."""
  return PartitionSpec(*[None if axis is None else RULES[axis] for axis in axes])


def of_axes(mesh: Mesh, axes: Params) -> Params:
  """Shardings of a tree of logical axes, such as `Definition.axes`."""
  return jax.tree.map(lambda a: NamedSharding(mesh, spec(a)), axes, is_leaf=is_axes)


def replicated(mesh: Mesh) -> NamedSharding:
  """The sharding of an array that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def of_batch(mesh: Mesh) -> NamedSharding:
  """The sharding of a batch [B, …]."""
  return NamedSharding(mesh, spec(('batch',)))


def of_optimizer_state(
  mesh: Mesh, tx: optax.GradientTransformation, abstract_params: Params, axes: Params
) -> Any:
  """Shardings of the state of `tx`: what belongs to a parameter lives where the parameter does."""
  return optax.tree.map_params(
    tx,
    lambda _, sharding: sharding,
    jax.eval_shape(tx.init, abstract_params),
    of_axes(mesh, axes),
    transform_non_params=lambda _: replicated(mesh),
  )


def with_shardings(abstract: Any, shardings: Any) -> Any:
  """Shapes and dtypes of `abstract` with shardings, as restoring a checkpoint needs them."""
  return jax.tree.map(
    lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings
  )


def with_even_shardings(abstract: Any, shardings: Any) -> Any:
  """Like `with_shardings`, but an axis that its mesh axes do not divide is not split."""

  def placed(array: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
    parts = []
    for size, axes in zip(array.shape, place.spec, strict=False):
      names = () if axes is None else (axes,) if isinstance(axes, str) else axes
      divides = size % int(np.prod([place.mesh.shape[name] for name in names])) == 0
      parts.append(axes if divides else None)
    even = NamedSharding(place.mesh, PartitionSpec(*parts))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=even)

  return jax.tree.map(placed, abstract, shardings)


def platform() -> str:
  """What a program that is traced here is for: `cpu`, `gpu` or `tpu`.

  That of the mesh that is set, whose devices may be elsewhere, or else that of this process.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device is not None else jax.default_backend()


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
  """Fixes the partition of an activation, if a mesh is set (`jax.set_mesh`).

  Inside `jax.shard_map` there is nothing to fix.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.manual_axes:
    return x
  return jax.lax.with_sharding_constraint(x, spec(axes))


def check_divides(mesh: Mesh, abstract: Params, axes: Params) -> None:
  """Checks that every parameter can be split evenly over the mesh.

  Raises:
    UserError: an axis is not a multiple of the mesh axes that it is split over.
  """
  paths = jax.tree_util.tree_flatten_with_path(abstract)[0]
  for (path, leaf), names in zip(paths, jax.tree.leaves(axes, is_leaf=is_axes), strict=True):
    for size, name in zip(leaf.shape, names, strict=True):
      check_divisible(mesh, name, size, f'of parameter {"/".join(key.key for key in path)}')


def check_divisible(mesh: Mesh, name: str, size: int, of_what: str) -> None:
  """Checks that a logical axis of this size can be split evenly over the mesh."""
  mesh_axes = RULES[name] or ()
  mesh_axes = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes
  parts = int(np.prod([mesh.shape[axis] for axis in mesh_axes]))
  if size % parts:
    raise UserError(
      f'the axis {name!r} {of_what} has the size {size}, which is not a multiple of '
      f'{" × ".join(mesh_axes)} = {parts} of the mesh; change that size or config.mesh'
    )
