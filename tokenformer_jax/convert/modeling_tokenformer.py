"""The language models of tokenformer_jax in PyTorch, for transformers to load with their weights.

`tokenformer convert to-hf` copies this file and `modeling_tokenformer_layers.py` into the folder of
a model. They need torch and transformers, nothing else. `config.tokenformer` is the section `model`
of the run's config, and `config.layers` names the config of each layer. Names end in shapes:
x_BxTxD is [B, T, D].
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .modeling_tokenformer_layers import (
  Experts,
  Values,
  gained,
  make_ffn,
  make_norm,
  make_projection,
  parameter,
)

TURN = 2**40  # units of a whole turn of a rotation
# The name that this version of transformers has for the cache: newer ones say `cache`.
CACHE = 'cache' if 'cache' in CausalLMOutputWithPast.__dataclass_fields__ else 'past_key_values'


class TokenformerConfig(PretrainedConfig):
  """The config of a model: the section `model` of its run, and what transformers needs to know."""

  model_type = 'tokenformer'

  def __init__(self, tokenformer: Values | None = None, layers: list[str] | None = None, **kwargs):
    self.tokenformer = tokenformer or {}
    self.layers = layers or []
    super().__init__(**kwargs)


class Rotary:
  """The rotation of the entries of heads by their positions."""

  def __init__(self, config: Values, head_width: int):
    is_rotary = config['kind'] == 'rotary'
    self.width = int(head_width * config['fraction']) // 2 * 2 if is_rotary else 0
    if not self.width:
      return
    self.interleaved = config['layout'] == 'interleaved'
    turns = [
      config['base'] ** (-2 * i / self.width) / (2 * math.pi) for i in range(self.width // 2)
    ]
    turns = slowed(config['scaling'], turns, config['base'])
    # A gain of both queries and keys is larger scores.
    scaling, self.gain = config['scaling'], 1.0
    if scaling['kind'] == 'yarn':
      self.gain = scaling['gain'] or 1 + 0.1 * math.log(scaling['factor'])
    # Angles in whole units of a turn stay exact at large positions.
    self.units = [round(turn % 1 * TURN) for turn in turns]

  def __call__(self, x_BxHxTxK: Tensor, positions_BxT: Tensor) -> Tensor:
    if not self.width:
      return x_BxHxTxK
    units = torch.tensor(self.units, device=x_BxHxTxK.device)
    turned = positions_BxT[:, None, :, None].long() * units % TURN
    angles = turned.float() * (2 * math.pi / TURN)
    cos, sin = self.gain * angles.cos(), self.gain * angles.sin()
    x, rest = x_BxHxTxK.float().split([self.width, x_BxHxTxK.shape[-1] - self.width], -1)
    a, b = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, -1)
    pairs = a * cos - b * sin, b * cos + a * sin
    x = torch.stack(pairs, -1).flatten(-2) if self.interleaved else torch.cat(pairs, -1)
    return torch.cat([x, rest], -1).to(x_BxHxTxK.dtype)


def slowed(scaling: Values, turns: list[float], base: float) -> list[float]:
  """Return the turns a position of planes whose i-th of n turns by base^(−i/n) / 2π."""
  if scaling['kind'] == 'none':
    return turns
  kept = [0.0] * len(turns)  # the share of its speed that each plane keeps
  if scaling['kind'] == 'llama3':
    low, high = scaling['low_frequency'], scaling['high_frequency']
    kept = [(turn * scaling['length'] - low) / (high - low) for turn in turns]
  elif scaling['kind'] == 'yarn':
    # The planes, as real numbers, that turn `fast` and `slow` times over the length.
    fast, slow = (
      len(turns) * math.log(scaling['length'] / (2 * math.pi * scaling[name])) / math.log(base)
      for name in ('fast', 'slow')
    )
    first, last = max(math.floor(fast), 0), min(math.ceil(slow), 2 * len(turns) - 1)
    kept = [1 - (plane - first) / max(last - first, 1e-3) for plane in range(len(turns))]
  kept = [min(max(share, 0), 1) for share in kept]
  shares = zip(turns, kept, strict=True)
  return [turn * (share + (1 - share) / scaling['factor']) for turn, share in shares]


class Attention(nn.Module):
  """Softmax attention; its projections, the skips around them and its shape are by the config."""

  input_gain: nn.Parameter | None
  value_gain: nn.Parameter | None
  identity_gain: nn.Parameter | None  # with the next two, or none of them
  attention_gain: nn.Parameter
  uniform_gain: nn.Parameter

  def __init__(self, config: Values, model: Values, layer: int):
    super().__init__()
    self.config, self.layer, width = config, layer, model['width']
    self.heads = config['heads']
    self.kv_heads = config['kv_heads'] or self.heads
    self.head_width = config['head_width'] or width // self.heads
    inner, kv = self.heads * self.head_width, self.kv_heads * self.head_width
    value = config['qkv'] if config['value']['kind'] == 'as_key' else config['value']
    self.query = make_projection(config['qkv'], width, inner)
    self.key = make_projection(config['qkv'], width, kv)
    self.value = make_projection(value, width, kv)
    self.proj = make_projection(config['proj'], inner, width)
    form, self.has_joint_norm = config['qk_norm'], config['qk_norm'] == 'rms_joint'
    widths = (inner, kv) if self.has_joint_norm else (self.head_width, self.head_width)
    form = form.removesuffix('_joint')
    self.query_norm, self.key_norm = (make_norm(form, model, own) for own in widths)
    self.score_scale = (config['score_width'] or self.head_width) ** -0.5
    for names, used, shape in (
      ('input_gain value_gain', config['value_skip'], ()),
      ('identity_gain attention_gain uniform_gain', config['shaped'], (self.heads,)),
    ):
      for name in names.split():
        self.register_parameter(name, parameter(*shape) if used else None)
    self.rotary = Rotary(config['positions'], self.head_width)

  def forward(
    self, x_BxTxD: Tensor, seen_Bx1xTxS: Tensor, positions_BxT: Tensor, cache: Cache | None
  ) -> Tensor:
    """Attend to the slots of `seen_Bx1xTxS`, those of the cache first."""
    batch, length, _ = x_BxTxD.shape

    def split(x: Tensor, heads: int) -> Tensor:
      return x.view(batch, length, heads, self.head_width).transpose(1, 2)

    query, key = self.query(x_BxTxD), self.key(x_BxTxD)
    if self.has_joint_norm:
      query, key = self.query_norm(query), self.key_norm(key)
    query, key = split(query, self.heads), split(key, self.kv_heads)
    value = gained(self.value_gain, self.value(x_BxTxD))
    if self.input_gain is not None:
      value = gained(self.input_gain, x_BxTxD) + value
    own_value = value = split(value, self.kv_heads)
    if not self.has_joint_norm:
      query, key = self.query_norm(query), self.key_norm(key)
    query = self._scaled_by_length(query, positions_BxT)
    query, key = self.rotary(query, positions_BxT), self.rotary(key, positions_BxT)
    if cache is not None:
      key, value = cache.update(key, value, self.layer)
    if window := self.config['window']:
      slots = torch.arange(key.shape[2], device=key.device)
      seen_Bx1xTxS = seen_Bx1xTxS & (slots[-length:, None] - slots < window)
    if self.kv_heads != self.heads:
      repeats = self.heads // self.kv_heads
      key, value = (heads.repeat_interleave(repeats, 1) for heads in (key, value))
    # A slot of padding sees itself, which keeps its meaningless output finite.
    itself = torch.eye(length, key.shape[2], dtype=torch.bool, device=key.device)
    mask = seen_Bx1xTxS | itself.roll(key.shape[2] - length, 1)
    if cap := self.config['score_cap']:
      scores = self.score_scale * (query.float() @ key.float().transpose(2, 3))
      scores = (cap * (scores / cap).tanh()).masked_fill(~mask, -math.inf)
      mixed = scores.softmax(-1).to(value.dtype) @ value
    else:
      mixed = functional.scaled_dot_product_attention(
        query, key, value, mask, scale=self.score_scale
      )
    if self.identity_gain is not None:
      mean = (mask.float() / mask.sum(-1, keepdim=True)) @ value.float()
      gains = self.identity_gain, self.attention_gain, self.uniform_gain
      alpha, beta, gamma = (gain.float()[:, None, None] for gain in gains)
      mixed = (alpha * own_value.float() + beta * mixed.float() - gamma * mean).to(x_BxTxD.dtype)
    return self.proj(mixed.transpose(1, 2).flatten(2))

  def _scaled_by_length(self, query_BxHxTxK: Tensor, positions_BxT: Tensor) -> Tensor:
    """Return queries times the factor of scores that grows with the length."""
    how, seen = self.config['length_scale'], positions_BxT.clamp(min=0) + 1
    if how['kind'] == 'seen':
      seen = seen.clamp(max=self.config['window']) if self.config['window'] else seen
      factor = seen.clamp(min=how['least']).float().log() / math.log(how['base'])
    elif how['kind'] == 'position':
      factor = (seen.float().log() / math.log(how['length'])).clamp(min=1)
    else:
      return query_BxHxTxK
    return (query_BxHxTxK.float() * factor[:, None, :, None]).to(query_BxHxTxK.dtype)


class Block(nn.Module):
  """Attention and a feed-forward layer, joined by a wiring.

  Wirings are pre_norm, post_norm, skipless (β a(norm(x)), then α y + β' f(norm(y))), parallel
  (β a(norm(x)) + β' f(norm(x)), with `skip` added to x, and with `two_norms` a norm for each), and
  sandwich, x + norm(a(norm(x))), with `before` false x + norm(a(x)).
  """

  def __init__(self, config: Values, model: Values, layer: int):
    super().__init__()
    wiring, has_ffn = config['wiring'], config['ffn']['kind'] != 'none'
    self.kind, self.skip, gains = wiring['kind'], wiring.get('skip'), wiring.get('gains')
    self.two_norms = wiring.get('two_norms')
    norm, before = config['norm'], wiring.get('before', True)
    form = norm if config['ffn_norm'] == 'same' else config['ffn_norm']
    has_norm = has_ffn and before and (self.kind != 'parallel' or self.two_norms)
    is_sandwich = self.kind == 'sandwich'
    self.attention_norm = make_norm(norm if before else 'none', model)
    self.ffn_norm = make_norm(form if has_norm else 'none', model)
    self.attention_after_norm = make_norm(norm if is_sandwich else 'none', model)
    self.ffn_after_norm = make_norm(form if is_sandwich and has_ffn else 'none', model)
    self.attention = Attention(config['mixer'], model, layer)
    self.ffn = make_ffn(config['ffn'], model)
    self.mixer_gain = parameter() if gains else None
    self.ffn_gain = parameter() if gains and has_ffn else None
    self.skip_gain = parameter() if gains and has_ffn and self.kind == 'skipless' else None

  def forward(
    self, x: Tensor, is_token: Tensor, seen: Tensor, positions: Tensor, cache: Cache | None
  ) -> Tensor:
    post, parallel = self.kind == 'post_norm', self.kind == 'parallel'
    normed = x if post else self.attention_norm(x)
    y = self.attention_after_norm(self.attention(normed, seen, positions, cache))
    y = gained(self.mixer_gain, y)
    if self.kind in ('pre_norm', 'post_norm', 'sandwich') or (parallel and self.skip):
      y = x + y
    y = self.attention_norm(y) if post else y
    if self.ffn is None:
      return y
    if parallel and self.two_norms:
      normed = self.ffn_norm(x)
    elif not parallel:
      normed = y if post else self.ffn_norm(y)
    from_start = seen.shape[-1] == x.shape[1]
    more = (is_token, from_start) if isinstance(self.ffn, Experts) else ()
    fed = self.ffn_after_norm(self.ffn(normed, *more))
    y = gained(self.skip_gain, y) + gained(self.ffn_gain, fed)
    return self.ffn_norm(y) if post else y


class TokenformerForCausalLM(PreTrainedModel, GenerationMixin):
  """A causal language model over token ids [B, T]."""

  config_class = TokenformerConfig
  base_model_prefix = ''
  _no_split_modules = ['Block']  # noqa: RUF012 (as transformers declares it)

  def __init__(self, config: TokenformerConfig):
    super().__init__(config)
    model = config.tokenformer
    named = {'layer': model['layer'], **model['variants']}
    vocabulary, width = model['vocab_size'], model['width']
    self.embedding = parameter(vocabulary, width)
    learned = model['position_embedding'] == 'learned'
    self.positions = parameter(model['max_length'], width) if learned else None
    self.embedding_norm = make_norm(model['embedding_norm'], model)
    self.blocks = nn.ModuleList(
      Block(named[name], model, number) for number, name in enumerate(config.layers)
    )
    self.final_norm = make_norm(model['final_norm'], model)
    self.head = None if model['tied_head'] else parameter(vocabulary, width)
    self.input_scale = math.sqrt(width) if model['embedding_scale'] else None
    self.head_scale = width**-0.5 if model['scaled_logits'] else None
    self.logit_cap = model['logit_cap']
    self.post_init()

  def _init_weights(self, module: nn.Module) -> None:
    """Draw parameters that no file has, for a model made from its config alone."""
    for values in module.parameters(recurse=False):
      nn.init.normal_(values, std=0.02)

  def forward(
    self,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Cache | None = None,
    cache: Cache | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int = 0,
    **loss_options: Any,
  ) -> CausalLMOutputWithPast:
    """Return logits in float32, the cache and, with labels, the loss of the next tokens.

    `attention_mask` [B, S] is 1 for tokens, of the cache and the input, and 0 for padding.
    `cache` is the newer name of `past_key_values`, and `logits_to_keep` asks for the logits of so
    many last positions; 0: all.
    """
    batch, length = input_ids.shape
    cache = past_key_values if cache is None else cache
    if cache is None and use_cache:
      cache = DynamicCache()
    past = 0 if cache is None else cache.get_seq_length()
    if attention_mask is None:
      attention_mask = torch.ones(batch, past + length, device=input_ids.device)
    is_token_BxS = attention_mask.bool()
    if position_ids is None:
      position_ids = (is_token_BxS.long().cumsum(-1) - 1)[:, -length:]
    slots = torch.arange(past + length, device=input_ids.device)
    seen_Bx1xTxS = (slots[past:, None] >= slots) & is_token_BxS[:, None, None]

    x_BxTxD = functional.embedding(input_ids, self.embedding)
    if self.input_scale is not None:
      x_BxTxD = x_BxTxD * self.input_scale
    if self.positions is not None:
      rows = position_ids.clamp(0, len(self.positions) - 1)
      x_BxTxD = x_BxTxD + functional.embedding(rows, self.positions)
    x_BxTxD = self.embedding_norm(x_BxTxD)
    for block in self.blocks:
      is_token = is_token_BxS[:, past:]
      x_BxTxD = block(x_BxTxD, is_token, seen_Bx1xTxS, position_ids, cache)
    x_BxTxD = self.final_norm(x_BxTxD[:, -logits_to_keep:])
    if self.head_scale is not None:
      x_BxTxD = x_BxTxD * self.head_scale
    logits = (x_BxTxD @ (self.embedding if self.head is None else self.head).T).float()
    if self.logit_cap:
      logits = self.logit_cap * (logits / self.logit_cap).tanh()
    loss = None
    if labels is not None:
      loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **loss_options)
    named: dict[str, Any] = {CACHE: cache}
    return CausalLMOutputWithPast(loss=loss, logits=logits, **named)
