"""Checkpoints: what is read is what was written, or it is refused by name."""

import dataclasses
import shutil
import signal
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from jax.sharding import NamedSharding, PartitionSpec

from tokenformer_jax.config import (
  Config,
  GrowConfig,
  LMConfig,
  MeshConfig,
  TrainConfig,
  growth,
  with_references,
)
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import sharding
from tokenformer_jax.resolve import origin
from tokenformer_jax.runs import checkpoint, checksum, saved_config
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Meta
from tokenformer_jax.runs.saved_config import FORMAT
from tokenformer_jax.storage import retry

FILLED = dataclasses.replace(Config(), model=with_references(Config().model))
TOKENIZER = {'kind': 'bytes'}


def state(seed=0):
  rng = np.random.default_rng(seed)
  return {
    'params': {'keys': jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)},
    'opt_state': {'count': jnp.asarray(3), 'mu': jnp.asarray(rng.normal(size=64), jnp.bfloat16)},
    'step': jnp.asarray(7, jnp.int32),
  }


def abstract(tree, shardings=None):
  single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shardings = jax.tree.map(lambda _: single, tree) if shardings is None else shardings
  return sharding.with_shardings(tree, shardings)


def save(workdir, steps=(1, 2), loss=None, keep=10):
  checkpoints = checkpoint.Checkpoints(workdir, keep=keep)
  for step in steps:
    checkpoints.save(Meta(step, FILLED, TOKENIZER), state(step), loss)
  checkpoints.wait()
  checkpoints.close()


def read(workdir, step):
  checkpoints = checkpoint.Checkpoints(workdir)
  return checkpoints.restore(checkpoints.meta(step), abstract(state()))


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
  save(tmp_path)
  restored = read(tmp_path, 2)
  for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state(2)), strict=True):
    assert a.dtype == b.dtype, 'a dtype changed on the way'
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg='a value changed')


def test_a_checkpoint_without_a_loss_is_written_without_a_warning(tmp_path, caplog):
  save(tmp_path)
  assert not caplog.records


def test_a_checkpoint_says_what_it_is(tmp_path):
  save(tmp_path)
  meta = checkpoint.Checkpoints(tmp_path).meta(2)
  assert (meta.step, meta.config, meta.tokenizer) == (2, FILLED, TOKENIZER)


def test_a_checkpoint_does_not_choose_where_programs_are_loaded_from(tmp_path):
  theirs = dataclasses.replace(FILLED, train=TrainConfig(compilation_cache='/tmp/theirs'))
  checkpoints = checkpoint.Checkpoints(tmp_path, keep=1)
  checkpoints.save(Meta(1, theirs, TOKENIZER), state())
  checkpoints.wait()
  got = checkpoints.meta(1).config
  assert got == FILLED, 'JAX would run what it finds in a directory that a stranger chose'


def test_a_checkpoint_says_how_its_model_came_to_be(tmp_path):
  first = Ancestor('grow', '/runs/a', 10, LMConfig(width=64), GrowConfig(), 9)
  second = dataclasses.replace(
    first, action='merge', source='/runs/b', grow=growth(method='duplicate', noise=0.5)
  )
  checkpoints = checkpoint.Checkpoints(tmp_path, keep=1)
  described = Meta(7, Config(), TOKENIZER, (first, second), 'added_tokens')
  checkpoints.save(described, {**state(), 'skipped': jnp.asarray(3)})
  checkpoints.wait()
  _, meta = checkpoint.open_source(tmp_path, None)
  assert meta.lineage == (first, second), 'the lineage is another one after reading'
  assert meta.contents == 'added_tokens'
  assert meta.updates == 4, 'skipped steps count as updates'


@pytest.mark.parametrize(
  'error',
  [
    FileExistsError('state'),
    ValueError('NOT_FOUND: state/manifest.ocdbt'),
    ValueError('Checkpoint directory does not exist: state.'),
  ],
)
def test_files_that_a_replaced_process_removed_are_written_again(tmp_path, monkeypatch, error):
  monkeypatch.setattr(retry, 'PAUSES', (0.0,))
  checkpoints = checkpoint.Checkpoints(tmp_path, keep=2)
  save, errors = checkpoints._manager.save, [error]

  def fail_once(*args, **kwargs):
    if errors:
      raise errors.pop()
    return save(*args, **kwargs)

  monkeypatch.setattr(checkpoints._manager, 'save', fail_once)
  checkpoints.save(Meta(10, Config(), TOKENIZER), state(), wait=True)
  assert not errors and checkpoints.steps() == [10]
  checkpoints.close()


def test_a_state_that_is_donated_after_save_is_still_written(tmp_path):
  checkpoints = checkpoint.Checkpoints(tmp_path, keep=1)
  big = {'params': jnp.arange(2**20, dtype=jnp.float32)}
  overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
  expected = np.asarray(big['params']).copy()
  checkpoints.save(Meta(1, Config(), TOKENIZER), big)
  for _ in range(3):
    big = overwrite(big)
  checkpoints.wait()
  single = abstract({'params': jnp.zeros(2**20)})
  restored = checkpoints.restore(checkpoints.meta(1), single)
  np.testing.assert_array_equal(
    np.asarray(restored['params']), expected, err_msg='the next step wrote into the checkpoint'
  )


def test_arrays_made_when_they_are_written_are_as_others(tmp_path):
  """Their checksums agree as well: whole or by layer, with three axes, two, and one."""
  rng = np.random.default_rng(0)
  shapes = {'a': (3, 5, 7), 'b': (2049, 513), 'c': (3,)}
  arrays = {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
  arrays['half'] = arrays['c'].astype(jnp.bfloat16)
  deferred = {
    n: checkpoint.Deferred(
      a.shape, a.dtype, lambda layer, a=a: a if layer is None else a[layer], stacked=n in 'ac'
    )
    for n, a in arrays.items()
  }
  checkpoints = checkpoint.Checkpoints(tmp_path, keep=2)
  checkpoints.save(Meta(2, Config(), TOKENIZER), {'params': deferred})
  checkpoints.wait()
  second = checkpoints.meta(2)
  of_jax = {f'params/{n}': int(checksum.on_devices(a)) for n, a in arrays.items()}
  assert second.checksums == of_jax, 'another checksum than that of a jax array'
  restored = checkpoints.restore(second, {'params': abstract(arrays)})['params']
  for name, array in arrays.items():
    np.testing.assert_array_equal(np.asarray(restored[name]), array, err_msg=name)


def test_the_rest_of_a_checkpoint_of_parameters_is_read_as_zeros(tmp_path):
  checkpoints = checkpoint.Checkpoints(tmp_path, keep=1)
  alone = {'params': state()['params']}
  checkpoints.save(Meta(0, Config(), TOKENIZER, contents='params'), alone)
  checkpoints.wait()
  meta = checkpoint.open_source(tmp_path).meta
  restored = checkpoints.restore(meta, abstract(state()))
  np.testing.assert_array_equal(restored['params']['keys'], state()['params']['keys'])
  rest = {name: part for name, part in restored.items() if name != 'params'}
  wanted = jax.tree.map(jnp.zeros_like, {name: state()[name] for name in rest})
  assert set(restored) == set(state())
  for a, b in zip(jax.tree.leaves(rest), jax.tree.leaves(wanted), strict=True):
    assert a.dtype == b.dtype and np.array_equal(a, b), 'not a fresh state'
  checkpoints.save(Meta(1, Config(), TOKENIZER), alone)
  checkpoints.wait()
  with pytest.raises(checkpoint.DamagedError):
    checkpoints.restore(checkpoints.meta(1), abstract(state()))


def test_arrays_are_read_into_the_shardings_of_another_mesh(tmp_path):
  save(tmp_path)
  mesh = sharding.make_mesh(MeshConfig(fsdp=4, tokens=2))
  everywhere = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), state())
  everywhere['params']['keys'] = NamedSharding(mesh, PartitionSpec('tokens', 'fsdp'))
  checkpoints = checkpoint.Checkpoints(tmp_path)
  restored = checkpoints.restore(checkpoints.meta(2), abstract(state(), everywhere))
  keys = restored['params']['keys']
  assert {shard.data.shape for shard in keys.addressable_shards} == {(4, 4)}, 'not split'
  np.testing.assert_array_equal(np.asarray(keys), np.asarray(state(2)['params']['keys']))


def test_another_shape_is_refused_and_not_padded(tmp_path):
  save(tmp_path)
  wanted = state()
  wanted['params']['keys'] = jnp.zeros((10, 16))
  checkpoints = checkpoint.Checkpoints(tmp_path)
  with pytest.raises(checkpoint.DamagedError):
    checkpoints.restore(checkpoints.meta(2), abstract(wanted))


def test_another_tree_is_refused(tmp_path):
  save(tmp_path)
  checkpoints = checkpoint.Checkpoints(tmp_path)
  more, fewer = state(), state()
  more['params']['values'] = jnp.zeros((8, 16))
  del fewer['opt_state']['mu']
  with pytest.raises(checkpoint.DamagedError, match='params/values is missing'):
    checkpoints.restore(checkpoints.meta(2), abstract(more))
  with pytest.raises(checkpoint.DamagedError, match='opt_state/mu is not one of the model'):
    checkpoints.restore(checkpoints.meta(2), abstract(fewer))
  some = checkpoints.restore(checkpoints.meta(2), abstract(fewer), partial=True)
  assert set(some['opt_state']) == {'count'}


def test_arrays_of_another_checkpoint_are_noticed(tmp_path):
  """Whole files, valid in themselves, that are not those which the description was written for."""
  save(tmp_path, steps=(1, 2))
  arrays = tmp_path / 'checkpoints' / '2' / 'state'
  shutil.rmtree(arrays)
  shutil.copytree(tmp_path / 'checkpoints' / '1' / 'state', arrays)
  with pytest.raises(checkpoint.DamagedError, match='has changed since it was written'):
    read(tmp_path, 2)


@pytest.mark.parametrize('shape', [(7, 5), (2, 3, 4)])
def test_the_checksum_sees_every_bit(shape):
  values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  reference = int(checksum.on_devices(jnp.asarray(values)))
  for index in np.ndindex(values.shape):
    for bit in range(32):
      flipped = values.copy()
      flipped.view(np.uint32)[index] ^= np.uint32(1 << bit)
      assert int(checksum.on_devices(jnp.asarray(flipped))) != reference, (index, bit)


@pytest.mark.parametrize('layers', [(), (3,)])
def test_the_checksum_is_the_same_on_every_mesh(layers):
  values = jnp.asarray(np.random.default_rng(0).normal(size=(*layers, 8, 16)), jnp.float32)
  mesh = sharding.make_mesh(MeshConfig(fsdp=4, tokens=2))
  spec = PartitionSpec(*[None for _ in layers], 'tokens', 'fsdp')
  split = jax.device_put(values, NamedSharding(mesh, spec))
  assert int(jax.jit(checksum.on_devices)(split)) == int(checksum.on_devices(values))


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_afresh(tmp_path):
  save(tmp_path)
  (tmp_path / 'checkpoints/1/meta/metadata').write_text('{}')
  known = {2: checkpoint.DamagedError('an array has changed')}
  sentence = r'no checkpoint in .* can be read \(step 2: an array has changed; step 1: '
  with pytest.raises(UserError, match=sentence):
    origin.find(Config(), tmp_path, known)
  assert not (tmp_path / 'damaged').exists(), 'checkpoints were moved although none was usable'


@pytest.mark.parametrize(
  ('stored', 'remedy'),
  [(FORMAT + 1, 'install a newer'), (FORMAT - 1, 'use the older'), ('x', 'use')],
)
def test_another_format_is_refused(stored, remedy, tmp_path, monkeypatch):
  monkeypatch.setattr(saved_config, 'FORMAT', stored)
  save(tmp_path)
  monkeypatch.undo()
  sentence = f'has the format {stored}, .* reads format {FORMAT} only; {remedy}'
  with pytest.raises(UserError, match=sentence):
    checkpoint.Checkpoints(tmp_path).meta(2)


def test_keys_that_are_gone_are_read_where_they_had_no_effect():
  stored = {'optim': {'learning_rate': 0.5, 'sparse_tokens': 0.0, 'background': ''}}
  config = saved_config.parse(Config, stored, 'config.json')
  assert config == Config(optim=dataclasses.replace(Config().optim, learning_rate=0.5))
  stored['optim']['sparse_tokens'] = 0.1
  with pytest.raises(UserError, match=r'config.json has optim.sparse_tokens=0.1, a key that this'):
    saved_config.parse(Config, stored, 'config.json')


@pytest.mark.full_size
@pytest.mark.slow
def test_sigterm_saves_and_says_how_to_go_on(tmp_path):
  source = tiny_run.write_corpus(tmp_path / 'corpus')
  command = tiny_run.command(
    source, tmp_path / 'cache', tmp_path / 'run', train__steps=100_000, train__log_every=10
  )
  process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=tiny_run.environment())
  said = ''
  for line in process.stderr:
    said += line
    if line.startswith('step 20/'):
      process.send_signal(signal.SIGTERM)
      break
  said += process.communicate(timeout=120)[1]
  assert process.returncode == 0, said
  assert 'to go on: tokenformer train ' in said, said
  saved = checkpoint.Checkpoints(tmp_path / 'run').steps()
  assert f'saving step {saved[-1]}' in said and saved[-1] >= 20, said
