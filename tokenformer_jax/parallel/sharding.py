"""Devices, their mesh, and the shardings of arrays and of any pytree by the rules of `rules.py`.

The mesh axes: `replica` (copies of the model, one or more per slice), `fsdp` (splits the width of
parameters and optimizer state, and the batch), `experts` (splits experts, and for everything else
is a part of fsdp), `sequence` (splits the positions of rows, and the width as fsdp does), `tokens`
(splits parameter tokens, heads and vocabulary).
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tokenformer_jax.config import (
  CapacityConfig,
  Config,
  MeshConfig,
  ModelConfig,
  stages,
)
from tokenformer_jax.config.model import layer_path
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel.rules import is_axes, mesh_axes, shard_count, spec


def find_devices() -> list[Any]:
  """Return all devices."""
  try:
    return jax.devices()
  except RuntimeError as error:
    asked = os.environ.get('JAX_PLATFORMS', '')
    raise UserError(
      f'no device of the kind JAX_PLATFORMS={asked!r} was found ({str(error).splitlines()[0]}); '
      'unset it, or install jax for that device (pip install -e ".[tpu]" or ".[cuda]")'
    ) from error


def lookup_kind(table: Mapping[str, Any], kind: str) -> Any:
  """Look up a `device_kind` by the longest key that is a prefix of it; None if none is."""
  matches = [name for name in table if kind.startswith(name)]
  return table[max(matches, key=len)] if matches else None


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
  """Return a mesh over the given devices (default: all), with the axes of the config in order.

  Each slice of TPUs is its own replica: slices are linked by the data center's network only.
  """
  devices = jax.devices() if devices is None else devices
  sizes = mesh_sizes(config, len(devices))
  names, types = tuple(sizes), (AxisType.Auto,) * len(sizes)
  # Only slices of TPUs count: on other platforms each host is a slice, and any layout is allowed.
  # TPUs of a compile-only topology of one slice have no slice index.
  slices = len({getattr(d, 'slice_index', 0) if d.platform == 'tpu' else 0 for d in devices})
  if slices == 1:
    # `jax.make_mesh` does the same, but fails for a mesh of 4 × 64 on most 16 × 16 topologies.
    shape = tuple(sizes.values())
    grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, names, types)
  if sizes['replica'] % slices:
    raise UserError(
      f'config.mesh.replica is {sizes["replica"]}, and the devices are in {slices} slices; it must '
      f'be a multiple of {slices}, because each slice holds whole replicas'
    )
  outside = {name: slices if name == 'replica' else 1 for name in names}
  inside = [sizes[name] // outside[name] for name in names]
  grid = mesh_utils.create_hybrid_device_mesh(
    inside, list(outside.values()), devices, allow_split_physical_axes=True
  )
  return Mesh(grid, names, types)


def abstract_mesh(config: MeshConfig, devices: int) -> AbstractMesh:
  """Return the abstract mesh over a number of devices, without the devices themselves."""
  sizes = mesh_sizes(config, devices)
  return AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))


def mesh_sizes(config: MeshConfig, devices: int) -> dict[str, int]:
  """Return the size of each mesh axis over a number of devices, with the −1 filled in."""
  sizes = dataclasses.asdict(config)
  named = ', '.join(f'{axis}={size}' for axis, size in sizes.items())
  values = list(sizes.values())
  if values.count(-1) > 1 or any(size < 1 and size != -1 for size in values):
    raise UserError(
      f'config.mesh has {named}; sizes are positive, and at most one is -1 (the rest)'
    )
  known = math.prod(size for size in values if size != -1)
  if devices % known == 0:
    sizes = {axis: devices // known if size == -1 else size for axis, size in sizes.items()}
  if math.prod(sizes.values()) != devices:
    raise UserError(
      f'config.mesh has {named}, and the product of these sizes must be the number of devices, '
      f'{devices}'
    )
  return sizes


def with_token_shards(config: MeshConfig, devices: int, tokens: int) -> MeshConfig | None:
  """Return the mesh with another number of shards of tokens, the rest split over the width.

  Replicas, experts and sequence stay; None if the devices do not divide.
  """
  sizes = mesh_sizes(config, devices)
  fsdp, rest = divmod(sizes['fsdp'] * sizes['tokens'], tokens)
  return None if rest else dataclasses.replace(config, fsdp=fsdp, tokens=tokens)


def tree_shardings(mesh: Mesh | AbstractMesh, axes: Any) -> Any:
  """Return the shardings for a tree of logical axes, such as `Definition.axes`."""
  return jax.tree.map(lambda a: NamedSharding(mesh, spec(a)), axes, is_leaf=is_axes)


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
  """Return the sharding of an array that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
  """Return the sharding of a batch [B, …]."""
  return NamedSharding(mesh, spec(('batch',)))


def with_shardings(abstract: Any, shardings: Any) -> Any:
  """Return the shapes and dtypes of `abstract` with shardings, for restoring a checkpoint."""
  return jax.tree.map(
    lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings
  )


def with_even_shardings(abstract: Any, shardings: Any) -> Any:
  """Return the same as `with_shardings`, but do not split an axis that does not divide."""

  def even(array: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    split = []
    for size, axes in zip(array.shape, sharding.spec, strict=False):
      names = () if axes is None else (axes,) if isinstance(axes, str) else axes
      divides = size % math.prod(sharding.mesh.shape[name] for name in names) == 0
      split.append(axes if divides else None)
    divided = NamedSharding(sharding.mesh, PartitionSpec(*split))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=divided)

  return jax.tree.map(even, abstract, shardings)


def platform() -> str:
  """Return the platform that the current trace is compiled for: `cpu`, `gpu` or `tpu`.

  The platform is that of the current mesh, whose devices may be remote, else that of this process.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device is not None else jax.default_backend()


def on_one_shard() -> bool:
  """Return whether the current trace is inside `jax.shard_map`, where arrays are shards."""
  return bool(jax.sharding.get_abstract_mesh().manual_axes)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
  """Fix the sharding of an activation if a mesh is set (`jax.set_mesh`).

  Slots that do not divide, such as that of a single new token, are not split. Return the activation
  unchanged inside `jax.shard_map`, where every array is already one shard.
  """
  if jax.sharding.get_abstract_mesh().empty or on_one_shard():
    return x
  if 'slots' in axes and x.shape[axes.index('slots')] % shard_count('slots'):
    axes = tuple(None if axis == 'slots' else axis for axis in axes)
  return jax.lax.with_sharding_constraint(x, spec(axes))


def check_devices(config: Config, mesh: Mesh) -> None:
  """Check that the mesh can split heads and batch, and suits the attention kernel.

  `check_divides` checks the parameters.
  """
  kernel, found = config.train.attention, mesh.devices.flat[0].platform
  needed = {'splash': 'tpu', 'cudnn': 'gpu'}.get(kernel, found)
  if needed != found:
    raise UserError(
      f'config.train.attention={kernel} is for a {needed}, and the devices are {found}; '
      'auto takes the kernel of the devices'
    )
  check_splits(config, mesh)


def check_splits(config: Config, mesh: Mesh | AbstractMesh) -> None:
  """Check that heads and batch can be split over the mesh."""
  check_model(config.model, mesh, ' of config.model')
  data, steps, sizes = config.data, config.optim.accumulation_steps, stages(config.data)
  if shard_count('slots', mesh) > 1:
    for stage in sizes:
      length = stage.sequence_length
      check_divisible(mesh, 'slots', length, 'of a row of config.data.sequence_length tokens')
  key = 'batch_size_by_step' if data.batch_size_by_step else 'batch_size'
  for size in dict.fromkeys(stage.batch_size for stage in sizes):
    rows = f'of config.data.{key} / optim.accumulation_steps = {size}/{steps}'
    check_divisible(mesh, 'batch', size // steps, rows)
  if data.batch_size_by_step:
    check_divisible(mesh, 'batch', data.batch_size, 'of config.data.batch_size, for evaluations,')


def check_model(model: ModelConfig, mesh: Mesh | AbstractMesh, where: str = '') -> None:
  """Check that the heads of a model can be split over the mesh, and its rows if the mesh does so.

  `where` follows the name of a part in messages: ' of config.model'.
  """
  for heads in model.heads:
    check_divisible(mesh, 'heads', heads, f'heads of a layer{where}')
  if shard_count('slots', mesh) == 1:
    return
  (axis,) = mesh_axes('slots')
  whole = f'and config.mesh.{axis}={mesh.shape[axis]} splits rows; set it to 1, or'
  if model.kind != 'lm':
    raise UserError(
      f'a ViT{where} sees the positions of an image in one piece, {whole} take a language model'
    )
  for name, layer in model.layers.items():
    if isinstance(getattr(layer.ffn, 'dispatch', None), CapacityConfig):
      raise UserError(
        f'{layer_path(name)}.ffn.dispatch.kind=capacity counts the tokens of whole rows, {whole} '
        'take dispatch.kind=grouped'
      )


def check_divides(mesh: Mesh | AbstractMesh, abstract: Any, axes: Any) -> None:
  """Check that every parameter can be split evenly over the mesh."""
  paths = jax.tree_util.tree_flatten_with_path(abstract)[0]
  for (path, leaf), names in zip(paths, jax.tree.leaves(axes, is_leaf=is_axes), strict=True):
    for size, name in zip(leaf.shape, names, strict=True):
      check_divisible(mesh, name, size, f'of parameter {"/".join(key.key for key in path)}')


def check_divisible(mesh: Mesh | AbstractMesh, name: str, size: int, owner: str) -> None:
  """Check that the logical axis `name` of a size can be split evenly over the mesh.

  `owner` names the array in the message: 'of parameter NAME'.
  """
  if size % (count := shard_count(name, mesh)):
    split = [axis for axis in mesh_axes(name) if mesh.shape[axis] > 1]
    raise UserError(
      f'the axis {name!r} {owner} has the size {size}, which is not a multiple of '
      f'{" × ".join(split)} = {count} of the mesh; change that size or config.mesh'
    )
