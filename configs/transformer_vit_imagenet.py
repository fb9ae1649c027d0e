r"""The usual vision transformers on ImageNet-1k: vit_imagenet.py with dense projections.

  python train.py --config=configs/transformer_vit_imagenet.py:b16

Layers, widths, heads, data, hardware and recipe are those of vit_imagenet.py. As usual, projections
have biases and norms are affine. The times are an estimate, as in vit_imagenet.py. The accuracies
are those of the ViTs with this recipe in the paper's comparison (Table 2).

  variant   parameters  layers  width  model FLOPs    time  top-1 in the paper
  ti16       5,679,400      12    192       2.9e18   4 min                   –
  s16       21,974,632      12    384       1.1e19  15 min                   –
  b16       86,415,592      12    768       4.0e19  57 min              82.3 %
  l16      304,123,880      24   1024       9.4e19   2.2 h              82.6 %
"""

import runpy
from pathlib import Path

from tokenformer_jax.errors import UserError

# A config file is loaded by its path, from any directory, so it must find its neighbour by path.
_TOKENFORMER = runpy.run_path(str(Path(__file__).with_name('vit_imagenet.py')))

VARIANTS = ('ti16', 's16', 'b16', 'l16')


def get_config(variant='b16'):
  if variant not in VARIANTS:
    raise UserError(f'config variant is {variant!r}; it must be one of {", ".join(VARIANTS)}')
  c = _TOKENFORMER['get_config'](variant)
  layer = c.model.layer
  layer.mixer.qkv = layer.mixer.proj = {'kind': 'dense', 'bias': True}
  layer.ffn = {'kind': 'mlp', 'bias': True}
  layer.norm = 'affine'
  return c
