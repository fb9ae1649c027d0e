"""The configuration: frozen dataclasses that the library works with, and their ml_collections form.

A file in `configs/` starts from `defaults()`, a `ConfigDict` with every key, and changes some.
`resolve` turns the result into a `Config` and validates everything that can be known before data is
read or a device is touched. `checkpoint.py` and `train.py` store the dataclasses as JSON.
"""

import dataclasses
import math
import typing
from collections.abc import Collection
from typing import Any

import ml_collections

from tokenformer_jax import bounds, kinds
from tokenformer_jax.errors import UserError, misspelt, nearest


@dataclasses.dataclass(frozen=True)
class TokenCounts:
  """Numbers of parameter tokens of one Pattention, by kind of projection."""

  qkv: int = 0  # query, key and value, each
  proj: int = 0  # output projection of the attention
  ffn: int = 0  # the feed-forward Pattention


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """What a model computes. Two models are the same if these are equal."""

  kind: str = 'lm'  # a language model or a vision transformer
  projection: str = 'pattention'  # 'dense' is the Transformer baseline
  layers: int = 4  # number of blocks
  width: int = 128  # D, the size of a hidden state
  heads: int = 4  # H, heads of the attention
  vocab_size: int = 0  # 0: the tokenizer's, rounded up to a multiple of 128
  param_tokens: TokenCounts = TokenCounts(qkv=128, proj=128, ffn=512)
  # τ = √reference_tokens. 0: equal to param_tokens. Stays what it was when a model grows.
  reference_tokens: TokenCounts = TokenCounts()
  score: str = 'l2_norm_gelu'  # Θ, from scores to weights: see pattention.py
  gelu: str = 'exact'  # the exact function or its approximation by tanh
  row_epsilon: float = 0.0  # added to the norm of scores; the released TPU code has 1e-5
  ffn_width: int = 0  # dense projections only. 0: 4 · width
  bias: bool = False  # dense projections only
  block_norm: str = 'plain'  # LayerNorm without parameters, with a bias, or with both
  final_norm: str = 'affine'  # the same, after the last block
  norm_epsilon: float = 1e-5  # added to the variance
  positions: str = 'rotary'  # lm: rotary, learned, none; vit: sincos, learned, none
  rotary_fraction: float = 0.25  # of each head's width
  rotary_base: float = 10000.0  # the longest wavelength is 2π times this
  # How many positions one attends to, its own the last. 0: all up to it. Language models only.
  window: int = 0
  # Learned positions only. 0: data.sequence_length, or the number of patches.
  max_length: int = 0
  tied_head: bool = True  # the output embedding is the input embedding. Language models only
  scaled_logits: bool = False  # logits / √width, as in the released TPU code
  init_std: float = 0.02  # of keys, embeddings and dense kernels
  embedding_std: float = 0.0  # 0: init_std. The released TPU code has 1
  # Only for kind='vit':

  patch: int = 16  # pixels of a patch's side
  channels: int = 0  # of the images. 0: those of the data
  classes: int = 0  # 0: those of the data
  pool: str = 'mean'  # over patches; or a class token; or attention by a learned query


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where text or images come from, and how they become batches."""

  # stdlib, files:GLOB, files:DIR or tfds:NAME; of images digits, tfds:NAME or folder:DIR.
  source: str = 'stdlib'
  # Of text: a source of its own for validation, in the place of a part of source. '': none.
  validation_source: str = ''
  text_field: str = 'text'  # of a jsonl line or a TFDS example
  tokenizer: str = 'bpe:4096'  # bpe:SIZE, bytes, or a path to a Hugging Face tokenizer.json
  sequence_length: int = 256  # T, in tokens
  batch_size: int = 16  # sequences or images in one optimizer update, over all devices
  # Of source, without validation_source: of its documents, chosen by a hash of the text, of a lone
  # text file the last part, and of images that come without a validation split.
  validation_fraction: float = 0.05
  cache_dir: str = ''  # of the token stores. '': $XDG_CACHE_HOME/tokenformer_jax or ~/.cache/…
  workers: int = 0  # processes that read ahead. 0: threads of this process
  prefetch: int = 8  # batches read ahead
  # A step of a checkpoint: a run that is resumed there may have another seed, sequence_length or
  # text, and begins at the first sample of that order. 0: a resumed run keeps its order.
  new_order_at: int = 0
  # Only for kind='vit':

  image_size: int = 224  # pixels of a side
  crop_area: float = 1.0  # the least part of an image that a random crop keeps. 1: no crops
  flip: bool = False  # mirror every other image
  rand_augment: float = 0.0  # magnitude of RandAugment, up to 10. 0: none
  rand_augment_std: float = 0.5  # of the magnitude
  color_jitter: float = 0.0  # most that brightness, contrast and saturation change by
  erase: float = 0.0  # probability that a rectangle of an image is filled with noise
  eval_crop: float = 1.0  # the part of the shorter side that evaluation sees
  on_bad_image: str = 'skip'  # an image that cannot be read, or has no valid label


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """AdamW with a warm-up and a cosine decay to a floor."""

  learning_rate: float = 1e-3  # the peak
  warmup_steps: int = 100  # in which the rate rises from 0 to the peak
  warmup_epochs: float = 0.0  # in the place of warmup_steps, if greater than 0
  warmup_examples: int = 0  # in the place of warmup_steps, if greater than 0
  final_fraction: float = 0.1  # the floor of the decay, as a fraction of the peak
  schedule: str = 'cosine'  # how the rate goes on after the warm-up
  beta1: float = 0.9  # decay of Adam's mean of gradients
  beta2: float = 0.95  # decay of Adam's mean of squared gradients
  epsilon: float = 1e-8  # added to Adam's denominator
  weight_decay: float = 0.1  # of matrices; norms and biases have none
  clip_norm: float = 1.0  # of the global gradient norm. 0: no clipping
  accumulation_steps: int = 1  # parts that a batch is computed in, one after the other
  z_loss: float = 0.0  # weight of log² of the softmax's denominator in the loss
  # Factor on a block's rate for each block above it (arXiv 2106.08254). 1: all rates are equal.
  layer_decay: float = 1.0
  # Only for kind='vit':

  mixup: float = 0.0  # α of the Beta distribution of the weights of two images. 0: none
  cutmix: float = 0.0  # α of the same of the areas; with both, half of the batches each
  label_smoothing: float = 0.0  # probability that is spread over all classes
  drop_path: float = 0.0  # probability that a branch of the last block is left out
  # Only for a model that has grown:

  restart_schedule: bool = True  # warm up and decay anew from the last growth on
  old_tokens: str = 'train'  # everything older than the last growth: train, freeze or scale:X
  new_token_warmup: int = 100  # updates in which the new tokens' rate rises to that of the old ones
  new_token_correction: bool = False  # Adam's bias correction counts from the growth for new tokens


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """The length of the run, what it writes, and how the step is computed."""

  steps: int = 1000  # optimizer updates
  epochs: float = 0.0  # passes over the training data, in the place of steps, if greater than 0
  examples: int = 0  # sequences or images, in the place of steps
  seed: int = 0  # of parameters, of the order of the data and of what is drawn
  log_every: int = 10  # steps between lines of figures
  eval_every: int = 250  # steps between evaluations; also at the end. 0: only at the end
  eval_batches: int = 0  # of an evaluation. 0: the whole validation split
  checkpoint_every: int = 250  # steps between checkpoints; also at the end
  keep_checkpoints: int = 2  # the newest ones; the best by eval/loss is kept besides
  # Decay of a moving average of the parameters, evaluated beside them as eval/ema_…. 0: none.
  ema: float = 0.0
  max_skipped_steps: int = 20  # non-finite steps in a row after which the run stops
  sample_tokens: int = 64  # length of the text written at each evaluation. 0: none
  sample_prompt: str = ''  # what that text starts with. '': a new document
  remat: str = 'auto'  # what is kept for the backward pass: see stack.py
  layers: str = 'scan'  # one program for all layers, in a loop; or one for each
  attention: str = 'auto'  # the kernel: see attention.py
  compiler_options: str = 'auto'  # those that suit the devices, or XLA's defaults: see compiler.py
  loss_chunk: int = 256  # positions of each sequence whose logits are alive at once
  profile_steps: str = ''  # 'FIRST:LAST' writes a profile of these steps into the work directory
  tensorboard: bool = True  # write figures for TensorBoard
  compilation_cache: str = ''  # directory of compiled programs. '': none


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Sizes of the mesh axes; one of them may be -1, the rest of the devices."""

  replica: int = 1  # copies of the model
  fsdp: int = -1  # parts of parameters by width, and of the batch
  tokens: int = 1  # parts of parameter tokens, heads and vocabulary


@dataclasses.dataclass(frozen=True)
class GrowConfig:
  """How `init_from`, or the grow command, makes a larger model of a trained one: see grow/."""

  method: str = 'zero_keys'  # the last three widen a Transformer, the others add tokens
  scale: str = ''  # keep or resize the reference counts. '': as it is exact for the method
  new_values: str = 'init'  # the values of new tokens
  moments: str = 'pad'  # the optimizer's moments
  step: str = 'keep'  # the number of steps, which the data and the schedule go by
  noise: float = 0.0  # added to copies, as a fraction of each array's root mean square. 0: exact
  seed: int = 0  # of what is drawn


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
      hint = _nearest_key(key, key, prefix, types)
      raise UserError(f'config key {path!r} is unknown{hint}')
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


def choices(path: str) -> tuple[str, ...]:
  """Return the values that a key such as `grow.method` allows, or none if they are not listed."""
  return bounds.CHOICES.get(path, ())


def lookup(config: Any, path: str) -> Any:
  """The value at a dotted path such as `model.param_tokens.qkv`."""
  for name in path.split('.'):
    config = getattr(config, name)
  return config


def check_key(path: str, *, single: bool = False) -> None:
  """Check that a dotted path such as `model.param_tokens.qkv` names a key.

  Args:
    path: of the key.
    single: whether a group of keys is refused.

  Raises:
    UserError: it does not; the message has the nearest name.
  """
  cls = Config
  for i, name in enumerate(names := path.split('.')):
    types = typing.get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
    if name not in types:
      group = ''.join(f'{outer}.' for outer in names[:i])
      hint = _nearest_key(name, names[-1], group, types)
      raise UserError(f'config key {group + name!r} is unknown{hint}')
    cls = types[name]
  if single and dataclasses.is_dataclass(cls):
    names = ', '.join(field.name for field in dataclasses.fields(cls))
    raise UserError(f'config.{path} is a group of keys; set one of {names}')


def _nearest_key(name: str, last: str, group: str, types: Collection[str]) -> str:
  """The hint for an unknown name in a group of keys, which may belong in another group."""
  if not types:
    return f'; config.{group[:-1]} is a single value'
  if near := misspelt(name, types):
    return f'; did you mean {group + near!r}?'
  if elsewhere := keys_named(last):
    return f'; did you mean {" or ".join(map(repr, elsewhere))}?'
  return nearest(name, types)


def keys_named(name: str) -> list[str]:
  """Return the keys whose last part is a name or near to it."""
  last = {path: path.rpartition('.')[2] for path in paths()}
  wanted = name if name in last.values() else misspelt(name, last.values())
  return [path for path, own in last.items() if own == wanted]


def paths(cls: type = Config, prefix: str = '') -> list[str]:
  """Return the dotted path of every key that is not a group."""
  found = []
  for name, kind in typing.get_type_hints(cls).items():
    is_group = dataclasses.is_dataclass(kind)
    found.extend(paths(kind, f'{prefix}{name}.') if is_group else [f'{prefix}{name}'])
  return found


def _validate(config: Config) -> None:
  bounds.check(config)
  for path in paths():
    value = lookup(config, path)
    if type(value) is int and abs(value) >= 2**31 and not path.endswith('examples'):
      raise UserError(f'config.{path} is {value}; it must be less than {2**31}')
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
      f'config.data.batch_size is {config.data.batch_size}, which is not a multiple of '
      f'optim.accumulation_steps={config.optim.accumulation_steps}'
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
      f'config.model.width is {model.width}, which is not a multiple of model.heads={model.heads}'
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
