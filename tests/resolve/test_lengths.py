"""Lengths in epochs and examples become steps."""

from tokenformer_jax import config as config_lib
from tokenformer_jax.data.order import BEGINNING, Position
from tokenformer_jax.resolve import lengths


def test_lengths_in_examples_count_a_shorter_sequence_as_its_part():
  data = config_lib.TextConfig(
    sequence_length=32, sequence_length_by_step='0:8 10:32', batch_size_by_step='0:16 10:8'
  )
  # 4 sequences a step up to step 10, then 8.
  assert [lengths.steps_to(data, count) for count in (1, 40, 41, 80)] == [1, 10, 11, 15]
  config = config_lib.Config(data=data, train=config_lib.TrainConfig(epochs=2.0))
  assert lengths.in_steps(config, 40).train.steps == 15
  seen = Position(5, 80)  # 80 of 8 tokens, 20 of 32
  assert lengths.in_steps(config, 40, seen).train.steps == 15


def test_a_run_resumed_at_a_change_ends_at_the_step_of_an_unbroken_one():
  """At step 3, 9 quarters of a sequence are seen, and the three that are left are left out."""
  data = config_lib.TextConfig(
    sequence_length=32, sequence_length_by_step='0:8 3:32', batch_size_by_step='0:3 3:1'
  )
  for examples in (2.3, 3, 3.5, 4, 7):
    ends = {
      lengths.steps_to(data, examples, position)
      for position in (BEGINNING, Position(2, 6), Position(3, 3))
    }
    assert len(ends) == 1, f'{examples} examples end at the steps {ends}'
