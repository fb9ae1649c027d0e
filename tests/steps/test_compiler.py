"""Options that the steps are compiled with."""

import types

import jax
import numpy as np
import pytest

from tokenformer_jax.steps import compiler


def _mesh(platform: str, kind: str):
  """What `compiler` reads of a mesh."""
  device = types.SimpleNamespace(platform=platform, device_kind=kind)
  return types.SimpleNamespace(devices=np.array([device], object))


@pytest.mark.parametrize('platform', ['cpu', 'tpu'])
def test_deterministic_is_auto_where_every_program_is(platform):
  mesh = _mesh(platform, 'TPU v5' if platform == 'tpu' else 'cpu')
  assert compiler.options('deterministic', mesh) == compiler.options('auto', mesh)
  assert compiler.eval_options('deterministic', mesh) == {}


def test_a_gpu_is_asked_for_the_same_bits():
  mesh = _mesh('gpu', 'NVIDIA H100')
  wanted = {'xla_gpu_deterministic_ops': True}
  assert compiler.options('deterministic', mesh) == wanted, 'sums of a scatter have no order'
  assert compiler.eval_options('deterministic', mesh) == wanted, 'the best step may be another'
  assert compiler.options('auto', mesh) == compiler.options('none', mesh) == {}


def test_this_version_of_xla_knows_the_option():
  options = compiler.options('deterministic', _mesh('gpu', 'NVIDIA H100'))
  assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
  with pytest.raises(jax.errors.JaxRuntimeError, match='No such compile option'):
    jax.jit(lambda x: x + 1, compiler_options={'xla_gpu_not_an_option': True})(1)
