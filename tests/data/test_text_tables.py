"""CSV, TSV and JSON arrays have a document a row."""

import csv
import gzip
import json

import pytest
import zstandard

from tokenformer_jax.data import reading
from tokenformer_jax.data.sources import open_source
from tokenformer_jax.errors import UserError

ROWS = [{'text': 'a, "b"\nc', 'n': '1'}, {'text': 'ä', 'n': '2'}]
TABLES = {
  'a.csv': b'text,n\n"a, ""b""\nc",1\n\xc3\xa4,2\n',
  'b.CSV.gz': gzip.compress(b'text,n\n"a, ""b""\nc",1\n\n\xc3\xa4,2'),
  'c.tsv': b'text\tn\n"a, ""b""\nc"\t1\n\xc3\xa4\t2\n',
  'd e.json': json.dumps(ROWS, indent=1).encode(),
  'f.jsonl': json.dumps(ROWS, indent=1).encode(),
  'g.json.zst': zstandard.compress(json.dumps(ROWS).encode()),
  'h.csv': b'\xef\xbb\xbftext,n\n"a, ""b""\nc",1\n\xc3\xa4,2\n',
  'i.json': b'\xef\xbb\xbf' + json.dumps(ROWS, ensure_ascii=False).encode(),
}


def _read(path, text_field='text') -> list[str]:
  return list(open_source(f'files:{path}', text_field).documents())


@pytest.mark.parametrize('name', TABLES)
def test_a_table_has_a_document_a_row(tmp_path, name):
  path = tmp_path / name
  path.write_bytes(TABLES[name])
  assert _read(path) == [row['text'] for row in ROWS], 'a row is lost, torn or changed'
  assert _read(path, 'n') == ['1', '2'], 'config.data.text_field is ignored'


def test_line_ends_of_windows_end_rows(tmp_path):
  (tmp_path / 'a.csv').write_bytes(b'text,n\r\n"a\r\nb",1\r\nc,2\r\n')
  assert _read(tmp_path / 'a.csv') == ['a\r\nb', 'c'], 'line ends are part of the text, or lost'


BAD = {
  'a.csv': ('txt,n\na,1\n', r"a\.csv has no field 'text'.*did you mean 'txt'"),
  'b.csv': ('text,n\na,1\na, b,2\n', r"b\.csv, line 3, has 3 fields, but the header has 2; put"),
  'c.csv': ('text,n\n"a,1\n', r'c\.csv, line 2, is not valid CSV'),
  'd.csv': ('text\n"a"b\n', r'd\.csv, line 2, is not valid CSV'),
  'e.json': ('[{"text": "a"}, {"txt": "b"}]', r"e\.json, element 2, has no field 'text'"),
  'f.json': ('[{"text": "a"}, "b"]', r'f\.json, element 2, is a JSON str; it must be an object'),
  'g.json': ('[{"text": "a"}, {"text": 3}]', r'g\.json, element 2, has a int in the field'),
  'h.json': ('[{"text": "a"}, {"text": b}]', r'h\.json is not valid JSON \(Expecting value'),
  'i.json': ('[{"text": "a"}, {"text": "', r'i\.json is not valid JSON'),
  'j.json': ('[{"text": "a"}] 3', r'j\.json is not valid JSON \(Extra data'),
  'k.jsonl': ('[1, 2]\n[3]\n', r'k\.jsonl, line 1, is a JSON list; it must be an object'),
}  # fmt: skip


@pytest.mark.parametrize('name', BAD)
def test_a_bad_row_is_named(tmp_path, name):
  content, sentence = BAD[name]
  (tmp_path / name).write_text(content)
  with pytest.raises(UserError, match=sentence):
    _read(tmp_path / name)


@pytest.mark.parametrize(
  ('name', 'content'),
  [('a.csv', 'text,n\na,1\nb\nc,2\n'), ('a.json', '[{"text": "a"}, 3, {"text": "c"}]')],
)
def test_a_bad_row_can_be_left_out(tmp_path, name, content):
  (tmp_path / name).write_text(content)
  bad = []
  source = open_source(f'files:{tmp_path}/{name}', 'text')
  assert list(source.documents(bad.append)) == ['a', 'c'], 'rows after a bad one are lost'
  assert len(bad) == 1 and name in str(bad[0]), 'the bad row is not told'


def test_a_byte_that_is_not_text_is_found_in_a_table(tmp_path):
  (tmp_path / 'a.csv').write_bytes(b'text\na\n\xff\n')
  with pytest.raises(UserError, match=r'a\.csv is not UTF-8 \(byte 7 is 0xff\)'):
    _read(tmp_path / 'a.csv')
  (tmp_path / 'a.csv').write_bytes(b'text\na\n\0\0')
  with pytest.raises(UserError, match=r'a\.csv is not text: its byte 7 is NUL'):
    _read(tmp_path / 'a.csv')


@pytest.mark.parametrize(
  ('name', 'content', 'sentence'),
  [
    ('a.txt', 'A text'.encode('utf-16'), 'is UTF-16; convert it: iconv -f UTF-16 -t UTF-8'),
    ('a.jsonl', '{"text": "a"}\n'.encode('utf-16'), 'is UTF-16; convert it'),
    ('a.csv', 'text\na\n'.encode('utf-16'), 'is UTF-16; convert it'),
    ('b.txt', b'%PDF-1.4 all in ASCII', 'is a PDF; take its text out'),
    ('c.txt', rb'{\rtf1\ansi Text}', 'is RTF; save it as plain text'),
    ('d.txt', b'PK\x03\x04\0\0', r'is a ZIP archive, as \.docx'),
    ('e.txt', b'PAR1\x15\0', 'is a Parquet table; name it as parquet:GLOB'),
  ],
)
def test_a_file_of_another_format_is_named_with_what_to_do(tmp_path, name, content, sentence):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(UserError, match=sentence):
    _read(tmp_path / name)


def test_a_row_has_the_limit_of_a_document(tmp_path, monkeypatch):
  limit = csv.field_size_limit(2**16)
  monkeypatch.setattr(reading, 'LONGEST_DOCUMENT', 2**16)
  try:
    (tmp_path / 'a.csv').write_bytes(b'text\n' + (b'a' * 2**15 + b'\n') * 3)
    assert len(_read(tmp_path / 'a.csv')) == 3, 'the limit counts rows together'
    for row in (b'"' + b'a\n' * 2**15, b'a' * 2**16):
      (tmp_path / 'a.csv').write_bytes(b'text\n' + row + b'a\n')
      with pytest.raises(UserError, match='has a document of more than 0 MiB'):
        _read(tmp_path / 'a.csv')
  finally:
    csv.field_size_limit(limit)


def test_a_large_array_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(reading, 'LONGEST_DOCUMENT', 2**20)
  path = tmp_path / 'a b.json.gz'
  path.write_bytes(gzip.compress(json.dumps([{'text': 'a' * 2**19}] * 3).encode()))
  with pytest.raises(UserError, match=r'array of more than 1 MiB, .* make lines of it: jq -c'):
    _read(path)
