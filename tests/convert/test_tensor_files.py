"""Files of tensors: what the libraries write and read, and what must be refused."""

import json
import os
import pickle
import zipfile

import numpy as np
import pytest
import released
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenformer_jax.convert import tensor_files
from tokenformer_jax.errors import UserError

EACH_FORMAT = pytest.mark.parametrize('suffix', tensor_files.SUFFIXES)
EACH_DTYPE = pytest.mark.parametrize('dtype', tensor_files.DTYPES)
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, 1e-40, 1.5], np.float32)


def _weights() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  random = {'a.weight': (5, 3), 'b': (7,), 'c': (2, 4)}
  arrays = {name: rng.normal(size=s).astype(np.float32) for name, s in random.items()}
  return {**arrays, 'special': SPECIAL}


def _write(path, weights=None, dtype='float32'):
  return released.write(path, _weights() if weights is None else weights, dtype)


def _read(path) -> dict[str, np.ndarray]:
  return {name: tensor.read() for name, tensor in tensor_files.find(path).items()}


def _assert_same(got, want, dtype='float32'):
  assert got.keys() == want.keys(), 'names'
  for name, array in want.items():
    array = array.astype(tensor_files.DTYPES[dtype])
    assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
    assert got[name].tobytes() == array.tobytes(), f'{name}: other bits'


@EACH_DTYPE
@pytest.mark.parametrize('most_bytes', [10**9, 40])
def test_the_safetensors_library_reads_what_is_written(tmp_path, dtype, most_bytes):
  shapes = {name: array.shape for name, array in _weights().items()}
  # In another order than that of the table, as arrays of layers come.
  tensor_files.write(tmp_path, dtype, shapes, reversed(_weights().items()), most_bytes)
  files = sorted(tmp_path.glob('*.safetensors'))
  assert (len(files) > 1) == (most_bytes == 40)
  theirs = {name: a for file in files for name, a in safetensors.numpy.load_file(file).items()}
  _assert_same(theirs, _weights(), dtype)
  _assert_same(_read(tmp_path), _weights(), dtype)
  assert list(_read(tmp_path)) == list(_weights()), 'another order'


@EACH_DTYPE
def test_files_of_pytorch_are_read(tmp_path, dtype):
  torch = pytest.importorskip('torch')
  weights = {n: torch.tensor(a).to(getattr(torch, dtype)) for n, a in _weights().items()}
  # The state dict of a module has metadata, and parameters have a form of their own.
  module = torch.nn.Module()
  module.weight = torch.nn.Parameter(weights['c'])
  both = torch.cat([weights['b'], weights['special']])  # Two tensors in one storage.
  saved = module.state_dict()
  saved.update(weights, b=both[:7], special=both[7:], parameter=module.weight)
  saved['columns'] = weights['c'].T
  torch.save(saved, tmp_path / 'model.bin')
  got = _read(tmp_path / 'model.bin')
  want = {'weight': _weights()['c'], **_weights(), 'parameter': _weights()['c']}
  want['columns'] = np.ascontiguousarray(_weights()['c'].T)
  _assert_same(got, want, dtype)


def _archive(path, table: bytes, records=(), compression=zipfile.ZIP_STORED):
  with zipfile.ZipFile(path, 'w', compression) as archive:
    archive.writestr('model/data.pkl', table)
    for name, content in dict([('version', b'3\n'), *records]).items():
      archive.writestr(f'model/{name}', content)
  return path


class _Runs:
  """Pickles as a call."""

  def __init__(self, function, *arguments):
    self.call = function, arguments

  def __reduce__(self):
    return self.call


@pytest.mark.parametrize('protocol', [2, pickle.HIGHEST_PROTOCOL])
def test_a_pickle_is_never_run(tmp_path, protocol):
  pytest.importorskip('torch')
  made = tmp_path / 'made'
  attacks = {
    'open': _Runs(open, str(made), 'w'),
    'system': _Runs(os.system, f'touch {made}'),
    'eval': _Runs(eval, f'open({str(made)!r}, "w")'),
    'mkdir': _Runs(os.mkdir, str(made)),
  }
  for name, attack in attacks.items():
    path = _archive(tmp_path / f'{name}.bin', pickle.dumps({'a.weight': attack}, protocol))
    with pytest.raises(UserError, match=r'asks to run|is not a file that torch\.save writes'):
      tensor_files.find(path)
    assert not made.exists(), f'{name} was run'


@EACH_FORMAT
def test_a_file_cut_anywhere_is_refused(tmp_path, suffix):
  whole = _write(tmp_path / f'model{suffix}').read_bytes()
  for length in [*range(0, len(whole) - 1, 11), len(whole) - 1]:
    path = tmp_path / f'cut{suffix}'
    path.write_bytes(whole[:length])
    with pytest.raises(UserError, match='cut'):
      tensor_files.find(path)


@EACH_FORMAT
@settings(
  max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_file_with_any_table_is_read_or_refused(tmp_path, suffix, data):
  """No other exception, and nothing read from outside of the file."""
  path = tmp_path / f'changed{suffix}'
  table, rest = _taken_apart(tmp_path, suffix)
  for _ in range(data.draw(st.integers(1, 4))):
    table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
  if suffix == '.bin':
    _archive(path, bytes(table), rest)
  else:
    path.write_bytes(len(table).to_bytes(8, 'little') + table + rest)
  try:
    for tensor in tensor_files.find(path).values():
      tensor.read()
  except UserError as error:
    assert str(path) in str(error)


def _taken_apart(tmp_path, suffix):
  """The table of a file, and its records or its data."""
  path = _write(tmp_path / f'whole{suffix}', {'a': SPECIAL, 'b': SPECIAL[:2]})
  if suffix == '.safetensors':
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], 'little')
    return bytearray(content[8:end]), content[end:]
  with zipfile.ZipFile(path) as archive:
    records = {name.partition('/')[2]: archive.read(name) for name in archive.namelist()}
  return bytearray(records.pop('data.pkl')), records.items()


def test_wrong_files_get_a_sentence(tmp_path):
  def refused(path, match):
    with pytest.raises(UserError, match=match):
      tensor_files.find(path)

  refused(tmp_path / 'nothing.bin', 'is not a file or directory')
  refused(tmp_path, r'has no \.bin, \.safetensors or \.index\.json')
  safetensors.numpy.save_file({'a': np.zeros(2)}, tmp_path / 'f64.safetensors')
  refused(tmp_path / 'f64.safetensors', 'tensor a has the dtype F64')
  (tmp_path / 'text.bin').write_text('version https://git-lfs.github.com/spec/v1')
  refused(tmp_path / 'text.bin', 'is a pointer of Git LFS')
  (tmp_path / 'text.bin').write_text('something')
  refused(tmp_path / 'text.bin', 'is not a file of PyTorch')
  _write(tmp_path / 'a.bin').rename(tmp_path / 'b.safetensors')
  refused(tmp_path / 'b.safetensors', 'has the content of a file of PyTorch; rename it to')
  _write(tmp_path / 'a.safetensors').rename(tmp_path / 'b.bin')
  refused(tmp_path / 'b.bin', 'has the content of a safetensors file; rename it to')
  (tmp_path / 'old.bin').write_bytes(pickle.dumps({}))
  refused(tmp_path / 'old.bin', 'PyTorch before 1.6')
  refused(_archive(tmp_path / 'list.bin', pickle.dumps([1], 2)), 'holds a list, not tensors by')
  training = pickle.dumps({'module': {}, 'optimizer': 1}, 2)
  refused(_archive(tmp_path / 'd.bin', training), "has 'module', which is not a tensor")


def test_other_dtypes_and_old_formats_of_pytorch_are_refused(tmp_path):
  torch = pytest.importorskip('torch')
  torch.save({'a': torch.zeros(3, dtype=torch.int64)}, tmp_path / 'int.bin')
  with pytest.raises(UserError, match='tensor a has the dtype int64; it must be one of float32'):
    tensor_files.find(tmp_path / 'int.bin')
  assert not tensor_files.find(tmp_path / 'int.bin', lambda name: name == 'a'), 'not left out'
  torch.save({'a': torch.zeros(1)}, tmp_path / 'old.bin', _use_new_zipfile_serialization=False)
  with pytest.raises(UserError, match=r'PyTorch before 1\.6.* ask its author'):
    tensor_files.find(tmp_path / 'old.bin')
  many = torch.zeros(2**16)
  torch.save({f'{i}': many for i in range(1000)}, tmp_path / 'many.bin')
  with pytest.raises(UserError, match='they share a storage'):
    tensor_files.find(tmp_path / 'many.bin')
  torch.save({'a': torch.zeros(1).expand(2**40)}, tmp_path / 'wide.bin')
  with pytest.raises(UserError, match='they share a storage'):
    tensor_files.find(tmp_path / 'wide.bin')


def test_an_old_pytorch_reads_no_file(tmp_path, monkeypatch):
  torch = pytest.importorskip('torch')
  torch.save({'a': torch.zeros(1)}, tmp_path / 'model.bin')
  monkeypatch.setattr(torch, '__version__', '2.9.1+cpu')
  with pytest.raises(UserError, match=r'install PyTorch 2\.10 or later'):
    tensor_files.find(tmp_path / 'model.bin')


@EACH_FORMAT
def test_a_sharded_set_is_whole_or_refused(tmp_path, suffix):
  weights = _weights()
  weight_map = {name: f'model-{i}{suffix}' for i, name in enumerate(weights)}
  for name, shard in weight_map.items():
    _write(tmp_path / shard, {name: weights[name]})
  index = tmp_path / f'model{suffix}.index.json'

  def write_index(names) -> None:
    index.write_text(json.dumps({'metadata': {}, 'weight_map': names}))

  write_index(weight_map)
  _assert_same(_read(index), weights)
  _assert_same(_read(tmp_path), weights)
  for changes, match in (
    ({'d': f'model-0{suffix}'}, 'puts the tensor d into model-0.*, and no shard holds it'),
    ({'b': f'model-0{suffix}'}, 'puts the tensor b into model-0'),
    ({'b': f'model-9{suffix}'}, r'names model-9.*\(1 of 4 shards are missing\); fetch'),
    ({'b': f'../model-1{suffix}'}, 'names shards that are not'),
  ):
    write_index({**weight_map, **changes})
    with pytest.raises(UserError, match=match):
      tensor_files.find(index)
  index.unlink()
  with pytest.raises(UserError, match='without an index'):
    tensor_files.find(tmp_path)


def test_shards_are_read_whole(tmp_path):
  """Tools that add a tensor to a shard leave the index as it was; transformers reads the shards."""
  weights = _weights()
  shards = ['model-1.safetensors', 'model-2.safetensors']
  _write(tmp_path / shards[0], weights)
  _write(tmp_path / shards[1], {'e': weights['b']})
  index = tmp_path / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': {'b': shards[0], 'e': shards[1], 'c': shards[1]}}))
  _assert_same(_read(index), {**weights, 'e': weights['b']})
  _write(tmp_path / shards[1], {'b': weights['b'] + 1, 'e': weights['b']})
  _assert_same(_read(index), {**weights, 'b': weights['b'] + 1, 'e': weights['b']})


def test_the_index_of_many_experts_is_read(tmp_path):
  """94 layers of 128 experts, as in Qwen3 235B, have an index of 3 MB."""
  names = [
    f'model.layers.{layer}.mlp.experts.{expert}.{end}_proj.weight'
    for layer in range(94)
    for expert in range(128)
    for end in ('gate', 'up', 'down')
  ]
  index = tmp_path / 'model.safetensors.index.json'
  shards = {name: f'model-{1 + i // 320:05}-of-00118.safetensors' for i, name in enumerate(names)}
  index.write_text(json.dumps({'weight_map': shards}, indent=2))
  assert tensor_files.read_index(index) == shards


def test_the_set_that_transformers_reads_is_read(tmp_path):
  """Folders keep files of before: each set here is read while those before it are not there."""
  names = ('model.safetensors', 'model.safetensors.index.json')
  names += ('pytorch_model.bin', 'pytorch_model.bin.index.json', 'other.safetensors', 'other.bin')
  for i, name in enumerate(names):
    weights = {'a': np.full(100, i, np.float32)}
    if not name.endswith('.json'):
      _write(tmp_path / name, weights)
      continue
    shard = f'part.of.{name}'.removesuffix('.index.json')
    _write(tmp_path / shard, weights)
    (tmp_path / name).write_text(json.dumps({'weight_map': {'a': shard}}))
  for i, name in enumerate(names[:4]):
    assert _read(tmp_path)['a'][0] == i, f'{name} is not read'
    (tmp_path / name).unlink()


def test_numbers_too_large_for_the_dtype_are_refused(tmp_path):
  numbers = np.array([7e4], np.float32)
  with pytest.raises(UserError, match=r'the tensor big has numbers too large for float16'):
    tensor_files.write(tmp_path, 'float16', {'big': (1,)}, [('big', numbers)])
