"""Groups of parameter tokens: each has a norm of its own, on every number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenformer_jax.config import (
  MeshConfig,
  PattentionConfig,
  ScoreConfig,
  TokenGroup,
  resolve,
)
from tokenformer_jax.config.pattention import (
  SCORES,
  L2NormGELU,
  from_groups,
  groups_as_text,
  resized,
  score_like,
)
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import groups
from tokenformer_jax.model.pattention import parameter_weights, pattention
from tokenformer_jax.parallel import rules, sharding

# Sizes of groups that lie on 4 devices in different ways.
L2_NORM_GELU = L2NormGELU()
SIZES = {'two on a device': (2, 2, 4, 4, 1, 3), 'across a border': (6, 2, 8)}


def _of(sizes: tuple[int, ...], score: ScoreConfig = L2_NORM_GELU) -> tuple[TokenGroup, ...]:
  return tuple(TokenGroup(size, 2 * size + i, score) for i, size in enumerate(sizes))


def _arrays(tokens: int, width: int = 8) -> tuple[np.ndarray, ...]:
  rng = np.random.default_rng(0)
  x = rng.normal(size=(4, 3, width))
  keys, values = rng.normal(size=(2, tokens, width))
  return tuple(map(np.float32, (x, keys, values)))


@pytest.mark.parametrize(('score', 'pieces'), [('l2_norm_gelu', 4), ('softmax', 1)])
@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES)
def test_each_group_has_the_weights_that_it_has_alone(sizes, pieces, score):
  scores = np.float32(np.random.default_rng(1).normal(size=(2, 3, sum(sizes))))

  @jax.jit
  def weights(scores):
    same = score_like(L2NormGELU(gelu='tanh'), score)
    each = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    alone = [
      parameter_weights(scores[..., own], same, groups.make((group,)))
      for own, group in zip(each, _of(sizes), strict=True)
    ]
    together = parameter_weights(scores, same, groups.make(_of(sizes), pieces))
    return together, jnp.concatenate(alone, axis=-1)

  got, want = weights(scores)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_group_of_large_scores_hides_no_other():
  scores = np.float32([[[1.0, 2.0, 300.0, 301.0]]])
  two = groups.make((TokenGroup(2, 2), TokenGroup(2, 2)), 1)
  weights = jax.jit(lambda s: parameter_weights(s, SCORES['softmax'](), two))(scores)
  weights = np.asarray(weights)
  np.testing.assert_allclose(weights[..., :2], weights[..., 2:], rtol=1e-5)


@pytest.mark.parametrize(
  ('score', 'dtype'), [*((score, 'bfloat16') for score in SCORES), ('l2_norm_gelu', 'float32')]
)
def test_a_group_with_values_of_zero_changes_no_bit(score, dtype):
  x, keys, values = (array.astype(dtype) for array in _arrays(28))
  values[12:] = 0
  run = jax.jit(pattention, static_argnames='groups')
  first, second = TokenGroup(12, 12, SCORES[score]()), TokenGroup(16, 5, SCORES[score]())
  small = run(x, keys[:12], values[:12], groups=(first,))
  large = run(x, keys, values, groups=(first, second))
  assert small.dtype == dtype and np.array_equal(small, large)


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES)
def test_outputs_and_gradients_do_not_depend_on_the_devices(sizes):
  arrays = _arrays(sum(sizes))
  target = np.float32(np.random.default_rng(2).normal(size=arrays[0].shape))

  def loss(x, keys, values):
    return jnp.sum(target * pattention(x, keys, values, groups=_of(sizes)))

  run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
  want = run(*arrays)
  mesh = sharding.make_mesh(MeshConfig(fsdp=2, tokens=4), jax.devices())
  with jax.set_mesh(mesh):
    got = run(*arrays)
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(('sizes', 'crosses'), [((4, 4, 4, 4), False), ((4, 12), True)])
def test_sums_of_norms_cross_devices_only_for_groups_that_do(sizes, crosses):
  mesh = sharding.make_mesh(MeshConfig(fsdp=2, tokens=4), jax.devices())

  def weights(scores):
    return parameter_weights(scores, L2_NORM_GELU, groups.make(_of(sizes)))

  place = jax.sharding.NamedSharding(mesh, rules.spec(('batch', None, 'param_tokens')))
  scores = jax.ShapeDtypeStruct((4, 3, 16), jnp.float32, sharding=place)
  with jax.set_mesh(mesh):
    text = jax.jit(weights, out_shardings=place).lower(scores).compile().as_text()
  assert ('all-reduce' in text) == crosses
  assert 'all-gather' not in text and 'collective-permute' not in text, 'scores move'


def test_groups_are_written_in_a_config_as_they_are_read():
  config = PattentionConfig(tokens=11, groups='2 3:7*3')
  found = config.groups
  assert found == (TokenGroup(2, 2), *[TokenGroup(3, 7)] * 3)
  assert groups_as_text(found) == '2:2 3:7*3' and from_groups(found) == config
  assert from_groups(found[:1]) == PattentionConfig(2, 2)


def test_two_different_groups_are_printed_differently():
  groups = [TokenGroup(8, 8, L2NormGELU(gelu)) for gelu in ('exact', 'tanh')]
  assert list(map(repr, groups)) == ['8:8', '8:8:l2_norm_gelu(gelu=tanh)']


def test_blank_groups_are_one_group_and_a_colon_has_something_behind_it():
  assert PattentionConfig(16, groups='  ') == PattentionConfig(16)
  with pytest.raises(UserError, match="groups='16:' has '16:'; a group is TOKENS, TOKENS:REF"):
    PattentionConfig(16, groups='16:')


def test_an_open_reference_count_is_no_scale():
  with pytest.raises(UserError, match='has no reference count; see with_references'):
    groups.make(PattentionConfig(tokens=16).groups)


def test_tokens_beside_groups_count_where_they_are_written():
  assert PattentionConfig(groups='2 6').tokens == 8
  with pytest.raises(
    UserError, match=r"^PattentionConfig.groups='2 6' has 8 tokens, and tokens is"
  ):
    PattentionConfig(tokens=9, groups='2 6')


@pytest.mark.parametrize(
  ('tokens', 'want'), [(14, '2:2 3:7*2 6:7'), (6, '2:2 3:7 1:7'), (5, '2:2 3:7'), (2, '2:2')]
)
def test_more_tokens_join_the_last_group_and_fewer_are_the_first_ones(tokens, want):
  config = resized(PattentionConfig(tokens=11, groups='2 3:7*3'), tokens)
  assert (config.tokens, groups_as_text(config.groups)) == (tokens, want)


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    ({'groups': '2 x'}, "has 'x'; a group is TOKENS, TOKENS:REFERENCE or"),
    ({'groups': '0 8'}, "has '0'"),
    ({'groups': '4*0 8'}, "has '4*0'"),
    ({'groups': '2 3'}, 'has 5 tokens, and tokens is 8; set tokens=5, or other groups'),
    ({'groups': '2 6', 'reference': 8}, 'reference=8 is for one group'),
  ],
)
def test_a_mistake_is_one_sentence(changes, sentence):
  with pytest.raises(UserError) as error:
    resolve({'model': {'layer': {'ffn': {'tokens': 8, **changes}}}})
  assert sentence in str(error.value) and 'config.model.layer.ffn.' in str(error.value)
