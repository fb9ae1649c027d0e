r"""Transformer baselines on the Pile: the models of lm_pile.py with dense projections, like Pythia.

  python train.py --config=configs/transformer_pile.py:150m

Variants, layers, widths, heads, data, hardware and optimizer are those of lm_pile.py. As in
Pythia, projections have biases, norms are affine, the output head has its own matrix and a quarter
of each attention head is rotated. Unlike in Pythia, the two halves of a block follow each other.
150m and 450m have the sizes of Pythia-160M and 410M; Pythia-1B and 1.4B are wider than 900m and
1_5b, with fewer layers.

Not run to the end with this code yet. The perplexities are those of the nearest Pythia in the
TokenFormer paper (Table 1); Pythia was trained on GPUs. The times are an estimate: the run's model
FLOPs at 40 % MFU on 64 chips of v5p.

  variant     parameters  layers  width  model FLOPs  time  perplexity in the paper
  150m       162,322,944      12    768       2.6e20   6 h       29.64, Pythia-160M
  450m       405,334,016      24   1024       7.3e20  17 h        9.95, Pythia-410M
  900m       758,458,880      32   1280       1.4e21  33 h          7.82, Pythia-1B
  1_5b     1,287,797,760      40   1536       2.4e21  57 h        7.51, Pythia-1.3B
"""

import runpy
from pathlib import Path

# A config file is loaded by its path, from any directory, so it must find its neighbour by path.
_TOKENFORMER = runpy.run_path(str(Path(__file__).with_name('lm_pile.py')))


def get_config(variant='150m'):
  c = _TOKENFORMER['get_config'](variant)
  layer = c.model.layer
  layer.mixer.qkv = layer.mixer.proj = {'kind': 'dense', 'bias': True}
  layer.ffn = {'kind': 'mlp', 'bias': True}
  layer.norm = 'affine'
  c.model.tied_head = False
  return c
