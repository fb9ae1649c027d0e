"""Sets of Hugging Face are read as `datasets` wrote them, in order, without the network."""

import dataclasses
import os
import pickle

import datasets
import huggingface_hub
import pytest

from tokenformer_jax.config import TextConfig
from tokenformer_jax.data.corpus import open_corpus
from tokenformer_jax.data.sources import open_source
from tokenformer_jax.errors import UserError

TRAIN = [f'döcument {i} ' * (i % 7) for i in range(300)]
TEST = ['test 1', 'test 2']
DOCUMENTS = [text for text in TRAIN if text]
HELD_OUT = ('validation', 'test', 'train')


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
  """Have an empty cache of sets, and no network."""
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(tmp_path / 'cache'))
  monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', True)
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)


def _of(texts) -> datasets.Dataset:
  return datasets.Dataset.from_dict({'text': texts, 'n': [*range(len(texts))]})


def _make(path, layout) -> str:
  """Write a set as `datasets` does, and return its folder."""
  train, test = _of(TRAIN), _of(TEST)
  match layout:
    case 'saved':
      train.save_to_disk(path, num_shards=3)
    case 'dictionary':
      datasets.DatasetDict(train=train, test=test).save_to_disk(path, num_shards={'train': 3})
    case 'parquet':
      (path / 'data').mkdir(parents=True)
      for i in range(3):
        name = path / f'data/train-{i:05}-of-00003.parquet'
        train.shard(3, i, contiguous=True).to_parquet(name)
      test.to_parquet(path / 'data/test-00000-of-00001.parquet')
      (path / 'README.md').write_text('---\nlicense: mit\n---\n# A set\n')
    case 'jsonl':
      path.mkdir(parents=True)
      train.to_json(path / 'train.jsonl')
      test.to_json(path / 'test.jsonl')
  return str(path)


def _read(spec, text_field='text', splits=('train',)) -> list[str]:
  return list(open_source(f'hf:{spec}', text_field, splits=splits).documents())


LAYOUTS = ['saved', 'dictionary', 'parquet', 'jsonl']


@pytest.mark.parametrize('layout', LAYOUTS)
def test_a_folder_is_read_in_the_order_of_its_rows(tmp_path, layout):
  folder = _make(tmp_path / 'a:b', layout)
  assert _read(folder) == DOCUMENTS, 'a row is lost, repeated or changed'
  cache = sum(len(names) for _, _, names in os.walk(tmp_path / 'cache'))
  assert cache <= 2, 'a folder that is there is copied'


def test_a_text_of_a_folder_keeps_its_characters(tmp_path):
  texts = ['NA', '007', '2024-01-31', 'null']
  for name in ('csv', 'jsonl'):
    (tmp_path / name).mkdir()
  (tmp_path / 'csv/train.csv').write_text('\n'.join(['text', *texts]))
  (tmp_path / 'jsonl/train.jsonl').write_text(''.join(f'{{"text": "{t}"}}\n' for t in texts))
  assert _read(tmp_path / 'csv') == texts == _read(tmp_path / 'jsonl')


def test_options_of_a_configuration_are_those_of_the_library(tmp_path):
  (tmp_path / 'set').mkdir()
  (tmp_path / 'set/a.csv').write_text('text;n\na, b;1\n')
  configuration = '- config_name: default\n  data_files: a.csv\n  sep: ";"\n'
  (tmp_path / 'set/README.md').write_text(f'---\nconfigs:\n{configuration}---\n')
  assert _read(tmp_path / 'set') == ['a, b'], 'the separator of the README is ignored'


@pytest.mark.parametrize('layout', ['dictionary', 'parquet'])
def test_a_split_is_named_or_chosen(tmp_path, layout):
  folder = _make(tmp_path / 'set', layout)
  assert _read(f'{folder}:test') == TEST, 'the name of a split is ignored'
  assert _read(folder, splits=HELD_OUT) == TEST, 'validation does not take the split for it'
  with pytest.raises(UserError, match=r"hf:.*/set, which has no split 'tst'; did you mean 'test'"):
    _read(f'{folder}:tst')


@pytest.mark.parametrize('layout', LAYOUTS)
def test_divided_sets_are_the_whole_in_order(tmp_path, layout):
  source = open_source(f'hf:{_make(tmp_path / "set", layout)}', 'text')
  parts = pickle.loads(pickle.dumps([part for part, _ in source.divide(1000)]))
  assert [text for part in parts for text in part.documents()] == DOCUMENTS
  assert len({part.fingerprint() for part in parts}) == len(parts), 'parts are taken for another'
  if layout != 'jsonl':
    assert len(parts) >= 3, 'a large set is not divided'


@pytest.mark.parametrize('layout', ['saved', 'parquet'])
def test_the_fingerprint_follows_the_content(tmp_path, layout):
  folder = _make(tmp_path / 'set', layout)
  seen = [open_source(f'hf:{folder}', 'text').fingerprint() for _ in range(2)]
  assert seen[0] == seen[1], 'a store is never reused'
  for path, _, names in os.walk(folder):
    for name in names:
      os.utime(os.path.join(path, name), (0, 0))
  seen.append(open_source(f'hf:{folder}', 'text').fingerprint())
  assert seen[2] != seen[0], 'other files do not lead to a new store'
  if layout != 'saved':
    seen.append(open_source(f'hf:{folder}:test', 'text').fingerprint())
    assert seen[3] != seen[2], 'splits have the same store'


@pytest.mark.parametrize('layout', ['saved', 'jsonl'])
def test_a_column_that_is_not_there_is_named(tmp_path, layout):
  folder = _make(tmp_path / 'set', layout)
  with pytest.raises(UserError, match=r"set.* has no field 'txt' .*did you mean 'text'"):
    _read(folder, 'txt')
  with pytest.raises(UserError, match=r"set.*(row|line) 1, has a int in the field 'n'"):
    _read(folder, 'n')


@pytest.mark.parametrize('layout', LAYOUTS)
def test_a_file_of_a_set_cannot_be_held_out_under_another_form(tmp_path, layout):
  folder = _make(tmp_path / 'set', layout)
  part, held_out = {
    'saved': (folder, folder),
    'dictionary': (f'{folder}:train', f'{folder}/train'),
    'parquet': (f'{folder}:train', f'{folder}/data/train-00001-of-00003.parquet'),
    'jsonl': (f'{folder}:train', f'{folder}/train.jsonl'),
  }[layout]
  form = {'parquet': 'parquet', 'jsonl': 'files'}.get(layout, 'hf')
  config = TextConfig(source=f'hf:{part}', validation_source=f'{form}:{held_out}')
  with pytest.raises(UserError, match=r'/set/.* and config\.data\.source=hf:'):
    open_corpus(config)
  if layout != 'saved':
    open_corpus(dataclasses.replace(config, validation_source=f'hf:{folder}:test'))


@pytest.mark.parametrize('suffix', ['', '-0123456789abcdef'])
def test_a_set_that_lacks_a_file_is_refused(tmp_path, suffix):
  folder = _make(tmp_path / 'set', 'parquet')
  for path in (tmp_path / 'set/data').iterdir():
    path.rename(path.with_stem(f'{path.stem}{suffix}'))
  assert _read(folder) == DOCUMENTS
  (tmp_path / f'set/data/train-00001-of-00003{suffix}.parquet').unlink()
  with pytest.raises(UserError, match=r'has 2 of the 3 files .*/data/train-…-of-00003; download'):
    _read(f'{folder}:train')
  assert _read(f'{folder}:test') == TEST, 'a split that is whole is refused'


def test_a_configuration_follows_the_folder(tmp_path):
  for name in ('en', 'de'):
    (tmp_path / 'set' / name).mkdir(parents=True)
    _of([name]).to_json(tmp_path / f'set/{name}/train.jsonl')
  listed = ''.join(f'- config_name: {name}\n  data_files: {name}/*\n' for name in ('en', 'de'))
  (tmp_path / 'set/README.md').write_text(f'---\nconfigs:\n{listed}---\n')
  (tmp_path / 'set/de').rename(tmp_path / 'set/german')
  readme = (tmp_path / 'set/README.md').read_text().replace('de/*', 'german/*')
  (tmp_path / 'set/README.md').write_text(readme)
  assert _read(tmp_path / 'set/de') == ['de'], 'the configuration is ignored'
  with pytest.raises(
    UserError, match=r"cannot be opened: .* one among the available configs: \['en', 'de'\]"
  ):
    _read(tmp_path / 'set')


MISTAKES = {
  'owner/other': 'is no folder and not in the cache, and HF_HUB_OFFLINE forbids the network; downl',
  'owner/other/config:test': 'hf:owner/other/config, which is no folder and not in the cache',
  './other': r'hf:\./other, which is no folder; check the path',
  '/no/folder:train': 'hf:/no/folder, which is no folder; check the path',
  'gs://bucket/set': 'is in a bucket; name its Parquet files as parquet:gs://bucket/set',
  '{}/empty': 'cannot be opened: .*contain any data files',
  '{}/saved:train': 'saved, which is a set without splits; leave out :train',
}


@pytest.mark.parametrize('name', MISTAKES)
def test_a_set_that_cannot_be_read_is_one_sentence(tmp_path, name):
  (tmp_path / 'empty').mkdir()
  _make(tmp_path / 'saved', 'saved')
  with pytest.raises(UserError, match=MISTAKES[name]):
    _read(name.format(tmp_path))
