r"""Fine-tune a trained ViT for other classes at a higher resolution.

  python train.py --config=configs/vit_finetune.py --config.init_from=runs/vit_imagenet_b16

Starts from the parameters of that run (DIR or DIR@STEP), with a new head for the classes of the new
data, new moments and the step 0. Sin-cos positions are computed for the new resolution; learned
positions are resampled. Lower blocks learn slower by `optim.layer_decay`. The model must be the
run's, by default vit_imagenet.py:b16; with larger counts of parameter tokens it also grows.

Needs cifar100 as TensorFlow Datasets prepares it in array_record files, or another
`--config.data.source`. Not run to the end with this code yet.
"""

import runpy
from pathlib import Path

# A config file is loaded by its path, from any directory, so it must find its neighbour by path.
_FROM_SCRATCH = runpy.run_path(str(Path(__file__).with_name('vit_imagenet.py')))


def get_config(variant='b16'):
  c = _FROM_SCRATCH['get_config'](variant)
  c.init_from = f'runs/vit_imagenet_{variant}'
  c.grow.step = 'restart'
  c.grow.moments = 'drop'
  c.data.source = 'tfds:cifar100'
  c.data.image_size = 384
  c.data.batch_size = 512
  c.data.crop_area = 0.3
  c.optim.learning_rate = c.data.get_ref('batch_size').to_float() * (5e-4 / 256)
  c.optim.warmup_epochs = 2.0
  c.optim.weight_decay = 0.05
  c.optim.layer_decay = 0.65
  c.train.epochs = 20.0
  c.train.ema = 0.0
  c.train.eval_every = 500
  c.train.checkpoint_every = 500
  return c
