"""Groups and reference counts that a config leaves to the growth of the run it begins from."""

import dataclasses
import types

import pytest

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import growth
from tokenformer_jax.resolve import facts

SOURCE = config_lib.with_references(config_lib.LMConfig())
TOKENS = SOURCE.layer.ffn.tokens
LARGER = 3 * TOKENS


def grown_ffn(method='group', model=SOURCE, **changes):
  """Returns the feed-forward part of a run that begins from a source with filled-in sizes."""
  ffn = dataclasses.replace(model.layer.ffn, tokens=LARGER, **changes)
  larger = dataclasses.replace(model, layer=dataclasses.replace(model.layer, ffn=ffn))
  origin = types.SimpleNamespace(model=SOURCE, own=None)
  return facts.with_references(larger, growth(method=method), origin).layer.ffn


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
