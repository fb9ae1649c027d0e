"""A model of 41,024 parameters on bytes of the Python standard library: it soon pays to grow it.

  tokenformer train --config=lm_bytes

The rate stays constant, so that the run can go on, end or grow at any step (README.md). A core
takes less than a minute.
"""

from tokenformer_jax import config


def get_config():
  c = config.defaults()
  c.model.pattern = 'layer*2'
  c.model.width = 32
  mixer = c.model.layer.mixer
  mixer.heads = 4
  mixer.positions.fraction = 1.0
  mixer.qkv.tokens = mixer.proj.tokens = 32
  c.model.layer.ffn.tokens = 128
  c.model.init.std = 0.1
  c.model.init.output_std = 0.044  # a quarter of the default's
  c.data.source = 'stdlib'
  c.data.tokenizer = 'bytes'
  c.data.sequence_length = 64
  c.data.batch_size = 8
  c.optim.schedule.kind = 'constant'
  c.optim.learning_rate = 4e-3
  c.optim.warmup_steps = 50
  c.train.steps = 1500
  c.train.log_every = 250
  c.train.eval_every = 500
  c.train.eval_batches = 64
  c.train.checkpoint_every = 500
  c.train.sample_tokens = 0
  return c
