"""Check that values of several sections of a run's config fit together."""

from tokenformer_jax.config import batch_sizes, mixture, names
from tokenformer_jax.config.check_model import (
  check_accumulation,
  check_capacity,
  check_model,
)
from tokenformer_jax.config.data import DataConfig, TextConfig
from tokenformer_jax.config.model import LMConfig, ModelConfig
from tokenformer_jax.config.optim import WSDSchedule, old_token_rate
from tokenformer_jax.config.run import Config
from tokenformer_jax.config.section import leaves
from tokenformer_jax.config.sections import profile_range
from tokenformer_jax.errors import UserError


def check(config: Config) -> None:
  """Check everything that can be known before data is read or a device is touched."""
  _check_kinds(config)
  _check_owners(config)
  check_model(config.model)
  if not config.train.steps:
    raise UserError('config.train.steps is 0; it must be greater than 0')
  profile_range(config.train)
  old_token_rate(config.optim)
  if config.optim.skip_deviations and config.train.max_skipped_steps == 1:
    raise UserError(
      f'config.optim.skip_deviations is {config.optim.skip_deviations:g}, and with '
      'config.train.max_skipped_steps=1 no outlier would be skipped; set that to 2 or more, or '
      'skip_deviations to 0'
    )
  if isinstance(config.data, TextConfig):
    _check_text(config)
  _check_lengths(config)
  check_decay(config)
  _check_positions(config.model, config.data)
  check_accumulation(config.model, config.optim.accumulation_steps)
  if config.data.has_stages:
    batch_sizes.check(config, _check_sizes)
  else:
    _check_sizes(config)


# Keys with an effect only if another key is set, or only for language models.
_OWNERS = {
  'optim.skip_window': 'optim.skip_deviations',
  'distill.weight': 'distill.teacher',
  'distill.temperature': 'distill.teacher',
}
_OF_LM = (
  'optim.z_loss',
  'train.sample_tokens',
  'train.sample_prompt',
  'train.loss_chunk',
  'distill.teacher',
)


def _check_kinds(config: Config) -> None:
  """Check that the data are of the kind that the model takes."""
  wanted = 'text' if isinstance(config.model, LMConfig) else 'images'
  if config.data.kind != wanted:
    raise UserError(
      f'config.model.kind is {config.model.kind} and config.data.kind is {config.data.kind}; set '
      f'config.data.kind={wanted}'
    )


def _check_owners(config: Config) -> None:
  """Check that no key is set without the key that gives it an effect."""
  keys = {leaf.path: leaf for leaf in leaves(config)}
  for path, owner in _OWNERS.items():
    if keys[path].value != keys[path].default and not keys[owner].value:
      raise names.needs(path, keys[path].value, owner, '')
  for path in _OF_LM:
    if keys[path].value != keys[path].default and not isinstance(config.model, LMConfig):
      raise names.needs(path, keys[path].value, 'model.kind=lm', config.model.kind)


def _check_text(config: Config) -> None:
  """Check the keys of text, and those of a mixture."""
  data = config.data
  if data.chat_template and not data.has_chat:
    raise UserError(
      f'config.data.chat_template is {data.chat_template}, which has a meaning for '
      'config.data.rows=chat and here no source has it; leave it out, or set rows'
    )
  if data.text_field != 'text' and not data.has_text:
    raise UserError(
      f'config.data.text_field is {data.text_field}, and rows of config.data.rows=chat have '
      'no such field, but messages, or a prompt with its response; leave it out'
    )
  if data.mixture:
    mixture.check(config)


def _check_sizes(config: Config) -> None:
  """Check the size of a batch and the length of its sequences."""
  check_capacity(config.model, _tokens_of_an_input(config))
  if config.data.batch_size % config.optim.accumulation_steps:
    raise UserError(
      f'config.data.batch_size is {config.data.batch_size}, which is not a multiple of '
      f'optim.accumulation_steps={config.optim.accumulation_steps}'
    )


def _check_lengths(config: Config) -> None:
  """Check that each length is set in one unit only."""
  for section, name in (('train', ''), ('optim', 'warmup_')):
    values = getattr(config, section)
    defaults = {leaf.path: leaf.default for leaf in leaves(values)}
    units = [f'{name}{unit}' for unit in ('steps', 'epochs', 'examples')]
    given = [n for n in units if n in defaults and getattr(values, n) != defaults[n]]
    if len(given) > 1:
      lengths = ' and '.join(f'config.{section}.{n}={getattr(values, n)}' for n in given)
      raise UserError(f'{lengths} set one length in several units; give one of them')


def check_decay(config: Config) -> None:
  """Check that `train.decay_from` fits the schedule, its warm-up and the length of the run.

  A length in epochs or examples is not checked: it has no number of steps before the data is read.
  """
  train, optim, start = config.train, config.optim, config.train.decay_from
  if not start:
    return
  found = f'config.train.decay_from is {start}'
  if not isinstance(optim.schedule, WSDSchedule):
    raise UserError(
      f'{found}, and optim.schedule={optim.schedule.kind} has no decay of its own; set '
      'config.optim.schedule=wsd, which is constant until the decay'
    )
  if (share := optim.schedule.decay_share) != WSDSchedule().decay_share:
    raise UserError(
      f'{found} and config.optim.schedule.decay_share is {share}, which both say where the '
      'decay begins; give one of them'
    )
  if not (train.epochs or train.examples) and start >= train.steps:
    raise UserError(
      f'{found}, but the run ends at train.steps={train.steps}; raise train.steps, which is where '
      'the decay ends'
    )
  if not optim.warmup_epochs and start < optim.warmup_steps:
    raise UserError(
      f'{found}, which is inside the warm-up of optim.warmup_steps={optim.warmup_steps}; set it to '
      f'{optim.warmup_steps} or more'
    )


def _tokens_of_an_input(config: Config) -> int:
  """Return T, the number of slots of a training text or of an image."""
  model, data = config.model, config.data
  if isinstance(model, LMConfig):
    return data.sequence_length
  return (data.image_size // model.patch) ** 2 + (model.pool == 'token')


def _check_positions(model: ModelConfig, data: DataConfig) -> None:
  """Check that a model has positions for all tokens or patches of an input."""
  learned = model.position_embedding == 'learned'
  if isinstance(model, LMConfig):
    if learned and 0 < model.max_length < data.sequence_length:
      raise UserError(
        f'config.model.max_length is {model.max_length}, less than data.sequence_length='
        f'{data.sequence_length}; learned positions must reach that far'
      )
    return
  if data.image_size % model.patch:
    raise UserError(
      f'config.data.image_size is {data.image_size}, which is not a multiple of '
      f'model.patch={model.patch}'
    )
  patches = (data.image_size // model.patch) ** 2
  if learned and model.max_length not in (0, patches):
    raise UserError(
      f'config.model.max_length is {model.max_length}, but images of data.image_size='
      f'{data.image_size} have {patches} patches; set it to 0 to have it fit'
    )
