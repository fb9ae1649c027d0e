"""Weights from a stranger: files crafted to run code, to fill the memory, or to lead elsewhere.

Each is refused in a sentence, in little memory, and nothing outside of it is read.
"""

import contextlib
import json
import pickle
import struct
import tracemalloc
import zipfile

import pytest
from test_tensor_files import _archive as archive

from tokenformer_jax.convert import tensor_files
from tokenformer_jax.errors import UserError

MOST = 2**25  # bytes; no file below has more than 4 MiB


@contextlib.contextmanager
def in_little_memory():
  tracemalloc.start()
  try:
    yield
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert peak < MOST, f'reading the file took {peak / 2**20:.0f} MiB'


def test_records_that_unpack_to_more_than_the_file_are_refused(tmp_path):
  path = tmp_path / 'model.bin'
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as file:
    file.writestr('model/data.pkl', bytes(2**26))
  assert path.stat().st_size < 2**20
  with in_little_memory(), pytest.raises(UserError, match='is compressed'):
    tensor_files.find(path)


def test_a_long_table_is_refused_before_it_is_read(tmp_path):
  path = archive(tmp_path / 'model.bin', pickle.EMPTY_DICT * (2**21 + 1))
  with in_little_memory(), pytest.raises(UserError, match='in 2097153 bytes, more than any model'):
    tensor_files.find(path)


def test_sizes_in_the_directory_beyond_the_file_are_refused(tmp_path):
  """A directory that says that a record of 16 bytes has a terabyte."""
  path = archive(tmp_path / 'model.bin', pickle.dumps({}), [('data/0', bytes(16))])
  content = bytearray(path.read_bytes())
  at = content.rindex(b'PK\x01\x02')
  content[at + 20 : at + 28] = struct.pack('<2L', 2**31, 2**31)
  path.write_bytes(content)
  with in_little_memory(), pytest.raises(UserError, match='records are larger than the file'):
    tensor_files.find(path)


DAMAGED = 'is not a safetensors file, or is cut short or damaged'
HEADERS = {
  'lists in lists': (b'[' * 100_000, DAMAGED),
  'a long number': (b'{"a":{"dtype":"F32","shape":[' + b'9' * 5000 + b']}}', 'out of range'),
  'an overlap': ({'a': ([2], [0, 8]), 'b': ([2], [4, 12])}, 'invalid offset for tensor `b`'),
  'an end beyond the file': ({'a': ([2**40], [0, 2**42])}, DAMAGED),
  'a product that overflows': ({'a': ([2**63, 2], [0, 16])}, 'overflow'),
  'many axes': ({'a': ([4, *[1] * 99], [0, 16])}, 'a shape of'),
  'a name that moves the cursor': ({'\x1b[2J': ([4], [0, 16])}, 'printable characters'),
}


@pytest.mark.parametrize('name', HEADERS)
def test_a_crafted_header_is_refused(tmp_path, name):
  header, match = HEADERS[name]
  if isinstance(header, dict):
    entries = {
      name: {'dtype': 'F32', 'shape': shape, 'data_offsets': offsets}
      for name, (shape, offsets) in header.items()
    }
    header = json.dumps(entries).encode()
  path = tmp_path / 'model.safetensors'
  path.write_bytes(struct.pack('<Q', len(header)) + header + bytes(16))
  with in_little_memory(), pytest.raises(UserError, match=match) as refused:
    tensor_files.find(path)
  assert len(str(refused.value)) < 600 and str(refused.value).isprintable()


@pytest.mark.parametrize('shard', ['../elsewhere/a.bin', '{outside}', '..\n.bin', 'a.bin\x00.bin'])
def test_an_index_leads_nowhere_else(tmp_path, shard):
  outside = tmp_path / 'elsewhere' / 'a.bin'
  outside.parent.mkdir()
  outside.write_bytes(b'')
  index = tmp_path / 'set' / 'model.bin.index.json'
  index.parent.mkdir()
  index.write_text(json.dumps({'weight_map': {'a': shard.format(outside=outside)}}))
  with pytest.raises(UserError, match=r'names shards that are not|is not the index of'):
    tensor_files.find(index)


@pytest.mark.parametrize('content', [b'[' * 10**5, b'\xff' * 10**5, bytes(2**22), b'{"weight_map"'])
def test_a_crafted_index_is_refused(tmp_path, content):
  index = tmp_path / 'model.bin.index.json'
  index.write_bytes(content)
  with in_little_memory(), pytest.raises(UserError, match='is not the index of') as refused:
    tensor_files.find(index)
  assert len(str(refused.value)) < 600, 'the whole file is in the message'
