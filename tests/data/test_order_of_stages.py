"""Stages of shorter and longer sequences read one order: no token of an epoch comes twice."""

import functools

import numbered
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenformer_jax.data import order
from tokenformer_jax.data.order import Position, TrainBatches

LONGEST, SEED = 8, 3
COUNT = 160  # longest sequences in an epoch, more than the stages of a test read
TOKENS = np.arange(COUNT * LONGEST + 1, dtype=np.uint16)


def inputs(stages, position=order.BEGINNING) -> list[np.ndarray]:
  """The inputs of the batches of stages, given by their steps, rows and length."""
  step, before, read = position.step, LONGEST, []
  for steps, rows, length in stages:
    position = position.in_length(before, length)
    batches = TrainBatches(
      sources=[numbered.Tokens(TOKENS)],
      rows=range(rows),
      batch_size=rows,
      sequence_length=length,
      seed=SEED,
      position=position,
      subsamples=LONGEST // length,
    )
    for step in range(position.step, position.step + steps):
      batch = batches[step]
      np.testing.assert_array_equal(batch[:, 1:], batch[:, :-1] + 1, 'targets are not the next ids')
      read.append(batch[:, :-1])
    end = position.step + steps
    position, before = Position(end, position.batch_start(end, rows)), length
  return read


SIZES = st.tuples(st.integers(0, 6), st.integers(1, 5), st.sampled_from([1, 2, 4, 8]))


@settings(max_examples=20, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=5))
def test_no_token_of_an_epoch_comes_twice_and_few_are_left_out(stages):
  seen = np.concatenate([batch.ravel() for batch in [np.array([], int), *inputs(stages)]])
  assert len({*seen}) == len(seen), 'a token of an epoch comes twice'
  begun = {*order_of_tokens()[: len(seen) + (len(stages) - 1) * LONGEST]}
  assert {*seen} <= begun, 'more than the rest of a sequence is left out at a change'


@functools.cache
def order_of_tokens() -> np.ndarray:
  """The tokens of an epoch in the order of sequences of the longest length."""
  return np.concatenate([batch.ravel() for batch in inputs([(COUNT, 1, LONGEST)])])


@pytest.mark.parametrize('length', [1, 4])
def test_short_sequences_are_the_parts_of_the_longest_in_turn(length):
  short = np.concatenate([batch.ravel() for batch in inputs([(80 // length, 4, length)])])
  np.testing.assert_array_equal(short, order_of_tokens()[: len(short)])


def test_a_far_position_is_found_at_once():
  far = Position(0, 10**12 * LONGEST)
  (batch,) = inputs([(1, 4, 2)], far)
  start = order.sample_index(SEED, 10**12 * LONGEST, COUNT) * LONGEST
  np.testing.assert_array_equal(batch.ravel(), np.arange(start, start + LONGEST))
