"""The one table of sharding rules: which mesh axes split a logical axis.

No other file names a mesh axis. Other files use logical axes: `shard_count` returns how many
shards an axis has, `sharding.constrain` fixes the sharding of an array, `per_device` exchanges
data. A new mesh axis needs a size in `config.MeshConfig` and a name in `RULES`.
"""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

Axes = tuple[str, ...]

# Logical axis → mesh axis or axes. None: not split.
RULES = {
  'batch': ('replica', 'fsdp', 'experts'),
  'slots': 'sequence',  # the positions of a row, where each is worked on alone
  'width': ('fsdp', 'experts', 'sequence'),
  'param_tokens': 'tokens',  # the axis that grows
  'heads': 'tokens',
  'hidden': 'tokens',  # the width inside an MLP or a gated attention unit
  # The same two where a device has all positions of a row, to let positions see each other.
  'row_heads': ('tokens', 'sequence'),
  'row_hidden': ('tokens', 'sequence'),
  'experts': 'experts',
  'expert_width': ('fsdp', 'sequence'),  # the width of the model in the arrays of experts
  'expert_hidden': 'tokens',  # the width inside an expert
  'routes': None,  # the outputs of a router: one for each expert
  'vocab': 'tokens',
  'layers': None,
  'position': None,
  'patch': None,
  'classes': None,
  'norm': None,
  'head_gains': None,
  'head_width': None,
}


def is_axes(node: Any) -> bool:
  """Return whether a node of a tree of axis names is a leaf, for `is_leaf` of `jax.tree.map`."""
  return isinstance(node, tuple)


def mesh_axes(axis: str) -> tuple[str, ...]:
  """Return the mesh axes over which the rules split a logical axis."""
  names = RULES[axis] or ()
  return (names,) if isinstance(names, str) else names


def shard_count(axis: str, mesh: Mesh | AbstractMesh | None = None) -> int:
  """Return in how many shards a mesh (default: the current one) splits a logical axis.

  A batch must have a multiple of `shard_count('batch')` rows. Without a mesh the result is 1.
  """
  sizes = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape
  return math.prod(sizes.get(name, 1) for name in mesh_axes(axis))


def replicas(mesh: Mesh | AbstractMesh) -> int:
  """Return how many devices of a mesh hold the same parameters with different rows."""
  of_width = mesh_axes('width')
  return math.prod(mesh.shape[name] for name in mesh_axes('batch') if name not in of_width)


def spec(axes: Axes | tuple[str | None, ...]) -> PartitionSpec:
  """Return the partition of an array with the given logical axes."""
  return PartitionSpec(*[None if axis is None else RULES[axis] for axis in axes])
