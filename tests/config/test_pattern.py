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
    ('((dense moe)*2 full)*3', [('dense moe dense moe full', 3)]),
    # Only a repetition of several layers has a row of several layers.
    ('(layer)*3', [('layer', 3)]),
    ('(layer*2)*3', [('layer', 6)]),
    ('((dense moe)*2)*3', [('dense moe', 6)]),
    ('(dense moe)', [('dense', 1), ('moe', 1)]),
    ('layer layer layer*2', [('layer', 4)]),
    ('(dense moe)*2 (dense moe)*3', [('dense moe', 5)]),
  ],
)
def test_repeats_of_a_pattern(pattern, repeats):
  want = tuple(Repeat(tuple(row.split()), count) for row, count in repeats)
  assert _parse(pattern) == want, 'other layers, or layers that could share a program do not'


def _run(repeats: tuple[Repeat, ...]) -> list[str]:
  return [name for repeat in repeats for name in repeat.layers * repeat.count]


PATTERNS = st.recursive(
  st.sampled_from(NAMES).map(lambda name: (name, [name])),
  lambda inner: st.tuples(st.lists(inner, min_size=1, max_size=3), st.integers(1, 3)).map(
    lambda drawn: (
      f'({" ".join(text for text, _ in drawn[0])})*{drawn[1]}',
      [name for _, names in drawn[0] for name in names] * drawn[1],
    )
  ),
  max_leaves=8,
)


@given(PATTERNS)
def test_layers_run_in_the_order_that_they_are_written(pattern):
  text, names = pattern
  repeats = _parse(text)
  assert _run(repeats) == names, f'{text} runs other layers'
  assert sum(repeat.size for repeat in repeats) == len(names), 'the size of a repeat is wrong'


@pytest.mark.parametrize(
  ('pattern', 'mistake'),
  [
    ('', 'it names no layer'),
    ('layr*2', "'layr' is not a layer; did you mean 'layer'?"),
    ('(dense moe', "a '(' is not closed"),
    ('dense moe)*2', "a ')' closes nothing"),
    ('()*2', 'a parenthesis is empty'),
    ('layer*0', "after '*' comes a number from 1 to 10,000, not '0'"),
    ('layer*-1', "not '-'"),
    ('layer*2*2', "'*' stands where the name of a layer is expected"),
    ('2', '2 is not a layer; did you mean "dense*2"?'),
    ('layer*10001', 'it has more than 10,000 layers'),
    ('((layer*9999 full)*9999 full)*9999', 'it has more than 10,000 layers'),
    ('(' * 5000 + 'layer', 'it has more than 20 nested parentheses'),
  ],
)
def test_a_malformed_pattern_is_refused_in_one_sentence(pattern, mistake):
  with pytest.raises(UserError) as error:
    _parse(pattern)
  message = str(error.value)
  assert message.startswith(f'config.model.pattern is {pattern!r}, and '), 'the key is not named'
  assert mistake in message and '\n' not in message, f'{mistake!r} is not what is said'
