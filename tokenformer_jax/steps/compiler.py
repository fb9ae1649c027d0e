"""XLA options for compiling the steps, by type of device.

The options for TPUs were chosen with the planner, on programs compiled for v5e, v5p, v6e and TPU7x
(docs/planned_speed.md).
"""

from jax.sharding import Mesh

from tokenformer_jax.parallel.sharding import lookup_kind

_TPU = {
  # Gather weights that are split over 64 or more chips, in parallel with other work. Without these
  # options the compiler uses an all-reduce of the whole matrix, which moves twice the bytes.
  'xla_enable_async_all_gather': 'true',
  'xla_tpu_prefer_async_allgather_to_allreduce': 'true',
  'xla_tpu_enable_async_collective_fusion': 'true',
  'xla_tpu_enable_async_collective_fusion_fuse_all_gather': 'true',
  'xla_tpu_enable_async_collective_fusion_multiple_steps': 'true',
  # Keep products with weights in thin shards whole. In a loop over the shards the matrix unit would
  # mostly wait.
  'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000',
}

# The limit on a core's vector memory (VMEM) for one operation, in KiB. Within the compiler's own
# limit, products are cut into smaller blocks, which read more, and a step takes a tenth longer. The
# values are common in training on these chips. Compilation takes up to three times as long. A v4
# has far less vector memory, so it keeps the compiler's limit.
_VMEM = 'xla_tpu_scoped_vmem_limit_kib'

# Scatter gradients on the sparse cores, while the other cores go on. Without this option, which
# MaxText sets as well, a v6e waits for every reduce-scatter. A TPU7x does not.
_SPARSE_CORES = {'xla_tpu_enable_sparse_core_collective_offload_reduce_scatter': 'true'}

_SETS = {  # by the start of `device_kind`
  'TPU': _TPU,
  'TPU v5': {**_TPU, _VMEM: '50000'},  # v5e and v5p
  'TPU v6': {**_TPU, **_SPARSE_CORES, _VMEM: '98304'},
  'TPU7x': {**_TPU, _VMEM: '61440'},
}


# With this option, runs of one program return the same bits. CPUs and TPUs need no option for that.
# On a GPU the sums of a scatter, some products and cuDNN's attention backward have no fixed order,
# and autotuning may choose another algorithm for a product at every start.
_DETERMINISTIC_GPU: dict[str, str | bool] = {'xla_gpu_deterministic_ops': True}


def options(name: str, mesh: Mesh) -> dict[str, str | bool]:
  """Return the options for the training step.

  `name` is `config.train.compiler_options`: `auto`, the set for the mesh's devices;
  `deterministic`, the same set with bit-exact repetition on a GPU; or `none`.
  """
  fastest = lookup_kind(_SETS, mesh.devices.flat[0].device_kind) or {}
  return {} if name == 'none' else {**fastest, **eval_options(name, mesh)}


def eval_options(name: str, mesh: Mesh) -> dict[str, str | bool]:
  """Return the options for the evaluation step; for the arguments see `options`."""
  repeats = name == 'deterministic' and mesh.devices.flat[0].platform == 'gpu'
  return _DETERMINISTIC_GPU if repeats else {}
