"""A small TokenFormer ViT on handwritten digits."""

from tokenformer_jax import config


def get_config():
  c = config.defaults()
  c.model.kind = 'vit'
  c.model.layers = 4
  c.model.width = 96
  c.model.heads = 4
  c.model.param_tokens = {'qkv': 96, 'proj': 96, 'ffn': 384}
  c.model.positions = 'sincos'
  c.model.patch = 4
  c.model.tied_head = False
  c.model.init_std = 0.1
  c.data.source = 'digits'
  c.data.image_size = 16
  c.data.batch_size = 64
  c.data.crop_area = 0.75
  c.optim.learning_rate = 2e-3
  c.optim.warmup_steps = 50
  c.optim.final_fraction = 0.0
  c.train.steps = 800
  c.train.log_every = 20
  c.train.eval_every = 200
  c.train.checkpoint_every = 400
  return c
