"""What the table of a growth says."""

from growing import DENSE, by_name
from tiny import tiny_model

from tokenformer_jax.config import GrowConfig
from tokenformer_jax.grow import grown_model, table
from tokenformer_jax.model.lm import define_lm


def _rows(text):
  return {line.split('  ')[0]: line.split() for line in text.splitlines()[1:]}


def test_counts_of_tokens_and_parameters():
  before = tiny_model()
  after = grown_model(before, by_name(48, 40, 96), GrowConfig())
  rows = _rows(table.render(before, after, 32))
  assert rows['qkv tokens'][-4:] == ['24', '48', '×', '2.00']
  assert rows['proj tokens'][-2:] == ['40', '40'], 'a factor where nothing grows'
  assert rows['qkv reference count (τ²)'][-2:] == ['24', '24']
  counts = [f'{define_lm(model).count:,}' for model in (before, after)]
  assert rows['parameters'][1:3] == counts
  assert float(rows['training MFLOP a token'][-1]) > 1, 'a larger model costs nothing'


def test_widths_of_a_transformer():
  rows = _rows(
    table.render(tiny_model(**DENSE), tiny_model(**DENSE, width=64, heads=8, ffn_width=300), 32)
  )
  assert rows['width'][1:] == ['32', '64', '×', '2.00']
  assert rows['feed-forward width'][-4:] == ['128', '300', '×', '2.34']
  assert not [name for name in rows if 'token' in name and 'MFLOP' not in name]


def test_counts_that_a_tpu_would_fill_up_are_named():
  lines = table.advice(tiny_model(tokens=by_name(128, 100, 300)))
  assert [line.split()[0] for line in lines] == ['proj=100', 'ffn=300']
  assert '384 costs it the same time' in lines[1]
  assert table.advice(tiny_model(**DENSE)) == []
