"""Compile for GPUs without one, and count the kernels of a program.

XLA's compiler for GPUs is a plugin of JAX. In the environment of ordinary use it would look for a
GPU in every program that uses JAX, so it is in a folder of its own, which only a process that
compiles for GPUs adds to its path. Without a device nothing is tuned: products are cuBLASLt's.
"""

import collections
import importlib
import os
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from tokenformer_jax.config import MeshConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import sharding
from tokenformer_jax.plan import layout_dump, trip_counts
from tokenformer_jax.plan.chips import CHIPS, Chip
from tokenformer_jax.plan.hlo import Instruction, parse
from tokenformer_jax.plan.kept_schedules import user_cache
from tokenformer_jax.steps import fit

FOLDER = 'GPU_COMPILER'  # the environment variable that names the compiler's folder
OPTIONS: dict[str, str | bool] = {
  'xla_gpu_autotune_level': '0',
  'xla_gpu_enable_triton_gemm': False,
}
_JAX_SHARE = 0.75  # of a GPU's memory, which JAX takes unless a variable says another share
_CUDNN = 91000  # the version of cuDNN to compile for, 9.10.0
# The module of JAX that asks the installed cuDNN for its version while attention is traced, and the
# function that does so.
CUDNN_MODULE, CUDNN_VERSION = 'jax._src.cudnn.fused_attention_stablehlo', 'check_cudnn_version'
_FREE = (
  *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'domain'),
  *('while', 'conditional', 'call', 'opt-barrier', 'partition-id', 'replica-id'),
)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRITON = '"kind":"__triton"'  # of a fusion that XLA writes with Triton

# What the compiler asks a device for. Hopper and Blackwell have the same limits.
_LIMITS = """
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 registers_per_core_limit: 65536 registers_per_block_limit: 65536
"""
_CAPABILITY = {'h100': 9, 'h200': 9, 'b200': 10}
_SECOND_CACHE = {'h100': 50 * 2**20, 'h200': 50 * 2**20, 'b200': 126 * 2**20}  # bytes


def folder() -> Path:
  """Return the folder of the compiler for GPUs: $GPU_COMPILER, or one in the user's cache."""
  named = os.environ.get(FOLDER) or user_cache() / f'gpu_compiler-{metadata.version("jaxlib")}'
  return Path(named).expanduser()


def command() -> str:
  """Return the command that brings the compiler."""
  version = metadata.version('jaxlib')
  return (
    f'pip install --no-deps --target {folder()} jax-cuda13-plugin=={version} '
    f'jax-cuda13-pjrt=={version} nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-nvrtc'
  )


def check_compiler() -> None:
  """Check that the compiler is there.

  Raises:
    UserError: it is missing; the sentence has the command that brings it.
  """
  if not (folder() / 'jax_plugins').is_dir():
    raise UserError(
      f'planning for GPUs needs their compiler, 545 MB in a folder of its own: {command()}'
    )


def devices(chip: Chip, count: int) -> list[Any]:
  """Return GPUs of one host to compile for, in a process in which JAX has not yet computed.

  The process keeps the compiler on its path.
  """
  check_compiler()
  # At the end of the path: nothing but the compiler comes from there.
  sys.path.append(str(folder()))
  os.environ['PATH'] += f'{os.pathsep}{folder() / "nvidia/cu13/bin"}'
  os.environ['CUDA_VISIBLE_DEVICES'] = '-1'
  setattr(importlib.import_module(CUDNN_MODULE), CUDNN_VERSION, lambda: _CUDNN)
  jax.devices()  # JAX looks for its plugins, the compiler among them.
  return list(
    topologies.get_topology_desc(
      platform='cuda', target_config=_target(chip), topology=f'1x1x{count}'
    ).devices
  )


def _target(chip: Chip) -> str:
  """Return the properties of a GPU as the compiler reads them, a `GpuTargetConfigProto`."""
  return (
    f'gpu_device_info {{ {_LIMITS} core_count: {chip.cores} fpus_per_core: {chip.lanes} '
    f'clock_rate_ghz: {chip.clock / 1e9} memory_bandwidth: {chip.hbm_rate:.0f} '
    f'device_memory_size: {chip.hbm:.0f} l2_cache_size: {_SECOND_CACHE[chip.name]} '
    f'cuda_compute_capability {{ major: {_CAPABILITY[chip.name]} }} }} platform_name: "CUDA" '
    'dnn_version_info { major: 9 minor: 10 } runtime_version { major: 13 minor: 0 patch: 0 } '
    f'device_description_str: "{chip.kind}"'
  )


def usable_share() -> float:
  """Return the share of a GPU's memory that JAX gives to a step, as in `fit.free_bytes`."""
  names = 'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'
  return fit.USABLE * float(next(filter(None, map(os.environ.get, names)), _JAX_SHARE))


def compile_text(lower: Callable[..., jax.stages.Lowered], *arguments: Any, on: str) -> str:
  """Return the text of the program that `lower(mesh, *arguments)` lowers, compiled for a GPU.

  A process of its own compiles, so `lower` must be a function of a module, and `arguments` must be
  such as can be pickled. `on` is a GPU of `chips.py`.
  """
  check_compiler()
  return layout_dump.run_alone(_compile_text, lower, arguments, CHIPS[on])


def _compile_text(lower: Callable[..., jax.stages.Lowered], arguments: Any, chip: Chip) -> str:
  mesh = sharding.make_mesh(MeshConfig(), devices(chip, 1))
  with jax.set_mesh(mesh):
    lowered = lower(mesh, *arguments)
  return lowered.compile(compiler_options=OPTIONS).as_text() or ''


def kernel_kind(instruction: Instruction) -> str:
  """Return what computes an instruction, or '' for nothing.

  It is `product`, `attention`, `triton` for a kernel that XLA writes with Triton, or an opcode.
  """
  target = _TARGET.search(instruction.attributes)
  if instruction.opcode in _FREE or instruction.opcode.endswith('-done'):
    return ''
  if not target:
    by_triton = instruction.opcode == 'fusion' and _TRITON in instruction.attributes
    return 'triton' if by_triton else instruction.opcode.removesuffix('-start')
  if target[1].startswith('__cublas'):
    return 'product'
  return 'attention' if target[1].startswith('__cudnn') else target[1]


def count_kernels(text: str) -> collections.Counter[str]:
  """Return how many kernels of each kind a program runs, as often as its loops do.

  A loop whose length is not known counts once. Copies to the host are kernels here.
  """
  counts: collections.Counter[str] = collections.Counter()
  for v in trip_counts.visit(parse(text)):
    if v.inside is None and (kind := kernel_kind(v.instruction)):
      counts[kind] += v.times
  return counts
