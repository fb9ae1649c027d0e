r"""Transformer baselines on OpenWebText: blocks of GPT-2, 12 layers of four widths, from scratch.

  python train.py --config=configs/transformer_openwebtext.py:124m

Each has about as many parameters as its namesake in lm_openwebtext.py, and the data, hardware,
optimizer and 600,000 steps of the first model there. A Transformer grows by its width, so each
trains from scratch.

Not run to the end with this code yet. The perplexities are the paper's (Section 4.1), on the
held-out 5 % of the documents, from training on TPU v4 for 300 billion tokens. The times are an
estimate: the run's model FLOPs at 40 % MFU on 64 chips of v5p.

  variant     parameters  width  heads  model FLOPs  time  perplexity in the paper
  124m       124,475,904    768     12       2.5e20   6 h                    17.06
  354m       357,967,104   1408     22       7.1e20  17 h                    13.02
  757m       751,056,768   2112     33       1.5e21  35 h                    11.99
  1_4b     1,399,642,368   2944     46       2.7e21  64 h                    11.63
"""

import runpy
from pathlib import Path

from tokenformer_jax.errors import UserError

# A config file is loaded by its path, from any directory, so it must find its neighbour by path.
_TOKENFORMER = runpy.run_path(str(Path(__file__).with_name('lm_openwebtext.py')))

VARIANTS = {  # width; heads are 64 wide
  '124m': 768,
  '354m': 1408,
  '757m': 2112,
  '1_4b': 2944,
}


def get_config(variant='124m'):
  if variant not in VARIANTS:
    raise UserError(f'config variant is {variant!r}; it must be one of {", ".join(VARIANTS)}')
  c = _TOKENFORMER['get_config']('124m')  # All variants train from scratch.
  c.model.width = VARIANTS[variant]
  c.model.position_embedding = 'learned'
  layer = c.model.layer
  layer.mixer.heads = c.model.width // 64
  layer.mixer.positions.kind = 'none'
  layer.mixer.qkv = layer.mixer.proj = {'kind': 'dense', 'bias': True}
  layer.ffn = {'kind': 'mlp', 'bias': True, 'activation': 'gelu_tanh'}
  layer.norm = 'affine'
  return c
