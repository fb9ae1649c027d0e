r"""A small TokenFormer ViT on scikit-learn's handwritten digits. No download.

  python train.py --config=configs/vit_digits.py

Needs `pip install -e ".[images]"` for scikit-learn, which has the 1,797 images of 8 × 8 pixels;
359 of them are held out. They are resized to 16 × 16, so the sequence has 16 patches of 4 × 4.

Two CPU cores (Xeon, 2.5 GHz): 1:47 minutes, 106 seconds of CPU time.
Reached: 98.9 % top-1 on the held-out images, the median of seeds 0 to 4 (98.6 to 98.9 %).
"""

from tokenformer_jax import config


def get_config():
  c = config.defaults(model='vit', data='images')
  c.model.pattern = 'layer*4'
  c.model.width = 96
  mixer = c.model.layer.mixer
  mixer.heads = 4
  mixer.positions.kind = 'none'
  mixer.qkv.tokens = mixer.proj.tokens = 96
  c.model.layer.ffn.tokens = 384
  c.model.position_embedding = 'sincos'
  c.model.patch = 4
  c.model.init.std = 0.1
  c.data.source = 'digits'
  c.data.image_size = 16
  c.data.batch_size = 64
  c.data.crop_area = 0.75
  c.optim.learning_rate = 2e-3
  c.optim.warmup_steps = 50
  c.optim.schedule.final_fraction = 0.0
  c.train.steps = 800
  c.train.log_every = 20
  c.train.eval_every = 200
  c.train.checkpoint_every = 400
  return c
