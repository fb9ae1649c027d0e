r"""DeepSeekMoE: many small experts, several for each token, beside shared experts for all tokens.

  python train.py --config=configs/lm_deepseekmoe.py          # tiny
  python train.py --config=configs/lm_deepseekmoe.py:16b

  tiny    three layers of width 128, two of them with 16 experts, 3 a token, and a shared one
  2b      the validation model of the article (Dai et al. 2024, arXiv 2401.06066, section 4.1): 63
          experts, 7 a token, and a shared one, in all 9 layers
  16b     the released model: 64 experts, 6 a token, and two shared ones as one MLP, in 27 of 28
          layers; the first layer is dense

`tiny` trains on the text of the Python standard library, 300 steps: 59 s of one core's time of a
shared EPYC, which took 3:47 minutes, compilation included; 2.335 bits per byte of a fifth of the
held-out text at the end (loss 5.110), seed 0.

The large ones are meant for 64 TPU chips of 95 GB (v5p). `16b` fits there with batches in nine
parts. Devices gather the experts, because sending tokens costs more (docs/planned_speed.md):
--config.mesh.experts=8 --config.model.layer.ffn.dispatch.device_factor=1.25. `2b` needs the files
of lm_pile.py, and trains a tokenizer of 8192 entries on them; `16b` needs data/deepseek/*.jsonl.zst
and a tokenizer of at most 102,400 entries, data/deepseek/tokenizer.json. Not run with this code
yet. Sizes, batch, steps and peak rates are the article's. Its rate drops to 0.316 of the peak at
80 % of the steps and to 0.1 at 90 %; here it falls to 0.1 in a line over the last 20 %. For `2b`
the article gives the entries of an expert, 2 · 1280², but not its form; here it is an MLP with
GELU, 1280 wide.

  variant      parameters  used by a token
  tiny          2,006,912        1,128,320
  2b        1,968,140,800      316,633,600
  16b      16,375,728,128    2,828,650,496
"""

import runpy
from pathlib import Path

from tokenformer_jax import config
from tokenformer_jax.errors import UserError

VARIANTS = ('tiny', '2b', '16b')
# A config file is loaded by its path, from any directory, so it must find its neighbour by path.
_SWITCH = runpy.run_path(str(Path(__file__).with_name('lm_switch.py')))


def get_config(variant='tiny'):
  if variant not in VARIANTS:
    raise UserError(f'config variant is {variant!r}; it must be one of {", ".join(VARIANTS)}')
  c = config.defaults()
  match variant:
    case 'tiny':
      set_model(c, width=128, heads=4, dense=344, experts=2, alpha=0.01)
      set_experts(c, count=16, top_k=3, width=88, shared=1, gated=True)
      _SWITCH['set_tiny'](c, rate=3e-3)
    case '2b':
      set_model(c, width=1280, heads=10, dense=0, experts=9, alpha=0.01)
      set_experts(c, count=63, top_k=7, width=1280, shared=1, gated=False)
      set_large(c, vocabulary=8192, length=2048, batch=2048, steps=25_000, rate=1.08e-3)
      c.data.source = 'files:data/pile/train/*.jsonl.zst'
      c.data.tokenizer = 'bpe:8192'
    case '16b':
      set_model(c, width=2048, heads=16, dense=10_944, experts=27, alpha=0.001)
      set_experts(c, count=64, top_k=6, width=1408, shared=2, gated=True)
      set_large(c, vocabulary=102_400, length=4096, batch=4608, steps=106_449, rate=4.2e-4)
      c.optim.accumulation_steps = 9
      c.data.source = 'files:data/deepseek/*.jsonl.zst'
      c.data.tokenizer = 'data/deepseek/tokenizer.json'
  return c


def set_model(c, width, heads, dense, experts, alpha):
  """Set layers with experts, after one with a gated MLP of width `dense` unless that is 0."""
  c.model.width = width
  c.model.pattern = f'dense layer*{experts}' if dense else f'layer*{experts}'
  c.model.tied_head = False
  layer = c.model.layer
  layer.norm = c.model.final_norm = 'rms'
  c.model.norm_epsilon = 1e-6
  layer.mixer.heads = heads
  layer.mixer.positions.fraction = 1.0
  layer.mixer.qkv = layer.mixer.proj = {'kind': 'dense'}
  balance = {'kind': 'loss', 'weight': alpha, 'over': 'sequence'}
  layer.ffn = {'kind': 'experts', 'balance': balance}
  if dense:
    mlp = {'kind': 'mlp', 'width': dense, 'activation': 'silu', 'gated': True}
    c.model.variants = {'dense': {'ffn': mlp}}


def set_experts(c, count, top_k, width, shared, gated):
  """Set routed experts that drop no token, and the shared ones as one MLP."""
  ffn = c.model.layer.ffn
  form = {'activation': 'silu', 'gated': True} if gated else {}
  ffn.count, ffn.router = count, {'top_k': top_k}
  ffn.expert = {'kind': 'mlp', 'width': width, **form}
  ffn.shared = {'kind': 'mlp', 'width': shared * width, **form}
  ffn.dispatch = {'kind': 'grouped'}


def set_large(c, vocabulary, length, batch, steps, rate):
  """Set a run as in the article."""
  c.model.vocab_size = vocabulary
  c.model.init.std = c.model.init.output_std = 0.006
  c.data.sequence_length = length
  c.data.batch_size = batch
  c.data.validation_fraction = 0.001
  c.optim.learning_rate = rate
  c.optim.warmup_steps = 2000
  c.optim.schedule = {'kind': 'wsd', 'decay_share': 0.2}
  c.train.steps = steps
  c.train.log_every = 20
  c.train.eval_every = 1000
  c.train.eval_batches = 16
  c.train.checkpoint_every = 1000
  c.train.loss_chunk = 512
