"""Sources yield every document, in order, or one sentence that says where the text is broken."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from tokenformer_jax.data import text
from tokenformer_jax.data.text import open_source
from tokenformer_jax.errors import UserError

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


@pytest.mark.parametrize('suffix', ['', '.gz', '.zst'])
def test_a_jsonl_file_has_a_document_a_line(tmp_path, suffix):
  path = tmp_path / f'a.jsonl{suffix}'
  path.write_bytes(_pack(JSONL, suffix))
  assert _read(path) == DOCUMENTS, f'documents of a .jsonl{suffix} file are lost or changed'


@pytest.mark.parametrize('suffix', ['', '.gz', '.zst'])
def test_a_text_file_is_one_document(tmp_path, suffix):
  path = tmp_path / f'a.txt{suffix}'
  path.write_bytes(_pack('ä\r\nb\n'.encode(), suffix))
  assert _read(path) == ['ä\r\nb\n'], f'the text of a .txt{suffix} file is changed'


def test_lines_may_span_chunks(tmp_path, monkeypatch):
  monkeypatch.setattr(text, '_CHUNK_BYTES', 7)
  path = tmp_path / 'a.jsonl'
  path.write_bytes(JSONL)
  assert _read(path) == DOCUMENTS, 'a line is torn where a chunk of the file ends'


def test_files_are_sorted_and_globs_reach_into_folders(tmp_path):
  for name in ('b/c.txt', 'b/a.txt', 'a.txt', 'c.md'):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(name)
  assert _read(f'{tmp_path}/**/*.txt') == ['a.txt', 'b/a.txt', 'b/c.txt'], 'files are out of order'


def test_empty_documents_are_dropped(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"text": ""}\n\n{"text": "a"}')
  assert _read(path) == ['a'], 'an empty document became training data'


def test_halves_of_surrogate_pairs_are_replaced(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text(r'{"text": "a\ud800b"}')
  assert _read(path) == ['a?b'], 'text that UTF-8 cannot hold reaches the tokenizer'


def test_the_text_field_is_configurable(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(JSONL)
  assert _read(path, 'title') == ['t0', 't1', 't2'], 'config.data.text_field is ignored'


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


@pytest.mark.parametrize('name', ['a.jsonl', 'a.txt'])
@pytest.mark.parametrize('suffix', ['.gz', '.zst'])
@pytest.mark.parametrize('damage', ['cut short', 'garbage'])
def test_a_damaged_archive_is_an_error(tmp_path, name, suffix, damage):
  packed = _pack(JSONL, suffix)
  path = tmp_path / (name + suffix)
  path.write_bytes(packed[:-5] if damage == 'cut short' else b'garbage' + packed[7:])
  with pytest.raises(UserError, match=f'^{path} is damaged or cut short'):
    _read(path)


def test_a_text_file_of_another_encoding_is_an_error(tmp_path):
  path = tmp_path / 'a.txt'
  path.write_bytes('ä'.encode('latin-1'))
  with pytest.raises(UserError, match=f'^{path} is not UTF-8'):
    _read(path)


def test_a_file_that_disappears_is_an_error(tmp_path):
  path = tmp_path / 'a.txt'
  path.write_text('a')
  source = open_source(f'files:{path}', 'text')
  path.unlink()
  with pytest.raises(UserError, match=f'^{path} cannot be read: No such file'):
    list(source.documents())


def test_a_glob_without_a_match_is_an_error(tmp_path):
  with pytest.raises(UserError, match='matches no file'):
    open_source(f'files:{tmp_path}/*.txt', 'text')


@pytest.mark.parametrize('spec', ['', 'files:', 'tfds:', 'stdlibs', 'http://x'])
def test_an_unknown_source_is_an_error(spec):
  with pytest.raises(UserError, match='must be stdlib, files:GLOB or tfds:NAME'):
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
  paths = [Path(path) for path in source.paths]
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
  source = text.PythonFiles(tuple(str(tmp_path / name) for name in contents))
  expected = ['# coding: latin-1\nä', '# coding: utf-8  \nä']
  assert list(source.documents()) == expected, 'a file is misread, or one without text is kept'


_TFDS_SCRIPT = """
import json, sys
from tokenformer_jax.data.text import open_source
from tokenformer_jax.errors import UserError

def read(spec, field='text'):
  try:
    source = open_source(spec, field)
    return [source.fingerprint(), sorted(source.documents())]
  except UserError as error:
    return str(error)

result = {'unprepared': read('tfds:tiny_text'), 'known': read('tfds:lm1b')}
from tiny_text.tiny_text import TinyText
TinyText(file_format='array_record').download_and_prepare()
result |= {
  'prepared': read('tfds:tiny_text'),
  'version': read('tfds:tiny_text:1.0.0'),
  'field': read('tfds:tiny_text', 'txt'),
  'number': read('tfds:tiny_text', 'number'),
  'tensorflow': 'tensorflow' in sys.modules,
}
print(json.dumps(result))
"""


@pytest.fixture(scope='module')
def tfds_results(tmp_path_factory) -> dict:
  """What a process with an empty TFDS_DATA_DIR sees before and after it prepares a dataset."""
  here = Path(__file__).parent
  environment = os.environ | {
    'TFDS_DATA_DIR': str(tmp_path_factory.mktemp('tfds')),
    'PYTHONPATH': os.pathsep.join([str(here), str(here.parents[1])]),
  }
  output = subprocess.run(
    [sys.executable, '-c', _TFDS_SCRIPT],
    env=environment,
    stdout=subprocess.PIPE,
    check=True,
    timeout=120,
    text=True,
  ).stdout
  return json.loads(output.splitlines()[-1])


def test_a_tfds_dataset_is_read(tfds_results):
  documents = tfds_results['prepared'][1]
  assert documents == [f'döc {i}' for i in range(5)], 'documents of a TFDS dataset are lost'


def test_a_tfds_version_may_be_given(tfds_results):
  assert tfds_results['version'] == tfds_results['prepared'], 'NAME:VERSION is another dataset'


def test_tfds_needs_no_tensorflow(tfds_results):
  assert not tfds_results['tensorflow'], 'reading a TFDS dataset imports TensorFlow'


@pytest.mark.parametrize('case', ['unprepared', 'known'])
def test_an_unprepared_tfds_dataset_is_an_error(tfds_results, case):
  assert 'tfds build' in tfds_results[case], 'the error does not say how to prepare the dataset'
  assert '\n' not in tfds_results[case], 'the error is more than a sentence'


def test_a_missing_tfds_field_is_an_error(tfds_results):
  assert "did you mean 'text'" in tfds_results['field'], 'the error does not name the fields'


def test_a_tfds_field_that_is_no_text_is_an_error(tfds_results):
  assert 'it must be text' in tfds_results['number'], 'numbers are taken for text'
