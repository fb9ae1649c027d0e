"""The command that adds layers: it writes what the function makes, and gives the source back."""

import dataclasses

import jax
import pytest
from grow_commands import first_state, meta_of, read, write_run
from grow_commands import grow as grow_command
from growing import (
  STEP,
  grow,
)
from outcomes import assert_same
from tiny import two_kinds
from tiny_run import write_corpus

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import GrowConfig, growth
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import grow_run
from tokenformer_jax.runs import checkpoint

SLOW = pytest.mark.slow  # because of what is compiled
PLAIN = GrowConfig()
BEHIND, COPIES = (GrowConfig(place=place) for place in ('behind', 'copies'))
KINDS = two_kinds()  # (local layer)*2 local


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  return write_corpus(tmp_path_factory.mktemp('text'))


@SLOW
def test_the_command_grows_and_gives_back(tmp_path, text, capsys, monkeypatch, one_device):
  source, target, back = (tmp_path / name for name in ('source', 'target', 'back'))
  write_run(source, text, tmp_path / 'cache')
  kept, restore = [], checkpoint.Source.restore

  def seen(self, abstract):
    kept.append(restore(self, abstract))
    return kept[-1]

  monkeypatch.setattr(checkpoint.Source, 'restore', seen)
  grow_command(
    f'--source={source}',
    f'--target={target}',
    '--layers=4',
    '--param_tokens=ffn=64',
    '--place=copies',
  )
  monkeypatch.setattr(checkpoint.Source, 'restore', restore)
  old = jax.tree.leaves(kept[0]['params']['blocks'])
  assert old and all(array.is_deleted() for array in old), 'both models are in memory'
  assert not kept[0]['params']['embedding'].is_deleted(), 'what stays is copied'
  said = capsys.readouterr()
  assert 'the logits differ by at most 0,' in said.err + said.out
  meta = meta_of(target)
  assert meta.config.model.depth == 4 and meta.lineage[-1].grow.place == 'copies'
  want = grow(read(source), meta.lineage[-1].model, meta.config.model, COPIES)
  assert_same(read(target), want, 'the command makes another state than the function')
  grow_command('remove', f'--source={target}', f'--target={back}')
  assert_same(read(back), read(source), 'remove after --layers')
  with pytest.raises(UserError, match='added layers'):
    grow_command('extract', f'--source={target}', f'--target={tmp_path / "parts"}')
  with pytest.raises(UserError, match='added layers'):
    grow_command(
      'merge', f'--source={target}', f'--added={target}', f'--target={tmp_path / "merged"}'
    )
  with pytest.raises(UserError, match='nothing would grow'):
    grow_command(f'--source={source}', f'--target={tmp_path / "no"}', '--place=behind')


@SLOW
def test_the_command_moves_layers_between_stacks(tmp_path, text, one_device):
  source, target = tmp_path / 'source', tmp_path / 'target'
  local = config_lib.to_json(KINDS)['variants']['local']
  changes = {'model.pattern': KINDS.pattern, 'model.variants': {'local': local}}
  write_run(source, text, tmp_path / 'cache', **changes)
  pattern = 'local layer*2 local*2 layer local'
  grow_command(
    f'--source={source}',
    f'--target={target}',
    f'--pattern={pattern}',
    '--param_tokens=ffn=96',
  )
  before, after = (meta_of(run).config.model for run in (source, target))
  want = grow(read(source), before, after, PLAIN)
  assert_same(read(target), want, 'the command makes another state than the function')


def test_copies_without_training_are_not_copied_as_layers(tmp_path, text, one_device):
  source, copied = tmp_path / 'source', tmp_path / 'copied'
  write_run(source, text, tmp_path / 'cache')
  meta = meta_of(source)
  lineage = grow_run.descend(meta, source, 'grow', growth('duplicate'))
  grow_run.write(copied, dataclasses.replace(meta, lineage=lineage), read(source))
  sentence = 'could stay equal for ever; train the model before you add layers'
  with pytest.raises(UserError, match=sentence):
    grow_command(
      f'--source={copied}', f'--target={tmp_path / "to"}', '--layers=4', '--place=copies'
    )
  old = meta_of(copied).config
  deeper = dataclasses.replace(old.model, pattern='layer*4')
  changes = {'init_from': str(copied), 'model': deeper, 'grow': COPIES}
  train = dataclasses.replace(old.train, steps=STEP + 1)
  config = dataclasses.replace(old, train=train, **changes)
  with pytest.raises(UserError, match=f'config.init_from={copied}: .*{sentence}'):
    first_state(config, tmp_path / 'to')
