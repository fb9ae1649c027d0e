"""Counted FLOPs against the compiler's count and the published ones."""

import types

import jax
import jax.numpy as jnp
import pytest
from mixtures import mixture
from tiny import gated_model, tiny_model, tiny_vit, two_kinds

from tokenformer_jax.config import (
  Config,
  ExpertsConfig,
  ImagesConfig,
  MLPConfig,
  ModelConfig,
  RouterConfig,
  TrainConfig,
)
from tokenformer_jax.model import flops
from tokenformer_jax.model.lm import define_lm

# So wide that little of the work is outside of matrix products. Rotation is one that is no model's.
WIDE = {'layers': 1, 'width': 512, 'vocab_size': 512, 'gelu': 'tanh', 'rotary': 0}
COUNTS = {'qkv': 512, 'proj': 768, 'ffn': 2048}
LENGTH = 128


def _attention(model: ModelConfig, length: int) -> float:
  """FLOPs of token-token attention for one token, from the function of the length."""
  return flops.forward_flops(model, length) - flops.forward_flops(model, 0)


def _counted(model: ModelConfig) -> float:
  """FLOPs of the program of the forward pass of `LENGTH` tokens."""
  definition = define_lm(model)
  ids = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
  forward = jax.jit(lambda params, ids: definition.bind(params)(ids)[0])
  return forward.lower(definition.abstract, ids).cost_analysis()['flops']


@pytest.mark.parametrize(
  'changes',
  [{'tokens': COUNTS}, {'dense': True}, {'dense': True, 'ffn_width': 1536}],
  ids=['pattention', 'dense', 'dense with a width'],
)
def test_forward_flops_are_those_the_compiler_counts(changes):
  model = tiny_model(**WIDE, **changes)
  counted = _counted(model)
  # The program computes all scores and masks half of them; the formula counts the other half.
  formula = LENGTH * (flops.forward_flops(model, LENGTH) + _attention(model, LENGTH))
  assert formula == pytest.approx(counted, rel=0.03), 'MFU is off by the ratio of these two'


# By hand, for width 32, 2 layers, 24, 40 and 48 parameter tokens, and 64 words.
TOKENS = 2 * (3 * 2 * 32 * 24 + 2 * 32 * 40 + 2 * 32 * 48)
DENSE = 2 * (4 * 32 * 32 + 2 * 32 * 128)
# A gated attention unit, 48 wide with a head of 16, has matrices into 112 and out of 48.
GATED = 2 * (24 * (32 + 112) + 40 * (48 + 32))
# Three layers without the 48, whose 16 positions see 6 on average in a window of 8, and two whole
# ones, whose positions see 8.
KINDS = 2 * (3 * (TOKENS // 2 - 2 * 32 * 48) + TOKENS + 64 * 32) + 4 * 32 * (3 * 6 + 2 * 8)


@pytest.mark.parametrize(
  ('model', 'want'),
  [
    (tiny_model(), 2 * (TOKENS + 64 * 32) + 2 * 4 * 32 * 8),
    (
      tiny_model(tied_head=False, rotary=0, position_embedding='learned'),
      2 * (TOKENS + 64 * 32) + 2 * 4 * 32 * 8,
    ),
    (tiny_model(dense=True, bias=True), 2 * (DENSE + 64 * 32) + 2 * 4 * 32 * 8),
    (two_kinds(), KINDS),
    (gated_model(), 2 * (GATED + 64 * 32) + 2 * (2 * 16 + 2 * 48) * 8),
    (
      gated_model(dense=True, bias=True, window=8),
      2 * (2 * (32 * 112 + 48 * 32) + 64 * 32) + 2 * (2 * 16 + 2 * 48) * 6,
    ),
    (tiny_vit(), 16 * (2 * 16 * 32 + 2 * TOKENS + 2 * 4 * 32 * 16) + 2 * 32 * 10),
    (
      tiny_vit(pool='token'),
      16 * 2 * 16 * 32 + 17 * (2 * TOKENS + 2 * 4 * 32 * 17) + 2 * 32 * 10,
    ),
  ],
  ids=[
    *('tied', 'untied', 'dense', 'two kinds', 'gated', 'gated, dense, a window'),
    *('mean', 'class token'),
  ],
)
def test_forward_flops_are_exact(model, want):
  assert flops.forward_flops(model, 16) == want, 'a matrix counts too often, or not at all'


def test_a_training_step_is_three_forward_passes():
  model = tiny_model()
  got = flops.train_flops(model, 64)
  assert got == 3 * flops.forward_flops(model, 64), 'backward is not twice forward'


@pytest.mark.parametrize(
  ('layers', 'width', 'attention', 'ffn', 'parameters'),
  [
    (12, 768, 768, 3072, 113_246_208),
    (40, 1536, 1536, 6144, 1_509_949_440),
  ],
)
def test_published_parameters_without_embeddings(layers, width, attention, ffn, parameters):
  counts = {'qkv': attention, 'proj': attention, 'ffn': ffn}
  model = tiny_model(layers=layers, width=width, heads=16, vocab_size=50304, tokens=counts)
  assert flops.matrix_parameters(model) == parameters, 'not the count of TokenFormer, Table 9'


# TokenFormer, Table 8 (3.6 and 10.1 · 10⁴ T²) counts all scores, we count the causal half.
@pytest.mark.parametrize(
  ('width', 'per_square', 'printed'),
  [(768, 36_864, '3.6'), (2112, 101_376, '10.1')],
)
def test_token_token_flops_are_half_of_table_8(width, per_square, printed):
  model = tiny_model(layers=12, width=width, heads=16, vocab_size=50304, dense=True)
  got = 2 * 1024 * _attention(model, 1024)
  assert got == per_square * 1024**2, f'Table 8 has {printed} · 10⁴ T² for this width'


# Published: cloud.google.com/tpu/docs and NVIDIA's data sheets (dense). A chip of TPU v3 (123) and
# of TPU7x (2307) has two TensorCores that do not work as one, and so is two devices to JAX.
@pytest.mark.parametrize(
  ('kind', 'tera'),
  [
    ('TPU v5 lite', 197),
    ('TPU v5p', 459),
    ('TPU7x', 2307 / 2),
    ('NVIDIA H100 80GB HBM3', 989),
    ('NVIDIA H100 PCIe', 756),
    ('NVIDIA L40S', 362),
    ('cpu', None),
    ('NVIDIA GeForce RTX 4090', None),
  ],
)
def test_the_peak_of_a_chip_is_that_of_the_longest_prefix(kind, tera):
  device = types.SimpleNamespace(device_kind=kind)
  assert flops.peak_flops(device) == (tera and tera * 1e12), f'MFU on {kind} is off by their ratio'


def test_a_step_of_images_counts_every_image_once():
  config = Config(
    model=tiny_vit(), data=ImagesConfig(image_size=16, batch_size=6), train=TrainConfig()
  )
  assert flops.length(config) == 16
  assert flops.step_flops(config) == 6 * 3 * flops.forward_flops(config.model, 16)


def test_experts_count_by_their_share():
  def entries(**changes):
    experts = ExpertsConfig(count=8, expert=MLPConfig(16), **changes)
    return flops.matrix_parameters(mixture(experts, dense=True)) / 2 - 4 * 32 * 32

  assert entries() == 32 * 8 + 2 * 32 * 16, 'the router, and one expert'
  assert entries(router=RouterConfig(top_k=3)) == 32 * 8 + 3 * 2 * 32 * 16
  assert entries(shared=MLPConfig(24)) == 32 * 8 + 2 * 32 * 16 + 2 * 32 * 24
