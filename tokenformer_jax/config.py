"""The configuration: frozen dataclasses that the library works with, and their ml_collections form.

A file in `configs/` starts from `defaults()`, a `ConfigDict` with every key, and changes some.
`resolve` turns the result into a `Config` and validates everything that can be known before data is
read or a device is touched. `checkpoint.py` and `train.py` store the dataclasses as JSON.
"""

import dataclasses
import math
import typing
from typing import Any

import ml_collections

from tokenformer_jax import kinds
from tokenformer_jax.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class TokenCounts:
  """Numbers of parameter tokens of one Pattention, by kind of projection."""

  qkv: int = 0  # query, key and value, each
  proj: int = 0  # output projection of the attention
  ffn: int = 0  # the feed-forward Pattention


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """What a model computes. Two models are the same if these are equal."""

  kind: str = 'lm'  # or 'vit'
  projection: str = 'pattention'  # or 'dense': the Transformer baseline
  layers: int = 4
  width: int = 128  # D
  heads: int = 4  # H
  vocab_size: int = 0  # 0: the tokenizer's, rounded up to a multiple of 128
  param_tokens: TokenCounts = TokenCounts(qkv=128, proj=128, ffn=512)
  # τ = √reference_tokens. 0: equal to param_tokens. Stays what it was when a model grows.
  reference_tokens: TokenCounts = TokenCounts()
  score: str = 'l2_norm_gelu'  # see pattention.py
  gelu: str = 'exact'  # or 'tanh'
  row_epsilon: float = 0.0  # added to the norm of scores; the released TPU code has 1e-5
  ffn_width: int = 0  # dense projections only. 0: 4 · width
  bias: bool = False  # dense projections only
  block_norm: str = 'plain'  # LayerNorm without parameters; or with 'bias', or 'affine'
  final_norm: str = 'affine'  # or 'plain', 'none'
  norm_epsilon: float = 1e-5
  positions: str = 'rotary'  # or 'learned', 'none'; of a ViT 'sincos', 'learned', 'none'
  rotary_fraction: float = 0.25  # of each head's width
  rotary_base: float = 10000.0
  # How many positions one attends to, its own the last. 0: all up to it. Never of a ViT.
  window: int = 0
  # Learned positions only. 0: data.sequence_length, or the number of patches.
  max_length: int = 0
  tied_head: bool = True  # never of a ViT
  scaled_logits: bool = False  # logits / √width, as in the released TPU code
  init_std: float = 0.02  # of keys, embeddings and dense kernels
  embedding_std: float = 0.0  # 0: init_std. The released TPU code has 1
  # The rest is for kind='vit'.
  patch: int = 16  # pixels of a patch's side
  channels: int = 0  # of the images. 0: those of the data
  classes: int = 0  # 0: those of the data
  pool: str = 'mean'  # or 'token': a class token; 'attention': a learned query


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where text or images come from, and how they become batches."""

  # stdlib, files:GLOB or tfds:NAME; of images digits, tfds:NAME or folder:DIR.
  source: str = 'stdlib'
  text_field: str = 'text'  # of a jsonl line or a TFDS example
  tokenizer: str = 'bpe:4096'  # or 'bytes', or a path to a Hugging Face tokenizer.json
  sequence_length: int = 256  # T
  batch_size: int = 16  # sequences or images in one optimizer update, over all devices
  # Of the documents, chosen by a hash of the text; of images that come without a validation split.
  validation_fraction: float = 0.05
  cache_dir: str = ''  # of the token stores. '': $XDG_CACHE_HOME/tokenformer_jax or ~/.cache/…
  workers: int = 0  # processes that read ahead. 0: threads of this process
  prefetch: int = 8  # batches read ahead
  # The rest is for kind='vit'.
  image_size: int = 224  # pixels of a side
  crop_area: float = 1.0  # the least part of an image that a random crop keeps. 1: no crops
  flip: bool = False  # mirrors every other image
  rand_augment: float = 0.0  # magnitude of RandAugment, up to 10. 0: none
  rand_augment_std: float = 0.5  # of the magnitude
  color_jitter: float = 0.0  # most that brightness, contrast and saturation change by
  erase: float = 0.0  # probability that a rectangle of an image is filled with noise
  eval_crop: float = 1.0  # the part of the shorter side that evaluation sees
  on_bad_image: str = 'skip'  # or 'fail': what cannot be read, or has no valid label


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """AdamW with a warm-up and a cosine decay to a floor."""

  learning_rate: float = 1e-3  # the peak
  warmup_steps: int = 100
  warmup_epochs: float = 0.0  # in the place of warmup_steps, if greater than 0
  warmup_examples: int = 0
  final_fraction: float = 0.1  # the floor of the decay, as a fraction of the peak
  schedule: str = 'cosine'  # or 'constant'
  beta1: float = 0.9
  beta2: float = 0.95
  epsilon: float = 1e-8
  weight_decay: float = 0.1  # of matrices; norms and biases have none
  clip_norm: float = 1.0  # of the global gradient norm. 0: no clipping
  accumulation_steps: int = 1  # parts that a batch is computed in, one after the other
  z_loss: float = 0.0
  # Factor on a block's rate for each block above it (arXiv 2106.08254). 1: all rates are equal.
  layer_decay: float = 1.0
  # These four are for kind='vit'.
  mixup: float = 0.0  # α of the Beta distribution of the weights of two images. 0: none
  cutmix: float = 0.0  # α of the same of the areas; with both, half of the batches each
  label_smoothing: float = 0.0
  drop_path: float = 0.0  # probability that a branch of the last block is left out
  # The rest is for a model that has grown.
  restart_schedule: bool = True  # warm up and decay anew from the last growth on
  old_tokens: str = 'train'  # or 'freeze', 'scale:X': everything that was there before it grew
  new_token_warmup: int = 100  # updates in which the new tokens' rate rises to that of the old ones
  new_token_correction: bool = False  # Adam's bias correction counts from the growth for new tokens


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """The length of the run, what it writes, and how the step is computed."""

  steps: int = 1000
  epochs: float = 0.0  # passes over the training data, in the place of steps, if greater than 0
  examples: int = 0  # sequences or images, in the place of steps
  seed: int = 0
  log_every: int = 10
  eval_every: int = 250  # also at the end. 0: only at the end
  eval_batches: int = 0  # 0: the whole validation split
  checkpoint_every: int = 250  # also at the end
  keep_checkpoints: int = 2  # the newest ones; the best by eval/loss is kept besides
  # Decay of a moving average of the parameters, evaluated beside them as eval/ema_…. 0: none.
  ema: float = 0.0
  max_skipped_steps: int = 20  # non-finite steps in a row after which the run stops
  sample_tokens: int = 64  # length of the text written at each evaluation. 0: none
  sample_prompt: str = ''  # '': a new document
  remat: str = 'none'  # or 'dots', 'full', 'offload': see stack.py
  scan_layers: bool = True  # one program for all layers, in a loop; or one for each: see stack.py
  attention: str = 'auto'  # or 'xla', 'cudnn', 'splash': see attention.py
  compiler_options: str = 'auto'  # or 'none': see compiler.py
  loss_chunk: int = 256  # positions of each sequence whose logits are alive at once
  profile_steps: str = ''  # 'FIRST:LAST' writes a profile of these steps into the work directory
  tensorboard: bool = True
  compilation_cache: str = ''  # directory of compiled programs. '': none


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Sizes of the mesh axes; one of them may be -1, the rest of the devices."""

  replica: int = 1
  fsdp: int = -1
  tokens: int = 1


@dataclasses.dataclass(frozen=True)
class GrowConfig:
  """How `init_from`, or the grow command, makes a larger model of a trained one: see grow/."""

  # zero_keys, duplicate or random; for a Transformer net2net, net2net_fill or hypercloning.
  method: str = 'zero_keys'
  scale: str = ''  # keep or resize the reference counts. '': as it is exact for the method
  new_values: str = 'init'  # or 'zero': the values of new tokens
  moments: str = 'pad'  # or 'drop': the optimizer's moments
  step: str = 'keep'  # or 'restart': the number of steps, which the data and the schedule go by
  noise: float = 0.0  # of what is copied, as a fraction of each array's root mean square
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run."""

  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  optim: OptimConfig = OptimConfig()
  train: TrainConfig = TrainConfig()
  mesh: MeshConfig = MeshConfig()
  dtype: str = 'auto'  # of activations: bfloat16 on TPU and GPU, float32 on CPU
  init_from: str = ''  # another run's directory, DIR or DIR@STEP, grown to this model
  grow: GrowConfig = GrowConfig()


def defaults() -> ml_collections.ConfigDict:
  """Every key with its default value, as the `ConfigDict` that a config file starts from."""
  return ml_collections.ConfigDict(dataclasses.asdict(Config()))


def resolve(config: ml_collections.ConfigDict) -> Config:
  """Validates a `ConfigDict` and freezes it.

  Raises:
    UserError: an unknown key, a value of the wrong type, or values that do not fit together.
  """
  resolved = from_dict(Config, config.to_dict())
  _validate(resolved)
  return resolved


def from_dict(cls: type, values: dict[str, Any], prefix: str = '') -> Any:
  """Builds the dataclass `cls` from nested dicts; keys that are left out have their defaults."""
  types = typing.get_type_hints(cls)
  kwargs = {}
  for key, value in values.items():
    path = f'{prefix}{key}'
    if key not in types:
      raise UserError(f'config key {path!r} is unknown{nearest(key, types)}')
    kwargs[key] = _convert(types[key], value, path)
  return cls(**kwargs)


def _convert(expected: type, value: Any, path: str) -> Any:
  if dataclasses.is_dataclass(expected):
    if not isinstance(value, dict):
      raise UserError(f'config.{path} is {value!r}; it is a group of keys')
    return from_dict(expected, value, f'{path}.')
  if expected is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if type(value) is not expected:
    raise UserError(
      f'config.{path} is {value!r}, of type {type(value).__name__}; it must be {expected.__name__}'
    )
  return value


_CHOICES = {
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
  'train.remat': ('none', 'dots', 'full', 'offload'),
  'train.attention': ('auto', 'xla', 'cudnn', 'splash'),
  'train.compiler_options': ('auto', 'none'),
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


def choices(path: str) -> tuple[str, ...]:
  """The values that a key allows, such as `grow.method`."""
  return _CHOICES[path]


def lookup(config: Any, path: str) -> Any:
  """The value at a dotted path such as `model.param_tokens.qkv`."""
  for name in path.split('.'):
    config = getattr(config, name)
  return config


def check_key(path: str) -> None:
  """Checks that a dotted path such as `model.param_tokens.qkv` names a key.

  Raises:
    UserError: it does not; the message has the nearest name.
  """
  cls = Config
  for i, name in enumerate(names := path.split('.')):
    types = typing.get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
    if name not in types:
      known = ('.'.join([*names[:i], key]) for key in types)
      raise UserError(f'config key {".".join(names[: i + 1])!r} is unknown{nearest(path, known)}')
    cls = types[name]


def _validate(config: Config) -> None:
  for path, allowed in _CHOICES.items():
    value = lookup(config, path)
    if value not in allowed:
      names = ', '.join(choice or "'' (empty)" for choice in allowed)
      raise UserError(f'config.{path} is {value!r}; it must be one of {names}')
  for path in _POSITIVE:
    if not 0 < lookup(config, path) < math.inf:  # NaN, too
      raise UserError(f'config.{path} is {lookup(config, path)}; it must be greater than 0')
  for path in _NOT_NEGATIVE:
    if not 0 <= lookup(config, path) < math.inf:
      raise UserError(f'config.{path} is {lookup(config, path)}; it must not be negative')
  for path in _FRACTIONS:
    if not 0 <= lookup(config, path) <= 1:
      raise UserError(f'config.{path} is {lookup(config, path)}; it must lie between 0 and 1')
  for path in _BELOW_ONE:
    if not 0 <= lookup(config, path) < 1:
      raise UserError(
        f'config.{path} is {lookup(config, path)}; it must lie between 0 and 1 (excluded)'
      )
  for path in ('train.seed', 'grow.seed'):
    if lookup(config, path) >= 2**31:
      raise UserError(f'config.{path} is {lookup(config, path)}; it must be less than {2**31}')
  if not 0 < config.data.validation_fraction < 1:
    raise UserError(
      f'config.data.validation_fraction is {config.data.validation_fraction}; it must lie between '
      '0 and 1, both excluded'
    )
  kinds.check(config, Config())
  _validate_lengths(config)
  _validate_model(config.model, config.data)
  if config.data.batch_size % config.optim.accumulation_steps:
    raise UserError(
      f'config.data.batch_size is {config.data.batch_size}, which optim.accumulation_steps='
      f'{config.optim.accumulation_steps} does not divide'
    )
  profile_range(config.train)
  old_token_rate(config.optim)


def _validate_lengths(config: Config) -> None:
  """A length is given in one unit."""
  for group, name in (('train', ''), ('optim', 'warmup_')):
    values, defaults = getattr(config, group), getattr(Config(), group)
    names = [f'{name}{unit}' for unit in ('steps', 'epochs', 'examples')]
    given = [n for n in names if getattr(values, n) != getattr(defaults, n)]
    if len(given) > 1:
      said = ' and '.join(f'config.{group}.{n}={getattr(values, n)}' for n in given)
      raise UserError(f'{said} say the same in several units; give one of them')


def _validate_model(model: ModelConfig, data: DataConfig) -> None:
  if model.width % model.heads:
    raise UserError(
      f'config.model.width is {model.width}, which model.heads={model.heads} does not divide'
    )
  head_width = model.width // model.heads
  if model.positions == 'rotary' and head_width * model.rotary_fraction < 2:
    raise UserError(
      f'config.model.rotary_fraction is {model.rotary_fraction} of heads {head_width} wide, which '
      'rotates nothing; at least two entries must turn, or set model.positions=none'
    )
  if model.projection == 'pattention':
    for kind in ('qkv', 'proj', 'ffn'):
      count, reference = getattr(model.param_tokens, kind), getattr(model.reference_tokens, kind)
      if count <= 0:
        raise UserError(f'config.model.param_tokens.{kind} is {count}; it must be greater than 0')
      if reference < 0:
        raise UserError(
          f'config.model.reference_tokens.{kind} is {reference}; it must be 0 (equal to '
          'param_tokens) or the count that sets the scale'
        )
    if model.bias:
      raise UserError('config.model.bias is for projection=dense; Pattention has no bias')
  if (
    model.kind == 'lm'
    and model.positions == 'learned'
    and 0 < model.max_length < data.sequence_length
  ):
    raise UserError(
      f'config.model.max_length is {model.max_length}, less than data.sequence_length='
      f'{data.sequence_length}; learned positions must reach that far'
    )


def profile_range(train: TrainConfig) -> tuple[int, int] | None:
  """The first and the last step to profile, or None."""
  if not train.profile_steps:
    return None
  first, _, last = train.profile_steps.partition(':')
  if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
    raise UserError(
      f'config.train.profile_steps is {train.profile_steps!r}; it must be FIRST:LAST, two step '
      'numbers, for example 10:13'
    )
  return int(first), int(last)


def old_token_rate(optim: OptimConfig) -> float:
  """The factor of `optim.old_tokens` on the updates of what was there before the model grew."""
  if optim.old_tokens in ('train', 'freeze'):
    return float(optim.old_tokens == 'train')
  name, _, factor = optim.old_tokens.partition(':')
  try:
    rate = float(factor)
  except ValueError:
    rate = math.nan
  if name != 'scale' or not 0 < rate < math.inf:
    raise UserError(
      f"config.optim.old_tokens is {optim.old_tokens!r}; it must be 'train', 'freeze' or 'scale:X' "
      'with a factor X greater than 0, for example scale:0.1'
    )
  return rate
