r"""TokenFormer vision transformers on ImageNet-1k, from scratch, as in the paper (Table 2).

  python train.py --config=configs/vit_imagenet.py:b16

The recipe is that of He et al. 2021 (arXiv 2111.06377, Table 11) for ViTs trained from scratch,
which the paper names: AdamW, a base rate of 1e-4 for each 256 images of a batch, weight decay 0.3,
20 of 300 epochs (200 for l16) of warm-up, RandAugment(9, 0.5), mixup, cutmix, label smoothing,
stochastic depth, and an average of the parameters that is evaluated beside them. Positions are
fixed, and the mean over the patches goes to the head. ti16 and s16 use the recipe of b16.

Needs imagenet2012 as TensorFlow Datasets prepares it, in array_record files, below $TFDS_DATA_DIR:
`tfds build imagenet2012 --file_format=array_record` after downloading the two archives by hand.
Meant for 64 TPU chips (v4, v5p, v6e); the batch is for all chips together.

Not run to the end with this code yet. The accuracies are the paper's. The times are an estimate:
the run's model FLOPs at 40 % MFU on 64 chips of v5p. The tokens are those of qkv and proj; ffn has
four times as many. b16_576 and l16_768 have about as many parameters as the usual ViT. The paper
gives 86, 109, 307 and 407 million for the last four. The first number agrees. With the paper's
widths and numbers of tokens (Table 9) the blocks of the others alone have 113.2, 302.0 and 402.7
million.

  variant   parameters  layers  width  tokens  model FLOPs    time  top-1 in the paper
  ti16       7,418,920      12    192     192       3.7e18   5 min                   –
  s16       28,992,616      12    384     384       1.4e19  19 min                   –
  b16_576   86,295,784      12    768     576       4.0e19  57 min              82.1 %
  b16      114,607,336      12    768     768       5.3e19   1.3 h              82.5 %
  l16_768  303,804,392      24   1024     768       9.4e19   2.2 h              83.0 %
  l16      404,467,688      24   1024    1024       1.2e20   2.9 h              83.1 %
"""

from tokenformer_jax import config
from tokenformer_jax.errors import UserError

VARIANTS = {  # layers, width, heads, tokens of qkv and proj (those of ffn are four times as many)
  'ti16': (12, 192, 3, 192),
  's16': (12, 384, 6, 384),
  'b16_576': (12, 768, 12, 576),
  'b16': (12, 768, 12, 768),
  'l16_768': (24, 1024, 16, 768),
  'l16': (24, 1024, 16, 1024),
}


def get_config(variant='b16'):
  if variant not in VARIANTS:
    raise UserError(f'config variant is {variant!r}; it must be one of {", ".join(VARIANTS)}')
  c = config.defaults(model='vit', data='images')
  large = variant.startswith('l')

  layers, width, heads, tokens = VARIANTS[variant]
  c.model.pattern, c.model.width = f'layer*{layers}', width
  mixer = c.model.layer.mixer
  mixer.heads = heads
  mixer.positions.kind = 'none'
  mixer.qkv.tokens = mixer.proj.tokens = tokens
  c.model.layer.ffn.tokens = 4 * tokens
  c.model.position_embedding = 'sincos'
  c.model.drop_path = 0.2 if large else 0.1

  c.data.source = 'tfds:imagenet2012'
  c.data.image_size = 224
  c.data.batch_size = 4096
  c.data.workers = 64  # processes of each host
  c.data.prefetch = 64
  c.data.crop_area = 0.08
  c.data.flip = True
  c.data.rand_augment = 9.0
  c.data.eval_crop = 0.875
  c.data.mixup = 0.8
  c.data.cutmix = 1.0
  c.data.label_smoothing = 0.1

  # The rate follows the batch, which a flag may change.
  c.optim.learning_rate = c.data.get_ref('batch_size').to_float() * (1e-4 / 256)
  c.optim.warmup_epochs = 20.0
  c.optim.schedule.final_fraction = 0.0
  c.optim.weight_decay = 0.3
  c.optim.clip_norm = 0.0

  c.train.epochs = 200.0 if large else 300.0
  c.train.ema = 0.9999
  c.train.log_every = 50
  c.train.eval_every = 1565  # about five epochs
  c.train.checkpoint_every = 1565
  return c
