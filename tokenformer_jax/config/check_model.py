"""Check that the values of a model fit together."""

from tokenformer_jax.config.feed_forward import (
  CapacityConfig,
  ExpertsConfig,
  LossBalanceConfig,
  MLPConfig,
  NoFeedForwardConfig,
)
from tokenformer_jax.config.layer import LayerConfig, ParallelConfig, SkiplessConfig, parts
from tokenformer_jax.config.mixers import (
  LinearConfig,
  Llama3ScalingConfig,
  NoPositionsConfig,
  PositionScaleConfig,
  RotaryConfig,
  SoftmaxConfig,
  YarnScalingConfig,
  width_of_heads,
)
from tokenformer_jax.config.model import (
  ModelConfig,
  ViTConfig,
  layer_path,
)
from tokenformer_jax.config.pattention import (
  NoProjectionConfig,
  PattentionConfig,
  groups_as_text,
  token_groups,
)
from tokenformer_jax.errors import UserError


def check_model(model: ModelConfig) -> None:
  """Check that the values of a model fit together; its sections have checked each one."""
  if unused := [name for name in model.variants if name not in model.layers]:
    raise UserError(
      f'config.model.variants has {unused[0]!r}, which is not in model.pattern={model.pattern!r}; '
      'name it there, or leave it out'
    )
  if isinstance(model, ViTConfig):
    _check_vit(model)
  for name, layer in model.layers.items():
    _check_layer(model, layer, layer_path(name))
  around = (getattr(model, 'embedding_norm', 'none'), model.final_norm)
  layers = model.layers.values()
  norms = {*around, *(norm for layer in layers for norm in (layer.norm, layer.norm_of_ffn))}
  if model.norm_epsilon_outside and not norms & {'rms', 'rms_plain', 'rms_offset'}:
    raise UserError(
      'config.model.norm_epsilon_outside is True, and no norm of the model is an RMSNorm; leave it '
      'out, or set model.layer.norm=rms'
    )


def _check_vit(model: ViTConfig) -> None:
  check_stochastic_depth(model, model.drop_path, 'model.drop_path')
  if model.init.embedding_std:
    raise UserError(
      f'config.model.init.embedding_std is {model.init.embedding_std}, and a ViT embeds no tokens; '
      'leave it out'
    )
  if model.position_embedding == 'sincos' and model.width % 4:
    raise UserError(
      f'config.model.width is {model.width}; it must be a multiple of 4 for '
      'position_embedding=sincos'
    )
  if model.channels not in (0, 1, 3):
    raise UserError(
      f'config.model.channels is {model.channels}; it must be 1 (grey), 3 (colour) or 0 (as the '
      'data)'
    )


def _check_layer(model: ModelConfig, layer: LayerConfig, path: str) -> None:
  for place, part in parts(layer):
    if isinstance(part, PattentionConfig) and not part.tokens:
      raise UserError(f'config.{path}.{place}.tokens is 0; it must be greater than 0')
  if isinstance(layer.ffn, ExpertsConfig):
    _check_experts(layer.ffn, f'config.{path}.ffn')
  if layer.ffn_norm != 'same':
    _check_ffn_norm(layer, f'config.{path}')
  mixer = layer.mixer
  heads = getattr(mixer, 'heads', 1)
  if model.width % heads and not getattr(mixer, 'head_width', 0):
    raise UserError(
      f'config.model.width is {model.width}, which is not a multiple of {path}.mixer.heads={heads}'
    )
  if isinstance(mixer, SoftmaxConfig):
    _check_heads(model, mixer, f'{path}.mixer')
  if isinstance(model, ViTConfig) and (window := getattr(mixer, 'window', 0)):
    raise UserError(
      f'config.{path}.mixer.window is {window}, and a ViT attends to all patches; leave it out'
    )
  scale = getattr(mixer, 'length_scale', None)
  if isinstance(model, ViTConfig) and isinstance(scale, PositionScaleConfig):
    raise UserError(
      f'config.{path}.mixer.length_scale.kind is position, and the patches of a ViT are in no '
      'order; set it to seen or none'
    )
  if isinstance(scale, PositionScaleConfig) and scale.length == 1:
    raise UserError(
      f'config.{path}.mixer.length_scale.length is 1, whose logarithm is 0; it must be at least 2, '
      'or 0 for data.sequence_length'
    )
  rotary = getattr(mixer, 'positions', NoPositionsConfig())
  if isinstance(rotary, RotaryConfig):
    _check_rotary(model, rotary, width_of_heads(mixer, model.width), f'{path}.mixer')
    if rotary.clip and isinstance(mixer, LinearConfig):
      raise UserError(
        f'config.{path}.mixer.positions.clip is {rotary.clip}, and linear attention has no scores '
        'of single pairs to clip distances in; leave it out'
      )


def _check_ffn_norm(layer: LayerConfig, path: str) -> None:
  if isinstance(layer.ffn, NoFeedForwardConfig) or isinstance(layer.wiring, ParallelConfig):
    other = 'ffn' if isinstance(layer.ffn, NoFeedForwardConfig) else 'wiring'
    raise UserError(
      f'{path}.ffn_norm is {layer.ffn_norm}, and with {other}.kind={getattr(layer, other).kind} '
      'the layer has one norm; leave it out'
    )


def _check_heads(model: ModelConfig, mixer: SoftmaxConfig, path: str) -> None:
  """Check the heads of keys and values, and what needs as many or as wide ones as the model."""
  if mixer.heads % mixer.key_heads:
    raise UserError(
      f'config.{path}.kv_heads is {mixer.kv_heads}, which does not divide {path}.heads='
      f'{mixer.heads}; each head of keys serves equally many heads of queries'
    )
  has_no_values = isinstance(mixer.value, NoProjectionConfig)
  if has_no_values and mixer.value_skip:
    raise UserError(
      f'config.{path}.value_skip is True, and value.kind=none has no projection to add the input '
      'to; set it to False'
    )
  own = {
    'value.kind=none': has_no_values,
    'value_skip=True': mixer.value_skip,
    'shaped=True': mixer.shaped,
  }
  whole = {**own, 'proj.kind=none': isinstance(mixer.proj, NoProjectionConfig)}
  if mixer.key_heads != mixer.heads and any(own.values()):
    raise UserError(
      f'config.{path}.kv_heads is {mixer.kv_heads}, and {_set(own)} needs a value for each of the '
      f'{mixer.heads} heads; set kv_heads=0'
    )
  if mixer.head_width * mixer.heads not in (0, model.width) and any(whole.values()):
    raise UserError(
      f'config.{path}.head_width is {mixer.head_width} of {mixer.heads} heads, and {_set(whole)} '
      f'needs heads that fill model.width={model.width}; set head_width=0'
    )


def _set(named: dict[str, bool]) -> str:
  """Return the first name whose value is true."""
  return next(name for name, value in named.items() if value)


def _check_scaling(rotary: RotaryConfig, path: str) -> None:
  scaling, clip, path = rotary.scaling, rotary.clip, f'{path}.positions.scaling'
  bounds = {
    Llama3ScalingConfig: ('low_frequency', 'high_frequency'),
    YarnScalingConfig: ('slow', 'fast'),
  }.get(type(scaling))
  if bounds and getattr(scaling, bounds[0]) >= getattr(scaling, bounds[1]):
    low, high = (f'{name}={getattr(scaling, name):g}' for name in bounds)
    raise UserError(
      f'config.{path}.{low} is not less than {high}; planes between the two are slowed in part'
    )
  if isinstance(scaling, YarnScalingConfig) and clip:
    raise UserError(
      f'config.{path}.kind is yarn, which multiplies what is rotated, and clip={clip} leaves keys '
      'far away as they are; leave one of them out'
    )


def _check_rotary(model: ModelConfig, rotary: RotaryConfig, head: int, path: str) -> None:
  if isinstance(model, ViTConfig):
    raise UserError(
      f'config.{path}.positions.kind is rotary, and the patches of a ViT are in no order; '
      'set it to none, and model.position_embedding to sincos or learned'
    )
  _check_scaling(rotary, path)
  if head * rotary.fraction < 2:
    raise UserError(
      f'config.{path}.positions.fraction is {rotary.fraction} of heads {head} wide, which rotates '
      f'nothing; at least two entries must turn, or set {path}.positions.kind=none'
    )


def check_stochastic_depth(model: ModelConfig, rate: float, key: str) -> None:
  """Check that branches may be left out: that each layer passes its input on without them."""
  for name, layer in model.layers.items():
    wiring = layer.wiring
    if rate and (
      isinstance(wiring, SkiplessConfig) or (isinstance(wiring, ParallelConfig) and not wiring.skip)
    ):
      raise UserError(
        f'config.{key} is {rate}, and {layer_path(name)}.wiring.kind={wiring.kind} has no skip '
        'connection that would be left without its branches; set it to 0'
      )


def _check_experts(experts: ExpertsConfig, path: str) -> None:
  """Check that the values of routed experts fit together."""
  router, balance, expert = experts.router, experts.balance, experts.expert
  if router.top_k > experts.count:
    raise UserError(
      f'{path}.router.top_k is {router.top_k}, and there are {path}.count={experts.count} experts; '
      f'take at most {experts.count}'
    )
  if router.renormalize and router.top_k == 1:
    raise UserError(
      f'{path}.router.renormalize is True with router.top_k=1, whose one gate would always be 1, '
      'so that the router could not learn; set it to False, or top_k to at least 2'
    )
  if experts.shared_gate and isinstance(experts.shared, NoFeedForwardConfig):
    raise UserError(
      f'{path}.shared_gate is True, and shared.kind=none has no part for all tokens; set it to '
      'False'
    )
  if isinstance(expert, MLPConfig) and expert.bias:
    raise UserError(f'{path}.expert.bias is True, and experts have no biases; set it to False')
  tokens, at = (expert.beside, '.beside') if isinstance(expert, MLPConfig) else (expert, '')
  if isinstance(tokens, PattentionConfig) and len(groups := token_groups(tokens)) > 1:
    raise UserError(
      f'{path}.expert{at}.groups is {groups_as_text(groups)!r}, and the tokens of each expert are '
      'one group already; leave it out'
    )
  if isinstance(balance, LossBalanceConfig):
    if experts.count % balance.devices:
      raise UserError(
        f'{path}.balance.devices is {balance.devices}, which does not divide the '
        f'{experts.count} experts; take a divisor'
      )
    if balance.device_weight and balance.devices == 1:
      raise UserError(
        f'{path}.balance.device_weight is {balance.device_weight}, and with balance.devices=1 '
        'there is nothing to balance between; set devices to the parts of the experts, or leave '
        'it out'
      )


def check_capacity(model: ModelConfig, length: int) -> None:
  """Check that experts with a capacity have a place for at least one of an input's T tokens."""
  for name, experts in model.experts.items():
    dispatch = experts.dispatch
    if not isinstance(dispatch, CapacityConfig):
      continue
    tokens = length * experts.router.top_k / experts.count
    for key in ('factor', 'eval_factor'):
      factor = getattr(dispatch, key)
      if max(round(factor * tokens), dispatch.least) < 1:
        raise UserError(
          f'the ffn.dispatch.{key} of {name} is {factor}, of {tokens:g} tokens at even load: no '
          'expert has a place and every token is dropped; make it larger, or ffn.dispatch.least 1'
        )


def check_accumulation(model: ModelConfig, parts: int) -> None:
  """Check that the objective of a batch is the mean over its `optim.accumulation_steps` parts."""
  for name, experts in model.experts.items():
    balance = experts.balance
    if parts == 1 or not isinstance(balance, LossBalanceConfig):
      continue
    if balance.over == 'batch' and (balance.weight or balance.device_weight):
      raise UserError(
        f'the ffn.balance.over of {name} is batch, and with optim.accumulation_steps={parts} it '
        'would be over each part of a batch alone; set balance.over=sequence, or '
        'accumulation_steps to 1'
      )
