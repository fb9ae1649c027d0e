"""Options of XLA that the steps are compiled with, by the kind of device.

Those of TPUs were found with the planner, on programs compiled for v5e, v5p, v6e and TPU7x
(docs/pods.md).
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


# Runs of one program give the same bits. A CPU and a TPU do that without any option. On a GPU the
# sums of a scatter, some products and cuDNN's attention backward have no fixed order, and a product
# may get another algorithm at every start, because the fastest in a measurement is taken.
_DETERMINISTIC_GPU = {'xla_gpu_deterministic_ops': True}


def options(name: str, mesh: Mesh) -> dict[str, str | bool]:
  """Return the options for the training step.

  Args:
    name: `config.train.compiler_options`: `auto`, the set of the mesh's devices; `deterministic`,
      the same and what makes a GPU repeat its bits; or `none`.
    mesh: of the program.
  """
  fastest = of_kind(_SETS, mesh.devices.flat[0]) or {}
  return {} if name == 'none' else {**fastest, **eval_options(name, mesh)}


def eval_options(name: str, mesh: Mesh) -> dict[str, str | bool]:
  """Return the options for the evaluation step; for the arguments see `options`."""
  repeats = name == 'deterministic' and mesh.devices.flat[0].platform == 'gpu'
  return _DETERMINISTIC_GPU if repeats else {}
