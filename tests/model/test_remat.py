"""What the forward pass keeps for the backward pass."""

import functools

import jax
import jax.numpy as jnp
import pytest
from tiny import tiny_model

from tokenformer_jax import config
from tokenformer_jax.config import ModelConfig, names
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.lm import define_lm

COUNTS = {'qkv': 40, 'proj': 48, 'ffn': 80}  # not the width of anything else


@functools.cache
def _kept_for_backward(remat: str, model: ModelConfig) -> list[tuple[tuple[int, ...], str]]:
  """Shapes of what the forward pass leaves for the backward pass, and whose memory they are in."""
  definition = define_lm(model, Execution(remat=remat))
  backward = jax.make_jaxpr(
    lambda params, ids: jax.tree.leaves(jax.vjp(lambda p: definition.bind(p)(ids)[0], params)[1])
  )(definition.abstract, jax.ShapeDtypeStruct((2, 8), jnp.int32))
  return [(kept.shape, kept.memory_space.name) for kept in backward.out_avals]


@pytest.mark.parametrize(
  ('remat', 'score'),
  [
    *((way, 'l2_norm_gelu') for way in sorted({*names.keys()['train.remat'].choices} - {'auto'})),
    *(('dots', score) for score in ('gelu_l2_norm', 'softmax')),
  ],
)
def test_scores_are_kept_for_the_backward_pass_only_with_everything(remat, score):
  kept = _kept_for_backward(remat, tiny_model(tokens=COUNTS, score=score))
  of_scores = [shape for shape, _ in kept if shape[2:] in {(8, 40), (8, 48), (8, 80)}]
  want = [(2, 2, 8, 40)] * 3 + [(2, 2, 8, 48), (2, 2, 8, 80)] if remat == 'everything' else []
  assert sorted(of_scores) == want, f'remat={remat} keeps {of_scores} [L, B, T, N]'


@pytest.mark.parametrize(
  ('platform', 'depth', 'want'),
  [
    ('cpu', 4, ('float32', 'everything', 'unrolled')),
    ('cpu', 5, ('float32', 'everything', 'scan')),
    ('tpu', 4, ('bfloat16', 'score_inputs', 'scan')),
  ],
)
def test_defaults_go_by_platform_and_depth(monkeypatch, platform, depth, want):
  monkeypatch.setattr(jax, 'default_backend', lambda: platform)
  model = tiny_model(layers=depth)
  found = Execution.from_config(config.Config(model=model, dtype='auto'))
  assert (found.dtype.name, found.remat, found.layers) == want
  train = config.TrainConfig(remat='full', layers='scan')
  asked = Execution.from_config(config.Config(model=model, train=train))
  assert (asked.remat, asked.layers) == ('full', 'scan')


@pytest.mark.parametrize('projection', ['pattention', 'dense'])
def test_dots_keeps_what_projections_make(projection):
  model = tiny_model(tokens=COUNTS, dense=projection == 'dense')
  kept = [shape for shape, _ in _kept_for_backward('dots', model) if shape[:3] == (2, 2, 8)]
  # The layer's input; queries, keys and values as heads; what attention adds to the residual. What
  # the feed-forward layer adds is needed by the next; of a Transformer, what goes into its GELU.
  heads = [(2, 2, 8, 4, 8)] * 3
  wide = [(2, 2, 8, 128)] if projection == 'dense' else []
  assert sorted(shape for shape in kept if shape[-1] > 1) == sorted(
    [*heads, *wide, *[(2, 2, 8, 32)] * 2]
  )


@pytest.mark.parametrize(('remat', 'memory'), [('full', 'Device'), ('offload', 'Host')])
def test_full_remat_keeps_the_input_of_each_layer(remat, memory):
  kept = _kept_for_backward(remat, tiny_model(tokens=COUNTS))
  activations = sorted((shape, where) for shape, where in kept if shape[:3] == (2, 2, 8))
  # One of each of 5 Pattentions, and two of each of 2 LayerNorms.
  statistics = 9 * [((2, 2, 8, 1), 'Device')]
  assert activations == [*statistics, ((2, 2, 8, 32), memory)], (
    f'remat={remat} keeps more than [L, B, T, D] and numbers of rows, or in the memory of another'
  )
