"""The values that keys of a config allow, by themselves.

Knows nothing of the dataclasses: `config.resolve` calls `check`.
"""

import math
import operator
from typing import Any

from tokenformer_jax.errors import UserError

CHOICES = {
  'model.kind': ('lm', 'vit'),
  'model.projection': ('pattention', 'dense'),
  'model.score': ('l2_norm_gelu', 'gelu_l2_norm', 'gelu_l1_norm', 'softmax', 'exp_l2_norm'),
  'model.gelu': ('exact', 'tanh'),
  'model.block_norm': ('plain', 'bias', 'affine'),
  'model.final_norm': ('none', 'plain', 'affine'),
  'model.positions': ('rotary', 'sincos', 'learned', 'none'),
  'data.on_bad_image': ('skip', 'fail'),
  'model.pool': ('mean', 'token', 'attention'),
  'optim.schedule': ('cosine', 'constant'),
  'train.remat': ('auto', 'everything', 'score_inputs', 'dots', 'full', 'offload'),
  'train.layers': ('scan', 'unrolled'),
  'train.attention': ('auto', 'xla', 'cudnn', 'splash'),
  'train.compiler_options': ('auto', 'deterministic', 'none'),
  'grow.method': (
    'zero_keys',
    'duplicate',
    'random',
    'net2net',
    'net2net_fill',
    'hypercloning',
  ),
  'grow.scale': ('', 'keep', 'resize'),
  'grow.new_values': ('init', 'zero'),
  'grow.moments': ('pad', 'drop'),
  'grow.step': ('keep', 'restart'),
  'dtype': ('auto', 'float32', 'bfloat16'),
}

_POSITIVE = (
  'model.layers',
  'model.width',
  'model.heads',
  'model.init_std',
  'model.norm_epsilon',
  'model.rotary_base',
  'model.patch',
  'data.image_size',
  'data.crop_area',
  'data.eval_crop',
  'data.sequence_length',
  'data.batch_size',
  'data.prefetch',
  'optim.learning_rate',
  'optim.epsilon',
  'optim.layer_decay',
  'optim.accumulation_steps',
  'train.steps',
  'train.log_every',
  'train.checkpoint_every',
  'train.keep_checkpoints',
  'train.max_skipped_steps',
  'train.loss_chunk',
)

_NOT_NEGATIVE = (
  'model.vocab_size',
  'model.ffn_width',
  'model.max_length',
  'model.window',
  'model.row_epsilon',
  'model.embedding_std',
  'model.channels',
  'model.classes',
  'data.workers',
  'data.new_order_at',
  'data.rand_augment',
  'data.rand_augment_std',
  'optim.mixup',
  'optim.cutmix',
  'optim.warmup_steps',
  'optim.weight_decay',
  'optim.warmup_epochs',
  'optim.warmup_examples',
  'train.epochs',
  'train.examples',
  'optim.clip_norm',
  'optim.z_loss',
  'optim.new_token_warmup',
  'train.seed',
  'train.eval_every',
  'train.eval_batches',
  'train.sample_tokens',
  'grow.noise',
  'grow.seed',
)

_FRACTIONS = (
  'model.rotary_fraction',
  'optim.final_fraction',
  'data.crop_area',
  'data.eval_crop',
  'data.color_jitter',
  'data.erase',
  'optim.layer_decay',
)

_BELOW_ONE = (
  'optim.beta1',  # Adam divides by 1 − β.
  'optim.beta2',
  'optim.label_smoothing',
  'optim.drop_path',
  'train.ema',
)


def check(config: Any) -> None:
  """Check every value that has choices or bounds.

  Args:
    config: the dataclass of a run.

  Raises:
    UserError: a value is none of its choices, or out of its bounds.
  """
  for path, allowed in CHOICES.items():
    value = operator.attrgetter(path)(config)
    if value not in allowed:
      names = ', '.join(choice or "'' (empty)" for choice in allowed)
      raise UserError(f'config.{path} is {value!r}; it must be one of {names}')
  for paths, fits, must in (
    (_POSITIVE, lambda value: 0 < value < math.inf, 'be greater than 0'),
    (_NOT_NEGATIVE, lambda value: 0 <= value < math.inf, 'not be negative'),
    (_FRACTIONS, lambda value: 0 <= value <= 1, 'lie between 0 and 1'),
    (_BELOW_ONE, lambda value: 0 <= value < 1, 'lie between 0 and 1 (excluded)'),
  ):
    for path in paths:
      value = operator.attrgetter(path)(config)
      if not fits(value):  # A NaN fits nothing.
        raise UserError(f'config.{path} is {value}; it must {must}')
