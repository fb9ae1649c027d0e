r"""TokenFormer language models on the Pile: 300 billion tokens, as in the paper (Table 1).

  python train.py --config=configs/lm_pile.py:150m

Needs data/pile/train/*.jsonl.zst (a document a line, under `text`) and the tokenizer of
GPT-NeoX-20B, data/gpt-neox-20b/tokenizer.json. Meant for 64 TPU chips of 32 GB or more (v4, v5p,
v6e). The batch is for all chips together; with fewer chips, raise
--config.optim.accumulation_steps. By default the step saves what fits the memory
(docs/planned_speed.md).

Not run to the end with this code yet. The perplexities are the paper's, on the Pile, from training
on GPUs. The times are an estimate: the run's model FLOPs at 40 % MFU on 64 chips of v5p.

  variant     parameters  layers  width  model FLOPs  time  perplexity in the paper
  150m       151,881,216      12    768       3.1e20   7 h                    10.45
  450m       454,166,528      24   1024       9.1e20  22 h                     8.28
  900m       903,252,480      32   1280       1.8e21  42 h                     7.38
  1_5b     1,587,219,456      40   1536       3.1e21  73 h                     6.91
"""

from tokenformer_jax import config
from tokenformer_jax.errors import UserError

VARIANTS = {  # layers, width, heads
  '150m': (12, 768, 12),
  '450m': (24, 1024, 16),
  '900m': (32, 1280, 16),
  '1_5b': (40, 1536, 16),
}


def get_config(variant='150m'):
  if variant not in VARIANTS:
    raise UserError(f'config variant is {variant!r}; it must be one of {", ".join(VARIANTS)}')
  c = config.defaults()

  layers, width, heads = VARIANTS[variant]
  c.model.pattern, c.model.width = f'layer*{layers}', width
  c.model.vocab_size = 50304  # 50277 of GPT-NeoX-20B's tokenizer, rounded up
  mixer = c.model.layer.mixer
  mixer.heads = heads
  mixer.qkv.tokens = mixer.proj.tokens = width
  c.model.layer.ffn.tokens = 4 * width

  c.data.source = 'files:data/pile/train/*.jsonl.zst'
  c.data.tokenizer = 'data/gpt-neox-20b/tokenizer.json'
  c.data.sequence_length = 2048
  c.data.batch_size = 1024
  c.data.validation_fraction = 0.001  # about 0.3 billion tokens

  c.optim.learning_rate = 6e-4
  c.optim.warmup_steps = 1430  # 1 %

  c.train.steps = 143_000
  c.train.log_every = 20
  c.train.eval_every = 1000
  c.train.eval_batches = 16  # 33.6 million tokens
  c.train.checkpoint_every = 1000
  c.train.loss_chunk = 512
  return c
