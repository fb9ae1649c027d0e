"""The modules of layers that work on each position alone, for `modeling_tokenformer.py`."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

EPSILON = 1e-12  # keeps the norm of a row of zeros finite

ACTIVATIONS = {
  'gelu': functional.gelu,
  'gelu_tanh': lambda x: functional.gelu(x, approximate='tanh'),
  'relu': functional.relu,
  'silu': functional.silu,
}

Values = dict[str, Any]  # a section of the config


def parameter(*shape: int) -> nn.Parameter:
  """Return a parameter for the weights that are loaded."""
  return nn.Parameter(torch.empty(shape))


def gained(factor: Tensor | None, x: Tensor) -> Tensor:
  """Return x times a learned factor, multiplied in float32; without a factor x itself."""
  return x if factor is None else (x.float() * factor.float()).to(x.dtype)


class Norm(nn.Module):
  """LayerNorm or RMSNorm over the last axis, in float32, with or without a scale and a bias."""

  def __init__(self, form: str, model: Values, width: int = 0):
    super().__init__()
    self.form, self.epsilon = form, model['norm_epsilon']
    self.outside = model['norm_epsilon_outside']
    width = width or model['width']
    self.scale = parameter(width) if form in ('affine', 'rms', 'rms_offset') else None
    self.bias = parameter(width) if form in ('bias', 'affine') else None

  def forward(self, x_BxTxD: Tensor) -> Tensor:
    x = x_BxTxD.float()
    if not self.form.startswith('rms'):
      x = x - x.mean(-1, keepdim=True)
    square = x.square().mean(-1, keepdim=True)
    if self.form.startswith('rms') and self.outside:
      x = x / ((square + torch.finfo(torch.float32).tiny).sqrt() + self.epsilon)
    else:
      x = x * torch.rsqrt(square + self.epsilon)
    if self.scale is not None:
      x = x * (self.scale.float() + (self.form == 'rms_offset'))
    if self.bias is not None:
      x = x + self.bias.float()
    return x.to(x_BxTxD.dtype)


def make_norm(form: str, model: Values, *width: int) -> nn.Module:
  """Return a norm over the model's width, or another one; the form `none` is the identity."""
  return nn.Identity() if form == 'none' else Norm(form, model, *width)


def token_weights(scores: Tensor, reference: float, score: Values) -> Tensor:
  """Return the weights of a group's tokens: Θ of the scores [..., N], with τ² = `reference`."""
  tanh = score.get('gelu') == 'tanh'

  def gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate='tanh' if tanh else 'none')

  def inverse_l2(x: Tensor) -> Tensor:
    return math.sqrt(reference) / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt()

  def inverse_l1(x: Tensor) -> Tensor:
    return reference / (x.abs().sum(-1, keepdim=True) + EPSILON)

  x, kind = scores.float(), score['kind']
  match kind:
    case 'linear':
      weights = x
    case 'gelu':
      weights = gelu(x)
    case 'l2_norm_gelu':
      weights = gelu(x * inverse_l2(x))
    case 'gelu_l2_norm':
      weights = gelu(x) * inverse_l2(gelu(x))
    case 'gelu_l1_norm':
      weights = gelu(x) * inverse_l1(gelu(x))
    case 'softmax' | 'exp_l2_norm':
      weights = (x - x.amax(-1, keepdim=True)).exp()
      weights = weights * (inverse_l1 if kind == 'softmax' else inverse_l2)(weights)
    case _:
      raise ValueError(f'unknown score {kind!r}')
  return weights.to(scores.dtype)


class Pattention(nn.Module):
  """Attention to parameter tokens: Σ Θ(x Kᵀ) V over groups of tokens with keys K and values V."""

  def __init__(self, config: Values, d_in: int, d_out: int):
    super().__init__()
    self.groups = config['groups']
    self.keys = parameter(config['tokens'], d_in)
    self.values = parameter(config['tokens'], d_out)

  def forward(self, x: Tensor) -> Tensor:
    sizes = [group['tokens'] for group in self.groups]
    arrays = zip(self.groups, self.keys.split(sizes), self.values.split(sizes), strict=True)
    first, *others = (
      token_weights(x @ keys.T, group['reference'], group['score']) @ values
      for group, keys, values in arrays
    )
    return sum(others, start=first)


class Dense(nn.Module):
  """x W, plus a bias and a Pattention if the config has them."""

  def __init__(self, config: Values, d_in: int, d_out: int):
    super().__init__()
    self.kernel = parameter(d_in, d_out)
    self.bias = parameter(d_out) if config['bias'] else None
    self.beside = make_beside(config, d_in, d_out)

  def forward(self, x: Tensor) -> Tensor:
    y = x @ self.kernel
    if self.bias is not None:
      y = y + self.bias
    return y if self.beside is None else y + self.beside(x)


def make_beside(config: Values, d_in: int, d_out: int) -> Pattention | None:
  """Return the parameter tokens beside a matrix or an MLP; None without any."""
  beside = config['beside']
  return Pattention(beside, d_in, d_out) if beside['kind'] == 'pattention' else None


def make_projection(config: Values, d_in: int, d_out: int) -> nn.Module:
  """Return a Pattention or a matrix, or the identity if the config has neither."""
  if config['kind'] == 'none':
    return nn.Identity()
  return (Pattention if config['kind'] == 'pattention' else Dense)(config, d_in, d_out)


class MLP(nn.Module):
  """φ(x W₁) W₂ or, gated, (φ(x W₃) ⊙ x W₁) W₂, plus a Pattention if the config has one."""

  def __init__(self, config: Values, model: Values):
    super().__init__()
    width = model['width']
    hidden = config['width'] or 4 * width
    dense = {'bias': config['bias'], 'beside': config['each']}
    self.up = Dense(dense, width, hidden)
    self.gate = Dense(dense, width, hidden) if config['gated'] else None
    self.down = Dense(dense, hidden, width)
    self.activation = ACTIVATIONS[config['activation']]
    self.beside = make_beside(config, width, width)

  def forward(self, x: Tensor) -> Tensor:
    hidden = self.up(x)
    gate = None if self.gate is None else self.activation(self.gate(x))
    y = self.down(self.activation(hidden) if gate is None else gate * hidden)
    return y if self.beside is None else y + self.beside(x)


class Router(nn.Module):
  """The choice of K experts for each token."""

  def __init__(self, config: Values, model: Values):
    super().__init__()
    self.router = config['router']
    self.kernel = parameter(model['width'], config['count'])
    self.bias = parameter(config['count']) if config['balance']['kind'] == 'bias' else None

  def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of the experts of each token, and their gates in float32."""
    dtype, top_k = getattr(torch, self.router['dtype']), self.router['top_k']
    logits = x.to(dtype) @ self.kernel.to(dtype)
    is_softmax = self.router['gates'] == 'softmax'
    gates = logits.softmax(-1) if is_softmax else logits.sigmoid()
    ranked = logits if self.bias is None else gates.float() + self.bias.float()
    # Sorted stably, so that of equal gates the lower numbers come first.
    experts = ranked.sort(stable=True, dim=-1, descending=True).indices[..., :top_k]
    if not self.router['renormalize']:
      return experts, gates.gather(-1, experts).float()
    chosen = logits.gather(-1, experts).float()
    return experts, (chosen if is_softmax else functional.logsigmoid(chosen)).softmax(-1)


class ExpertTokens(nn.Module):
  """The parameter tokens of all experts, or those beside their matrices."""

  def __init__(self, config: Values, count: int, width: int):
    super().__init__()
    (self.group,) = config['groups']
    self.keys = parameter(count, config['tokens'], width)
    self.values = parameter(count, config['tokens'], width)

  def forward(self, x: Tensor, expert: int) -> Tensor:
    group = self.group
    weights = token_weights(x @ self.keys[expert].T, group['reference'], group['score'])
    return weights @ self.values[expert]


class ExpertMLPs(nn.Module):
  """The matrices of all experts."""

  def __init__(self, config: Values, count: int, width: int):
    super().__init__()
    hidden = config['width'] or 4 * width
    self.up = parameter(count, width, hidden)
    self.gate = parameter(count, width, hidden) if config['gated'] else None
    self.down = parameter(count, hidden, width)
    self.activation = ACTIVATIONS[config['activation']]
    beside = config['beside']
    has_tokens = beside['kind'] == 'pattention'
    self.beside = ExpertTokens(beside, count, width) if has_tokens else None

  def forward(self, x: Tensor, expert: int) -> Tensor:
    hidden = x @ self.up[expert]
    gate = None if self.gate is None else self.activation(x @ self.gate[expert])
    y = (self.activation(hidden) if gate is None else gate * hidden) @ self.down[expert]
    return y if self.beside is None else y + self.beside(x, expert)


class Experts(nn.Module):
  """An expert that all tokens use, plus the experts that a router chooses for each token."""

  def __init__(self, config: Values, model: Values):
    super().__init__()
    self.config = config
    self.shared = make_ffn(config['shared'], model)
    self.shared_gate = parameter(model['width']) if config['shared_gate'] else None
    self.router = Router(config, model)
    kind = ExpertTokens if config['expert']['kind'] == 'pattention' else ExpertMLPs
    self.experts = kind(config['expert'], config['count'], model['width'])

  def forward(self, x_BxTxD: Tensor, is_token_BxT: Tensor, from_start: bool) -> Tensor:
    experts_BxTxK, gates_BxTxK = self.router(x_BxTxD)
    kept_BxTxK = is_token_BxT[..., None].expand_as(experts_BxTxK)
    if self.config['dispatch']['kind'] == 'capacity' and from_start:
      kept_BxTxK = self._taken(experts_BxTxK, kept_BxTxK)
    flat_NxD, y_NxD = x_BxTxD.flatten(0, 1), torch.zeros_like(x_BxTxD).flatten(0, 1)
    for expert in range(self.config['count']):
      token, choice = torch.where(((experts_BxTxK == expert) & kept_BxTxK).flatten(0, 1))
      gate = gates_BxTxK.flatten(0, 1)[token, choice, None].to(y_NxD.dtype)
      y_NxD.index_add_(0, token, gate * self.experts(flat_NxD[token], expert))
    y_BxTxD = y_NxD.view_as(x_BxTxD)
    if self.shared is None:
      return y_BxTxD
    shared = self.shared(x_BxTxD)
    if self.shared_gate is not None:
      gate = torch.sigmoid(x_BxTxD.float() @ self.shared_gate.float())[..., None]
      shared = (gate * shared.float()).to(shared.dtype)
    return y_BxTxD + shared

  def _taken(self, experts_BxTxK: Tensor, valid: Tensor) -> Tensor:
    """Return which choices their expert takes; each row has a capacity of its own."""
    how, count, top_k = self.config['dispatch'], self.config['count'], experts_BxTxK.shape[-1]
    tokens = valid[..., 0].sum(-1).tolist()
    even = [round(how['eval_factor'] * n * top_k / count) for n in tokens]
    capacities = [min(n, max(number, how['least'])) for n, number in zip(tokens, even, strict=True)]
    one_hot = functional.one_hot(experts_BxTxK.flatten(1), count) * valid.flatten(1)[..., None]
    rank = ((one_hot.cumsum(1) - 1) * one_hot).sum(-1)
    is_taken = rank < torch.tensor(capacities, device=rank.device)[:, None]
    return valid & is_taken.view_as(valid)


def make_ffn(config: Values, model: Values) -> nn.Module | None:
  """Return the feed-forward layer, or None if the config has none."""
  match config['kind']:
    case 'none':
      return None
    case 'pattention':
      return Pattention(config, model['width'], model['width'])
    case 'mlp':
      return MLP(config, model)
  return Experts(config, model)
