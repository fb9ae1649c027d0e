r"""The dense twin of lm_stdlib.py: matrices in the place of parameter tokens, as many parameters.

  python train.py --config=configs/transformer_stdlib.py

Everything else, and so the hardware and about the time, is as in lm_stdlib.py.
"""

import runpy
from pathlib import Path

# A config file is loaded by its path, from any directory; so it finds its neighbour by path, too.
_TOKENFORMER = runpy.run_path(str(Path(__file__).with_name('lm_stdlib.py')))


def get_config():
  c = _TOKENFORMER['get_config']()
  c.model.projection = 'dense'
  # As many matrix entries: a block has 2 D (3 qkv + proj + ffn) of them there, 4 D² + 2 D F here.
  counts = c.model.param_tokens
  c.model.ffn_width = 3 * counts.qkv + counts.proj + counts.ffn - 2 * c.model.width
  return c
