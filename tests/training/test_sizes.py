"""Groups and reference counts that a config leaves to the growth of the run it begins from."""

import dataclasses
import types

import pytest

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import growth
from tokenformer_jax.training import sizes

SOURCE = config_lib.with_references(config_lib.LMConfig())
TOKENS = SOURCE.layer.ffn.tokens
LARGER = 3 * TOKENS


def grown_ffn(method='group', model=SOURCE, **changes):
  """Returns the feed-forward part of a run that begins from a source with filled-in sizes."""
  ffn = dataclasses.replace(model.layer.ffn, tokens=LARGER, **changes)
  larger = dataclasses.replace(model, layer=dataclasses.replace(model.layer, ffn=ffn))
  origin = types.SimpleNamespace(model=SOURCE, own=None)
  return sizes.with_references(larger, growth(method=method), origin).layer.ffn


@pytest.mark.parametrize('reference', [0, TOKENS], ids=['open', 'of the source'])
def test_larger_counts_make_a_group(reference):
  ffn = grown_ffn(reference=reference)
  assert str(ffn.groups) == f'({TOKENS}:{TOKENS}, {LARGER - TOKENS}:{LARGER - TOKENS})', (
    'a config made from that of the source does not grow by a group'
  )
  assert ffn.reference == 0


def test_values_of_the_config_have_precedence():
  ffn = grown_ffn(reference=0, groups=f'{TOKENS}*3')
  assert len(ffn.groups) == 3
  other = grown_ffn(reference=LARGER)
  assert (other.reference, len(other.groups)) == (LARGER, 1)


def test_without_a_group_the_scale_stays():
  ffn = grown_ffn('zero_keys')
  assert (ffn.reference, len(ffn.groups)) == (TOKENS, 1)


def test_a_projection_that_the_source_lacks_is_grown_beside_several_groups():
  grown = config_lib.pattentions(config_lib.grown_model(SOURCE, {'ffn': LARGER}, growth()))
  model = config_lib.with_token_counts(SOURCE, {'ffn': LARGER})
  source = {name: one for name, one in config_lib.pattentions(SOURCE).items() if name != 'ffn'}
  assert config_lib.with_references(model, source, grown).layer.ffn.groups == model.layer.ffn.groups


def test_lengths_in_examples_count_a_shorter_sequence_as_its_part():
  data = config_lib.TextConfig(
    sequence_length=32, sequence_length_by_step='0:8 10:32', batch_size_by_step='0:16 10:8'
  )
  # 4 sequences a step up to step 10, then 8.
  assert [sizes.steps_to(data, count) for count in (1, 40, 41, 80)] == [1, 10, 11, 15]
  config = config_lib.Config(data=data, train=config_lib.TrainConfig(epochs=2.0))
  assert sizes.in_steps(config, 40).train.steps == 15
  seen = sizes.Position(5, 80)  # 80 of 8 tokens, 20 of 32
  assert sizes.in_steps(config, 40, seen).train.steps == 15


def test_a_run_resumed_at_a_change_ends_at_the_step_of_an_unbroken_one():
  """At step 3, 9 quarters of a sequence are seen, and the three that are left are left out."""
  data = config_lib.TextConfig(
    sequence_length=32, sequence_length_by_step='0:8 3:32', batch_size_by_step='0:3 3:1'
  )
  for examples in (2.3, 3, 3.5, 4, 7):
    ends = {
      sizes.steps_to(data, examples, position)
      for position in (sizes.BEGINNING, sizes.Position(2, 6), sizes.Position(3, 3))
    }
    assert len(ends) == 1, f'{examples} examples end at the steps {ends}'
