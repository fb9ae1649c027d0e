"""Weights from a stranger: files crafted to run code, to fill the memory, or to lead elsewhere.

Each is refused in a sentence, in little memory, and nothing outside of it is read.
"""

import contextlib
import json
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
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


def test_many_tensors_of_the_same_bytes_are_refused(tmp_path):
  """A megabyte of file that would become gigabytes of parameters."""
  names, size, path = [f'{i}' for i in range(1000)], 2**16, tmp_path / 'model.safetensors'
  entry = {'dtype': 'F32', 'shape': [size], 'data_offsets': [0, 4 * size]}
  header = json.dumps(dict.fromkeys(names, entry)).encode()
  path.write_bytes(struct.pack('<Q', len(header)) + header + bytes(4 * size))
  with pytest.raises(UserError, match='invalid offset for tensor'):
    tensor_files.find(path)


DAMAGED = 'is not a safetensors file, or is cut short or damaged'
HEADERS = {
  'lists in lists': (b'[' * 100_000, DAMAGED),
  'dicts in dicts': (b'{"a":' * 100_000, 'recursion limit exceeded'),
  'a long number': (
    b'{"a":{"dtype":"F32","shape":[' + b'9' * 5000 + b']}}',
    'number out of range',
  ),
  'an overlap': (
    {'a': ([2], [0, 8]), 'b': ([2], [4, 12])},
    'invalid offset for tensor `b`',
  ),
  'an end beyond the file': ({'a': ([2**40], [0, 2**42])}, DAMAGED),
  'a begin before the file': ({'a': ([4], [-8, 8])}, 'integer `-8`'),
  'a shape of fractions': ({'a': ([0.5], [0, 2])}, 'floating point `0.5`'),
  'a product that overflows': ({'a': ([2**63, 2], [0, 16])}, 'overflow'),
  'many axes': ({'a': ([4, *[1] * 99], [0, 16])}, 'a shape of'),
  'a name that moves the cursor': ({'\x1b[2J': ([4], [0, 16])}, 'printable characters'),
}


@pytest.mark.parametrize('name', HEADERS)
def test_a_crafted_header_is_refused(tmp_path, name):
  header, said = HEADERS[name]
  if isinstance(header, dict):
    entries = {
      name: {'dtype': 'F32', 'shape': shape, 'data_offsets': offsets}
      for name, (shape, offsets) in header.items()
    }
    header = json.dumps(entries).encode()
  path = tmp_path / 'model.safetensors'
  path.write_bytes(struct.pack('<Q', len(header)) + header + bytes(16))
  with in_little_memory(), pytest.raises(UserError, match=said) as refused:
    tensor_files.find(path)
  assert len(str(refused.value)) < 600 and str(refused.value).isprintable()


@pytest.mark.parametrize('length', [2**31, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path, length):
  path = tmp_path / 'model.safetensors'
  path.write_bytes(struct.pack('<Q', length) + b'{}' + bytes(100))
  with in_little_memory(), pytest.raises(UserError, match=DAMAGED):
    tensor_files.find(path)


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


@pytest.mark.parametrize(
  'content', [b'[' * 10**5, b'{"weight_map": ' + b'{"a":' * 10**5, b'\xff' * 10**5, bytes(2**22)]
)
def test_a_crafted_index_is_refused(tmp_path, content):
  index = tmp_path / 'model.bin.index.json'
  index.write_bytes(content)
  with in_little_memory(), pytest.raises(UserError, match='is not the index of') as refused:
    tensor_files.find(index)
  assert len(str(refused.value)) < 600, 'the whole file is in the message'


def test_chunks_are_the_tensor(tmp_path, monkeypatch):
  monkeypatch.setattr(tensor_files, '_CHUNK', 5)
  numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
  path = Path(tmp_path / 'a.safetensors')
  tensor_files.write(path, 'bfloat16', {'a': (3, 4)}, [('a', numbers)])
  chunks = list(tensor_files.find(path)['a'].chunks())
  assert [len(chunk) for chunk in chunks] == [1, 1, 1], 'more than a chunk is read at once'
  np.testing.assert_array_equal(np.concatenate(chunks).astype(np.float32), numbers)
