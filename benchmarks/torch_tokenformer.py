"""Define TokenFormers and their training step in PyTorch, as a reference for speed.

The code is independent of the package and written for speed: query, key and value are one pair of
matrix products, attention is `scaled_dot_product_attention`, AdamW is fused, and the forward and
backward passes can be compiled. With `bf16`, parameters and moments stay in float32 and matrix
products run in bfloat16, as in our step.

  sizes = Sizes(layers=12, width=768, heads=12, vocab_size=50304, qkv=768, proj=768, ffn=3072)
  model = TokenFormer(sizes).to('cuda')
  train_step = build_train_step(model, build_optimizer(model), bf16=True, compile=True)
  loss, grad_norm = train_step(input_ids, targets)  # [B, T] each; both results stay on the device

The model is the one released for the Pile (Wang et al. 2024, arXiv 2410.23168): pre-norm blocks of
Pattentions with `l2_norm_gelu` scores, norms without parameters in the blocks, rotary positions on
a part of every head, an affine final norm and a tied head. `ViT` has the same blocks without
positions in attention.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPSILON = 1e-5
# Keeps a row of zero scores finite; smaller than the rounding of any other row.
SCORE_EPSILON = 1e-14

TrainStep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The sizes of a model."""

  layers: int
  width: int
  heads: int  # divides the width
  vocab_size: int
  qkv: int  # parameter tokens of each of the query, key and value projections
  proj: int  # parameter tokens
  ffn: int  # parameter tokens
  rotary_fraction: float = 0.25  # of every head
  max_length: int = 2048

  @property
  def head_size(self) -> int:
    """Return the features of a head."""
    return self.width // self.heads

  @property
  def rotary_size(self) -> int:
    """Return the features of a head that are rotated."""
    return int(self.head_size * self.rotary_fraction)


def parameter_weights(scores_xN: Tensor) -> Tensor:
  """Return GELU(√N A / ‖A‖₂) over the last axis: GELU after a norm by the root mean square."""
  return F.gelu(F.rms_norm(scores_xN, scores_xN.shape[-1:], eps=SCORE_EPSILON))


class Pattention(nn.Module):
  """Attention to parameter tokens: `keys` [N, I] and `values` [N, O] (eq. 3-5 of the paper)."""

  def __init__(self, width: int, tokens: int):
    super().__init__()
    self.keys = nn.Parameter(torch.empty(tokens, width))
    self.values = nn.Parameter(torch.empty(tokens, width))

  def forward(self, x_BxTxD: Tensor) -> Tensor:
    """Map [B, T, D] to [B, T, D]."""
    return parameter_weights(F.linear(x_BxTxD, self.keys)) @ self.values


class QKVPattention(nn.Module):
  """The Pattentions of query, key and value: `keys` and `values` [3, N, D]."""

  def __init__(self, width: int, tokens: int):
    super().__init__()
    self.keys = nn.Parameter(torch.empty(3, tokens, width))
    self.values = nn.Parameter(torch.empty(3, tokens, width))

  def forward(self, x_BxTxD: Tensor) -> Tensor:
    """Map [B, T, D] to [3, B, T, D]."""
    batch, length, width = x_BxTxD.shape
    scores_Mx3N = F.linear(x_BxTxD.reshape(-1, width), self.keys.flatten(0, 1))
    weights_Mx3xN = parameter_weights(scores_Mx3N.unflatten(-1, (3, -1)))
    return torch.bmm(weights_Mx3xN.transpose(0, 1), self.values).view(3, batch, length, width)


class Rotary(nn.Module):
  """Cached rotations of a head's first features, in the half-split layout with base 10000."""

  def __init__(self, size: int, max_length: int):
    super().__init__()
    exponents_R = torch.arange(0, size, 2, dtype=torch.float32) / max(size, 1)
    positions_T = torch.arange(max_length, dtype=torch.float32)
    angles_TxR = torch.outer(positions_T, 10000.0**-exponents_R)
    self.register_buffer('cos', angles_TxR.cos(), persistent=False)
    self.register_buffer('sin', angles_TxR.sin(), persistent=False)

  def forward(self, x_xTxK: Tensor, start: int = 0) -> Tensor:
    """Rotate [..., T, K] by the positions from `start` on, in float32; keep the dtype."""
    end, half = start + x_xTxK.shape[-2], self.cos.shape[-1]
    if not half:
      return x_xTxK
    cos_TxR, sin_TxR = self.cos[start:end], self.sin[start:end]
    first, second, rest = x_xTxK.split((half, half, x_xTxK.shape[-1] - 2 * half), dim=-1)
    rotated = (first * cos_TxR - second * sin_TxR, second * cos_TxR + first * sin_TxR)
    return torch.cat((*(part.to(x_xTxK.dtype) for part in rotated), rest), dim=-1)


class Block(nn.Module):
  """A pre-norm block of attention and a Pattention as feed-forward layer."""

  def __init__(self, sizes: Sizes, *, causal: bool = True):
    super().__init__()
    self.heads, self.causal = sizes.heads, causal
    self.qkv = QKVPattention(sizes.width, sizes.qkv)
    self.proj = Pattention(sizes.width, sizes.proj)
    self.ffn = Pattention(sizes.width, sizes.ffn)

  def forward(
    self, x_BxTxD: Tensor, rotary: Rotary, start: int = 0, cache_2xBxHxSxK: Tensor | None = None
  ) -> Tensor:
    """Map [B, T, D] to [B, T, D], in the dtype of the input.

    If a cache is given, fill its positions from `start` on and attend to all positions before.
    """
    dtype, end = x_BxTxD.dtype, start + x_BxTxD.shape[1]
    qkv_3xBxHxTxK = self.qkv(_norm(x_BxTxD)).unflatten(-1, (self.heads, -1)).transpose(2, 3)
    query_BxHxTxK, key_BxHxTxK = rotary(qkv_3xBxHxTxK[:2], start)
    value_BxHxTxK = qkv_3xBxHxTxK[2]
    if cache_2xBxHxSxK is not None:
      cache_2xBxHxSxK[0, :, :, start:end] = key_BxHxTxK
      cache_2xBxHxSxK[1, :, :, start:end] = value_BxHxTxK
      key_BxHxTxK, value_BxHxTxK = cache_2xBxHxSxK[:, :, :, :end]
    mixed_BxHxTxK = F.scaled_dot_product_attention(
      query_BxHxTxK, key_BxHxTxK, value_BxHxTxK, is_causal=self.causal and start == 0
    )
    x_BxTxD = x_BxTxD + self.proj(mixed_BxHxTxK.transpose(1, 2).flatten(2)).to(dtype)
    return x_BxTxD + self.ffn(_norm(x_BxTxD)).to(dtype)


class TokenFormer(nn.Module):
  """The language model, with newly drawn parameters.

  As in the released code, keys and the embedding are normal with standard deviation 0.02, and
  values with 2 / (L √D).
  """

  def __init__(self, sizes: Sizes):
    super().__init__()
    self.sizes = sizes
    self.embedding = nn.Embedding(sizes.vocab_size, sizes.width)
    self.rotary = Rotary(sizes.rotary_size, sizes.max_length)
    self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
    self.final_norm = nn.LayerNorm(sizes.width, eps=NORM_EPSILON)
    nn.init.normal_(self.embedding.weight, std=0.02)
    _draw_tokens(self)

  def forward(self, input_ids_BxT: Tensor) -> Tensor:
    """Return the logits [B, T, V] of the next token at every position."""
    x_BxTxD = self.embedding(input_ids_BxT)
    if torch.is_autocast_enabled(x_BxTxD.device.type):
      # Autocast keeps the embedding in float32, and then every addition to the residual stream.
      x_BxTxD = x_BxTxD.to(torch.get_autocast_dtype(x_BxTxD.device.type))
    for block in self.blocks:
      x_BxTxD = block(x_BxTxD, self.rotary)
    return F.linear(self.final_norm(x_BxTxD), self.embedding.weight)

  @torch.inference_mode()
  def decode(self, prompts_BxT: Tensor, length: int, written: Callable[[], None]) -> Tensor:
    """Return the likeliest tokens [B, length] after prompts of equal lengths, by a key-value cache.

    Call `written` after every token, when the device has finished it.
    """
    batch, start = prompts_BxT.shape
    sizes, weight = self.sizes, self.embedding.weight
    shape = (sizes.layers, 2, batch, sizes.heads, start + length, sizes.head_size)
    cache = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
    ids_BxT, start, tokens = prompts_BxT, 0, []
    for _ in range(length):
      x_BxTxD = self.embedding(ids_BxT)
      for block, layer_cache in zip(self.blocks, cache, strict=True):
        x_BxTxD = block(x_BxTxD, self.rotary, start, layer_cache)
      start += ids_BxT.shape[1]
      ids_BxT = F.linear(self.final_norm(x_BxTxD[:, -1:]), weight).argmax(dim=-1)
      tokens.append(ids_BxT)
      if weight.is_cuda:
        torch.cuda.synchronize()
      written()
    return torch.cat(tokens, dim=1)

  def loss(self, input_ids_BxT: Tensor, targets_BxT: Tensor) -> Tensor:
    """Return the mean cross entropy in float32, without positions whose target is -100."""
    logits_BxTxV = self(input_ids_BxT)
    return F.cross_entropy(logits_BxTxV.flatten(0, 1).float(), targets_BxT.flatten())


class ViT(nn.Module):
  """The vision transformer of square images, with fixed positions and a mean over the patches."""

  def __init__(self, sizes: Sizes, patch: int, channels: int):
    """Draw the parameters; `sizes.max_length` is the number of patches, `vocab_size` of classes."""
    super().__init__()
    self.sizes, self.patch = sizes, patch
    inputs, side = patch * patch * channels, math.isqrt(sizes.max_length)
    self.embedding = nn.Linear(inputs, sizes.width)
    self.register_buffer('positions', _sincos(side, sizes.width), persistent=False)
    self.rotary = Rotary(0, sizes.max_length)
    self.blocks = nn.ModuleList(Block(sizes, causal=False) for _ in range(sizes.layers))
    self.final_norm = nn.LayerNorm(sizes.width, eps=NORM_EPSILON)
    self.head = nn.Linear(sizes.width, sizes.vocab_size)
    nn.init.normal_(self.embedding.weight, std=inputs**-0.5)
    nn.init.normal_(self.head.weight, std=0.02)
    _draw_tokens(self)

  def forward(self, images_BxHxWxC: Tensor) -> Tensor:
    """Return the logits [B, classes] of images of bytes."""
    images_BxHxWxC = images_BxHxWxC.float() / 127.5 - 1
    rows_BxRxHxCxWxC = images_BxHxWxC.unfold(1, self.patch, self.patch).unfold(
      2, self.patch, self.patch
    )
    patches_BxTxP = rows_BxRxHxCxWxC.flatten(1, 2).flatten(2)
    x_BxTxD = self.embedding(patches_BxTxP)
    x_BxTxD = x_BxTxD + self.positions.to(x_BxTxD.dtype)
    for block in self.blocks:
      x_BxTxD = block(x_BxTxD, self.rotary)
    return self.head(self.final_norm(x_BxTxD).float().mean(dim=1))

  def loss(self, images_BxHxWxC: Tensor, labels_B: Tensor) -> Tensor:
    """Return the mean cross entropy in float32."""
    return F.cross_entropy(self(images_BxHxWxC).float(), labels_B)


def build_optimizer(model: nn.Module) -> torch.optim.AdamW:
  """Return AdamW with decoupled decay of the matrices; norm scales and biases do not decay."""
  parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
  groups = [
    {'params': [p for p in parameters if p.ndim >= 2], 'weight_decay': 0.1},
    {'params': [p for p in parameters if p.ndim < 2], 'weight_decay': 0.0},
  ]
  fused = all(parameter.device.type in ('cpu', 'cuda') for parameter in parameters)
  return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), eps=1e-8, fused=fused)


def build_train_step(
  model: TokenFormer | ViT, optimizer: torch.optim.Optimizer, *, bf16: bool, compile: bool
) -> TrainStep:
  """Return a function that updates the model in place by one step.

  The model is on the device of the batches. With `bf16` autocast uses bfloat16 for matrix products
  and the residual stream. `compile` compiles the loss and its gradient.

  Returns:
    (input_ids [B, T], targets [B, T]) or (images, labels [B]) → the loss and the gradient's norm
    before clipping, as scalars on the device; the step does not wait for them.
  """
  parameters = list(model.parameters())
  device_type = parameters[0].device.type
  loss_fn = model.loss
  if compile:
    loss_fn = torch.compile(loss_fn, fullgraph=True, dynamic=False)

  def train_step(input_ids_BxT: Tensor, targets_BxT: Tensor) -> tuple[Tensor, Tensor]:
    optimizer.zero_grad(set_to_none=True)
    cast = torch.autocast(device_type, torch.bfloat16) if bf16 else contextlib.nullcontext()
    with cast:
      loss = loss_fn(input_ids_BxT, targets_BxT)
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    return loss.detach(), grad_norm

  return train_step


def _draw_tokens(model: TokenFormer | ViT) -> None:
  value_std = 2 / (model.sizes.layers * math.sqrt(model.sizes.width))
  for module in model.modules():
    if isinstance(module, Pattention | QKVPattention):
      nn.init.normal_(module.keys, std=0.02)
      nn.init.normal_(module.values, std=value_std)


def _sincos(side: int, width: int) -> Tensor:
  """Return fixed 2-D positions [side · side, width] (arXiv 2104.02057)."""
  frequencies = 10000.0 ** -(torch.arange(width // 4) / (width // 4))
  row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing='ij')
  angles = [at.reshape(-1, 1) * frequencies for at in (column, row)]
  return torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1)


def _norm(x_BxTxD: Tensor) -> Tensor:
  return F.layer_norm(x_BxTxD, x_BxTxD.shape[-1:], eps=NORM_EPSILON)
