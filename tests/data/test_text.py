"""Sources yield every document, in order, or one sentence that says where the text is broken."""

import errno
import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest
import tensorflow_datasets as tfds
import zstandard
from pyarrow import parquet
from tiny_text import tiny_text

from tokenformer_jax.data import reading, text_files, text_parquet, tfds_sets
from tokenformer_jax.data.sources import open_source
from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import paths, retry

LINES = [{'text': f'döcument {i}', 'title': f't{i}'} for i in range(3)]
DOCUMENTS = [line['text'] for line in LINES]
JSONL = ''.join(json.dumps(line) + '\n' for line in LINES).encode()


def _pack(data: bytes, suffix: str) -> bytes:
  match suffix:
    case '.gz':
      return gzip.compress(data)
    case '.zst':  # Two frames, as parallel compressors write them.
      half = len(data) // 2
      compress = zstandard.ZstdCompressor().compress
      return compress(data[:half]) + compress(data[half:])
    case _:
      return data


def _read(path, text_field='text') -> list[str]:
  return list(open_source(f'files:{path}', text_field).documents())


@pytest.mark.parametrize(
  'name', ['a.jsonl', 'a.jsonl.gz', 'a.jsonl.zst', 'a.ndjson', 'A.JSON', 'c4.00000.json.gz']
)
def test_a_file_of_json_lines_has_a_document_a_line(tmp_path, name):
  path = tmp_path / name
  path.write_bytes(_pack(JSONL, path.suffix))
  assert _read(path) == DOCUMENTS, 'a document is lost, or the model would learn to write JSON'


def test_a_text_file_is_one_document(tmp_path):
  (tmp_path / 'a.txt').write_bytes('ä\r\nb\n'.encode())
  assert _read(tmp_path / 'a.txt') == ['ä\r\nb\n'], 'the text is changed'


def test_halves_of_surrogate_pairs_are_replaced(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text(r'{"text": "a\ud800b"}')
  assert _read(path) == ['a?b'], 'text that UTF-8 cannot hold reaches the tokenizer'


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    (b'{"text": "a"', 'not valid JSON'),
    (b'["text"]', 'must be an object'),
    (b'{"texts": "a"}', "no field 'text'.*did you mean 'texts'"),
    (b'{}', "no field 'text'"),
    (b'{"text": 3}', 'has a int'),
    (b'{"text": "\xff"}', 'not UTF-8'),
  ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(JSONL + line)
  with pytest.raises(UserError, match=f'^{path}, line 4, .*{message}'):
    _read(path)


@pytest.mark.parametrize('suffix', ['.gz', '.zst'])
@pytest.mark.parametrize('damage', ['cut short', 'garbage'])
def test_a_damaged_archive_is_an_error(tmp_path, suffix, damage):
  packed = _pack(JSONL, suffix)
  path = tmp_path / f'a.jsonl{suffix}'
  path.write_bytes(packed[:-5] if damage == 'cut short' else b'garbage' + packed[7:])
  with pytest.raises(UserError, match=f'^{path} is damaged or cut short'):
    _read(path)


def test_a_folder_stands_for_its_files(tmp_path):
  for name in ('b/c.txt', 'b/[d].md', 'a.txt', '.git/config', 'b/.hidden', 'empty'):
    path = tmp_path / 'x[1]' / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('' if name == 'empty' else name)
  for spec in (f'{tmp_path}/x[1]', f'{tmp_path}/x[[]1]/**/*'):
    assert _read(spec) == ['a.txt', 'b/[d].md', 'b/c.txt'], (
      'a folder is not all of its text files, or hidden ones are trained on'
    )


OTHERS = {
  'b.parquet': (b'PAR1\x15\x04\x15\0', 'is a Parquet table; name it as parquet:GLOB'),
  'i.txt': (gzip.compress(b'text'), r'is packed by gzip; give its name the ending \.gz'),
  'j.txt': (zstandard.compress(b'text'), r'is packed by zstd; .* the ending \.zst'),
  'k.txt': ('text'.encode('utf-16'), 'is UTF-16; convert it'),
  'o.jsonl': (JSONL + bytes(10), 'line 4, is not valid JSON .*; a line must be a JSON object'),
  'p.json': (
    b'{\n  "text": "a"\n}\n',
    'line 1, is not valid JSON .*; a line must be a JSON object',
  ),
}


@pytest.mark.parametrize('name', OTHERS)
def test_a_file_that_is_not_text_is_named(tmp_path, name):
  content, sentence = OTHERS[name]
  path = tmp_path / name
  path.write_bytes(content)
  with pytest.raises(UserError, match=f'^{path},? .*({sentence})'):
    _read(path)


def test_a_text_keeps_its_characters(tmp_path):
  texts = ['NA', 'null', '007', '1e5', '2024-01-31', ' a ', 'True', 'nan']
  lines = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
  (tmp_path / 'a.jsonl').write_text(lines)
  (tmp_path / 'b.csv').write_text('text\n' + '\n'.join(texts))
  (tmp_path / 'c.json').write_text(json.dumps([{'text': text} for text in texts]))
  assert _read(tmp_path) == texts * 3, 'a text was taken for a number, a date or nothing'


def test_a_dotted_name_is_a_field_inside_another(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"meta": {"text": "a"}, "x.y": "b"}\n')
  assert _read(path, 'meta.text') == ['a']
  assert _read(path, 'x.y') == ['b'], 'a field whose own name has a dot is not read'
  for name in ('meta.txt', 'meta.text.x', 'x.z'):
    with pytest.raises(UserError, match=f"line 1, has no field '{name}'"):
      _read(path, name)


def test_a_small_file_that_unpacks_to_much_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(reading, 'LONGEST_DOCUMENT', 2**25)
  frame = b'\x28\xb5\x2f\xfd\0' + bytes([(31 - 10) << 3])
  for last in [False] * 3999 + [True]:  # blocks that repeat a byte 2 ** 17 times
    frame += (2**17 << 3 | 1 << 1 | last).to_bytes(3, 'little') + b'a'
  path = tmp_path / 'a.jsonl.zst'
  path.write_bytes(frame)  # 16 KB, of 500 MiB
  tracemalloc.start()
  try:
    with pytest.raises(UserError, match='document of more than 32 MiB'):
      _read(path)
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert peak < 150 * 2**20, f'a file of 16 KB takes {peak >> 20} MiB of memory'


def test_a_file_of_a_wide_window_is_read(tmp_path):
  block = os.urandom(2**16).hex().encode()
  parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=31, enable_ldm=True)
  packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
  (tmp_path / 'a.txt.zst').write_bytes(packer.compress(block) + packer.flush())
  assert _read(tmp_path / 'a.txt.zst') == [block.decode()], 'what `zstd --long=31` made is lost'


@pytest.mark.parametrize('name', ['a.txt', 'a.jsonl'])
def test_a_document_has_a_limit(tmp_path, monkeypatch, name):
  monkeypatch.setattr(reading, 'LONGEST_DOCUMENT', 2**20)
  content = b'{"text": "' + b'a' * 2**20 + b'"}\n'
  (tmp_path / name).write_bytes(content)
  with pytest.raises(UserError, match=r'has a document of more than 1 MiB, the limit .* \.jsonl'):
    _read(tmp_path / name)


class Failing:
  """A file of which every third read fails, from a disk that is busy."""

  reads = 0

  def __init__(self, path):
    self.file = open(path, 'rb')  # noqa: SIM115 (closed below)

  def __getattr__(self, name):
    return getattr(self.file, name)

  def read(self, size):
    Failing.reads += 1
    data = self.file.read(size)
    if Failing.reads % 3 == 0:
      raise OSError(errno.EIO, os.strerror(errno.EIO))
    return data


@pytest.mark.parametrize('name', ['a.jsonl', 'a.jsonl.gz', 'a.jsonl.zst', 'a.parquet'])
def test_an_error_of_reading_that_passes_changes_nothing(tmp_path, monkeypatch, name):
  path, form = tmp_path / name, 'files'
  path.write_bytes(_pack(JSONL * 50, path.suffix))
  if path.suffix == '.parquet':
    form = 'parquet'
    parquet.write_table(pa.table({'text': DOCUMENTS * 50}), path, row_group_size=15)
  monkeypatch.setattr(reading, '_CHUNK_BYTES', 20)
  monkeypatch.setattr(text_parquet, '_BUFFER_BYTES', 50)
  monkeypatch.setattr(retry, 'PAUSES', (0.0,) * 3)
  monkeypatch.setattr(paths, 'open_to_read', Failing)
  monkeypatch.setattr(Failing, 'reads', 0)
  found = list(open_source(f'{form}:{path}', 'text').documents())
  assert found == DOCUMENTS * 50, 'text is lost or repeated where reading failed'
  assert Failing.reads >= 4, 'the test made nothing fail'


def test_a_file_that_disappears_is_an_error(tmp_path):
  path = tmp_path / 'a.txt'
  path.write_text('a')
  source = open_source(f'files:{path}', 'text')
  path.unlink()
  with pytest.raises(UserError, match=f'^{path} cannot be read: No such file'):
    list(source.documents())


@pytest.mark.parametrize(
  'spec',
  ['', 'files:', 'tfds:', 'hf:', 'stdlibs', 'http://x', 'stdlib + ', ' + stdlib', 'stdlib + wiki'],
)
def test_an_unknown_source_is_an_error(spec):
  with pytest.raises(UserError, match='must be stdlib, files:GLOB, parquet:GLOB, hf:NAME'):
    open_source(spec, 'text')


def test_the_fingerprint_follows_the_files(tmp_path):
  def fingerprint() -> str:
    return open_source(f'files:{tmp_path}/*.txt', 'text').fingerprint()

  path = tmp_path / 'a.txt'
  path.write_text('a')
  seen = [fingerprint()]
  assert fingerprint() == seen[0], 'a store is never reused'
  path.write_text('bb')
  seen.append(fingerprint())
  os.utime(path, (0, 0))
  seen.append(fingerprint())
  path.rename(tmp_path / 'b.txt')
  seen.append(fingerprint())
  assert len(set(seen)) == 4, 'a change of size, time or name does not lead to a new store'


def test_the_standard_library_is_there_without_its_tests():
  source = open_source('stdlib', 'text')
  paths = [Path(path) for path in source.files()]
  assert paths == sorted(paths), 'the order of documents depends on the file system'
  assert 'argparse.py' in {path.name for path in paths}, 'the standard library is incomplete'
  folders = {folder for path in paths for folder in path.parts[-3:-1]}
  assert not folders & {'test', 'tests', 'site-packages'}, 'files beyond the library are read'


def test_python_files_are_read_as_they_declare(tmp_path):
  contents = {
    'a.py': '# coding: latin-1\nä'.encode('latin-1'),
    'b.py': '# coding: latin-1\nä'.encode().replace(b'latin-1', b'utf-8  '),
    'c.py': b'\xff',
    'd.py': b'# coding: nonsense\n',
  }
  for name, content in contents.items():
    (tmp_path / name).write_bytes(content)
  source = text_files.PythonFiles({str(tmp_path / name): () for name in contents})
  expected = ['# coding: latin-1\nä', '# coding: utf-8  \nä']
  assert list(source.documents()) == expected, 'a file is misread, or one without text is kept'


@pytest.fixture(scope='module')
def tiny_set(tmp_path_factory):
  """The set tfds:tiny_text of six documents, one of them empty, and its test split."""
  folder = tmp_path_factory.mktemp('tfds')
  tfds.core.add_data_dir(folder)
  tiny_text.TinyText(data_dir=folder, file_format='array_record').download_and_prepare()
  return 'tfds:tiny_text'


def test_a_tfds_dataset_is_read(tiny_set):
  source = open_source(tiny_set, 'text')
  assert sorted(source.documents()) == [f'döc {i}' for i in range(5)], 'documents are lost'
  assert open_source(f'{tiny_set}:1.0.0', 'text').fingerprint() == source.fingerprint()
  held_out = open_source(tiny_set, 'text', splits=('validation', 'test', 'train'))
  assert sorted(held_out.documents()) == ['döc 0', 'döc 1'], 'validation is another split'
  assert held_out.fingerprint() != source.fingerprint(), 'splits of a set pass for the same text'
  assert all(Path(path).is_file() and 'train' in path for path in source.files())


@pytest.mark.parametrize(
  ('spec', 'field', 'message'),
  [
    ('tfds:no_such_set', 'text', 'tfds build'),
    ('tfds:tiny_text', 'txt', "did you mean 'text'"),
    ('tfds:tiny_text', 'number', 'it must be text'),
  ],
)
def test_a_tfds_dataset_that_has_no_text_is_an_error(tiny_set, spec, field, message):
  with pytest.raises(UserError, match=message):
    list(open_source(spec, field).documents())


def test_a_tfds_example_that_cannot_be_read_for_a_moment_is_read_later(monkeypatch):
  class Examples(list):
    failed: ClassVar[set[int]] = set()

    def __getitem__(self, i):
      if i not in self.failed:
        self.failed.add(i)
        raise RuntimeError('pread() failed: Input/output error; reading tiny.array_record')
      return super().__getitem__(i)

  monkeypatch.setattr(retry, 'PAUSES', (0.0,))
  monkeypatch.setattr(tfds_sets.Tfds, '_examples', Examples(LINES))
  assert list(open_source('tfds:any', 'text').documents()) == DOCUMENTS, 'a hiccup ends the run'
  assert len(Examples.failed) == 3


@pytest.mark.parametrize('size', [1, 7, 16, 50, 1000])
@pytest.mark.parametrize('end', ['', '\n'])
def test_a_file_of_lines_is_divided_by_bytes(tmp_path, size, end):
  texts = ['a', 'naïve', 'x' * 40, '', 'b', 'b']
  lines = [json.dumps({'text': text}, ensure_ascii=False) for text in texts]
  path = tmp_path / 'a.jsonl'
  path.write_text('\n'.join([*lines[:3], '', *lines[3:]]) + end)
  source = open_source(f'files:{path}', 'text')
  parts = [part for part, _ in source.divide(size)]
  assert len(parts) == max(1, -(-path.stat().st_size // size)), 'it is not divided'
  assert len({part.fingerprint() for part in parts}) == len(parts)
  documents = [document for part in parts for document in part.documents()]
  assert documents == list(source.documents()), 'a line is lost, torn or read twice'


def test_a_bad_line_of_a_divided_file_is_named_by_its_byte(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"text": "a"}\n{"text": "b"}\nno JSON\n{"text": "c"}')
  parts = [part for part, _ in open_source(f'files:{path}', 'text').divide(14)]
  bad = []
  assert [list(part.documents(bad.append)) for part in parts] == [['a'], ['b'], ['c'], []]
  (error,) = bad
  assert f'{path}, the line at byte 28, is not valid JSON' in str(error)
