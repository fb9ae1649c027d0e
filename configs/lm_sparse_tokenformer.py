r"""TokenFormers with parameter tokens as experts: shared tokens beside routed groups of tokens.

  python train.py --config=configs/lm_sparse_tokenformer.py   # tiny
  python train.py --config=configs/lm_sparse_tokenformer.py:124m_8x

  tiny      four layers of width 128: 256 shared tokens, and 16 groups of 64, two for each input
  124m_8x   lm_openwebtext.py:124m with 96 groups of 512 tokens beside its own 2304, four for each
            input: 8.3 times the parameters at 1.29 times the FLOPs

Each group has its own norm, so leaving it out does not change the others. A bias on the router's
choice keeps the load even, without a loss (Wang et al. 2024, arXiv 2408.15664).

`tiny` trains on the text of the Python standard library, 300 steps: 55 s of one core's time of a
shared EPYC, which took 6:56 minutes, compilation included; 2.204 bits per byte of a fifth of the
held-out text at the end (loss 4.824), seed 0.

`124m_8x` needs the files of lm_openwebtext.py, and is meant for 64 TPU chips of 32 GB or more. Not
run with this code yet. FLOPs are those of a training step for a token.

  variant     parameters  used by a token  FLOPs
  tiny         2,105,664        1,188,160  7.5e6
  124m_8x  1,030,425,216      162,204,288  1.0e9
"""

import runpy
from pathlib import Path

from tokenformer_jax import config
from tokenformer_jax.errors import UserError

VARIANTS = ('tiny', '124m_8x')
# A config file is loaded by its path, from any directory, so it must find its neighbours by path.
_BASE = runpy.run_path(str(Path(__file__).with_name('lm_openwebtext.py')))
_SWITCH = runpy.run_path(str(Path(__file__).with_name('lm_switch.py')))


def get_config(variant='tiny'):
  if variant not in VARIANTS:
    raise UserError(f'config variant is {variant!r}; it must be one of {", ".join(VARIANTS)}')
  if variant == '124m_8x':
    c = _BASE['get_config']('124m')
    set_experts(c, shared=2304, count=96, tokens=512, top_k=4, rate=1e-3)
    c.mesh.experts = 8
    return c
  c = config.defaults()
  set_tiny(c)
  set_experts(c, shared=256, count=16, tokens=64, top_k=2, rate=1e-2)
  return c


def set_experts(c, shared, count, tokens, top_k, rate):
  """Set a feed-forward part of shared and routed parameter tokens."""
  c.model.layer.ffn = {
    'kind': 'experts',
    'count': count,
    'expert': {'kind': 'pattention', 'tokens': tokens},
    'shared': {'kind': 'pattention', 'tokens': shared},
    'router': {'gates': 'sigmoid', 'top_k': top_k},
    'balance': {'kind': 'bias', 'rate': rate},
    'dispatch': {'kind': 'grouped'},
  }


def set_tiny(c):
  """Set a short run on the text of the Python standard library."""
  c.model.width = 128
  c.model.pattern = 'layer*4'
  mixer = c.model.layer.mixer
  mixer.heads = 4
  mixer.positions.fraction = 1.0
  mixer.qkv.tokens = mixer.proj.tokens = 128
  c.model.init.std = 0.1
  _SWITCH['set_tiny'](c, rate=4e-3)
