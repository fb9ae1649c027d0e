"""A store holds the corpus exactly once, or it is not there."""

import dataclasses
import json
import os
import pickle
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from byte_text import byte_config, documents

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import corpus, shard_writer, shards, tokenizers, tokens
from tokenformer_jax.data import store as store_lib
from tokenformer_jax.data.store import prepare
from tokenformer_jax.errors import UserError
from tokenformer_jax.runs import claim

TEXTS = [f'document {i}: naïve {i * i}' for i in range(200)]


def _config(folder: Path, texts: list[str] = TEXTS, **changes) -> DataConfig:
  path = folder / 'corpus.jsonl'
  if not path.exists():
    path.write_text(
      ''.join(json.dumps({'text': text, 'other': text.upper()}) + '\n' for text in texts)
    )
  return byte_config(folder, f'files:{path}', **{'validation_fraction': 0.2, **changes})


def _unfinished(folder: Path) -> list[Path]:
  folders = (folder / 'cache' / 'stores').iterdir()
  return [path for path in folders if path.suffix != '.claim' and not (path / 'meta.json').exists()]


@pytest.mark.parametrize('tokenizer', ['bytes', 'bpe:300'])
def test_every_document_is_in_one_split(tmp_path, tokenizer):
  store = prepare(_config(tmp_path, tokenizer=tokenizer))
  found = documents(store) + documents(store, 'validation')
  assert sorted(found) == sorted(TEXTS), 'the store lost, repeated or changed documents'


def test_the_store_does_not_depend_on_the_batches(tmp_path, monkeypatch):
  whole = prepare(_config(tmp_path))
  monkeypatch.setattr(shard_writer, 'BATCH_CHARACTERS', 100)
  batched = prepare(_config(tmp_path, cache_dir=str(tmp_path / 'other')))
  assert batched.digest == whole.digest, 'tokens depend on what is encoded together'


def test_counts_describe_the_files(tmp_path):
  store = prepare(_config(tmp_path))
  for split in store_lib.SPLITS:
    texts = documents(store, split)
    assert store.index.total(split, 'documents') == len(texts), f'{split}_documents is wrong'
    size = sum(len(text.encode()) for text in texts)
    assert store.index.total(split, 'bytes') == size, f'{split}_bytes is wrong'
    expected = size / (size + len(texts))
    assert store.bytes_per_token(split) == expected, 'bits per byte will be wrong'


def test_the_split_is_the_same_on_every_machine():
  chosen = [i for i in range(40) if corpus._hash(TEXTS[i]) < 0.2 * 2**64]
  assert chosen == [12, 14, 15, 18, 20, 30, 33, 34, 38], (
    'the hash of the split changed: validation text of old runs is trained on'
  )


@pytest.mark.parametrize(
  'change',
  [{'tokenizer': 'bpe:300'}, {'validation_fraction': 0.3}, {'text_field': 'other'}, {}],
  ids=['tokenizer', 'validation_fraction', 'text_field', 'content'],
)
def test_a_change_leads_to_another_store(tmp_path, change):
  built = prepare(_config(tmp_path))
  if not change:
    with (tmp_path / 'corpus.jsonl').open('a') as file:
      file.write('{"text": "one more"}')
  changed = prepare(_config(tmp_path, **change))
  assert changed.path != built.path, 'a run trains on the tokens of another config'


@pytest.mark.parametrize('missing', [False, True], ids=['cut', 'missing'])
def test_a_damaged_store_is_built_again(tmp_path, missing):
  built = prepare(_config(tmp_path))
  path, tokens = built.path / '00000/c/0', built.train[:].tolist()
  path.unlink() if missing else path.write_bytes(path.read_bytes()[:-2])
  assert prepare(_config(tmp_path)).train[:].tolist() == tokens, 'a run trains on a damaged store'


def _flip(path: Path) -> None:
  content = bytearray(path.read_bytes())
  content[len(content) // 3] ^= 1
  path.write_bytes(content)


@pytest.mark.parametrize('tokenizer', ['bytes', 'bpe:300'])
def test_a_bit_that_flips_in_the_cache_is_repaired_by_its_reader(
  tmp_path, monkeypatch, capsys, tokenizer
):
  config = dataclasses.replace(_many_shards(tmp_path, monkeypatch), tokenizer=tokenizer)
  built = prepare(config)
  named = dataclasses.replace(config, store=str(tmp_path / 'named'))
  shutil.copytree(built.path, named.store)
  whole, files = built.train[:], shards.file_sizes(built.path)
  for number in (2, 5):
    _flip(built.path / f'0000{number}/c/0')
    _flip(Path(named.store, f'0000{number}/c/0'))
  capsys.readouterr()
  again = pickle.loads(pickle.dumps(prepare(config, built.tokenizer).train))  # as for a worker
  np.testing.assert_array_equal(again[:], whole)
  said = capsys.readouterr().err.splitlines()
  assert said == [
    f'{built.path}/0000{n} is damaged; building this shard of the token store again' for n in (2, 5)
  ]
  assert shards.verify(built.path) and shards.file_sizes(built.path) == files
  for _ in range(2):
    with pytest.raises(UserError, match=r'named/00002 are not as they were written .* make the'):
      prepare(named).train[:]
  opened = prepare(config)
  (tmp_path / 'corpus/7.jsonl').write_text('{"text": "other text"}')
  _flip(built.path / '00003/c/0')
  with pytest.raises(UserError, match=r'00003 is damaged, and files:.* has changed since; start'):
    opened.train[:]


@pytest.mark.parametrize(
  ('texts', 'message'),
  [([], 'holds no text'), ([''], 'holds no text'), (['a'], 'the train split is empty')],
)
def test_too_little_text_is_an_error(tmp_path, texts, message):
  with pytest.raises(UserError, match=message):
    prepare(_config(tmp_path, texts=texts))
  assert not _unfinished(tmp_path), 'a failed build leaves a folder behind'


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match=r'cannot be written .*config\.data\.cache_dir'):
    prepare(_config(tmp_path, cache_dir=str(tmp_path / 'file')))


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
  def full(*_, **options) -> None:
    raise ValueError(
      'RESOURCE_EXHAUSTED: Error writing local file "c/0": Failed to write 2979752 bytes to file: '
      "No space left on device [os_error_code='28']"
    )

  monkeypatch.setattr(tokens.ts, 'open', full)
  with pytest.raises(UserError, match=r'the disk is full.*config\.data\.cache_dir'):
    prepare(_config(tmp_path))
  assert not _unfinished(tmp_path), 'a failed build keeps the disk full'


def test_an_id_beyond_the_vocabulary_is_an_error(tmp_path, monkeypatch):
  class Small(tokenizers.ByteTokenizer):
    size = 100

  monkeypatch.setattr(tokenizers, 'load', lambda spec: Small())
  with pytest.raises(UserError, match='returned the id 255, but its vocabulary has 100 ids'):
    prepare(_config(tmp_path))


def test_the_default_cache_follows_xdg(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))
  store = prepare(_config(tmp_path, cache_dir=''))
  parent = tmp_path / 'xdg' / 'tokenformer_jax' / 'stores'
  assert store.path.parent == parent, 'the cache is not where the documentation says'


def test_a_file_that_changed_is_named(tmp_path):
  built = prepare(_config(tmp_path))
  path = built.path / '00000/zarr.json'
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)
  with pytest.raises(UserError, match=f'^{path} has changed since it was written; if .* remove it'):
    shards.verify(built.path)


def test_a_run_waits_for_a_store_that_is_being_built_and_takes_it(tmp_path, capsys, monkeypatch):
  config, made = _config(tmp_path), prepare(_config(tmp_path, cache_dir=str(tmp_path / 'other')))
  monkeypatch.setattr(store_lib, '_write', lambda *_: pytest.fail('it is built twice'))
  path, built = store_lib.store_folder(config), []
  path.parent.mkdir(parents=True)
  with store_lib.lock(path, f'the token store {path}'):
    thread = threading.Thread(target=lambda: built.append(prepare(config)))
    thread.start()
    said, deadline = '', time.monotonic() + 60
    while f'the token store {path} is being built by process {os.getpid()} on' not in said:
      assert time.monotonic() < deadline, 'nothing says what is waited for'
      said += capsys.readouterr().err
      time.sleep(0.01)
    assert not built, 'two processes build the same store at once'
    shutil.copytree(made.path, path)
  thread.join()
  assert built[0].digest == made.digest


def test_a_builder_that_was_replaced_publishes_nothing(tmp_path, monkeypatch):
  """Stand for a process that was suspended: its successor has claimed the store."""
  write, folders = store_lib._write, []

  def write_too_slowly(spec, *options) -> shards.Index:
    index = write(spec, *options)
    successor = dataclasses.replace(claim.this_process(), machine='elsewhere')
    (claim.directory_for(spec.path) / '2.json').write_text(
      json.dumps(dataclasses.asdict(successor))
    )
    folders.append(spec.path)
    return index

  hold = claim.hold
  monkeypatch.setattr(
    claim, 'hold', lambda *a, **o: hold(*a, **o, timing=claim.Timing(beat=60, silence=-1))
  )
  monkeypatch.setattr(store_lib, '_write', write_too_slowly)
  with pytest.raises(UserError, match=r'the token store .* was taken over by'):
    prepare(_config(tmp_path))
  assert not (folders[0] / 'meta.json').exists()
  assert (claim.directory_for(folders[0]) / '2.json').exists(), (
    'the claim of the successor was removed'
  )


def _many_shards(folder: Path, monkeypatch) -> DataConfig:
  """Return the config of a source of 8 files, each of which is a shard."""
  (folder / 'corpus').mkdir()
  for i in range(8):
    lines = [json.dumps({'text': text}) + '\n' for text in TEXTS[25 * i : 25 * (i + 1)]]
    (folder / f'corpus/{i}.jsonl').write_text(''.join(lines))
  longest = max(path.stat().st_size for path in (folder / 'corpus').iterdir())
  monkeypatch.setattr(corpus, 'UNIT_BYTES', longest)
  return _config(folder, source=f'files:{folder}/corpus')


def test_shards_have_the_tokens_of_one_shard(tmp_path, monkeypatch):
  one = prepare(_config(tmp_path))
  many = prepare(_many_shards(tmp_path, monkeypatch))
  assert len(many.index.shards) == 8
  for split in store_lib.SPLITS:
    np.testing.assert_array_equal(getattr(many, split)[:], getattr(one, split)[:])
    for count in ('bytes', 'documents'):
      assert many.index.total(split, count) == one.index.total(split, count)
  assert shards.verify(many.path) == len(one.train) + len(one.validation)


def test_a_build_continues_after_its_last_shard(tmp_path, monkeypatch):
  config = _many_shards(tmp_path, monkeypatch)
  whole = prepare(dataclasses.replace(config, cache_dir=str(tmp_path / 'unbroken')))
  write, written = store_lib.ShardBuild.write, []

  def write_some(self, *arguments) -> shards.Shard:
    if len(written) == 5:
      raise KeyboardInterrupt
    written.append(self.name)
    return write(self, *arguments)

  with monkeypatch.context() as patch:
    patch.setattr(store_lib.ShardBuild, 'write', write_some)
    with pytest.raises(KeyboardInterrupt):
      prepare(config)
  (folder,) = _unfinished(tmp_path)
  damaged = folder / '00003/c/0'
  damaged.write_bytes(damaged.read_bytes()[:-2])
  (folder / '00004.json').write_text('')  # as a power cut leaves it
  record = folder / '00001.json'
  record.write_text(record.read_text().replace('"documents": ', '"documents": 1', 1))
  monkeypatch.setattr(
    store_lib.ShardBuild,
    'write',
    lambda self, *rest: written.append(self.name) or write(self, *rest),
  )
  assert prepare(config).digest == whole.digest, 'a continued store is another one'
  assert written == [f'0000{i}' for i in (*range(5), 1, *range(3, 8))], (
    'shards that were complete are written again, or others are not'
  )
  contents = [
    {path.relative_to(root): path.read_bytes() for path in root.rglob('*') if path.is_file()}
    for root in (folder, whole.path)
  ]
  assert contents[0] == contents[1], 'something is left behind or differs'


def test_a_shard_of_other_text_is_written_again(tmp_path, monkeypatch):
  config = dataclasses.replace(_many_shards(tmp_path, monkeypatch), store=str(tmp_path / 'named'))
  with monkeypatch.context() as patch:
    patch.setattr(store_lib, '_publish', lambda *_: pytest.fail('interrupted'))
    with pytest.raises(pytest.fail.Exception):
      store_lib.make(config)
  file = tmp_path / 'corpus/0.jsonl'
  file.write_text(file.read_text().replace('document 0:', 'DOCUMENT 0:'))
  made = store_lib.make(config)
  found = documents(made) + documents(made, 'validation')
  assert 'DOCUMENT 0: naïve 0' in found, 'a build continues with shards of other text'
