"""Compile for GPUs with their compiler, which needs none; skip the tests where it is absent."""

import importlib

import jax
import jax.numpy as jnp
import pytest

from tokenformer_jax.errors import UserError
from tokenformer_jax.plan import gpu

needs_compiler = pytest.mark.skipif(
  not gpu.folder().is_dir(), reason=f'no compiler for GPUs in ${gpu.FOLDER}'
)


def test_without_the_compiler_one_sentence_has_the_command(monkeypatch, tmp_path):
  monkeypatch.setenv(gpu.FOLDER, str(tmp_path / 'nothing'))
  with pytest.raises(
    UserError, match=f'pip install --no-deps --target {tmp_path}/nothing jax-cuda'
  ):
    gpu.check_compiler()


def test_jax_asks_for_the_version_of_cudnn_by_the_name_that_is_replaced():
  module = importlib.import_module(gpu.CUDNN_MODULE)
  assert callable(getattr(module, gpu.CUDNN_VERSION)), 'the name of a private function changed'


def _attention_in_a_loop(mesh, trips):
  shape = jax.ShapeDtypeStruct(
    (2, 256, 4, 64), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P())
  )

  def step(_, x):
    return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation='cudnn')

  return jax.jit(lambda x: jax.lax.fori_loop(0, trips, step, x)).lower(shape)


@pytest.mark.slow
@needs_compiler
def test_kernels_count_as_often_as_a_loop_runs():
  once, thrice = (
    gpu.count_kernels(gpu.compile_text(_attention_in_a_loop, trips, on='h200')) for trips in (2, 4)
  )
  assert (once['attention'], thrice['attention']) == (2, 4)
