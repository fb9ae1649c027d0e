r"""Simplified Transformer Blocks as a vision transformer, on scikit-learn's handwritten digits.

  python train.py --config=configs/vit_simplified.py                 # SAS-P
  python train.py --config=configs/vit_simplified.py:sas,tokens      # with parameter tokens

The variant is BLOCK, or BLOCK,tokens, as in lm_simplified.py. Data, sizes and steps are those of
vit_digits.py.
"""

import runpy
from pathlib import Path

# A config file is loaded by its path, from any directory, so it must find its neighbours by path.
_HERE = Path(__file__)
_DIGITS = runpy.run_path(str(_HERE.with_name('vit_digits.py')))
_SIMPLIFIED = runpy.run_path(str(_HERE.with_name('lm_simplified.py')))


def get_config(variant='sas_p'):
  _, block, has_tokens = _SIMPLIFIED['parse'](f'small,{variant}')
  c = _DIGITS['get_config']()
  _SIMPLIFIED['set_blocks'](c, 4, 384, block, has_tokens)
  c.optim.learning_rate = 1e-3
  return c
