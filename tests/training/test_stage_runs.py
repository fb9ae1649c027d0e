"""Runs of masks, stages and a mixture of text and conversations together, resumed anywhere."""

import contextlib
import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import tiny_run
from compilations import compilations
from outcomes import assert_same
from tiny_hosts import gather_batches
from tiny_run import broken, prepared, train_on_one_device

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import SourceConfig, Sources, at_stage, stages
from tokenformer_jax.data import order
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import flops
from tokenformer_jax.parallel import sharding
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.runs import batches, checkpoint, curves, metrics
from tokenformer_jax.runs.checkpoint_meta import Batches
from tokenformer_jax.training import loop

# Almost every test trains a run.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('one_device')]

CHANGE, STEPS = 7, 14
VARYING = {'a': {'weight_by_step': '0:0.25 7:1'}, 'b': {'weight_by_step': '0:0.75 7:0'}}
STAGES = {
  # 68 parts of an eighth before the change are eight sequences and a half.
  'data__sequence_length_by_step': f'0:4 {CHANGE}:32',
  'data__batch_size_by_step': f'0:12 5:4 {CHANGE}:8',
  'data__batch_size': 4,
  'data__documents': 'separate',
  'train__steps': STEPS,
  'train__log_every': 1,
  'train__checkpoint_every': 1,
  'train__keep_checkpoints': 99,
}


def staged(texts, weights=None, **changes) -> config_lib.Config:
  """The config of a tiny run on text, `a`, and conversations, `b`, with stages."""
  config = tiny_run.config('stdlib', texts / 'cache', **{**STAGES, **changes})
  weights = weights or {'a': {'weight': 0.75}, 'b': {'weight': 0.25}}
  of = {
    'a': {'source': f'files:{texts}/a/*.txt'},
    'b': {'source': f'files:{texts}/b.jsonl', 'rows': 'chat'},
  }
  sources = {name: SourceConfig(**of[name], **own) for name, own in weights.items()}
  return dataclasses.replace(
    config, data=dataclasses.replace(config.data, mixture=Sources(sources))
  )


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
  root = tmp_path_factory.mktemp('texts')
  tiny_run.write_corpus(root / 'a')
  rows = [
    {'prompt': f'What is in {file.name}?', 'response': file.read_text().upper()}
    for file in sorted((root / 'a').iterdir())
  ]
  (root / 'b.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  return root


@pytest.fixture(scope='module')
def whole(texts, tmp_path_factory):
  """The work directory of an unbroken run, its last state, what it compiled and what it said."""
  workdir = tmp_path_factory.mktemp('run') / 'run'
  said = []
  with pytest.MonkeyPatch.context() as patch, compilations() as compiled:
    patch.setattr(metrics.Metrics, 'say', lambda self, text: said.append(text))
    state = train_on_one_device(staged(texts), workdir)
  return workdir, state, list(compiled), said


def batches_of(run) -> list[np.ndarray]:
  """All batches that a prepared run trains on."""
  found = []
  for stage in run.stages:
    rows, first = range(stage.batch_size), stage.position.step
    with contextlib.closing(
      stage.task.train_batches(rows, first, stage.end, stage.position)
    ) as batches:
      found += list(batches)
  return found


def test_a_run_resumed_at_any_step_has_the_batches_of_an_unbroken_one(texts, whole, tmp_path):
  config = staged(texts)
  every = batches_of(prepared(config, tmp_path / 'new'))
  assert len(every) == STEPS and len({*(batch.shape for batch in every)}) == 3
  assert any((batch < -1).any() for batch in every), 'no token of a question is without loss'
  for step in (1, 4, 5, CHANGE - 1, CHANGE, CHANGE + 1, STEPS - 1):
    folder = broken(whole[0], tmp_path / 'broken', step)
    for ours, theirs in zip(batches_of(prepared(config, folder)), every[step:], strict=True):
      np.testing.assert_array_equal(ours, theirs, f'resumed at step {step}')
    shutil.rmtree(folder)


@pytest.mark.parametrize('step', [6, CHANGE])
def test_a_resumed_run_ends_bit_for_bit_where_an_unbroken_one_does(texts, whole, tmp_path, step):
  again = broken(whole[0], tmp_path / 'broken', step)
  assert_same(whole[1], loop.train(staged(texts), again), f'resumed at step {step}')
  names = ('data/a/epochs', 'train/loss')
  last = [[metrics.read(run)[-2][name] for name in names] for run in (whole[0], again)]
  assert last[0] == last[1]


def test_each_stage_has_one_program_and_says_so(whole):
  _, _, compiled, said = whole
  assert compiled.count('step') == 3, 'not one program for each size'
  assert [line for line in said if line.startswith('from step')] == [
    'from step 1 on, batches are 12 rows, 48 tokens; compiling the step for them',
    'from step 6 on, batches are 4 rows, 16 tokens; compiling the step for them',
    'from step 8 on, batches are 8 rows, 256 tokens; compiling the step for them',
  ]


def test_tokens_flops_and_figures_count_each_stage_by_its_own_size(texts, whole):
  config = staged(texts)
  meta = checkpoint.open_source(whole[0], None)[1]
  assert meta.seen.batches == (Batches(0, 12, 4), Batches(5, 4, 4), Batches(CHANGE, 8, 32))
  assert meta.seen.samples == 9 + 7 * 8, 'the order goes on elsewhere after the change'
  tokens = 5 * 48 + 2 * 16 + 7 * 256
  assert curves.curves(whole[0], 'tokens', 'eval/loss')['eval/loss'][0] == [tokens]
  filled = complete(config)
  counts = [5, 2, 7]
  want = sum(
    count * flops.step_flops(dataclasses.replace(filled, data=at_stage(filled.data, stage)))
    for count, stage in zip(counts, stages(filled.data), strict=True)
  )
  assert batches.flops_at_checkpoint(meta) == pytest.approx(want)
  lines = {line['step']: line for line in metrics.read(whole[0]) if 'train/loss' in line}
  for step, each in ((5, 48), (6, 16), (8, 256)):
    line = lines[step]
    work = line['perf/tokens_per_second'] * line['perf/step_seconds']
    assert work == pytest.approx(each), f'step {step} counts other tokens'


def test_a_stage_changed_in_the_middle_goes_on_at_the_next_whole_sequence(texts, whole, tmp_path):
  later = staged(texts, data__sequence_length_by_step='0:4 5:32')
  run = prepared(later, broken(whole[0], tmp_path / 'broken', 5))
  assert run.position == order.Position(5, 8), '60 parts of an eighth are not rounded up'
  with pytest.raises(UserError, match=r'config\.data\.sequence_length is 64 and was 32'):
    longer = staged(texts, data__sequence_length=64, data__sequence_length_by_step='0:4 5:64')
    prepared(longer, tmp_path / 'broken')


def test_batches_that_devices_cannot_share_are_refused(texts, tmp_path, monkeypatch):
  monkeypatch.setattr(sharding, 'find_devices', lambda: jax.devices()[:8])
  with pytest.raises(UserError, match=r'config\.data\.batch_size_by_step / .* = 12/1 has the size'):
    prepared(staged(texts), tmp_path / 'run')


def test_batches_are_the_same_on_two_processes(texts, tmp_path):
  together = gather_batches(staged(texts, VARYING, mesh__fsdp=4), tmp_path, 2, 4, range(STEPS))
  alone = batches_of(prepared(staged(texts, VARYING), tmp_path / 'alone'))
  for step, (ours, theirs) in enumerate(zip(together, alone, strict=True)):
    np.testing.assert_array_equal(ours, theirs, f'step {step}')
