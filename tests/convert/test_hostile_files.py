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
import pytorch_file
from test_tensor_files import _archive as archive

from tokenformer_jax.convert import pickled_table, tensor_files
from tokenformer_jax.errors import UserError

MOST = 2**25  # bytes; no file below has more than 4 MiB
PROTO = pickle.PROTO + b'\x02'
FLOATS = b'ctorch\nFloatStorage\n'


@contextlib.contextmanager
def in_little_memory():
  tracemalloc.start()
  try:
    yield
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert peak < MOST, f'reading the file took {peak / 2**20:.0f} MiB'


def integer(value: int) -> bytes:
  return pickle.LONG1 + b'\x08' + struct.pack('<q', value)


def view(offset: bytes, shape: bytes, strides: bytes, key: bytes = b'U\x010') -> bytes:
  """The pickle of a table with one tensor `a`; every argument is pickled."""
  storage = b'(U\x07storage' + FLOATS + key + b'U\x03cpuK\x04tQ'
  made = b'ctorch._utils\n_rebuild_tensor_v2\n(' + storage + offset + shape + strides + b'\x89}tR'
  return PROTO + b'}U\x01a' + made + b's.'


def pair(a: int, b: int) -> bytes:
  return integer(a) + integer(b) + b'\x86'


def nested(opcode: bytes, depth: int) -> bytes:
  """A value that names the one before it twice: small, but 2^depth long when it is written out."""
  levels = (b'h' + bytes([i]) + b'h' + bytes([i]) + opcode for i in range(depth))
  made = b''.join(level + b'q' + bytes([i + 1]) for i, level in enumerate(levels))
  return b'(K\x01q\x00' + made + b't'


FOUR = [('data/0', bytes(16))]
ONE = pair(1, 1)
TABLES = {  # name → (pickle, records, what is said)
  'a memo index of 2²⁶': (PROTO + b'}r' + struct.pack('<I', 2**26) + b'.', (), None),
  'a byte array of 2 GiB': (PROTO + b'\x96' + struct.pack('<Q', 2**31) + b'.', (), 'torch.save'),
  'a text of 2 GiB': (PROTO + b'\x8d' + struct.pack('<Q', 2**31) + b'.', (), 'torch.save'),
  'a key that takes for ever to hash': (
    PROTO + b'}' + nested(b'\x86', 60) + b'K\x01s.',
    (),
    'a key that is not a name',
  ),
  'a shape that is too long to print': (
    view(integer(0), nested(b'\x86', 60), ONE),
    FOUR,
    'a tuple instead of an integer',
  ),
  'a tensor larger than its storage': (view(integer(0), pair(2, 3), pair(3, 1)), FOUR, 'cut short'),
  'a tensor of 2⁶⁰ numbers': (view(integer(0), pair(2**30, 2**30), pair(2**30, 1)), FOUR, 'cut s'),
  'an offset beyond the storage': (view(integer(2**40), pair(2, 2), pair(2, 1)), FOUR, 'cut short'),
  'an offset before the storage': (view(integer(-4), pair(2, 2), pair(2, 1)), FOUR, 'cut short'),
  'strides beyond the storage': (view(integer(0), pair(2, 2), pair(2**40, 1)), FOUR, 'row by row'),
  'strides of zero': (view(integer(0), pair(2, 2), pair(0, 0)), FOUR, 'not stored row by row'),
  'a negative shape': (view(integer(0), pair(-2, -2), pair(-2, 1)), FOUR, 'a shape of'),
  'an empty tensor': (view(integer(0), pair(0, 2**62), pair(2**62, 1)), FOUR, 'a shape of'),
  'a storage outside of the archive': (
    view(integer(0), pair(2, 2), pair(2, 1), b'X\x09\x00\x00\x00../../etc'),
    FOUR,
    'cut short',
  ),
  'a name that moves the cursor': (
    PROTO + b'}U\x09\x1b[2J\x1b]0;aK\x01s.',
    (),
    'not 1 to 256 printable characters',
  ),
  'a name of a million characters': (
    PROTO + b'}X' + struct.pack('<I', 10**6) + b'a' * 10**6 + b'K\x01s.',
    (),
    'not 1 to 256 printable characters',
  ),
}


@pytest.mark.parametrize('name', TABLES)
def test_a_crafted_table_is_refused_in_little_memory(tmp_path, name):
  table, records, said = TABLES[name]
  path = archive(tmp_path / 'model.bin', table, records)
  with in_little_memory():
    if said is None:
      assert tensor_files.find(path) == {}
      return
    with pytest.raises(UserError, match=said) as refused:
      tensor_files.find(path)
  message = str(refused.value)
  assert len(message) < 600 and message.isprintable(), f'no sentence to show to anybody: {message}'


def test_a_table_of_a_million_objects_is_refused(tmp_path):
  path = archive(tmp_path / 'model.bin', PROTO + b']' * 10**6 + b'.')
  with pytest.raises(UserError, match='more than 262144 instructions'):
    tensor_files.find(path)


@pytest.mark.parametrize('name', ['data.pkl', 'byteorder', 'data/0'])
def test_what_unpacks_to_more_than_the_file_holds_is_refused(tmp_path, name):
  records = {'data.pkl': view(integer(0), pair(2, 2), pair(2, 1)), 'data/0': bytes(16)}
  records[name] = pickle.EMPTY_DICT * 2**23 if name == 'data.pkl' else bytes(2**26)
  path = tmp_path / 'model.bin'
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as file:
    for record, content in records.items():
      file.writestr(f'model/{record}', content, None if record == name else zipfile.ZIP_STORED)
  assert path.stat().st_size < 2**20
  with in_little_memory(), pytest.raises(UserError, match='is compressed'):
    tensor_files.find(path)


def test_a_long_table_is_refused_before_it_is_read(tmp_path):
  path = archive(tmp_path / 'model.bin', pickle.EMPTY_DICT * (2**21 + 1))
  with in_little_memory(), pytest.raises(UserError, match='in 2097153 bytes, more than any model'):
    tensor_files.find(path)


def test_a_long_directory_is_refused_before_it_is_read(tmp_path):
  size = 3 * 2**20
  end = struct.pack('<4s4H2LH', b'PK\x05\x06', 0, 0, 60000, 60000, size, 0, 0)
  (tmp_path / 'model.bin').write_bytes(b'PK\x01\x02' + bytes(size - 4) + end)
  with in_little_memory(), pytest.raises(UserError, match='a record of 3145728 bytes'):
    tensor_files.find(tmp_path / 'model.bin')


@pytest.mark.parametrize('suffix', tensor_files.SUFFIXES)
def test_many_tensors_of_the_same_bytes_are_refused(tmp_path, suffix):
  """A megabyte of file that would become gigabytes of parameters."""
  names, size, path = [f'{i}' for i in range(1000)], 2**16, tmp_path / f'model{suffix}'
  if suffix == '.bin':
    table = pytorch_file.dump_table(
      'float32', dict.fromkeys(names, (size,)), dict.fromkeys(names, '0')
    )
    archive(path, table, [('data/0', bytes(4 * size))])
  else:
    entry = {'dtype': 'F32', 'shape': [size], 'data_offsets': [0, 4 * size]}
    header = json.dumps(dict.fromkeys(names, entry)).encode()
    path.write_bytes(struct.pack('<Q', len(header)) + header + bytes(4 * size))
  with pytest.raises(UserError, match=r'share a storage|invalid offset for tensor'):
    tensor_files.find(path)


def test_no_instruction_of_a_pickle_is_run_or_ends_in_a_traceback(tmp_path):
  """Every byte in every place of a table is an instruction once."""
  table = view(integer(0), pair(2, 2), pair(2, 1))
  for place in range(2, len(table), 3):
    for byte in range(0, 256, 7 if place % 2 else 5):
      changed = table[:place] + bytes([byte]) + table[place + 1 :]
      with contextlib.suppress(Exception):  # `find` turns any into a sentence
        assert type(pickled_table.parse(changed)) in (dict, list, tuple, str, int, bool, type(None))


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
  'many axes': ({'a': ([4, *[1] * 99], [0, 16])}, '100 axes'),
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
  pytorch_file.write(outside, 'float32', {'a': np.zeros(2, np.float32)})
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


def test_an_old_pickle_is_not_recommended_to_a_reader_that_runs_it(tmp_path):
  """PyTorch's own reader, told nothing, runs what a pickle says."""
  magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
  (tmp_path / 'old.bin').write_bytes(magic + pickle.dumps(1001, 2))
  with pytest.raises(UserError, match=r'before 1\.6') as refused:
    tensor_files.find(tmp_path / 'old.bin')
  said = str(refused.value)
  assert 'torch.load(FILE, weights_only=True)' in said and 'ask its author' in said
  assert 'PyTorch 2.10 or later' in said, 'earlier ones run code in spite of weights_only'
  assert said.count('load') == said.count('loaded') + said.count('torch.load(FILE, weights_only'), (
    'another way to load the file is recommended'
  )


def test_chunks_are_the_tensor(tmp_path, monkeypatch):
  monkeypatch.setattr(tensor_files, '_CHUNK', 5)
  numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
  path = Path(tmp_path / 'a.safetensors')
  tensor_files.write(path, 'bfloat16', {'a': (3, 4)}, [('a', numbers)])
  chunks = list(tensor_files.find(path)['a'].chunks())
  assert [len(chunk) for chunk in chunks] == [5, 5, 2], 'more than a chunk is read at once'
  np.testing.assert_array_equal(np.concatenate(chunks).astype(np.float32), numbers.ravel())
