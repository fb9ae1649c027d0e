"""Train TokenFormer models and grow them without changing what they compute.

  run = tokenformer_jax.load('runs/lm_stdlib')         a run: DIR, or DIR@STEP
  run.generate('def main(')                            text
  run.grow('runs/grown', {'ffn': 1536}).train(1500)    a larger model, trained on
  tokenformer_jax.train('vit_digits', 'runs/digits')   a new run from a config
  tokenformer_jax.bring('llama', 'runs/llama')         a run from a folder of transformers
  tokenformer_jax.plan('lm_pile:1_5b', 'v5p:4x4x4')    what a run needs on TPUs
  tokenformer_jax.config.defaults()                    every key of a config

`help(tokenformer_jax.Run)` has the rest. Importing the package imports nothing else; each of these
names is imported at its first use. JAX then leaves out libtpu where that is there for plans alone.
"""

import glob
import importlib.util
import os
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from tokenformer_jax import config, plan
  from tokenformer_jax.api.run import Run, bring, load, train
  from tokenformer_jax.errors import UserError

_FROM = {
  'Run': 'api.run',
  'UserError': 'errors',
  'bring': 'api.run',
  'load': 'api.run',
  'train': 'api.run',
}
_MODULES = ('config', 'plan')  # `plan` can be called: see tokenformer_jax/plan/__init__.py

__version__ = '0.1.0'  # pyproject.toml reads it here

__all__ = ['Run', 'UserError', 'bring', 'config', 'load', 'plan', 'train']


def __getattr__(name: str) -> Any:
  if name in _FROM:
    return getattr(importlib.import_module(f'{__name__}.{_FROM[name]}'), name)
  if name in _MODULES:
    return importlib.import_module(f'{__name__}.{name}')
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})


def _leave_out_tpu() -> None:
  """Keep JAX from starting libtpu on a machine without accelerators, where it would print errors.

  The package may be installed for the planner alone. A platform that the user names is kept.
  """
  jax = sys.modules.get('jax')
  named = jax.config.jax_platforms if jax else os.environ.get('JAX_PLATFORMS')
  if named or importlib.util.find_spec('libtpu') is None:
    return
  # A container may hide the PCI bus, so check device files. With another plugin, such as that of
  # GPUs, leave the choice to JAX.
  files = ('accel*', 'vfio/[0-9]*', 'nvidia[0-9]*', 'dxg')
  if any(glob.glob(f'/dev/{file}') for file in files) or metadata.entry_points(group='jax_plugins'):
    return
  if jax:
    jax.config.update('jax_platforms', 'cpu')
  else:
    os.environ['JAX_PLATFORMS'] = 'cpu'


_leave_out_tpu()
