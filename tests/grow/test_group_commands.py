"""The actions of the command grow on groups of parameter tokens, from run to run."""

import contextlib
import dataclasses
import re
import shutil

import jax
import numpy as np
import pytest
import tiny_run
from grow_commands import grow as command
from grow_commands import meta_of, read, write_run
from growing import STEP, params_of
from outcomes import assert_same, paths

from tokenformer_jax.config import GrowConfig
from tokenformer_jax.config import groups as chosen
from tokenformer_jax.config.groups import frozen_numbers
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.decoding import trained
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import grow_run
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Meta

SLOW = pytest.mark.slow  # because whole commands compile two models each


def _sizes(model):
  return {
    name: [group.tokens for group in found] for name, found in chosen.named_groups(model).items()
  }


pytestmark = pytest.mark.usefixtures('one_device_in_module')


@pytest.fixture(scope='module')
def home(one_device_in_module, tmp_path_factory):
  """A directory with the run `run` of one group, `two` of two groups, and a Transformer."""
  root = tmp_path_factory.mktemp('groups')
  text = tiny_run.write_corpus(root / 'corpus')
  write_run(root / 'run', text, root / 'cache')
  tokens = {f'model__layer__{name}__tokens': 64 for name in ('mixer__qkv', 'mixer__proj', 'ffn')}
  split = {name.replace('tokens', 'groups'): '32 32' for name in tokens}
  write_run(root / 'two', text, root / 'cache', **tokens, **split)
  write_run(root / 'dense', text, root / 'cache', **tiny_run.DENSE)
  return root


def test_the_command_prints_the_table(home, capsys):
  command('groups', f'--source={home}/two')
  out = capsys.readouterr().out.splitlines()
  assert [line.split()[:2] for line in out[1:]] == [['1', '32:32'], ['2', '32:32']]
  command('groups', f'--source={home}/run')
  assert len(capsys.readouterr().out.splitlines()) == 2


def test_freeze_writes_the_same_run_with_another_config(home, tmp_path):
  command('freeze', '--groups=2', f'--source={home}/two', f'--target={tmp_path}/frozen')
  meta = meta_of(tmp_path / 'frozen')
  assert frozen_numbers(meta.config.model) == (2,)
  assert (meta.lineage[-1].action, meta.lineage[-1].groups) == ('freeze', '2')
  assert_same(read(tmp_path / 'frozen'), read(home / 'two'), 'frozen')
  with pytest.raises(UserError, match=r'new tokens of ffn would be in group 2, which is frozen'):
    flags = '--param_tokens=ffn=96', '--method=zero_keys'
    command(f'--source={tmp_path}/frozen', f'--target={tmp_path}/new', *flags)
  assert not (tmp_path / 'new').exists()
  command('freeze', '--groups=', f'--source={tmp_path}/frozen', f'--target={tmp_path}/free')
  assert meta_of(tmp_path / 'free').config.model == meta_of(home / 'two').config.model


@SLOW
def test_remove_slice_and_scale_write_runs(home, tmp_path, capsys):
  source = f'--source={home}/two'
  command('remove', '--groups=1', source, f'--target={tmp_path}/removed')
  command('slice', '--groups=1', source, f'--target={tmp_path}/sliced')
  old = paths(read(home / 'two')['params'])['blocks/ffn/keys']
  for name, part, gone in (('removed', old[:, 32:], '1'), ('sliced', old[:, :32], '2')):
    np.testing.assert_array_equal(paths(read(tmp_path / name)['params'])['blocks/ffn/keys'], part)
    assert meta_of(tmp_path / name).lineage[-1].groups == gone
  command('scale', '--groups=2', '--factor=0', source, f'--target={tmp_path}/scaled')
  last = meta_of(tmp_path / 'scaled').lineage[-1]
  assert (last.action, last.groups, last.factor) == ('scale', '2', 0.0)
  assert not paths(read(tmp_path / 'scaled')['params'])['blocks/ffn/values'][:, 32:].any()
  said = capsys.readouterr().err
  assert len(re.findall(r'16 × 32 tokens of .* the loss is .* before and ', said)) == 3


def test_runs_that_were_moved_are_not_merged_twice(home, tmp_path):
  shutil.copytree(home / 'run', tmp_path / 'base')
  base = meta_of(tmp_path / 'base')
  counts = {'qkv': 48, 'ffn': 96}
  larger = grown_model(base.config.model, counts, GrowConfig())
  with contextlib.closing(checkpoint.Checkpoints(tmp_path / 'grown', keep=1)) as checkpoints:
    config = dataclasses.replace(base.config, model=larger)
    lineage = grow_run.descend(base, tmp_path / 'base', 'grow', GrowConfig())
    checkpoints.save(Meta(STEP, config, base.tokenizer, lineage), {'params': params_of(larger)})
  moved = [(tmp_path / name).rename(tmp_path / f'moved_{name}') for name in ('base', 'grown')]
  for source, added in (moved, moved[::-1], (home / 'run', moved[1]), (moved[0], home / 'run')):
    with pytest.raises(UserError, match=r'has parameter tokens of .*, they would count twice'):
      command('merge', f'--source={source}', f'--added={added}', f'--target={tmp_path}/twice')
  assert not (tmp_path / 'twice').exists()


@SLOW
def test_two_runs_grown_by_a_group_merge(home, tmp_path, capsys):
  grown = ['--method=group', '--param_tokens=qkv=48,ffn=96']
  for name, seed in (('a', 1), ('b', 2)):
    command(f'--source={home}/run', f'--target={tmp_path}/{name}', *grown, f'--seed={seed}')
  command('extract', '--groups=2', f'--source={tmp_path}/b', f'--target={tmp_path}/of_b')
  merge = ['merge', f'--added={tmp_path}/of_b']
  command(*merge, f'--source={tmp_path}/a', f'--target={tmp_path}/both')
  meta = meta_of(tmp_path / 'both')
  assert _sizes(meta.config.model) == {'qkv': [32, 16, 16], 'proj': [32], 'ffn': [64, 32, 32]}
  with pytest.raises(UserError, match='merged, they would count twice; merge them into a run with'):
    command(*merge, f'--source={tmp_path}/both', f'--target={tmp_path}/again')
  command('remove', f'--source={tmp_path}/both', f'--target={tmp_path}/a_again')
  assert_same(read(tmp_path / 'a_again'), read(tmp_path / 'a'), 'merged and removed')
  capsys.readouterr()
  command('groups', f'--source={tmp_path}/both')
  assert f'{tmp_path}/b from step {STEP}' in capsys.readouterr().out.splitlines()[-1]


def test_a_run_is_used_with_its_first_groups(home):
  whole = trained.load(f'{home}/two')
  part = trained.load(f'{home}/two', groups=1)
  assert _sizes(part.config.model)['ffn'] == [32]
  keys = [one.params['blocks']['ffn']['keys'] for one in (whole, part)]
  np.testing.assert_array_equal(keys[1], keys[0][:, :32])
  assert_same(trained.load(f'{home}/two', groups=2).params, whole.params, 'all groups')
  for count in (0, 3):
    with pytest.raises(UserError, match=rf'groups is {count}; it must be from 1 to 2'):
      trained.load(f'{home}/two', groups=count)
  with pytest.raises(UserError, match='is a Transformer, which has no groups'):
    trained.load(f'{home}/dense', groups=1)


def test_first_groups_on_several_devices(home, monkeypatch):
  want = trained.load(f'{home}/two', groups=1)
  monkeypatch.setattr(sharding, 'find_devices', jax.devices)
  got = trained.load(f'{home}/two', 2, groups=1)
  assert_same(got.params, want.params, 'on eight devices')
  keys = got.params['blocks']['ffn']['keys']
  assert {s.data.shape for s in keys.addressable_shards} == {(2, 32 // 2, 32 // 4)}


def test_choices_of_groups_that_a_model_lacks_are_refused(home, tmp_path):
  with pytest.raises(UserError, match=r'groups is 2, .*it must be from 1 to 1'):
    command('slice', '--groups=2', f'--source={home}/two', f'--target={tmp_path}/new')
  with pytest.raises(UserError, match='is a Transformer, which has no groups of parameter tokens'):
    command('freeze', '--groups=1', f'--source={home}/dense', f'--target={tmp_path}/new')
  assert not list(tmp_path.iterdir())
