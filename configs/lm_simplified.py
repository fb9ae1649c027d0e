r"""Simplified Transformer Blocks: skipless blocks, without values and output projections.

  python train.py --config=configs/lm_simplified.py                    # small, SAS-P
  python train.py --config=configs/lm_simplified.py:small,sas,tokens   # parameter tokens: it grows
  python train.py --config=configs/lm_simplified.py:18x768,sas_p       # the paper's

The variant is SIZE, or SIZE,BLOCK, or SIZE,BLOCK,tokens. A block is one of

  sas, sas_p      the paper's: one part after the other, or side by side with a single norm
  sas_p_nonorm    sas_p with norms in the first layer only
  pre_ln          the Transformer's block; parallel: its two parts side by side
  v_skipinit      skipless with shaped attention and the usual values
  skipless        pre_ln without skips around attention, and without a replacement

`tokens` gives queries, keys and the feed-forward part parameter tokens (Pattention).

18x768 and 72x768 are those of He & Hofmann 2023 (arXiv 2311.01906) on Python code. They need
data/codeparrot/*.json.gz (a document a line, under `content`) and a tokenizer of 50,000 ids,
data/codeparrot/tokenizer.json. The paper's rate falls linearly; here it falls by a cosine. Not run
with this code yet: one GPU of 24 GB took 10 hours for 18x768 in the paper, to a loss of 1.16
(pre_ln) and 1.25 (sas_p_nonorm).

small: the text of the Python standard library; 12 layers; for two CPU cores. docs/architectures.md
compares all blocks in a smaller size.
"""

from tokenformer_jax import config
from tokenformer_jax.errors import UserError

BLOCKS = ('sas', 'sas_p', 'sas_p_nonorm', 'pre_ln', 'parallel', 'v_skipinit', 'skipless')
SIZES = {  # layers, width, heads, width inside the feed-forward part
  'small': (12, 128, 4, 512),
  '18x768': (18, 768, 12, 3072),
  '72x768': (72, 768, 12, 1536),
}


def get_config(variant='small'):
  size, block, has_tokens = parse(variant)
  c = config.defaults()
  layers, c.model.width, heads, hidden = SIZES[size]
  c.model.layer.mixer.heads = heads
  set_blocks(c, layers, hidden, block, has_tokens)
  c.model.position_embedding = 'learned'
  c.optim.learning_rate = 3e-4 if block == 'v_skipinit' else 1e-3
  c.optim.beta2 = 0.999
  if size == 'small':
    c.data.source = 'stdlib'
    c.data.tokenizer = 'bpe:2048'
    c.data.sequence_length = 128
    c.data.batch_size = 8
    c.optim.warmup_steps = 30
    c.train.steps = 600
    c.train.log_every = 20
    c.train.eval_every = 100
    c.train.eval_batches = 28
    c.train.checkpoint_every = 300
    return c
  c.model.vocab_size = 50_000
  c.data.source = 'files:data/codeparrot/*.json.gz'
  c.data.text_field = 'content'
  c.data.tokenizer = 'data/codeparrot/tokenizer.json'
  c.data.sequence_length = 128
  c.data.batch_size = 128
  c.optim.warmup_steps = 2150  # 5 %
  c.train.steps = 43_000
  c.train.log_every = 20
  c.train.eval_every = 1000
  c.train.eval_batches = 100
  c.train.checkpoint_every = 1000
  return c


def parse(variant):
  """Return the size, the block, and whether it has parameter tokens."""
  size, _, rest = variant.partition(',')
  block, _, tokens = rest.partition(',')
  block = block or 'sas_p'
  if size not in SIZES or block not in BLOCKS or tokens not in ('', 'tokens'):
    raise UserError(
      f'config variant is {variant!r}; it must be SIZE, SIZE,BLOCK or SIZE,BLOCK,tokens, with a '
      f'size of {", ".join(SIZES)} and a block of {", ".join(BLOCKS)}'
    )
  return size, block, tokens == 'tokens'


def set_blocks(c, layers, hidden, block, has_tokens):
  """Set the layers of a config; `hidden` is the width inside the feed-forward part."""
  layer, mixer, width = c.model.layer, c.model.layer.mixer, c.model.width
  simple = block.startswith('sas')
  layer.norm = 'none' if block == 'sas_p_nonorm' else 'rms'
  mixer.positions.kind = 'none'
  if has_tokens:
    mixer.qkv.tokens, layer.ffn.tokens = width, hidden
    dense = {'kind': 'pattention', 'tokens': width}
  else:
    mixer.qkv = {'kind': 'dense', 'bias': True}
    layer.ffn = {'kind': 'mlp', 'width': hidden, 'activation': 'relu'}
    dense = {'kind': 'dense'}
  mixer.proj = {'kind': 'none'} if simple else dense
  mixer.value = {'kind': 'none'} if simple else dense
  mixer.shaped = simple or block == 'v_skipinit'
  match block:
    case 'sas' | 'v_skipinit':
      layer.wiring.kind = 'skipless'
    case 'sas_p' | 'sas_p_nonorm':
      layer.wiring.kind = 'parallel'
    case 'skipless':
      layer.wiring = {'kind': 'skipless', 'gains': False}
    case 'parallel':
      layer.wiring = {'kind': 'parallel', 'gains': False, 'skip': True}
  c.model.init.output_std = c.model.init.std  # The gain of a branch replaces a small start.
  if block == 'v_skipinit':
    c.model.init.attention_kernels = 'orthogonal'
  c.model.pattern = f'layer*{layers}'
  if simple:  # The first layer alone has values.
    c.model.pattern = f'first layer*{layers - 1}'
    c.model.variants.first = {'mixer': {'value': dense, 'value_skip': True}}
    if layer.norm == 'none':
      c.model.variants.first.norm = 'affine'
