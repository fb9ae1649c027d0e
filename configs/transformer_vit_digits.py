r"""The usual vision transformer instead of the TokenFormer of vit_digits.py.

  python train.py --config=configs/transformer_vit_digits.py

Its blocks have as many matrix entries. Everything else is as in vit_digits.py: the same hardware,
and about the same time.
"""

import runpy
from pathlib import Path

# A config file is loaded by its path, from any directory, so it must find its neighbour by path.
_TOKENFORMER = runpy.run_path(str(Path(__file__).with_name('vit_digits.py')))


def get_config():
  c = _TOKENFORMER['get_config']()
  layer, mixer = c.model.layer, c.model.layer.mixer
  # Keep the matrix entries of a block: 2 D (3 qkv + proj + ffn) there, 4 D² + 2 D F here.
  tokens = 3 * mixer.qkv.tokens + mixer.proj.tokens + layer.ffn.tokens
  mixer.qkv = mixer.proj = {'kind': 'dense'}
  layer.ffn = {'kind': 'mlp', 'width': tokens - 2 * c.model.width}
  return c
