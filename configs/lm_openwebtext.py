r"""The growth family on OpenWebText: 12 layers of width 768 with more and more parameter tokens.

  python train.py --config=configs/lm_openwebtext.py:{124m,354m,757m,1_4b}

The models differ only in their parameter tokens, and keep the scale of the first. As in the paper,
each grows from the one before it: runs/lm_openwebtext_124m and so on, the default work directories
of these commands (--config.init_from=DIR names another). Growth is exact, keeps the optimizer's
moments and continues the count of steps, so each stage sees new text. With --config.init_from=
(empty) and --config.train.steps, a size trains from scratch.

Needs data/openwebtext/*.jsonl.zst (a document a line, under `text`) and the tokenizer of GPT-2,
data/gpt2/tokenizer.json. Meant for 64 TPU chips of 32 GB or more (v4, v5p, v6e). The batch is for
all chips together; with fewer chips, raise --config.optim.accumulation_steps.

Not run to the end with this code yet. The perplexities are the paper's (Section 4.1), on the
held-out 5 % of the documents, from training on TPU v4: 300 billion tokens for the first model,
30 billion for each stage. The times are an estimate: the run's model FLOPs at 40 % MFU on 64 chips
of v5p.

  variant     parameters  qkv, proj    ffn  model FLOPs  time  perplexity in the paper
  124m       123,569,664        576   2304       2.5e20   6 h                    16.41
  354m       354,190,848       2140   8560       6.9e19   2 h                    14.02
  757m       753,796,608       4850  19400       1.4e20   3 h                    12.59
  1_4b     1,309,705,728       8620  34480       2.5e20   6 h                    11.77

The counts are the paper's. Multiples of 128 fill the matrix unit of a TPU: 640, 2176, 4864 and
8704, four times that for ffn. Set them by flags such as --config.model.layer.mixer.qkv.tokens=2176;
other counts of the first model are the `reference` of every later one. The paper's released TPU
code trains without positions (--config.model.layer.mixer.positions.kind=none); here they are
rotary, as on the Pile.
"""

from tokenformer_jax import config
from tokenformer_jax.errors import UserError

# Parameter tokens of qkv and proj; ffn has four times as many.
VARIANTS = {'124m': 576, '354m': 2140, '757m': 4850, '1_4b': 8620}


def get_config(variant='124m'):
  if variant not in VARIANTS:
    raise UserError(f'config variant is {variant!r}; it must be one of {", ".join(VARIANTS)}')
  c = config.defaults()

  count = VARIANTS[variant]
  c.model.pattern, c.model.width = 'layer*12', 768
  c.model.vocab_size = 50304  # 50257 of GPT-2's tokenizer, rounded up
  mixer, ffn = c.model.layer.mixer, c.model.layer.ffn
  mixer.heads = 12
  mixer.qkv.tokens = mixer.proj.tokens = count
  ffn.tokens = 4 * count
  # The first model learns with the scale τ = √576 (√2304), so τ stays when tokens are added. With
  # τ = √count, growth would multiply all scores of the old tokens.
  first = VARIANTS['124m']
  mixer.qkv.reference = mixer.proj.reference = first
  ffn.reference = 4 * first

  c.data.source = 'files:data/openwebtext/*.jsonl.zst'
  c.data.tokenizer = 'data/gpt2/tokenizer.json'
  c.data.sequence_length = 1024
  c.data.batch_size = 512
  c.data.validation_fraction = 0.05

  c.optim.learning_rate = 6e-4
  c.optim.warmup_steps = 2000
  c.optim.schedule.final_fraction = 0.0

  # 600,000 steps, and 60,000 more for each stage.
  stage = list(VARIANTS).index(variant)
  c.train.steps = 600_000 + 60_000 * stage
  if stage:
    c.init_from = f'runs/lm_openwebtext_{list(VARIANTS)[stage - 1]}'
    c.grow.method.kind = 'zero_keys'  # one norm over all tokens, as in the paper
  c.train.log_every = 100
  c.train.eval_every = 2000
  c.train.eval_batches = 64  # 33.6 million tokens
  c.train.checkpoint_every = 2000
  c.train.loss_chunk = 512
  return c
