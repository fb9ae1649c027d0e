"""Tables name what they are about."""

import numpy as np

from tokenformer_jax.data.tokenizers import ByteTokenizer
from tokenformer_jax.inspection import report


def test_white_space_and_ends_are_visible():
  tokenizer = ByteTokenizer()
  ids = [tokenizer.end_of_document, *tokenizer.encode('a b\n\t')]
  assert report.labels(tokenizer, ids) == ['⟨end⟩', 'a', '·', 'b', '⏎', '⇥']


def test_the_strongest_are_those_of_the_largest_weights():
  map_TxN = np.array([[0.5, 0.0, -3.0, 1.0], [2.0, 0.1, 0.0, 1.5], [1.0, 0.0, 0.5, 0.0]])
  rows = report.strongest_rows({3: {'ffn': map_TxN}}, top_k=2)
  assert rows == [
    {
      'layer': 3,
      'kind': 'ffn',
      'token': 2,
      'inputs': [{'position': 0, 'weight': -3.0}, {'position': 2, 'weight': 0.5}],
    },
    {
      'layer': 3,
      'kind': 'ffn',
      'token': 0,
      'inputs': [{'position': 1, 'weight': 2.0}, {'position': 2, 'weight': 1.0}],
    },
  ]
  assert report.strongest_table(rows, ['x', 'y', 'z']).splitlines() == [
    'layer  kind  token  input tokens (position) and its weights for them',
    '    3  ffn       2  x (0) -3.00  z (2) 0.50',
    '    3  ffn       0  y (1) 2.00  z (2) 1.00',
  ]


def test_more_than_there_is_can_be_asked_for():
  rows = report.strongest_rows({0: {'ffn': np.ones((2, 3))}}, top_k=9)
  assert [len(row['inputs']) for row in rows] == [2, 2, 2]
