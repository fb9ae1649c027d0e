"""The grow command: what it writes is whole, is what the functions make, and leaves the source."""

import contextlib
import dataclasses
import io
import resource
import signal

import growing
import jax
import numpy as np
import pytest
import tiny_run
from grow_commands import (
  LARGER,
  SEEN,
  command_line,
  contents,
  first_state,
  grow,
  meta_of,
  read,
  write_run,
)
from growing import STEP, UPDATES, adam, by_name, mesh_of
from outcomes import assert_same, paths

from tokenformer_jax.config import GrowConfig, token_counts
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import grow_run
from tokenformer_jax.grow.steps.tokens import AddTokens
from tokenformer_jax.model import flops
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import checkpoint, saved_config
from tokenformer_jax.runs.checkpoint_meta import Ancestor

SLOW = pytest.mark.slow  # each of them runs the command, two models of which are compiled
COUNTS = by_name(48, 32, 96)
DENSE = tiny_run.DENSE | {
  'model.layer.mixer.qkv.bias': True,
  'model.layer.mixer.proj.bias': True,
  'model.layer.ffn.bias': True,
  'model.layer.norm': 'affine',
}


pytestmark = pytest.mark.usefixtures('one_device_in_module')


@pytest.fixture(scope='module')
def home(one_device_in_module, tmp_path_factory):
  """A directory with the runs `run` and `dense`, of 32, 32 and 64 tokens and of width 32."""
  root = tmp_path_factory.mktemp('grow')
  text = tiny_run.write_corpus(root / 'corpus')
  write_run(root / 'run', text, root / 'cache')
  write_run(root / 'dense', text, root / 'cache', **DENSE)
  return root


@pytest.fixture(scope='module')
def printed(home):
  """The lines on stderr and stdout of the command that grows to 48, 32 and 96 tokens."""
  with (
    contextlib.redirect_stderr(io.StringIO()) as err,
    contextlib.redirect_stdout(io.StringIO()) as out,
  ):
    grow(f'--source={home}/run@{STEP}', f'--target={home}/grown', LARGER)
  return err.getvalue().splitlines(), out.getvalue()


@pytest.fixture(scope='module')
def grown(home, printed):
  """The run that the command wrote."""
  return home / 'grown'


def _config(home, **changes):
  text = f'files:{home}/corpus/*.txt'
  return tiny_run.config(text, home / 'cache', **changes)


def test_the_command_writes_the_state_of_the_function(home, grown):
  source, meta = read(home / 'run'), meta_of(grown)
  before = meta_of(home / 'run').config.model
  target = grown_model(before, COUNTS, GrowConfig())
  assert meta.config.model == target, 'another model was written'
  want = growing.grow(source, before, target, GrowConfig())
  assert_same(read(grown), want, 'written by the command')


def test_the_target_says_where_it_came_from(home, grown):
  meta, before = meta_of(grown), meta_of(home / 'run')
  assert (meta.step, meta.updates, meta.contents) == (STEP, UPDATES, 'model')
  data = before.config.data
  spent = SEEN.samples / data.batch_size * flops.step_flops(before.config)
  (ancestor,) = meta.lineage
  assert ancestor.flops == pytest.approx(spent)
  assert meta.lineage == (
    Ancestor(
      *('grow', str(home / 'run'), STEP, before.config.model, GrowConfig(), UPDATES),
      flops=ancestor.flops,
      tokens=SEEN.samples * data.sequence_length,
      run=before.run,
    ),
  )
  assert meta.tokenizer == before.tokenizer
  assert meta.seen == SEEN, 'training the target repeats or skips data'


def test_the_target_has_a_config_to_go_on_with(home, grown):
  config = saved_config.read(grown / 'config.json', 'nothing')
  assert config == meta_of(grown).config, 'config.json and the checkpoint disagree'
  assert token_counts(config.model) == COUNTS and not config.init_from
  _, step = first_state(dataclasses.replace(config), grown)
  assert step == STEP, 'training does not go on from the growth'


def test_the_command_leaves_only_the_target(home, grown):
  assert not list(home.glob('.*')), 'a partial target was left'
  assert {path.name for path in grown.iterdir()} == {'checkpoints', 'config.json'}


def test_the_command_prints_the_table_and_the_check(home, printed):
  lines, out = printed
  assert 'the logits differ by at most' in lines[0]
  assert lines[-3] == 'exact: the grown model computes what the source does'
  assert lines[-2].startswith('`tokenformer convert to-hf` writes this model with PyTorch files of')
  assert lines[-1].startswith(f'wrote {home}/grown, step {STEP}')
  assert f'tokenformer train --workdir={home}/grown --config.train.steps=' in out
  assert 'ffn tokens' in out and '× 1.50' in out, 'no table'


@SLOW
def test_an_inexact_growth_from_step_0_is_written_with_a_warning(home, tmp_path, capsys):
  (tmp_path / '.new.partial/checkpoints').mkdir(parents=True)  # of a growth that was killed
  source, flags = contents(home / 'run'), ('--method=random', '--step=restart')
  grow(f'--source={home}/run', f'--target={tmp_path}/new', LARGER, *flags)
  said = capsys.readouterr().err
  assert 'not exact: the grown model will not compute what the source does, because the sc' in said
  assert [path.name for path in tmp_path.iterdir()] == ['new']
  assert contents(home / 'run') == source, 'the source was touched'
  meta = meta_of(tmp_path / 'new')
  assert (meta.step, meta.seen.samples, meta.lineage[-1].updates) == (0, 0, 0)


@SLOW
def test_a_growth_that_is_not_what_it_should_be_is_not_written(home, tmp_path, monkeypatch):
  """The check is of what was computed: here the new keys are not zero."""
  right = AddTokens.param
  monkeypatch.setattr(
    AddTokens,
    'param',
    lambda *arguments, **more: right(*arguments, **more) + 0.01,
  )
  with pytest.raises(UserError, match=r'computes something else: its logits.*nothing was written'):
    grow(f'--source={home}/run', f'--target={tmp_path}/new', LARGER)
  assert not list(tmp_path.iterdir()), 'it was written'


def test_a_refusal_makes_no_directory(home, tmp_path):
  """The parents of a target are made when something is written into it."""
  with pytest.raises(UserError, match='are fewer'):
    grow(f'--source={home}/run', f'--target={tmp_path}/a/b/new', '--param_tokens=ffn=1')
  assert not list(tmp_path.iterdir()), 'a refused growth made directories'


def test_a_dry_run_writes_nothing_and_says_what_would_not_fit(home, tmp_path, capsys):
  counts = '--param_tokens=qkv=2000000000'
  grow(f'--source={home}/run', f'--target={tmp_path}/new', counts, '--dry_run')
  said = capsys.readouterr()
  assert 'qkv tokens' in said.out, 'a growth for another host cannot be looked at'
  assert 'will it pay? Outside of what was measured' in said.out
  assert 'without --dry_run this would end here: the result and its moments take' in said.err
  assert not list(tmp_path.iterdir()), 'a dry run wrote something'


# Arguments of the command, and the sentence; tests/mistakes has more.
REFUSALS = {
  'no such step': (['--source={home}/run@7', LARGER], 'has no checkpoint of step 7; it has the st'),
  'a wider one than there is': (
    ['--source={home}/dense', '--method=hypercloning', '--width=3200000'],
    r'take [\d,.]+ GiB of the memory of this host, where [\d.]+ GiB is free',
  ),
  'a target in the source': (['--target={home}/run/new', LARGER], 'lies in the source; choose'),
  'merging with itself': (['merge', '--added={home}/run'], 'merged, they would count twice'),
  'shrinking a Transformer': (
    ['shrink', '--source={home}/dense', '--param_tokens=ffn=32'],
    '--param_tokens counts parameter tokens, and this model has none',
  ),
  'no multiple': (
    ['--param_tokens=ffn=96', '--method=duplicate'],
    'ffn=96 is not a multiple of the',
  ),
  'the wrong model': (['--width=64', '--method=net2net'], 'method net2net is for Transformers'),
  'a flag of another action': (['extract', LARGER], '--param_tokens has no meaning for extract'),
}


@pytest.mark.parametrize('name', REFUSALS)
def test_mistakes_get_a_sentence_and_nothing_is_written(home, tmp_path, name):
  arguments, sentence = REFUSALS[name]
  arguments = [argument.format(home=home) for argument in arguments]
  defaults = {'source': home / 'run', 'target': tmp_path / 'new'}
  for flag, value in defaults.items():
    if not any(argument.startswith(f'--{flag}=') for argument in arguments):
      arguments.append(f'--{flag}={value}')
  before = {name: contents(home / name) for name in ('run', 'dense')}
  with pytest.raises(UserError, match=sentence) as error:
    grow(*arguments)
  assert '\n' not in str(error.value), 'more than a line'
  assert not list(tmp_path.iterdir()), 'something was written'
  assert {name: contents(home / name) for name in before} == before, 'the source was touched'


def test_counts_that_the_mesh_does_not_divide_are_refused(home, tmp_path, monkeypatch):
  monkeypatch.setattr(sharding, 'find_devices', jax.devices)
  with pytest.raises(UserError, match=r"'param_tokens' of parameter blocks/ffn/keys has"):
    grow(
      f'--source={home}/run',
      f'--target={tmp_path}/new',
      '--param_tokens=ffn=97',
      '--mesh=fsdp=4,tokens=2',
    )
  assert not list(tmp_path.iterdir())


@SLOW
def test_a_source_that_the_mesh_does_not_divide_can_grow(home, tmp_path, monkeypatch):
  counts = {'model__layer__mixer__qkv__tokens': 33, 'model__layer__ffn__tokens': 65}
  write_run(tmp_path / 'odd', f'files:{home}/corpus/*.txt', home / 'cache', **counts)
  monkeypatch.setattr(sharding, 'find_devices', jax.devices)
  counts, mesh = '--param_tokens=qkv=40,ffn=96', '--mesh=fsdp=4,tokens=2'
  grow(f'--source={tmp_path}/odd', f'--target={tmp_path}/many', counts, mesh)
  config, before = (meta_of(tmp_path / name).config for name in ('many', 'odd'))
  want = growing.grow(read(tmp_path / 'odd'), before.model, config.model, GrowConfig())
  assert_same(read(tmp_path / 'many'), want, 'on 4 × 2 devices')
  assert config.mesh.tokens == 2, 'the run does not go on on that mesh'


# What is added, by itself


@pytest.fixture(scope='module')
def extracted(home, grown):
  grow('extract', f'--source={grown}', f'--target={home}/added')
  return home / 'added'


@SLOW
def test_added_tokens_are_written_alone_put_back_and_removed(home, grown, extracted, tmp_path):
  """With one kind that has none: proj stays at 32."""
  assert meta_of(extracted).contents == 'added_tokens'
  assert not any('embedding' in path for path in meta_of(extracted).checksums)
  target = tmp_path / 'merged'
  grow('merge', f'--source={home}/run', f'--added={extracted}', f'--target={target}')
  assert meta_of(target).config.model == meta_of(grown).config.model
  assert meta_of(target).lineage[-1].action == 'merge'
  assert_same(read(target)['params'], read(grown)['params'], 'extracted and merged')
  grow('remove', f'--source={grown}', f'--target={tmp_path}/base')
  base = meta_of(tmp_path / 'base')
  assert base.config.model == meta_of(home / 'run').config.model
  assert [ancestor.action for ancestor in base.lineage] == ['grow', 'remove']
  assert_same(read(tmp_path / 'base'), read(home / 'run'), 'grown and removed')


@SLOW
def test_added_tokens_alone_are_no_model(home, extracted, tmp_path):
  with pytest.raises(UserError, match=r'holds added tokens only; merge them into a model first'):
    grow(f'--source={extracted}', f'--target={tmp_path}/new', '--param_tokens=ffn=128')
  assert not list(tmp_path.iterdir())
  config = dataclasses.replace(
    _config(home, model__layer__ffn__tokens=128, model__layer__mixer__qkv__tokens=48),
    init_from=str(extracted),
  )
  with pytest.raises(UserError, match=r'holds added tokens only'):
    first_state(config, tmp_path / 'run')


@SLOW
def test_two_runs_merge(home, tmp_path, capsys):
  write_run(tmp_path / 'other', f'files:{home}/corpus/*.txt', home / 'cache', seed=3)
  grow('merge', f'--source={home}/run', f'--added={tmp_path}/other', f'--target={tmp_path}/both')
  assert token_counts(meta_of(tmp_path / 'both').config.model) == by_name(64, 64, 128)
  assert 'the logits differ by at most' in capsys.readouterr().err
  keys = paths(read(tmp_path / 'both')['params'])['blocks/ffn/keys']
  for run, half in ((home / 'run', keys[:, :64]), (tmp_path / 'other', keys[:, 64:])):
    want = paths(read(run)['params'])['blocks/ffn/keys']
    np.testing.assert_array_equal(half, want, err_msg=f'not the tokens of {run.name}')


@SLOW
def test_shrink_writes_a_smaller_run(home, grown, tmp_path, capsys):
  counts = '--param_tokens=qkv=32,ffn=64'
  grow('shrink', f'--source={grown}', f'--target={tmp_path}/s', counts, '--examples=4')
  assert 'importance of a token' in capsys.readouterr().err
  assert meta_of(tmp_path / 's').config.model == meta_of(home / 'run').config.model
  new = read(tmp_path / 's')
  assert_same(new['params'], read(home / 'run')['params'], 'unused tokens were kept')
  assert_same(adam(new).nu, adam(read(home / 'run')).nu, 'moments of the tokens that stay')


# By config.init_from


def test_init_from_grows_as_the_command_does(home, grown, tmp_path):
  counts = {'model__layer__mixer__qkv__tokens': 48, 'model__layer__ffn__tokens': 96}
  config = _config(home, **counts, train__steps=STEP + 1)
  config = dataclasses.replace(config, init_from=f'{home}/run')
  state, step = first_state(config, tmp_path / 'run')
  assert step == STEP, 'steps are forgotten'
  assert_same(state, read(grown), 'grown by config.init_from')


# What goes wrong while writing


def test_a_write_that_fails_leaves_nothing(home, tmp_path, monkeypatch):
  save = checkpoint.Checkpoints.save

  def fail(*arguments, **named):
    save(*arguments, **named)
    raise UserError('a checkpoint could not be written') from OSError('no room')

  monkeypatch.setattr(checkpoint.Checkpoints, 'save', fail)
  with pytest.raises(UserError, match=r'could not be written \(OSError: no room\); nothing is lef'):
    grow_run.write(tmp_path / 'new', meta_of(home / 'run'), read(home / 'run'))
  assert not list(tmp_path.iterdir()), 'a part of the target is left'


@SLOW
def test_a_full_disk_leaves_no_target(home, tmp_path):
  """A limit on the size of files stands for a disk without room: a write fails half way."""

  def limit():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

  before = contents(home / 'run')
  command = command_line(f'--source={home}/run', f'--target={tmp_path}/new', LARGER)
  full = tiny_run.run(command, preexec_fn=limit)
  assert full.returncode == 2, full.stderr[-2000:]
  assert 'nothing is left of it; make room or choose another --target' in full.stderr
  assert 'Traceback' not in full.stderr, full.stderr[-2000:]
  assert not list(tmp_path.iterdir()), 'a part of the target is left'
  assert contents(home / 'run') == before, 'the source was touched'


def test_a_target_holds_arrays_of_the_target_on_every_device(home, grown):
  """`grow_run.read` puts arrays straight into their places on another mesh."""
  source = checkpoint.open_source(grown)
  state = grow_run.read(source, mesh_of(fsdp=2, tokens=4))
  keys = state['params']['blocks']['ffn']['keys']
  assert {s.data.shape for s in keys.addressable_shards} == {(2, 96 // 4, 32 // 2)}
  assert jax.tree.map(lambda a: a.shape, state['params']) == jax.tree.map(
    lambda a: a.shape, define_lm(source.meta.config.model).abstract
  )
