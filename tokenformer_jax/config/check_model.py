"""Check that the values of a model fit together."""

from tokenformer_jax.config.feed_forward import (
  CapacityConfig,
  ExpertsConfig,
  LossBalanceConfig,
  MLPConfig,
)
from tokenformer_jax.config.layer import LayerConfig, ParallelConfig, SkiplessConfig, parts
from tokenformer_jax.config.mixers import (
  Llama3ScalingConfig,
  NoPositionsConfig,
  PositionScaleConfig,
  RotaryConfig,
  SoftmaxConfig,
  YarnScalingConfig,
  has_own_values,
  width_of_heads,
)
from tokenformer_jax.config.model import ModelConfig, ViTConfig, layer_path
from tokenformer_jax.config.pattention import (
  NoProjectionConfig,
  PattentionConfig,
  groups_as_text,
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


def _check_vit(model: ViTConfig) -> None:
  for name, layer in model.layers.items() if model.drop_path else ():
    wiring = layer.wiring
    if isinstance(wiring, SkiplessConfig) or (
      isinstance(wiring, ParallelConfig) and not wiring.skip
    ):
      raise UserError(
        f'config.model.drop_path is {model.drop_path}, and {layer_path(name)}.wiring.kind='
        f'{wiring.kind} has no skip connection that would be left without its branches; set it to 0'
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
  for inside, section in parts(layer):
    if isinstance(section, PattentionConfig) and not section.tokens:
      raise UserError(f'config.{path}.{inside}.tokens is 0; it must be greater than 0')
  if isinstance(layer.ffn, ExpertsConfig):
    _check_experts(layer.ffn, f'config.{path}.ffn')
  mixer = layer.mixer
  heads = getattr(mixer, 'heads', 1)
  if model.width % heads and not getattr(mixer, 'head_width', 0):
    raise UserError(
      f'config.model.width is {model.width}, which is not a multiple of {path}.mixer.heads={heads}'
    )
  if isinstance(mixer, SoftmaxConfig):
    _check_heads(model, mixer, f'{path}.mixer')
  scale = getattr(mixer, 'length_scale', None)
  if isinstance(model, ViTConfig) and isinstance(scale, PositionScaleConfig):
    raise UserError(
      f'config.{path}.mixer.length_scale.kind is position, and the patches of a ViT are in no '
      'order; set it to seen or none'
    )
  rotary = getattr(mixer, 'positions', NoPositionsConfig())
  if isinstance(rotary, RotaryConfig):
    _check_rotary(model, rotary, width_of_heads(mixer, model.width), f'{path}.mixer')


def _check_heads(model: ModelConfig, mixer: SoftmaxConfig, path: str) -> None:
  """Check the heads of keys and values, and what needs as many or as wide ones as the model."""
  if mixer.heads % mixer.key_heads:
    raise UserError(
      f'config.{path}.kv_heads is {mixer.kv_heads}, which does not divide {path}.heads='
      f'{mixer.heads}; each head of keys serves equally many heads of queries'
    )
  if isinstance(mixer.value, NoProjectionConfig) and mixer.value_skip:
    raise UserError(
      f'config.{path}.value_skip is True, and value.kind=none has no projection to add the input '
      'to; set it to False'
    )
  fills = mixer.head_width * mixer.heads in (0, model.width)
  if not (has_own_values(mixer) or (mixer.key_heads == mixer.heads and fills)):
    raise UserError(
      f'config.{path} has kv_heads={mixer.kv_heads} and head_width={mixer.head_width}, which need '
      'a projection of the value and of the output, and neither shaped nor value_skip; set both '
      'to 0'
    )


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
  if isinstance(expert, MLPConfig) and expert.bias:
    raise UserError(f'{path}.expert.bias is True, and experts have no biases; set it to False')
  if isinstance(expert, MLPConfig) and isinstance(expert.each, PattentionConfig):
    raise UserError(
      f'{path}.expert.each has parameter tokens, and matrices of experts have none of their own; '
      'set them in expert.beside'
    )
  tokens, at = (expert.beside, '.beside') if isinstance(expert, MLPConfig) else (expert, '')
  if isinstance(tokens, PattentionConfig) and len(groups := tokens.groups) > 1:
    raise UserError(
      f'{path}.expert{at}.groups is {groups_as_text(groups)!r}, and the tokens of each expert are '
      'one group already; leave it out'
    )
  if isinstance(balance, LossBalanceConfig) and experts.count % balance.devices:
    raise UserError(
      f'{path}.balance.devices is {balance.devices}, which does not divide the '
      f'{experts.count} experts; take a divisor'
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
