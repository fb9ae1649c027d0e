"""Options of XLA that the training step is compiled with, by the kind of device.

Found with the planner, on programs compiled for v5e, v5p, v6e and TPU7x (docs/pods.md).
"""

from jax.sharding import Mesh

from tokenformer_jax.flops import of_kind

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

# KiB of the vector memory (VMEM) of a core that one operation may use. Within the compiler's own
# limits products are cut into smaller blocks, which read more, and a step takes a tenth longer. The
# values are common in training on these chips. The compiler takes up to three times as long. A v4
# has far less of that memory; there the compiler's limit stays.
_VMEM = 'xla_tpu_scoped_vmem_limit_kib'

_TPU = {**_GATHERS, **_WHOLE_PRODUCTS}
_SETS = {  # by the start of `device_kind`
  'TPU': _TPU,
  'TPU v5': {**_TPU, _VMEM: '50000'},  # v5e and v5p
  'TPU v6': {**_TPU, _VMEM: '98304'},
  'TPU7x': {**_TPU, _VMEM: '61440'},
}


def options(name: str, mesh: Mesh) -> dict[str, str]:
  """For `config.train.compiler_options`: `auto`, the set of the mesh's devices, or `none`."""
  return (of_kind(_SETS, mesh.devices.flat[0]) or {}) if name == 'auto' else {}
