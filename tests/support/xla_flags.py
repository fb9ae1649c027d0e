"""Flags of XLA for the tests and the processes that they start."""

from importlib.metadata import version

# The tests spend their time in compiling, which takes half as long so: without optimisation, and
# in one piece, because each piece has a price and the workers keep the cores busy. Later versions
# of XLA have no other way to fuse, and do not take the last.
COMPILE_FAST = (
  '--xla_backend_optimization_level=0',
  '--xla_cpu_parallel_codegen_split_count=1',
  *['--xla_cpu_use_fusion_emitters=false'] * version('jaxlib').startswith('0.10.'),
)


def join_flags(devices: int) -> str:
  """Return the value of `XLA_FLAGS` for a process with so many fake CPU devices."""
  return ' '.join([f'--xla_force_host_platform_device_count={devices}', *COMPILE_FAST])
