"""The source and the sample of every row of a mixture follow from its position."""

import dataclasses
import fractions

import numbered
import numpy as np
import pytest
from byte_text import total
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenformer_jax.config import DataConfig, SourceConfig, Sources
from tokenformer_jax.config.mixture import BLOCK, shares, source_configs
from tokenformer_jax.data import order, store
from tokenformer_jax.data.held_out import held_out_tokens
from tokenformer_jax.data.mixture import make_stores, open_sources
from tokenformer_jax.data.mixture_order import MixtureOrder
from tokenformer_jax.data.order import Position, sample_index
from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.storage import retry

BATCH, LENGTH, SEED = 8, 16, 3


def mixed(*weights: str, batch_size: int = BATCH, first_step: int = 0) -> MixtureOrder:
  """Return the order of sources a, b, …; a weight is a number, or points over steps."""
  sources = {}
  for name, weight in zip('abcdefghijkl', weights, strict=False):
    key = {'weight_by_step': weight} if ':' in weight else {'weight': float(weight)}
    sources[name] = SourceConfig(source=f'files:{name}', **key)
  return MixtureOrder(shares(Sources(sources)), batch_size, first_step)


@st.composite
def mixtures(draw) -> MixtureOrder:
  """Fixed weights in thousandths, or weights that change at up to four steps."""
  count, steps = draw(st.integers(1, 6)), draw(st.sets(st.integers(0, 60), min_size=1, max_size=4))
  rows = []
  for _ in steps:
    numbers = draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    numbers[0] += not any(numbers)
    weights = [round(number / sum(numbers), 3) for number in numbers]
    weights[np.argmax(weights)] += 1 - sum(weights)
    rows.append([f'{weight:.3f}' for weight in weights])
  points = [
    ' '.join(f'{step}:{row[i]}' for step, row in zip(sorted(steps), rows, strict=True))
    for i in range(count)
  ]
  return mixed(*points, batch_size=draw(st.integers(1, 9)), first_step=draw(st.integers(0, 70)))


def exact(mixture: MixtureOrder, samples: int) -> list[fractions.Fraction]:
  """The sums of the weights of the first samples, one after the other."""
  sums = [fractions.Fraction(0)] * len(mixture.shares.names)
  for i in range(samples):
    step = mixture.first_step + i // mixture.batch_size
    stage = max((k for k, known in enumerate(mixture.shares.steps) if known <= step), default=0)
    counts = mixture.shares.counts[stage]
    sums = [total + fractions.Fraction(n, BLOCK) for total, n in zip(sums, counts, strict=True)]
  return sums


@settings(max_examples=20, deadline=None)
@given(mixture=mixtures())
def test_each_source_gives_its_samples_one_after_the_other(mixture):
  taken = [0] * len(mixture.shares.names)
  for position in range(150):
    assert mixture.taken(position) == taken, f'the counts before position {position} are others'
    source, sample = mixture.locate(position)
    assert sample == taken[source], 'a source repeats or skips a sample'
    taken[source] += 1


@settings(max_examples=20, deadline=None)
@given(mixture=mixtures(), samples=st.integers(0, 400))
def test_weights_are_met_to_within_a_sample_of_each_stage(mixture, samples):
  most = max(1, len(mixture.shares.names) / 2) * len(mixture.shares.steps)
  differences = np.subtract(mixture.taken(samples), exact(mixture, samples))
  assert max(abs(differences)) <= most, 'a source is ahead of its weight, or behind'


@settings(max_examples=20, deadline=None)
@given(numbers=st.lists(st.integers(0, 1000), min_size=1, max_size=6))
def test_a_block_has_whole_counts(numbers):
  numbers[0] += not any(numbers)
  total = sum(numbers)
  sources = {
    name: SourceConfig(source=name, weight=number / total)
    for name, number in zip('abcdef', numbers, strict=False)
  }
  (counts,) = shares(Sources(sources)).counts
  assert sum(counts) == BLOCK
  assert all(
    abs(count - BLOCK * number / total) < 1 for count, number in zip(counts, numbers, strict=True)
  )
  order = MixtureOrder(shares(Sources(sources)), 8)
  assert order.taken(3 * BLOCK) == [3 * count for count in counts]


@pytest.mark.parametrize('weights', [('0.7', '0.2', '0.1'), ('0:1 9:0.5', '0:0 9:0.5')])
def test_a_trillionth_sample_is_exact(weights):
  mixture = mixed(*weights)
  for position in (10**12, 10**12 + 1, 10**12 - 12345):
    source, sample = mixture.locate(position)
    assert mixture.taken(position)[source] == sample
    after = mixture.taken(position + 1)
    assert after[source] == sample + 1 and sum(after) == position + 1


def test_the_order_of_a_fixed_mixture_does_not_change_between_versions():
  mixture = mixed('0.5', '0.3', '0.2')
  sources = [mixture.locate(position)[0] for position in range(20)]
  assert sources == [*[0, 1, 0, 2] * 2, 0, 1, *[0, 1, 0, 2] * 2, 0, 1]


@pytest.fixture(scope='module')
def config(tmp_path_factory) -> DataConfig:
  folder = tmp_path_factory.mktemp('mixture')
  sources = {
    name: SourceConfig(numbered.write(folder / f'{name}.jsonl', count, name), weight=weight)
    for name, count, weight in (('new', 120, 0.75), ('old', 40, 0.25))
  }
  return numbered.config(folder, BATCH, LENGTH, mixture=Sources(sources))


@pytest.fixture(scope='module')
def mixture(config):
  return open_sources(config, SEED)


def batches(mixture, first, last, rows=range(BATCH), position=order.BEGINNING) -> np.ndarray:
  return np.stack(list(mixture.train_batches(rows, first, last, position)))


def test_rows_are_samples_of_the_orders_of_their_sources(mixture, config):
  stores = [store.prepare(one) for one in source_configs(config).values()]
  rows = batches(mixture, 0, 15).reshape(-1, LENGTH + 1)
  for position, row in enumerate(rows):
    source, sample = MixtureOrder(mixture.shares, BATCH).locate(position)
    n = order.window_count(stores[source].train, LENGTH)
    start = LENGTH * sample_index(SEED, sample, n)
    expected = stores[source].train[start : start + LENGTH + 1]
    np.testing.assert_array_equal(row, expected, f'position {position} has another sample')


def test_a_mixture_goes_on_where_it_ended(mixture):
  whole = batches(mixture, 0, 20)
  np.testing.assert_array_equal(batches(mixture, 12, 20), whole[12:], 'a resumed run reads others')
  seen = Position(12, 12 * BATCH)
  np.testing.assert_array_equal(batches(mixture, 12, 20, position=seen), whole[12:])


def test_fixed_weights_give_the_same_samples_in_batches_of_any_size(config, mixture):
  large = open_sources(dataclasses.replace(config, batch_size=2 * BATCH), SEED)
  seen = Position(10, 10 * BATCH)
  np.testing.assert_array_equal(
    batches(large, 10, 15, range(2 * BATCH), seen).reshape(-1, LENGTH + 1),
    batches(mixture, 10, 20).reshape(-1, LENGTH + 1),
  )


def test_epochs_count_the_samples_of_each_source(mixture):
  figures = mixture.figures(10, order.BEGINNING)
  lengths = mixture._lengths
  assert figures == {
    'data/new/epochs': 60 / lengths['new'],
    'data/old/epochs': 20 / lengths['old'],
  }


def test_short_sequences_are_the_parts_of_the_long_ones_of_a_mixture(mixture):
  sizes = {'batch_size': 4 * BATCH, 'sequence_length': LENGTH // 4}
  stage = mixture.at_stage(dataclasses.replace(mixture.config, **sizes))
  short = np.stack(list(stage.train_batches(range(4 * BATCH), 3, 9, Position())))
  long = np.stack(list(mixture.train_batches(range(BATCH), 3, 9, Position())))
  np.testing.assert_array_equal(short[..., :-1].reshape(6, BATCH, LENGTH), long[..., :-1])
  assert stage.figures(9, Position()) == mixture.figures(9, Position())


def test_the_digest_covers_texts_and_names_and_that_of_earlier_versions_weights(config, mixture):
  def digest(**sources):
    changed = dataclasses.replace(config, mixture=Sources(sources))
    return open_sources(changed, SEED).digests

  new, old = config.mixture['new'], config.mixture['old']
  weighed = [dataclasses.replace(one, weight=0.5) for one in (new, old)]
  content, weights = digest(new=weighed[0], old=weighed[1])
  assert (content == mixture.digests[0], weights == mixture.digests[1]) == (True, False)
  others = {
    digest(a=new, old=old),
    digest(
      new=dataclasses.replace(new, source=old.source),
      old=dataclasses.replace(old, source=new.source),
    ),
  }
  assert digest(old=old, new=new) == mixture.digests, 'the order of a config file counts'
  assert len({content for content, _ in others} - {mixture.digests[0]}) == 2, 'taken for one'


def test_a_bpe_is_trained_on_the_text_of_all_sources_once(config, capsys):
  bpe = dataclasses.replace(config, tokenizer='bpe:300')
  made = open_sources(bpe, SEED)
  assert 'training the tokenizer bpe:300 on new, old' in capsys.readouterr().err
  tokens = {made.tokenizer.decode([i]) for i in range(made.tokenizer.size)}
  assert {'new', 'old'} <= {token.strip() for token in tokens}, 'a source had no part in it'
  digests = {one.tokenizer.fingerprint for one in made.stores.values()}
  assert digests == {made.tokenizer.fingerprint}, 'sources have tokenizers of their own'
  assert open_sources(bpe, SEED).digests == made.digests
  assert 'training' not in capsys.readouterr().err, 'another start trains the tokenizer again'


def test_a_source_that_does_not_exist_is_named_by_its_key(config):
  spec = 'files:/nowhere/config.data.source/config.data.store/*.txt'
  gone = dataclasses.replace(config.mixture['old'], source=spec)
  changed = Sources({**config.mixture, 'old': gone})
  with pytest.raises(UserError) as error:
    open_sources(dataclasses.replace(config, mixture=changed), SEED)
  wanted = f'config.data.mixture.old.source is {spec}, which matches no file'
  assert str(error.value).startswith(wanted), 'a path of the user is changed'


def _of(config: DataConfig, **sources: SourceConfig) -> DataConfig:
  return dataclasses.replace(config, mixture=Sources(sources))


@pytest.mark.parametrize('form', ['a glob', 'a link', 'its end'])
def test_a_text_has_one_place_in_a_mixture(config, tmp_path, form):
  held_out = numbered.write(tmp_path / 'held.jsonl', 20, 'held')
  other = numbered.write(tmp_path / 'b.jsonl', 20, 'b')
  (tmp_path / 'a.txt').write_text('a line\n' * 99)
  (tmp_path / 'link').symlink_to(tmp_path / 'held.jsonl')
  (tmp_path / 'link').rename(tmp_path / 'link.jsonl')
  first, second = {
    'a glob': ((other, held_out), (f'files:{tmp_path}/h*.jsonl', '')),
    'a link': ((other, held_out), (f'files:{tmp_path}/link.jsonl', '')),
    'its end': ((f'files:{tmp_path}/a.txt', ''), (f'files:{tmp_path}/[a].*', held_out)),
  }[form]
  mixed = _of(
    config,
    a=SourceConfig(*first, weight=0.5),
    b=SourceConfig(*second, weight=0.5),
  )
  sentence = (
    r'mixture\.b\.(validation_)?source=.* has .*/(held|link|a)\.(jsonl|txt) '
    r'and config\.data\.mixture\.a\.(validation_)?source=.* has it as well; leave it out'
  )
  for make in (
    lambda: open_sources(mixed, SEED),
    lambda: make_stores(mixed, str(tmp_path / 'out')),
  ):
    with pytest.raises(UserError, match=sentence):
      make()
  assert not (tmp_path / 'out').exists(), 'a store is made although its text has two places'


def test_a_text_has_one_place_also_where_stores_are_named(config):
  new = config.mixture['new']
  for other in (new, dataclasses.replace(config.mixture['old'], validation_source=new.source)):
    stored = dataclasses.replace(new, store='nowhere', weight=0.5)
    with pytest.raises(UserError, match=r'files:.* and config\.data\.mixture\.a\.source='):
      open_sources(_of(config, a=stored, b=dataclasses.replace(other, weight=0.5)), SEED)


def test_copies_of_text_that_any_source_holds_out_are_not_trained_on(config, tmp_path):
  numbered.write(tmp_path / 'held.jsonl', 30, 'held')
  own = numbered.write(tmp_path / 'own.jsonl', 30, 'own')
  (tmp_path / 'copy.jsonl').write_bytes((tmp_path / 'held.jsonl').read_bytes())
  copies = f'files:{tmp_path}/copy.jsonl + {numbered.write(tmp_path / "b.jsonl", 30, "b")}'
  mixed = _of(
    dataclasses.replace(config, deduplicate=True),
    a=SourceConfig(own, f'files:{tmp_path}/held.jsonl', weight=0.5),
    b=SourceConfig(copies, weight=0.5),
  )
  stores = open_sources(mixed, SEED).stores
  texts = {name: one.tokenizer.decode(one.train[:]) for name, one in stores.items()}
  assert 'this held document' not in texts['b'], 'a copy of held-out text is trained on'
  assert stores['a'].index.total('validation', 'documents') == total(stores['b'], 'documents') == 30


def test_text_that_a_mixture_was_not_trained_on_is_that_of_the_heaviest_source(mixture, config):
  tokens, name = held_out_tokens(config, mixture.tokenizer, 50)
  np.testing.assert_array_equal(tokens, mixture.stores['new'].validation[:50])
  assert name == 'held-out text of the run'


def test_text_that_cannot_be_read_now_is_not_waited_for(mixture, config, monkeypatch):
  def fail(_) -> None:
    raise TransientError('the hub cannot be reached')

  monkeypatch.setattr(store, 'open_corpus', fail)
  monkeypatch.setattr(retry, 'PAUSES', (60,))
  monkeypatch.setattr(retry.time, 'sleep', lambda _: pytest.fail('it is tried again'))
  _, name = held_out_tokens(config, mixture.tokenizer, 50)
  assert name == 'text of the Python standard library'
