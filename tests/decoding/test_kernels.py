"""The kernels of a token on a GPU, whose number decides its time."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from tokenformer_jax import config
from tokenformer_jax.config import LMConfig, PattentionConfig
from tokenformer_jax.decoding import decode, sampling
from tokenformer_jax.decoding.decode import Decoder
from tokenformer_jax.model.lm import Execution, define_lm
from tokenformer_jax.plan import gpu, trip_counts
from tokenformer_jax.plan.hlo import parse

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(not gpu.folder().is_dir(), reason=f'no compiler for GPUs in ${gpu.FOLDER}'),
]
TOKENS = 16  # of a chunk


def _model(width: int, heads: int, layers: int) -> LMConfig:
  of_width, of_ffn = (PattentionConfig(count, count) for count in (width, 4 * width))
  layer = config.LayerConfig(config.SoftmaxConfig(heads, qkv=of_width, proj=of_width), of_ffn)
  return LMConfig(f'layer*{layers}', width=width, layer=layer, vocab_size=50304)


SIZES = {'150m': _model(768, 12, 4), '1_5b': _model(1536, 16, 4)}


def _lower(mesh, model: LMConfig, count: int, need: str) -> jax.stages.Lowered:
  """Lower the program that writes a chunk of texts, with at most 384 slots."""
  decoder = Decoder(model, Execution(jnp.dtype('bfloat16')))
  int_B = jax.ShapeDtypeStruct((count,), jnp.int32)
  draws = sampling.Draws.from_samplings([sampling.DEFAULT] * count)
  rows = decode._Rows(int_B, draws, jax.ShapeDtypeStruct((count, 4), jnp.int32))
  params = jax.eval_shape(decoder.prepare, define_lm(model).abstract)
  ids = jax.ShapeDtypeStruct((count, 128), jnp.int32)
  prefill = functools.partial(decoder._prefill, space=384)
  state = jax.eval_shape(prefill, params, ids, rows, int_B)
  arguments = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.NamedSharding(mesh, jax.P())),
    (params, state, rows, jax.ShapeDtypeStruct((count,), bool)),
  )
  return decoder._advance.lower(*arguments, need=need, chunk=TOKENS)


@functools.cache
def _text(size: str, layers: int, rows: int, need: str = 'likeliest') -> str:
  model = dataclasses.replace(SIZES[size], pattern=f'layer*{layers}')
  return gpu.compile_text(_lower, model, rows, need, on='h200')


def _kernels(text: str) -> float:
  """Return the kernels of one token."""
  return gpu.count_kernels(text).total() / TOKENS


@pytest.mark.parametrize(('rows', 'most'), [(8, 17), (4, 20), (1, 20)])
@pytest.mark.parametrize('size', SIZES)
def test_the_kernels_of_a_layer(size, rows, most):
  two, four = (_kernels(_text(size, layers, rows)) for layers in (2, 4))
  assert (four - two) / 2 <= most


def test_no_token_copies_a_parameter():
  """No operation of the loop writes as much as the keys of one projection, but for the logits."""
  for visit in trip_counts.visit(parse(_text('1_5b', 2, 8))):
    if visit.times == TOKENS and visit.inside is None and 'fusion' in visit.instruction.opcode:
      for sizes in re.findall(r'\[([\d,]+)\]', visit.instruction.shape):
        entries = math.prod(map(int, sizes.split(',')))
        is_cache = sizes == '8,16,384,96'
        assert is_cache or entries < 1536 * 1536, visit.instruction


def test_the_default_draw_takes_at_most_12_kernels_more_than_the_likeliest_token():
  likeliest, drawn = (_kernels(_text('1_5b', 2, 8, need)) for need in ('likeliest', 'likely'))
  assert drawn - likeliest <= 12
