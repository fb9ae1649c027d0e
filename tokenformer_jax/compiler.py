"""Options of XLA that the training step is compiled with, by the kind of device.

Found with the planner, on programs compiled for v5e, v5p and v6e (docs/pods.md).
"""

from jax.sharding import Mesh

# Weights that are split over all of 64 or more chips are gathered, beside other work. Without these
# the compiler writes an all-reduce of the whole matrix in its place: twice the bytes.
_GATHERS = {
  'xla_enable_async_all_gather': 'true',
  'xla_tpu_prefer_async_allgather_to_allreduce': 'true',
  'xla_tpu_enable_async_collective_fusion': 'true',
  'xla_tpu_enable_async_collective_fusion_fuse_all_gather': 'true',
  'xla_tpu_enable_async_collective_fusion_multiple_steps': 'true',
}
# Products with weights in thin shards stay whole, and are not a loop over the shards, in which the
# matrix unit would mostly wait.
_WHOLE_PRODUCTS = {'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'}

_SETS = {'tpu': {**_GATHERS, **_WHOLE_PRODUCTS}}


def options(name: str, mesh: Mesh) -> dict[str, str]:
  """For `config.train.compiler_options`: `auto`, the set of the mesh's devices, or `none`."""
  return _SETS.get(mesh.devices.flat[0].platform, {}) if name == 'auto' else {}
