r"""Windows beside full attention, gated units, and linear attention.

  python train.py --config=configs/lm_hybrid.py               # small
  python train.py --config=configs/lm_hybrid.py:hwfa2

  small           HWFA: windows with rotary positions, then one layer of full attention without
                  positions, with a factor for longer texts (Su 2023, kexue.fm/archives/9603)
  hwfa2           wider windows, and full attention with rotary positions in the middle; longer
                  texts need --clip_positions (kexue.fm/archives/9731)
  local_full      the layers of `small` with rotary positions everywhere
  gau             gated units as in GAU-alpha, two for each attention and feed-forward part
  linear          linear attention with rotary positions
  gau_24x768, hwfa_24x768, hwfa2_24x768
                  GAU-alpha, and HWFA and HWFA2 with its layers, in the sizes of these articles

All but `gau` and the large ones have parameter tokens. The first five train on the text of the
Python standard library, 500 steps. Measured on two cores of an AMD EPYC (2.6 GHz) that other
programs shared, seed 0, with the text prepared before: CPU time and time, compilation included;
bits per byte of a fifth of the held-out text at the end; and the loss of the first 32,768 held-out
tokens in windows of 128 tokens, as in training, of 2048, and of 2048 with --clip_positions=64:

  variant     parameters   CPU   time  bits/byte    128   2048  clipped
  small        1,835,264  91 s   2:56      2.008  4.480  4.475        -
  hwfa2        1,835,264  98 s   3:51      2.006  4.475  4.458    4.457
  local_full   1,835,264  94 s   5:36      2.008  4.483  4.466    4.473
  gau          1,541,632  110 s  4:05      2.007  4.468  4.573    4.476
  linear       1,835,264  104 s  4:27      2.051  4.564  6.402        -

Such short runs learn little from distant tokens: one layer of full attention with rotary positions
loses nothing yet in longer windows.

The large ones need the files of lm_pile.py. Not run with this code yet. Batch, steps and rate
differ from the articles, which train on other text, with LAMB.

  variant         parameters
  gau_24x768     125,933,568
  hwfa_24x768    125,933,568
  hwfa2_24x768   125,933,568
"""

from tokenformer_jax import config
from tokenformer_jax.errors import UserError

SMALL = ('small', 'hwfa2', 'local_full', 'gau', 'linear')
LARGE = ('gau_24x768', 'hwfa_24x768', 'hwfa2_24x768')
VARIANTS = SMALL + LARGE


def get_config(variant='small'):
  if variant not in VARIANTS:
    raise UserError(f'config variant is {variant!r}; it must be one of {", ".join(VARIANTS)}')
  c = config.defaults()
  if variant in LARGE:
    set_gated_units(c, width=768, inside=1536, head=128, layers=24, length=512)
    set_large(c)
  elif variant == 'gau':
    set_gated_units(c, width=128, inside=256, head=64, layers=12, length=128)
    set_small(c)
  else:
    set_tokens(c, width=128, heads=4)
    set_small(c)
  set_layers(c, variant)
  return c


def set_layers(c, variant):
  """Set the layers that attend in a window, and those that attend to everything.

  The windows of HWFA reach over at most 3/4 of a training text, (w − 1)(L − 1) + 1 ≤ 0.75 N; the
  windows of HWFA2 are 2 to 4 times N / L wide.
  """
  scale = {'kind': 'position'}  # a factor of 1 in texts as long as in training
  rotary, full = {'length_scale': scale}, {'length_scale': scale, 'positions': {'kind': 'none'}}
  match variant:
    case 'small':
      windows, c.model.pattern = 20, 'local*5 full'
    case 'hwfa2':
      windows, full, c.model.pattern = 48, rotary, 'local*3 full local*2'
    case 'local_full':
      windows, full, c.model.pattern = 20, {}, '(local*5 full)*1'
    case 'hwfa_24x768':
      windows, c.model.pattern = 16, 'local*23 full'
    case 'hwfa2_24x768':
      windows, full, c.model.pattern = 64, rotary, 'local*11 full local*12'
    case 'linear':
      c.model.layer.mixer.kind, c.model.pattern = 'linear', 'layer*6'
      return
    case _:
      return
  local = {'window': windows, 'length_scale': {'kind': 'none'}}
  c.model.variants = {'local': {'mixer': local}, 'full': {'mixer': full}}


def set_tokens(c, width, heads):
  """Set layers of parameter tokens."""
  c.model.width = width
  mixer = c.model.layer.mixer
  mixer.heads = heads
  mixer.positions.fraction = 1.0
  mixer.qkv.tokens = mixer.proj.tokens = width
  c.model.layer.ffn.tokens = 4 * width
  c.model.init.std = 0.1
  c.optim.learning_rate = 4e-3


def set_gated_units(c, width, inside, head, layers, length):
  """Set layers as in GAU-alpha: gated units alone, two for each attention and feed-forward part."""
  c.model.width = width
  c.model.pattern = f'layer*{layers}'
  c.model.layer.mixer = {
    'kind': 'gated_unit',
    'width': inside,
    'head_width': head,
    'positions': {'fraction': 1.0, 'layout': 'interleaved'},
    'length_scale': {'kind': 'seen', 'base': float(length)},
    'uvq': {'kind': 'dense'},
    'out': {'kind': 'dense'},
  }
  c.model.layer.ffn = {'kind': 'none'}
  c.model.layer.wiring.kind = 'post_norm'
  c.model.layer.norm = c.model.embedding_norm = 'rms_plain'
  c.model.final_norm = 'none'
  c.model.norm_epsilon = 1e-7
  # As in GAU-alpha: (input width)^(−1/2) · layers^(−1/3).
  c.model.init.std = width**-0.5 * layers ** (-1 / 3)
  c.model.init.output_std = inside**-0.5 * layers ** (-1 / 3)
  c.optim.learning_rate = 3e-3


def set_small(c):
  """Set a run of about two minutes on two cores, on the text of the Python standard library."""
  c.data.source = 'stdlib'
  c.data.tokenizer = 'bpe:2048'
  c.data.sequence_length = 128
  c.data.batch_size = 8
  c.optim.warmup_steps = 50
  c.train.steps = 500
  c.train.log_every = 25
  c.train.eval_every = 250
  c.train.eval_batches = 28
  c.train.checkpoint_every = 250
  c.train.sample_tokens = 0


def set_large(c):
  """Set a run on the Pile, with texts as long as the articles'."""
  c.model.vocab_size = 50304
  c.data.source = 'files:data/pile/train/*.jsonl.zst'
  c.data.tokenizer = 'data/gpt-neox-20b/tokenizer.json'
  c.data.sequence_length = 512
  c.data.batch_size = 256
  c.data.validation_fraction = 0.001
  c.optim.learning_rate = 3e-4
  c.optim.warmup_steps = 2000
  c.train.steps = 200_000
  c.train.log_every = 20
  c.train.eval_every = 1000
  c.train.eval_batches = 64
  c.train.checkpoint_every = 1000
