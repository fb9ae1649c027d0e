"""A small file that decides numbers is as it was written, or it is damaged."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenformer_jax.storage import sealed

# Not all of st.text(), which first builds tables for seconds.
TEXT = st.lists(st.sampled_from('aé"\\ \n\0😀'), max_size=6).map(''.join)
VALUES = st.dictionaries(TEXT, st.none() | st.integers() | TEXT, min_size=1)


@settings(max_examples=40, deadline=None)
@given(VALUES)
def test_sealed_values_are_read_back_and_are_json(values):
  text = sealed.dump(values)
  assert sealed.load(text.encode()) == values
  assert json.loads(text).keys() == {*values, 'seal'}


@settings(max_examples=40, deadline=None)
@given(VALUES, st.data())
def test_every_other_content_is_damaged(values, data):
  content = bytearray(sealed.dump(values).encode())
  for place in data.draw(st.sets(st.integers(0, 8 * len(content) - 1), min_size=1, max_size=3)):
    content[place // 8] ^= 1 << place % 8
  for damaged in (content, content[: len(content) // 2], json.dumps(values).encode(), b'', b'[]'):
    with pytest.raises(sealed.DamagedError):
      sealed.load(bytes(damaged))
