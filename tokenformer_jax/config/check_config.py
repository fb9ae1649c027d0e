"""Check that values of several sections of a run's config fit together."""

from collections.abc import Iterator

from tokenformer_jax.config import batch_sizes, mixture, names
from tokenformer_jax.config.check_model import check_accumulation, check_capacity, check_model
from tokenformer_jax.config.data import DataConfig, TextConfig
from tokenformer_jax.config.feed_forward import (
  ExpertsConfig,
  LossBalanceConfig,
  NoFeedForwardConfig,
)
from tokenformer_jax.config.layer import LayerConfig, ParallelConfig
from tokenformer_jax.config.mixers import LinearConfig, RotaryConfig
from tokenformer_jax.config.model import LMConfig, ModelConfig, layer_path
from tokenformer_jax.config.optim import WSDSchedule, old_token_rate
from tokenformer_jax.config.run import Config, profile_range
from tokenformer_jax.config.section import leaves
from tokenformer_jax.errors import UserError


def check(config: Config) -> None:
  """Check everything that can be known before data is read or a device is touched."""
  _check_kinds(config)
  check_model(config.model)
  _check_idle_keys(config)
  if not config.train.steps:
    raise UserError('config.train.steps is 0; it must be greater than 0')
  profile_range(config.train)
  old_token_rate(config.optim)
  if config.data.mixture:
    mixture.check(config.data)
  check_decay(config)
  _check_positions(config.model, config.data)
  check_accumulation(config.model, config.optim.accumulation_steps)
  if config.data.has_stages:
    batch_sizes.check(config, _check_sizes)
  else:
    _check_sizes(config)


def _check_kinds(config: Config) -> None:
  """Check that the data are of the kind that the model takes."""
  wanted = 'text' if isinstance(config.model, LMConfig) else 'images'
  if config.data.kind != wanted:
    raise UserError(
      f'config.model.kind is {config.model.kind} and config.data.kind is {config.data.kind}; set '
      f'config.data.kind={wanted}'
    )


def _check_idle_keys(config: Config) -> None:
  """Check that no key is set that has no effect beside the others."""
  keys = {leaf.path: leaf for leaf in leaves(config)}
  for path, cause in _idle_keys(config):
    if keys[path].value != keys[path].default:
      raise names.idle(path, keys[path].value, cause)


def _idle_keys(config: Config) -> Iterator[tuple[str, str]]:
  """Yield each key that has no effect in a config, with the key that takes it away."""
  model, data, optim, train = config.model, config.data, config.optim, config.train
  if train.epochs or train.examples:
    unit = 'epochs' if train.epochs else 'examples'
    for other in ('steps', 'examples', 'epochs'):
      if other != unit:
        yield f'train.{other}', f'train.{unit}={getattr(train, unit):g}'
  if optim.warmup_epochs:
    yield 'optim.warmup_steps', f'optim.warmup_epochs={optim.warmup_epochs:g}'
  if train.max_skipped_steps == 1:  # the step that would be the last one is made
    yield 'optim.skip_deviations', 'train.max_skipped_steps=1'
  if not optim.skip_deviations:
    yield 'optim.skip_window', 'optim.skip_deviations=0'
  if not config.distill.teacher:
    yield 'distill.weight', 'distill.teacher='
    yield 'distill.temperature', 'distill.teacher='
  if config.preference.loss == 'orpo':
    yield 'distill.teacher', 'preference.loss=orpo, which has no reference'
  if not isinstance(optim.schedule, WSDSchedule):
    yield 'train.decay_from', f'optim.schedule.kind={optim.schedule.kind}'
  elif train.decay_from:
    yield 'optim.schedule.decay_share', f'train.decay_from={train.decay_from}'
  if isinstance(data, TextConfig):
    yield from _idle_keys_of_text(data)
  if not isinstance(model, LMConfig):
    for path in _OF_LM:
      yield path, f'model.kind={model.kind}'
  around = (getattr(model, 'embedding_norm', 'none'), model.final_norm)
  norms = {*around, *(norm for one in model.layers.values() for norm in (one.norm, one.ffn_norm))}
  if not any(norm.startswith('rms') for norm in norms):
    yield 'model.norm_epsilon_outside', f'model.layer.norm={model.layer.norm}'
  for name, layer in model.layers.items():
    path = layer_path(name)
    if not isinstance(model, LMConfig) and hasattr(layer.mixer, 'window'):
      yield f'{path}.mixer.window', f'model.kind={model.kind}'
    for key, cause in _idle_keys_of_layer(layer):
      yield f'{path}.{key}', f'{path}.{cause}'


_OF_PAIRS = ('preference.loss', 'preference.beta')
_NOT_OF_PAIRS = (
  *('data.documents', 'data.sequence_length_by_step', 'optim.z_loss', 'train.nested_rows'),
  *('data.packing', 'distill.weight', 'distill.temperature'),
)
_OF_LM = (
  'model.init.embedding_std',
  'optim.z_loss',
  'train.sample_tokens',
  'train.sample_prompt',
  'train.loss_chunk',
  'distill.teacher',
  *_OF_PAIRS,
)


def _idle_keys_of_text(data: TextConfig) -> Iterator[tuple[str, str]]:
  for key in _NOT_OF_PAIRS if data.has_pairs else _OF_PAIRS:
    yield key, f'data.rows={data.rows}'
  if not data.has_chat:
    yield 'data.chat_template', 'data.rows=text'
    yield 'data.packing', 'data.rows=text'
  if not data.has_text:
    for key in ('data.text_field', 'data.document_separator'):
      yield key, f'data.rows={"preference" if data.has_pairs else "chat"}'
  if data.mixture:  # Each source has its own.
    for key in ('data.rows', 'data.store', 'train.epochs', 'optim.warmup_epochs'):
      yield key, 'data.mixture, whose sources have their own'


def _idle_keys_of_layer(layer: LayerConfig) -> Iterator[tuple[str, str]]:
  """Yield the same for a layer; paths begin in its section."""
  mixer, ffn = layer.mixer, layer.ffn
  if isinstance(mixer, LinearConfig) and isinstance(mixer.positions, RotaryConfig):
    yield 'mixer.positions.clip', 'mixer.kind=linear'
  if isinstance(ffn, NoFeedForwardConfig):
    yield 'ffn_norm', 'ffn.kind=none'
  if isinstance(layer.wiring, ParallelConfig):
    yield 'ffn_norm', 'wiring.kind=parallel'
  if isinstance(ffn, ExpertsConfig):
    if isinstance(ffn.shared, NoFeedForwardConfig):
      yield 'ffn.shared_gate', 'ffn.shared.kind=none'
    if isinstance(ffn.balance, LossBalanceConfig) and ffn.balance.devices == 1:
      yield 'ffn.balance.device_weight', 'ffn.balance.devices=1'


def _check_sizes(config: Config) -> None:
  """Check the size of a batch and the length of its sequences."""
  check_capacity(config.model, _tokens_of_an_input(config))
  if config.data.batch_size % config.optim.accumulation_steps:
    raise UserError(
      f'config.data.batch_size is {config.data.batch_size}, which is not a multiple of '
      f'optim.accumulation_steps={config.optim.accumulation_steps}'
    )
  for size in (
    {stage.batch_size for stage in batch_sizes.stages(config.data)}
    if config.train.nested_rows
    else ()
  ):
    if size % (config.optim.accumulation_steps * config.train.nested_rows):
      raise UserError(
        f'config.train.nested_rows is {config.train.nested_rows}, which does not divide a batch of '
        f'{size} rows in optim.accumulation_steps={config.optim.accumulation_steps} parts; take a '
        'divisor, or another batch'
      )


def check_decay(config: Config) -> None:
  """Check that `train.decay_from` is after the warm-up and before the end of the run.

  A length in epochs or examples is not checked: it has no number of steps before the data is read.
  """
  train, optim, start = config.train, config.optim, config.train.decay_from
  if not start:
    return
  setting = f'config.train.decay_from is {start}'
  if not (train.epochs or train.examples) and start >= train.steps:
    raise UserError(
      f'{setting}, but the run and its decay end at train.steps={train.steps}; raise train.steps'
    )
  if not optim.warmup_epochs and start < optim.warmup_steps:
    raise UserError(
      f'{setting}, which is inside the warm-up of optim.warmup_steps={optim.warmup_steps}; set it '
      f'to {optim.warmup_steps} or more'
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
