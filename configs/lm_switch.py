r"""Switch Transformers as causal language models: every other layer has experts, one per token.

  python train.py --config=configs/lm_switch.py               # tiny
  python train.py --config=configs/lm_switch.py:base

  tiny    four layers of width 128, two of them with 8 experts
  base    the shape of Switch-Base (Fedus et al. 2021, arXiv 2101.03961): width 768, 12 heads of 64,
          12 layers, 6 of them with 128 experts of width 3072; ReLU, RMSNorm, a capacity of 1.25 in
          training and 2.0 in evaluation, Adafactor

`tiny` trains on the text of the Python standard library, 300 steps: 43 s of one core's time of a
shared EPYC, which took 2:11 minutes, compilation included; 2.374 bits per byte of a fifth of the
held-out text at the end (loss 5.196), seed 0.

`base` needs the files of lm_pile.py and is meant for 64 TPU chips of 32 GB or more; each eight of
them share the experts (mesh.experts). Not run with this code yet. The article's model is T5, and
fills gaps in C4; here it is causal, with rotary positions, the embedding as its head, and a rate
that follows a cosine.

  variant     parameters  used by a token
  tiny         2,886,784        1,051,776
  base     3,719,744,256      124,177,152
"""

from tokenformer_jax import config
from tokenformer_jax.errors import UserError

VARIANTS = ('tiny', 'base')


def get_config(variant='tiny'):
  if variant not in VARIANTS:
    raise UserError(f'config variant is {variant!r}; it must be one of {", ".join(VARIANTS)}')
  c = config.defaults()
  if variant == 'base':
    set_model(c, width=768, heads=12, pairs=6, count=128)
    set_base(c)
  else:
    set_model(c, width=128, heads=4, pairs=2, count=8)
    set_tiny(c, rate=3e-3)
  return c


def set_model(c, width, heads, pairs, count):
  """Set pairs of a layer with an MLP and a layer with experts, MLPs of the same size."""
  c.model.width = width
  c.model.pattern = f'(layer switch)*{pairs}'
  layer = c.model.layer
  layer.norm = c.model.final_norm = 'rms'
  c.model.norm_epsilon = 1e-6
  layer.mixer.heads = heads
  layer.mixer.positions.fraction = 1.0
  layer.mixer.qkv = layer.mixer.proj = {'kind': 'dense'}
  mlp = {'kind': 'mlp', 'width': 4 * width, 'activation': 'relu'}
  layer.ffn = mlp
  experts = {
    'kind': 'experts',
    'count': count,
    'expert': mlp,
    'balance': {'kind': 'loss', 'weight': 0.01},
    'dispatch': {'kind': 'capacity', 'factor': 1.25, 'eval_factor': 2.0},
  }
  c.model.variants = {'switch': {'ffn': experts}}


def set_tiny(c, rate):
  """Set a short run on the text of the Python standard library."""
  c.data.source = 'stdlib'
  c.data.tokenizer = 'bpe:2048'
  c.data.sequence_length = 128
  c.data.batch_size = 8
  c.optim.learning_rate = rate
  c.optim.warmup_steps = 30
  c.train.steps = 300
  c.train.log_every = 25
  c.train.eval_every = 0
  c.train.eval_batches = 28
  c.train.checkpoint_every = 300
  c.train.sample_tokens = 0


def set_base(c):
  """Set a run of 2²⁰ tokens a batch on the Pile."""
  c.model.vocab_size = 50304
  # A tenth of the usual variance 1 / (inputs of a matrix) for all but the embedding.
  c.model.init.std = (0.1 / 768) ** 0.5
  c.model.init.output_std = (0.1 / 3072) ** 0.5
  c.model.init.embedding_std = 1.0
  c.model.scaled_logits = True
  c.data.source = 'files:data/pile/train/*.jsonl.zst'
  c.data.tokenizer = 'data/gpt-neox-20b/tokenizer.json'
  c.data.sequence_length = 512
  c.data.batch_size = 2048
  c.data.validation_fraction = 0.001
  c.mesh.experts = 8
  c.optim.kind = 'adafactor'
  c.optim.learning_rate = 1e-3
  c.optim.warmup_steps = 10_000
  c.optim.z_loss = 1e-4
  c.train.steps = 550_000
  c.train.log_every = 20
  c.train.eval_every = 1000
  c.train.eval_batches = 64
  c.train.checkpoint_every = 1000
