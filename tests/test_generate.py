"""Generated text is what the model says: with a cache, in buckets, on any number of devices."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import tiny_model

from tokenformer_jax import sharding
from tokenformer_jax.config import MeshConfig, ModelConfig
from tokenformer_jax.data.tokenizers import ByteTokenizer
from tokenformer_jax.errors import UserError
from tokenformer_jax.generate import Generator, Sampling, sample, stream_text
from tokenformer_jax.lm import define_lm
from tokenformer_jax.params import Params

GREEDY = Sampling(temperature=0)
MODEL = tiny_model(tied_head=False)  # A tied head mostly repeats the last token.
LEARNED = tiny_model(tied_head=False, positions='learned', max_length=100)


@functools.cache
def _params(model: ModelConfig) -> Params:
  """Parameters large enough that every earlier token matters."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda p: jnp.asarray(rng.normal(size=p.shape) * p.shape[-1] ** -0.5, p.dtype),
    define_lm(model).abstract,
  )


@functools.cache
def _generator(model: ModelConfig) -> Generator:
  return Generator(define_lm(model), model, jnp.float32)


def _prompt(length: int) -> np.ndarray:
  return np.random.default_rng(length).integers(0, 64, length, np.int32)


def _generate(
  prompt: int, length: int, sampling: Sampling, model: ModelConfig = MODEL
) -> list[int]:
  ids = _generator(model)(_params(model), _prompt(prompt), length=length, sampling=sampling)
  return list(ids)


@functools.cache
def _likeliest(model: ModelConfig):
  """The likeliest token after each of 80 positions, without a cache."""
  definition = define_lm(model)
  return jax.jit(lambda params, ids: jnp.argmax(definition.bind(params)(ids)[0], axis=-1))


@contextlib.contextmanager
def _compilations() -> Iterator[list[str]]:
  """The names of the functions that JAX compiles meanwhile."""
  names = []

  class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
      names.extend(re.findall(r'^Compiling jit\((\w+)\)', record.getMessage()))

  handler = Handler()
  logging.getLogger('jax').addHandler(handler)
  with jax.log_compiles():
    yield names
  logging.getLogger('jax').removeHandler(handler)


# Prompts are padded to a multiple of 64 tokens, and so is the room for all tokens. In this order,
# so many functions (for the prompt and for a token) have to be compiled.
NEW_FUNCTIONS = {(1, 8): 2, (40, 4): 0, (60, 4): 0, (60, 12): 2, (63, 4): 0, (64, 4): 0, (65, 4): 1}
EACH_LENGTH = pytest.mark.parametrize(('prompt', 'length'), NEW_FUNCTIONS)


@functools.cache
def _greedy() -> dict[tuple[int, int], tuple[list[int], int]]:
  """For each (prompt, length), the text and the number of functions that were compiled for it."""
  found = {}
  for sizes in NEW_FUNCTIONS:
    with _compilations() as names:
      text = _generate(*sizes, GREEDY)
    found[sizes] = text, names.count('prefill') + names.count('step')
  return found


def _greedy_without_cache(model: ModelConfig, prompt: int, text: list[int]) -> list[int]:
  """The likeliest token after each prefix of a prompt and text."""
  ids = np.zeros((1, 80), np.int32)
  ids[0, : prompt + len(text)] = np.append(_prompt(prompt), text)
  return _likeliest(model)(_params(model), ids)[0, prompt - 1 :][: len(text)].tolist()


@EACH_LENGTH
def test_greedy_text_is_the_argmax_of_the_forward_pass(prompt, length):
  text, _ = _greedy()[prompt, length]
  want = _greedy_without_cache(MODEL, prompt, text)
  assert text == want, 'the cache or the padding changes what the model says'


@EACH_LENGTH
def test_the_text_has_the_length_asked_for(prompt, length):
  assert len(_greedy()[prompt, length][0]) == length, 'the text is shorter or longer'


@EACH_LENGTH
def test_a_bucket_of_lengths_is_compiled_once(prompt, length):
  _, compiled = _greedy()[prompt, length]
  assert compiled == NEW_FUNCTIONS[prompt, length], 'every length of prompt is compiled again'


def test_the_prompt_matters():
  assert _greedy()[63, 4][0] != _greedy()[64, 4][0], 'the prompt is not read'


def test_greedy_text_with_learned_positions():
  text = _generate(65, 4, GREEDY, LEARNED)  # The prompt is padded to 100, all there are.
  want = _greedy_without_cache(LEARNED, 65, text)
  assert text == want, 'the cache or the padding changes what the model says'


# On several devices

DRAWN = Sampling(temperature=2.0, top_k=20, top_p=0.9, seed=1)


class OnAMesh(NamedTuple):
  greedy: list[int]
  drawn: list[int]
  compiled: list[str]
  ids: list[np.ndarray]  # what the model was given, for all copies of the prompt


@functools.cache
def _on_a_mesh() -> OnAMesh:
  definition, ids = define_lm(MODEL), []

  def bind(params):
    model = definition.bind(params)

    def watched(ids_BxT, start, cache):
      jax.debug.callback(lambda values: ids.append(np.array(values)), ids_BxT)
      return model(ids_BxT, start, cache)

    return watched

  generator = Generator(dataclasses.replace(definition, bind=bind), MODEL, jnp.float32)
  mesh = sharding.make_mesh(MeshConfig(fsdp=4, tokens=2))
  params = jax.device_put(_params(MODEL), sharding.of_axes(mesh, definition.axes))

  def generate(prompt: int, sampling: Sampling) -> list[int]:
    return list(generator(params, _prompt(prompt), length=4, sampling=sampling))

  with jax.set_mesh(mesh):
    with _compilations() as compiled:
      greedy = [*generate(40, GREEDY), *generate(60, GREEDY)]
    drawn = generate(60, DRAWN)
    jax.effects_barrier()
  return OnAMesh(greedy, drawn, compiled, ids)


def test_likeliest_text_does_not_depend_on_the_devices():
  want = _greedy()[40, 4][0] + _greedy()[60, 4][0]
  assert _on_a_mesh().greedy == want, '8 devices write another text than one'


def test_drawn_text_does_not_depend_on_the_devices():
  assert _on_a_mesh().drawn == _generate(60, 4, DRAWN), '8 devices draw otherwise than one'


def test_a_bucket_is_compiled_once_on_a_mesh():
  compiled = [name for name in _on_a_mesh().compiled if name in ('prefill', 'step')]
  assert compiled == ['prefill', 'step'], 'the state of a step comes out otherwise than it went in'


def test_copies_of_the_prompt_stay_the_same():
  """Hosts read different copies, and must stop at the same token."""
  alike = [bool(np.all(ids == ids[:1])) for ids in _on_a_mesh().ids]
  assert all(alike), 'copies of the prompt go on differently on different devices'


# Drawing


def _drawn(logits: np.ndarray, sampling: Sampling) -> set[int]:
  """The tokens that come up in so many draws that one of a probability of 1 % is not missed."""
  rows = jnp.broadcast_to(jnp.asarray(logits), (4096, len(logits)))
  return set(np.asarray(sample(rows, jax.random.key(sampling.seed), sampling)).tolist())


# Different by 0.25 at least, so that none is too rare to be drawn and none is drawn with another.
LOGITS = st.permutations(range(8)).map(lambda order: np.float32(order) / 4)


@settings(deadline=None, max_examples=20)
@given(logits=LOGITS, k=st.integers(1, 10))
def test_top_k_keeps_the_k_likeliest(logits, k):
  want = set(np.argsort(-logits)[:k].tolist())
  assert _drawn(logits, Sampling(1.0, top_k=k, top_p=1.0)) == want, f'not the {k} likeliest'


@settings(deadline=None, max_examples=20)
@given(logits=LOGITS, p=st.floats(0.01, 0.999), temperature=st.sampled_from([0.7, 1.0, 1.5]))
def test_top_p_keeps_the_likeliest_that_reach_p(logits, p, temperature):
  order = np.argsort(-logits)
  probabilities = np.exp(np.float64(logits) / temperature)
  reached = np.cumsum(probabilities[order] / probabilities.sum())
  assume(np.min(np.abs(reached - p)) > 1e-4)
  want = set(order[: np.searchsorted(reached, p) + 1].tolist())
  assert _drawn(logits, Sampling(temperature, top_p=p)) == want, (
    f'not the least set that reaches {p}'
  )


def test_without_limits_every_token_is_drawn():
  logits = np.arange(8, dtype=np.float32) / 4
  assert _drawn(logits, Sampling(1.0, top_p=1.0)) == set(range(8)), 'a token cannot come up'


@pytest.mark.parametrize('temperature', [0.5, 2.0])
def test_draws_have_the_probabilities_of_the_model(temperature):
  logits = np.array([0, 1, 2], np.float32)
  rows = jnp.broadcast_to(logits, (20_000, 3))
  ids = sample(rows, jax.random.key(0), Sampling(temperature, top_p=1.0))
  want = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
  np.testing.assert_allclose(
    np.bincount(ids, minlength=3) / 20_000, want, atol=0.015, err_msg='not softmax(logits / T)'
  )


def test_temperature_0_takes_the_likeliest():
  logits = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
  got = sample(jnp.asarray(logits), jax.random.key(0), Sampling(0, top_k=3, top_p=0.5))
  assert got.tolist() == logits.argmax(axis=-1).tolist(), 'temperature 0 is not greedy'


def test_a_seed_gives_one_text():
  assert _generate(5, 16, DRAWN) == _generate(5, 16, DRAWN), 'a text cannot be written again'


@pytest.mark.slow
def test_another_seed_gives_another_text():
  other = dataclasses.replace(DRAWN, seed=2)
  assert _generate(5, 16, DRAWN) != _generate(5, 16, other), 'the seed has no effect'


def test_a_text_goes_on_as_it_began():
  assert _generate(5, 16, DRAWN)[:7] == _generate(5, 7, DRAWN), 'the length changes the text'


@pytest.mark.parametrize(
  ('options', 'sentence'),
  [
    ({'temperature': -0.1}, 'temperature is -0.1; it must not be negative'),
    ({'top_k': -1}, 'top_k is -1; it must not be negative'),
    ({'top_p': 0.0}, 'top_p is 0.0; it must lie between 0 (excluded) and 1'),
    ({'top_p': 1.1}, 'top_p is 1.1; it must lie between 0 (excluded) and 1'),
  ],
)
def test_sampling_that_cannot_be(options, sentence):
  with pytest.raises(UserError) as error:
    Sampling(**options)
  assert str(error.value) == sentence, 'the sentence does not say what is allowed'


# Learned positions


def test_learned_positions_are_used_to_the_end():
  assert len(_generate(96, 4, GREEDY, LEARNED)) == 4, 'the last of the positions cannot be used'


def test_learned_positions_have_an_end():
  with pytest.raises(UserError) as error:
    _generate(96, 5, GREEDY, LEARNED)
  assert str(error.value) == (
    'the prompt and the text to write are 101 tokens; this model has learned positions for 100; '
    'ask for fewer'
  ), 'the sentence does not say how many positions there are'


# Streaming

BYTES = ByteTokenizer()
# Not st.text(), which first builds tables for seconds.
CHARACTERS = st.integers(0, 127) | st.integers(0x80, 0xD7FF) | st.integers(0xE000, 0x10FFFF)
TEXT = st.lists(CHARACTERS.map(chr), max_size=20).map(''.join)


def _stream(ids) -> list[str]:
  return list(stream_text(BYTES, iter(ids)))


@given(text=TEXT)
def test_streaming_loses_nothing(text):
  assert ''.join(_stream(BYTES.encode(text))) == text, 'the pieces are not the text'


@given(text=TEXT)
def test_streaming_splits_no_character(text):
  assume('\N{REPLACEMENT CHARACTER}' not in text)
  pieces = _stream(BYTES.encode(text))
  broken = [piece for piece in pieces if '\N{REPLACEMENT CHARACTER}' in piece]
  assert not broken, 'half a character is written'


@given(text=TEXT)
def test_streaming_does_not_wait(text):
  """A character is written with its last byte."""
  assume('\N{REPLACEMENT CHARACTER}' not in text)
  ids = BYTES.encode(text).tolist()
  fed = 0

  def feed():
    nonlocal fed
    for token in ids:
      fed += 1
      yield token

  ends = list(itertools.accumulate(len(c.encode()) for c in text))
  written = ''
  for piece in stream_text(BYTES, feed()):
    written += piece
    assert fed in (ends[len(written) - 1] if written else 0, len(ids)), 'a character waits'


@given(ids=st.lists(st.integers(0, 254), max_size=20))
def test_streaming_ends_with_what_all_the_ids_say(ids):
  assert ''.join(_stream(ids)) == BYTES.decode(ids), 'text that is no UTF-8 comes out otherwise'


def test_streaming_ends_at_the_end_of_the_document():
  ids = iter([*b'ab', BYTES.end_of_document, *b'cd'])
  assert ''.join(stream_text(BYTES, ids)) == 'ab', 'the next document is written, too'


def test_streaming_draws_nothing_after_the_end_of_the_document():
  ids = iter([*b'ab', BYTES.end_of_document, *b'cd'])
  list(stream_text(BYTES, ids))
  assert bytes(ids) == b'cd', 'tokens that nobody reads are computed'


def test_an_empty_text_is_empty():
  assert ''.join(_stream([])) == '', 'a text of no tokens is not empty'
