"""The sizes of batches over steps: what a config says, and what it refuses."""

import dataclasses

import pytest
from changing import refusal, resolved

from tokenformer_jax.config import Stage, TextConfig, stages, stages_after

BOTH = TextConfig(
  batch_size=3,
  batch_size_by_step='0:64 200:16',
  sequence_length=2048,
  sequence_length_by_step='0:512 100:1024 200:2048',
)


def test_stages_have_the_points_of_both_keys():
  assert stages(BOTH) == (Stage(0, 64, 512), Stage(100, 64, 1024), Stage(200, 16, 2048))
  rows = dataclasses.replace(BOTH, sequence_length_by_step='')
  assert stages(rows) == (Stage(0, 64, 2048), Stage(200, 16, 2048))
  lengths = dataclasses.replace(BOTH, batch_size_by_step='')
  assert [stage.batch_size for stage in stages(lengths)] == [3, 3, 3]
  equal = dataclasses.replace(rows, batch_size_by_step='0:8 5:8')
  assert stages(equal) == (Stage(0, 8, 2048),), 'a point that changes nothing makes a stage'


def test_a_config_without_points_has_one_stage():
  data = TextConfig(batch_size=8, sequence_length=32)
  assert stages(data) == (Stage(0, 8, 32),) and stages_after(data, 7) == (Stage(7, 8, 32),)


@pytest.mark.parametrize(
  ('step', 'first'), [(0, Stage(0, 64, 512)), (99, Stage(99, 64, 512)), (100, Stage(100, 64, 1024))]
)
def test_the_first_of_the_stages_that_are_left_begins_at_the_step(step, first):
  left = stages_after(BOTH, step)
  assert left[0] == first and left[-1] == Stage(200, 16, 2048)


LENGTHS = {'data.sequence_length': 2048}
VARYING = {
  'a': {'source': 'files:a', 'weight_by_step': '0:0 9:1'},
  'b': {'source': 'files:b', 'weight_by_step': '0:1 9:0'},
}


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    (
      {'data.batch_size_by_step': '0:8,9:16'},
      "config.data.batch_size_by_step is '0:8,9:16'; it must be points STEP:NUMBER with ascending",
    ),
    ({'data.batch_size_by_step': '0:8 9:16 9:4'}, 'with ascending steps'),
    ({'data.batch_size_by_step': '0:8 9:-16'}, 'every number must be greater than 0'),
    ({'data.batch_size_by_step': '5:8 9:16'}, 'it says nothing about the first steps; begin it'),
    ({'data.batch_size_by_step': '0:8 9:0'}, 'every number must be greater than 0'),
    (
      {'data.sequence_length_by_step': '0:128 9:512'},
      'config.data.sequence_length is 256, which must be the longest of them, because the model '
      'and evaluations have it; set it to 512',
    ),
    (
      {**LENGTHS, 'data.sequence_length_by_step': '0:768 9:2048'},
      "config.data.sequence_length_by_step is '0:768 9:2048', and 768 does not divide 2048",
    ),
    (
      {'data.batch_size_by_step': '0:8 9:6', 'optim.accumulation_steps': 4},
      'in the stage of config.data after step 9, config.data.batch_size is 6, which is not a mult',
    ),
    (
      {
        **LENGTHS,
        'data.sequence_length_by_step': '0:512 9:2048',
        'model.position_embedding': 'learned',
        'model.layer.mixer.positions.kind': 'none',
        'model.max_length': 1024,
      },
      'config.model.max_length is 1024, less than data.sequence_length=2048',
    ),
    (
      {'data.mixture': VARYING, 'data.batch_size_by_step': '0:8 9:16'},
      'so every step needs as many tokens, a multiple of config.data.sequence_length=256, and the '
      'stages of config.data have 2048, 4096',
    ),
    (
      {
        'model.kind': 'vit',
        'data.kind': 'images',
        **LENGTHS,
        'data.sequence_length_by_step': '0:512 9:2048',
      },
      'which has no effect with data.kind=images',
    ),
  ],
)
def test_sizes_that_do_not_fit_are_refused(changes, sentence):
  assert sentence in refusal(**changes)


def test_weights_over_steps_go_with_stages_of_equal_tokens():
  sizes = {'data.sequence_length_by_step': '0:64 9:256', 'data.batch_size_by_step': '0:64 9:16'}
  assert len(stages(resolved(**sizes, data__mixture=VARYING).data)) == 2
