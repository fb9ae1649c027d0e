"""Bring jax and the GPU or TPU of this machine together, in the first cells of a notebook."""

import glob
import importlib
import os
import subprocess
import sys
from importlib import metadata

from tokenformer_jax.errors import UserError

# Modules that a session may have loaded before pip replaced their packages.
_LOADED = {
  'flax': 'flax',
  'jax': 'jax',
  'jaxlib': 'jaxlib',
  'matplotlib': 'matplotlib',
  'numpy': 'numpy',
  'optax': 'optax',
  'PIL': 'pillow',
  'sklearn': 'scikit-learn',
}
_CUDA_13_DRIVER = 580  # the first driver for CUDA 13


def use_accelerator() -> str:
  """Install the jax of this machine's GPU or TPU, if it is missing, and check that jax uses it.

  `pip install tokenformer_jax` brings a jax for CPUs. On a hosted runtime it leaves an older plugin
  for GPUs beside the new jax, which ignores it. Without an accelerator, or with JAX_PLATFORMS=cpu,
  nothing is installed.

  Returns:
    The platform that jax computes on: `cpu`, `gpu` or `tpu`.

  Raises:
    UserError: pip cannot install this jax, the session must be restarted because it has loaded
      packages that pip has replaced, or jax does not see the accelerator.
  """
  cpu = os.getenv('JAX_PLATFORMS') == 'cpu'
  extra = '' if cpu else _find_extra()
  if extra:
    _install(f'jax[{extra}]=={metadata.version("jax")}')
  if replaced := _find_replaced():
    raise UserError(
      f'pip has replaced {", ".join(replaced)}, which this session has loaded; restart the session '
      '(Runtime → Restart session) and run the cells again'
    )
  import jax  # noqa: PLC0415 (its plugins are installed now)

  backend = jax.default_backend()
  if extra and backend == 'cpu':
    raise UserError(
      f'this machine has an accelerator that jax {metadata.version("jax")} with jax[{extra}] does '
      'not see; restart the session and run the cells again, or set JAX_PLATFORMS=cpu in '
      'os.environ to compute on the CPU'
    )
  return backend


def _find_extra() -> str:
  """Return the extra of jax for this machine's accelerator, or an empty string without one."""
  asked = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
  try:
    driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split('.')[0]
  except (OSError, subprocess.CalledProcessError):
    chips = glob.glob('/dev/accel[0-9]*') + glob.glob('/dev/vfio/[0-9]*')
    return 'tpu' if chips else ''
  # A runtime's own plugin is brought up to date: beside another one it would be left behind.
  old = _find_version('jax-cuda12-plugin') is not None
  return 'cuda12' if old or int(driver) < _CUDA_13_DRIVER else 'cuda13'


def _install(requirement: str) -> None:
  """Install a package by pip, which does nothing where it is there.

  Raises:
    UserError: pip fails.
  """
  pip = [sys.executable, '-m', 'pip', 'install', '--quiet', requirement]
  done = subprocess.run(pip, capture_output=True, text=True)
  if done.returncode:
    said = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in said if line.startswith('ERROR')] or said[-1:]
    raise UserError(f'pip install "{requirement}" failed: {" ".join(errors) or "no reason given"}')
  importlib.invalidate_caches()


def _find_replaced() -> list[str]:
  """Return the packages whose loaded version is not the installed one."""
  loaded = {_LOADED[name]: module for name, module in {**sys.modules}.items() if name in _LOADED}
  return sorted(
    package
    for package, module in loaded.items()
    if _find_version(package) not in (None, getattr(module, '__version__', None))
  )


def _find_version(package: str) -> str | None:
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return None
