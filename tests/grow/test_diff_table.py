"""What the table of a growth says."""

from growing import DENSE, by_name, mesh_of
from tiny import tiny_model

from tokenformer_jax.config import OPTIMIZERS, growth
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.grow import diff_table
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.steps.step import bytes_on_a_device


def _rows(text):
  return {line.split('  ')[0]: line.split() for line in text.splitlines()[1:]}


def test_counts_of_tokens_and_parameters():
  before = tiny_model()
  after = grown_model(before, by_name(48, 40, 96), growth(method='zero_keys'))
  rows = _rows(diff_table.render(before, after, 32))
  assert rows['qkv tokens'][-4:] == ['24', '48', '×', '2.00']
  assert rows['proj tokens'][-2:] == ['40', '40'], 'a factor where nothing grows'
  assert rows['qkv reference count (τ²)'][-2:] == ['24', '24']
  counts = [f'{define_lm(model).count:,}' for model in (before, after)]
  assert rows['parameters'][1:3] == counts
  assert float(rows['training MFLOP a token'][-1]) > 1, 'a larger model costs nothing'


def test_memory_is_that_of_the_optimizer():
  definition, parts = define_lm(tiny_model(width=256)), {}
  for name in ('adamw', 'muon', 'adafactor', 'lion'):
    optim = OPTIMIZERS[name]()
    parameters, rest = bytes_on_a_device(mesh_of(), definition, optim)
    parts[name] = rest / parameters
    rows = _rows(diff_table.render(tiny_model(width=256), tiny_model(width=256), 32, optim))
    want = f'{(parameters + rest) / 2**20:.1f}'
    assert rows[f'MiB with state of {name}'][-1] == want, 'the table has another memory'
  assert (parts['adamw'], parts['lion']) == (2, 1)
  assert 1 < parts['muon'] < 2, 'muon keeps two moments where it needs one'
  assert parts['adafactor'] < 0.1, 'mean squares are not factored'


def test_widths_of_a_transformer():
  rows = _rows(
    diff_table.render(
      tiny_model(**DENSE), tiny_model(**DENSE, width=64, heads=8, ffn_width=300), 32
    )
  )
  assert rows['width'][1:] == ['32', '64', '×', '2.00']
  assert rows['feed-forward width'][-4:] == ['128', '300', '×', '2.34']
  assert not [name for name in rows if 'token' in name and 'MFLOP' not in name]
