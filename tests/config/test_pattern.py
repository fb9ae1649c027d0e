"""Patterns of layers become repeats of rows of layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenformer_jax.config.pattern import Repeat, parse
from tokenformer_jax.errors import UserError

NAMES = ('dense', 'full', 'layer', 'local', 'moe')


def _parse(pattern: str) -> tuple[Repeat, ...]:
  return parse(pattern, NAMES, 'config.model.pattern')


@pytest.mark.parametrize(
  ('pattern', 'repeats'),
  [
    ('layer', [('layer', 1)]),
    ('layer*12', [('layer', 12)]),
    (' layer  * 12 ', [('layer', 12)]),
    ('local*23 full', [('local', 23), ('full', 1)]),
    ('dense moe*27', [('dense', 1), ('moe', 27)]),
    ('(dense moe)*6', [('dense moe', 6)]),
    ('(local*3 full)*4', [('local local local full', 4)]),
    ('full (dense moe)*2 full', [('full', 1), ('dense moe', 2), ('full', 1)]),
    # Only a repetition of several layers has a row of several layers.
    ('(layer)*3', [('layer', 3)]),
    ('(layer*2)*3', [('layer', 6)]),
    ('(dense moe*2 moe)*3', [('dense moe moe moe', 3)]),
    ('(dense moe)', [('dense', 1), ('moe', 1)]),
    ('layer layer layer*2', [('layer', 4)]),
    ('(dense moe)*2 (dense moe)*3', [('dense moe', 5)]),
    ('full layer^3 layer*2', [('full', 1), ('layer', 3, True), ('layer', 2)]),
    ('(dense moe*2)^2', [('dense moe moe', 2, True)]),
    ('layer^1 layer', [('layer', 2)]),
  ],
)
def test_repeats_of_a_pattern(pattern, repeats):
  want = tuple(Repeat(tuple(row.split()), *counts) for row, *counts in repeats)
  assert _parse(pattern) == want, 'other layers, or layers that could share a program do not'


def _run(repeats: tuple[Repeat, ...]) -> list[str]:
  return [name for repeat in repeats for name in repeat.layers * repeat.count]


LAYERS = st.tuples(st.sampled_from(NAMES), st.integers(1, 3))
ROWS = st.tuples(st.lists(LAYERS, min_size=1, max_size=4), st.integers(1, 3))


@st.composite
def written(draw) -> tuple[str, list[str]]:
  """Draw a pattern and the names of its layers in order."""
  texts, names = [], []
  for row, times in draw(st.lists(ROWS, min_size=1, max_size=4)):
    texts.append(f'({" ".join(f"{name}*{count}" for name, count in row)})*{times}')
    names += [name for name, count in row for _ in range(count)] * times
  return ' '.join(texts), names


@given(written())
def test_layers_run_in_the_order_that_they_are_written(pattern):
  text, names = pattern
  repeats = _parse(text)
  assert _run(repeats) == names, f'{text} runs other layers'
  assert sum(repeat.size for repeat in repeats) == len(names), 'the size of a repeat is wrong'


@pytest.mark.parametrize(
  ('pattern', 'mistake'),
  [
    ('', 'names no layer'),
    ('layr*2', "'layr' is not a layer; did you mean 'layer'?"),
    ('(dense moe', "'(' stands where"),
    ('dense moe)*2', "')' stands where"),
    ('((dense moe)*2 full)*2', "'(' stands where"),
    ('()*2', 'a parenthesis in it, names no layer'),
    ('layer*0', "after '*' comes a number from 1 to 10,000, not '0'"),
    ('layer*-1', 'and there is none'),
    ('layer*2*2', "'*' stands where the name of a layer is expected"),
    ('layer^', "after '^' comes a number from 1 to 10,000, and there is none"),
    ('(local^2 full)*2', "'^' stands in the parenthesis (local^2 full)"),
    ('2', '2 is not a layer; did you mean "dense*2"?'),
    ('layer*10001', 'it has more than 10,000 layers'),
    ('(layer*9999 full)*9999', 'it has more than 10,000 layers'),
  ],
)
def test_a_malformed_pattern_is_refused_in_one_sentence(pattern, mistake):
  with pytest.raises(UserError) as error:
    _parse(pattern)
  message = str(error.value)
  assert message.startswith(f'config.model.pattern is {pattern!r}, and '), 'the key is not named'
  assert mistake in message and '\n' not in message, f'{mistake!r} is not what is said'
