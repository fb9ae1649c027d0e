"""Keys of a config that mean something for one kind of model only, and values that do not fit it.

Knows nothing of the dataclasses: `config.resolve` calls `check`.
"""

import operator
from typing import Any

from tokenformer_jax.errors import UserError

ONLY = {
  'lm': (
    'model.vocab_size',
    'model.rotary_fraction',
    'model.rotary_base',
    'model.window',
    'model.scaled_logits',
    'model.embedding_std',
    'data.text_field',
    'data.validation_source',
    'data.tokenizer',
    'data.sequence_length',
    'optim.z_loss',
    'train.sample_tokens',
    'train.sample_prompt',
    'train.loss_chunk',
  ),
  'vit': (
    'model.patch',
    'model.channels',
    'model.classes',
    'model.pool',
    'data.image_size',
    'data.crop_area',
    'data.flip',
    'data.rand_augment',
    'data.rand_augment_std',
    'data.color_jitter',
    'data.erase',
    'data.eval_crop',
    'data.on_bad_image',
    'optim.mixup',
    'optim.cutmix',
    'optim.label_smoothing',
    'optim.drop_path',
  ),
}

_POSITIONS = {'lm': ('rotary', 'learned', 'none'), 'vit': ('sincos', 'learned', 'none')}


def check(config: Any, defaults: Any) -> None:
  """Checks that what a config sets has a meaning for `model.kind`.

  Args:
    config: the dataclass of a run.
    defaults: one with every default.

  Raises:
    UserError: a key of another kind has another value than its default, or a value does not fit.
  """
  kind = config.model.kind
  for other, paths in ONLY.items():
    for path in paths:
      read = operator.attrgetter(path)
      if other != kind and read(config) != read(defaults):
        raise UserError(
          f'config.{path} is {read(config)!r}, which has a meaning for model.kind={other} only, '
          f'and this is {kind}; leave it out'
        )
  if config.model.positions not in _POSITIONS[kind]:
    raise UserError(
      f'config.model.positions is {config.model.positions!r}; for model.kind={kind} it must be one '
      f'of {", ".join(_POSITIONS[kind])}'
    )
  if kind == 'vit':
    _check_vit(config.model, config.data)


def _check_vit(model: Any, data: Any) -> None:
  if model.tied_head:
    raise UserError(
      'config.model.tied_head is True, and the head of a ViT has nothing to be tied to; set it to '
      'False'
    )
  if data.image_size % model.patch:
    raise UserError(
      f'config.data.image_size is {data.image_size}, which is not a multiple of '
      f'model.patch={model.patch}'
    )
  if model.positions == 'sincos' and model.width % 4:
    raise UserError(
      f'config.model.width is {model.width}; it must be a multiple of 4 for positions=sincos'
    )
  if model.channels not in (0, 1, 3):
    raise UserError(
      f'config.model.channels is {model.channels}; it must be 1 (grey), 3 (colour) or 0 (as the '
      'data)'
    )
  if data.rand_augment > 10:
    raise UserError(
      f'config.data.rand_augment is {data.rand_augment}; it must lie between 0 and 10'
    )
  patches = (data.image_size // model.patch) ** 2
  if model.positions == 'learned' and model.max_length not in (0, patches):
    raise UserError(
      f'config.model.max_length is {model.max_length}, but images of data.image_size='
      f'{data.image_size} have {patches} patches; set it to 0 to have it fit'
    )
