"""Written tokens are what the model says: with a cache, in batches, on any number of devices."""

import dataclasses
import functools

import architectures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from mixtures import mixture, unbalanced
from tiny import gated_model, large_params, linear, tiny_model, two_kinds, with_mixer

from tokenformer_jax.config import (
  CapacityConfig,
  MeshConfig,
  ModelConfig,
  PattentionConfig,
  PositionScaleConfig,
  RotaryConfig,
  SeenScaleConfig,
  SkiplessConfig,
  TokenGroup,
)
from tokenformer_jax.decoding import decode
from tokenformer_jax.decoding.buckets import bucket, growing_bucket
from tokenformer_jax.decoding.decode import Decoder, Request
from tokenformer_jax.decoding.sampling import GREEDY, Sampling
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.lm import Execution, define_lm, unstack
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import sharding

# A tied head mostly repeats the last token.
MODEL = tiny_model(layers=1, tied_head=False, position_embedding='learned', max_length=96)
DENSE = tiny_model(layers=1, tied_head=False, dense=True, bias=True, norm='affine', rotary=0)
KINDS = two_kinds(tied_head=False, pattern='local layer')
LINEAR = linear(tiny_model(layers=1, tied_head=False))
GATED = gated_model(layers=1, tied_head=False, window=7, length_scale=SeenScaleConfig())
CLIPPED = gated_model(
  layers=1,
  tied_head=False,
  positions=RotaryConfig(fraction=1.0, clip=5),
  length_scale=PositionScaleConfig(length=8),
)
DRAWN = Sampling(temperature=2.0, top_k=20, top_p=0.9, seed=1)
UNEQUAL = (5, 63, 1, 64, 40)  # lengths of prompts
LENGTH = 32  # of texts, two chunks


@functools.cache
def _prepared(model: ModelConfig) -> Params:
  return _decoder(model).prepare(large_params(model))


@functools.cache
def _decoder(model: ModelConfig) -> Decoder:
  return Decoder(model, Execution())


def _prompt(length: int) -> list[int]:
  return np.random.default_rng(length).integers(0, 64, length).tolist()


def _write(requests: list[Request], model: ModelConfig = MODEL, **options) -> list[list[int]]:
  texts = _decoder(model)(_prepared(model), requests, **options)
  return [text.tolist() for text in texts]


def _batch(*ways: Sampling, **changes) -> list[Request]:
  """Requests after prompts of unequal lengths; all batches of one model share programs."""
  return [Request(_prompt(n), LENGTH, way, **changes) for n, way in zip(UNEQUAL, ways, strict=True)]


MIXED = _batch(GREEDY, DRAWN, GREEDY, DRAWN, GREEDY)


@functools.cache
def _texts(model: ModelConfig = MODEL) -> list[list[int]]:
  return _write(MIXED, model)


@functools.cache
def _forward(model: ModelConfig):
  """Logits of 96 positions, without a cache."""
  definition = define_lm(model)
  return jax.jit(lambda params, ids: definition.bind(params)(ids)[0])


def _logits(model: ModelConfig, ids: list[int]) -> np.ndarray:
  padded = np.zeros((1, 96), np.int32)
  padded[0, : len(ids)] = ids
  return np.asarray(_forward(model)(large_params(model), padded)[0, : len(ids)])


def _likeliest(model: ModelConfig, prompt: list[int], text: list[int]) -> list[int]:
  return _logits(model, [*prompt, *text])[len(prompt) - 1 : -1].argmax(axis=-1).tolist()


@pytest.mark.parametrize(
  'model',
  [
    *(KINDS, LINEAR),
    *(pytest.param(model, marks=pytest.mark.slow) for model in (MODEL, GATED, CLIPPED)),
  ],
  ids=['kinds', 'linear', 'learned', 'gated, a window', 'gated, clipped distances'],
)
def test_cached_logits_of_unequal_prompts_are_those_of_each_alone(model):
  """The prompts in one batch, left-padded, then three tokens one by one."""
  definition, params = _decoder(model).definition, _prepared(model)
  rows = [_prompt(length + 3) for length in UNEQUAL]
  padding = np.array([64 - length for length in UNEQUAL], np.int32)
  ids = np.zeros((len(rows), 64 + 3), np.int32)
  for row, tokens in zip(ids, rows, strict=True):
    row[-len(tokens) :] = tokens

  @functools.partial(jax.jit, static_argnames='first')
  def apply(cache, ids, start, first):
    return definition.bind(params)(ids, Context(0 if first else start, padding), cache)

  cache = jax.jit(lambda: definition.bind(params).init_caches(len(rows), 96))()
  logits, cache = apply(cache, ids[:, :64], 0, first=True)
  parts = [logits]
  for slot in range(64, 67):
    logits, cache = apply(cache, ids[:, slot : slot + 1], slot, first=False)
    parts.append(logits)
  got = np.concatenate(parts, axis=1)
  for i, tokens in enumerate(rows):
    np.testing.assert_allclose(
      got[i, -len(tokens) :],
      _logits(model, tokens),
      atol=1e-5,
      err_msg=f'the cache or the padding changes what follows {len(tokens) - 3} tokens',
    )


def test_greedy_text_is_the_argmax_of_the_forward_pass():
  for request, text in zip(MIXED, _texts(), strict=True):
    if request.sampling == GREEDY:
      assert text == _likeliest(MODEL, request.prompt, text), 'not the likeliest tokens'


@pytest.mark.slow
def test_a_text_does_not_depend_on_its_batch():
  few_places = unbalanced(dispatch=CapacityConfig(eval_factor=0.5, least=1))
  model = mixture(few_places, layers=1, tied_head=False)
  ways = [DRAWN, Sampling(0.5, top_k=5, seed=5), DRAWN, Sampling(seed=2), Sampling(seed=1)]
  requests = [
    Request(_prompt(n), 5 + 4 * i, way)
    for i, (n, way) in enumerate(zip(UNEQUAL, ways, strict=True))
  ]
  together = _write(requests, model, batch_size=2)
  assert [len(text) for text in together] == [r.length for r in requests], 'other lengths'
  assert together == [_write([one], model)[0] for one in requests], 'neighbours change a text'


def test_a_seed_gives_one_text_and_another_seed_another():
  other = dataclasses.replace(DRAWN, seed=2)
  again = _write(_batch(GREEDY, DRAWN, GREEDY, other, GREEDY))
  assert again[1] == _texts()[1], 'a text cannot be written again'
  assert again[3] != _texts()[3], 'the seed has no effect'


def test_a_text_ends_with_its_stop_token_or_once_its_caller_has_enough():
  free, asked = _texts(), []
  first = next(i for i, token in enumerate(free[3]) if i and token not in free[3][:i])
  stop = free[3][first]

  def ended(text: list[int]) -> bool:
    asked.append(len(text))
    return len(text) >= 10

  stopping = dataclasses.replace(MIXED[3], stop=(63, stop))
  ending = dataclasses.replace(MIXED[1], ended=ended)
  texts = _write([MIXED[0], ending, MIXED[2], stopping, MIXED[4]])
  assert texts[3] == free[3][: first + 1], 'a text does not end with its stop token'
  text = texts[1]
  assert free[1][: len(text)] == text and 10 <= len(text) < LENGTH, 'it goes on to its full length'
  assert asked == sorted(asked) and asked[-1] == len(text), 'not asked about the text so far'
  assert texts[::2] == free[::2], 'another row ends with it'


def _compiled(names: list[str]) -> list[str]:
  return [name for name in names if name in ('prefill', 'advance')]


def test_a_bucket_of_lengths_is_compiled_once_and_streaming_writes_the_same_text():
  decoder, params = Decoder(MODEL, Execution()), _prepared(MODEL)
  with compilations() as names:
    (text,) = decoder(params, MIXED[1:2])  # prompts to 64, all to 96
    for prompt, length in [(1, 16), (64, 1), (30, 31)]:
      decoder(params, [Request(_prompt(prompt), length, DRAWN, stop=(1,))])
  assert _compiled(names) == ['prefill', 'advance'], 'a length that fits is compiled again'
  assert list(decoder.stream(params, MIXED[1])) == text.tolist() == _texts()[1]


def test_the_turns_of_a_conversation_are_compiled_once():
  decoder, params, prompt = Decoder(KINDS, Execution()), _prepared(KINDS), _prompt(20)
  with compilations() as names:
    for length in (12, 9, 6):  # after 20, 47 and 71 tokens, which are in two buckets else
      (text,) = decoder(params, [Request(prompt, length, GREEDY, grows=True)])
      text = text.tolist()
      assert text == _likeliest(KINDS, prompt, text), 'the larger bucket changes the text'
      prompt = [*prompt, *text, *_prompt(15)]
  assert _compiled(names) == ['prefill', 'advance'], 'a turn is compiled anew'
  assert sorted({growing_bucket(length) for length in range(1, 4097)}) == [256, 1024, 4096]


def test_the_least_bucket_that_fits():
  sizes = sorted({bucket(length) for length in range(1, 1025)})
  assert sizes == [64, 96, 128, 192, 256, 384, 512, 768, 1024]
  for length in range(1, 1025):
    assert bucket(length) == min(size for size in sizes if size >= length)


# On several devices


@pytest.mark.parametrize(
  'model', [MODEL, pytest.param(GATED, marks=pytest.mark.slow)], ids=['heads', 'gated']
)
def test_texts_do_not_depend_on_the_devices_and_a_bucket_is_compiled_once(model):
  """Two chunks of tokens, twice."""
  decoder, mesh = Decoder(model, Execution()), sharding.make_mesh(MeshConfig(fsdp=4, tokens=2))
  shardings = sharding.tree_shardings(mesh, define_lm(model).axes)
  params = jax.device_put(large_params(model), shardings)
  with jax.set_mesh(mesh), compilations() as names:
    params = decoder.prepare(params)
    decoder(params, MIXED)
    texts = decoder(params, MIXED)
  assert _compiled(names) == ['prefill', 'advance'], 'a state comes out otherwise than it went in'
  assert [text.tolist() for text in texts] == _texts(model), '8 devices write other texts'


# What is refused, and what is cast


def test_learned_positions_have_an_end():
  """The prompt of 64 tokens and its text, above, take all 96."""
  with pytest.raises(UserError) as error:
    _write([Request(_prompt(64), LENGTH + 1, GREEDY)])
  assert str(error.value) == (
    'the prompt and the text to write are 97 tokens; this model has learned positions for 96; '
    'ask for fewer'
  ), 'the sentence does not say how many positions there are'


@pytest.mark.parametrize(
  'model',
  [
    MODEL,
    DENSE,
    mixture(unbalanced(), layers=1, tied_head=False),
    pytest.param(architectures.simplified(SkiplessConfig(), dense=False), marks=pytest.mark.slow),
  ],
  ids=['pattention', 'dense', 'experts', 'shaped'],
)
def test_prepared_parameters_compute_what_the_model_does(model):
  """Those of the embedding and the matrices are rounded once, and not each time."""
  execution = Execution(dtype=jnp.dtype('bfloat16'))
  prepared = Decoder(model, execution).prepare(large_params(model))
  assert {a.dtype.name for a in jax.tree.leaves(prepared)} == {'bfloat16', 'float32'}

  definition = define_lm(model, dataclasses.replace(execution, layers='list'))
  logits = jax.jit(lambda params: definition.bind(params)(np.array([_prompt(20)]))[0])
  want = logits(unstack(large_params(model), model))
  np.testing.assert_array_equal(logits(prepared), want, 'another model')


# On one accelerator, whose layers have another form

GROUPED = with_mixer(  # queries, and fewer heads of keys and values, by groups of tokens
  tiny_model(layers=1, tied_head=False),
  qkv=PattentionConfig(groups=[TokenGroup(16, 16), TokenGroup(8, 8)]),
  kv_heads=2,
)
FEW_KEYS = dataclasses.replace(architectures.few_key_heads(), pattern='layer')
SHAPED = architectures.simplified(SkiplessConfig(), dense=False)
EXPERTS = mixture(unbalanced(), layers=1, tied_head=False)


@pytest.fixture(name='on_accelerator')
def fixture_on_accelerator(monkeypatch):
  monkeypatch.setattr(decode, 'platform', lambda: 'gpu')


@pytest.mark.parametrize(
  'model',
  [
    MODEL,
    *(
      pytest.param(model, marks=pytest.mark.slow)
      for model in (DENSE, KINDS, LINEAR, GATED, GROUPED, FEW_KEYS, SHAPED, EXPERTS)
    ),
  ],
)
def test_an_accelerator_writes_the_texts_of_a_cpu(model, monkeypatch):
  want = _texts(model)
  monkeypatch.setattr(decode, 'platform', lambda: 'gpu')
  decoder = Decoder(model, Execution())
  texts = decoder(decoder.prepare(large_params(model)), MIXED)
  assert [text.tolist() for text in texts] == want


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('model', [MODEL, DENSE, LINEAR, GROUPED, FEW_KEYS, SHAPED])
def test_the_layers_for_an_accelerator_compute_what_the_model_does(model, dtype, on_accelerator):
  execution, params, ids = Execution(jnp.dtype(dtype)), large_params(model), [_prompt(20)]
  decoder, stored = Decoder(model, execution), define_lm(model, execution)
  want = np.asarray(jax.jit(lambda params: stored.bind(params)(np.array(ids))[0])(params))
  joined, prepared = decoder.definition, decoder.prepare(params)
  got = np.asarray(jax.jit(lambda params: joined.bind(params)(np.array(ids))[0])(prepared))
  if dtype == 'float32':
    np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max(), err_msg='another model')
  else:
    assert (got.argmax(-1) == want.argmax(-1)).all(), 'other tokens are the likeliest'


def test_projections_of_equal_sizes_are_joined_and_groups_have_their_own_arrays(on_accelerator):
  def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    layer = Decoder(model, Execution()).definition.abstract['blocks'][0]
    paths = jax.tree_util.tree_leaves_with_path(layer)
    return {'/'.join(str(key.key) for key in path): array.shape for path, array in paths}

  assert shapes(MODEL)['attention/joined/products/0/keys/0'] == (3, 24, 32)
  assert shapes(DENSE)['attention/joined/products/0/kernel'] == (32, 96)
  values = {path: shape for path, shape in shapes(GROUPED).items() if 'joined' in path}
  assert values == {
    'attention/joined/products/0/keys/0': (1, 16, 32),
    'attention/joined/products/0/keys/1': (1, 8, 32),
    'attention/joined/products/0/values/0': (1, 16, 32),
    'attention/joined/products/0/values/1': (1, 8, 32),
    'attention/joined/products/1/keys/0': (2, 16, 32),
    'attention/joined/products/1/keys/1': (2, 8, 32),
    'attention/joined/products/1/values/0': (2, 16, 16),
    'attention/joined/products/1/values/1': (2, 8, 16),
  }, 'queries are apart, keys and values together'
