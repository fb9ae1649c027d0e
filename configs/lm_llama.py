r"""Transformers in the sizes of Llama 3: to train on from a converted run, or from scratch.

  python -m tokenformer_jax convert to-jax --source=llama3_8b --target=runs/llama3_8b
  python train.py --config=configs/lm_llama.py:8b --config.init_from=runs/llama3_8b

Needs data/pile/train/*.jsonl.zst (a document a line, under `text`) and the model's tokenizer,
data/llama-3/tokenizer.json. Meant for 64 chips of v5p or 256 of v6e. The batch is for all chips
together; with fewer chips, raise --config.optim.accumulation_steps.

Not run to the end with this code yet. The times are an estimate: the run's model FLOPs at 40 % MFU
on 64 chips of v5p.

  variant      parameters  layers  width  model FLOPs    time
  8b        8,030,261,248      32   4096       5.2e21   122 h
  70b      70,553,706,496      80   8192       4.6e22  1080 h
"""

from tokenformer_jax import config
from tokenformer_jax.errors import UserError

VARIANTS = {  # layers, width, heads, hidden width
  '8b': (32, 4096, 32, 14336),
  '70b': (80, 8192, 64, 28672),
}


def get_config(variant='8b'):
  if variant not in VARIANTS:
    raise UserError(f'config variant is {variant!r}; it must be one of {", ".join(VARIANTS)}')
  c = config.defaults()

  layers, width, heads, hidden = VARIANTS[variant]
  c.model.pattern, c.model.width = f'layer*{layers}', width
  c.model.vocab_size, c.model.max_length = 128256, 8192
  c.model.tied_head, c.model.norm_epsilon, c.model.final_norm = False, 1e-5, 'rms'
  layer = c.model.layer
  layer.norm = 'rms'
  layer.mixer.heads, layer.mixer.kv_heads = heads, 8
  layer.mixer.qkv = layer.mixer.proj = {'kind': 'dense'}
  layer.mixer.positions = {'kind': 'rotary', 'base': 5e5, 'fraction': 1.0}
  layer.ffn = {'kind': 'mlp', 'width': hidden, 'activation': 'silu', 'gated': True}

  c.data.source = 'files:data/pile/train/*.jsonl.zst'
  c.data.tokenizer = 'data/llama-3/tokenizer.json'
  c.data.sequence_length = 8192
  c.data.batch_size = 512  # 4.2 million tokens
  c.data.validation_fraction = 0.001

  c.optim.learning_rate = 3e-4
  c.optim.warmup_steps = 2000

  c.train.steps = 24_000  # 100 billion tokens
  c.train.log_every = 20
  c.train.eval_every = 1000
  c.train.eval_batches = 4
  c.train.checkpoint_every = 1000
  c.train.loss_chunk = 512
  return c
