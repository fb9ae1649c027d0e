"""Training runs: what they leave, the same after a resume, and steps that move nothing."""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import socket
import threading

import faulty
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from jax.experimental.compilation_cache import compilation_cache
from outcomes import assert_same, losses
from tiny_run import broken, trainer

from tokenformer_jax.data import order
from tokenformer_jax.errors import FaultyDeviceError, UserError
from tokenformer_jax.laws import runs as laws_runs
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import checkpoint, claim, curves, metrics, wall_time
from tokenformer_jax.steps import fit
from tokenformer_jax.tasks.text import TextTask
from tokenformer_jax.training import loop

KEPT = {'train__checkpoint_every': 7, 'train__keep_checkpoints': 9}


@pytest.fixture(scope='module')
def whole(source, tmp_path_factory):
  """The directory of an unbroken run, and its last state."""
  root = tmp_path_factory.mktemp('whole')
  changes = {
    'train__trackers': ('tensorboard',),
    'train__eval_every': 10,
    'train__sample_tokens': 8,
  }
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
    run = trainer(tiny_run.config(source, root / 'cache', **KEPT, **changes), root / 'run')
    before = run.train_step._cache_size()  # other tests may have the same step
    with jax.set_mesh(run.mesh), contextlib.closing(run.checkpoints):
      state = run.train(*run.first_state())
    assert run.train_step._cache_size() <= before + 1, 'the step was compiled more than once'
    return root / 'run', state


def test_a_run_learns_and_leaves_what_the_docs_promise(whole):
  workdir, _ = whole
  lines = metrics.read(workdir)
  names = set().union(*lines)
  assert names >= {
    'train/loss',
    'train/perplexity',
    'train/bits_per_byte',
    'train/grad_norm',
    'train/update_norm',
    'train/learning_rate',
    'train/skipped_steps',
    'eval/loss',
    'eval/perplexity',
    'eval/bits_per_byte',
    'eval/accuracy',
    'perf/tokens_per_second',
    'perf/step_seconds',
    'perf/model_tflops_per_second',
    'perf/host_peak_gib',
  }, 'metrics.jsonl lacks figures'
  by_step = losses(workdir, 'eval/loss')
  assert by_step[20] < by_step[10] - 0.3, 'the model does not learn'
  # The bytes tokenizer has one token for a byte and one more for the end of each document.
  bits, least = losses(workdir, 'eval/bits_per_byte')[20], by_step[20] / math.log(2)
  assert least < bits < 1.02 * least, 'bits per byte do not fit the loss'
  ranks = json.loads((workdir / 'checkpoints/20/metrics/metrics').read_text())
  assert ranks['loss'] == by_step[20], 'a checkpoint is not ranked by its loss'
  stored = json.loads((workdir / 'config.json').read_text())
  assert stored['model']['layer']['ffn']['reference'] == 64, 'config.json is not filled in'
  assert list((workdir / 'tensorboard').iterdir()), 'no TensorBoard events'
  samples = metrics.read_lines(workdir / 'samples.jsonl')
  assert [one['step'] for one in samples] == [10, 20] and samples[-1]['text']
  first, *times = metrics.read_lines(workdir / 'times.jsonl')
  assert first['step'] == 0 and first['starting'] > 0 and first['devices'] == '1 × cpu'
  assert [one['step'] for one in times] == [5, 10, 15, 20, 20]
  spent = {kind: sum(one.get(kind, 0) for one in [first, *times]) for kind in wall_time.KINDS}
  assert min(spent[kind] for kind in ('training', 'evaluation', 'saving', 'compiling')) > 0, spent
  passed = times[-1]['time'] - first['time'] + first['starting'] + first.get('compiling', 0)
  assert abs(sum(spent.values()) - passed) < 0.1, 'some time is counted twice or not at all'


def test_a_resumed_run_ends_bit_for_bit_where_an_unbroken_one_does(
  make, tmp_path, one_device, whole
):
  workdir, state = whole
  again = broken(workdir, tmp_path / 'broken', 7)
  assert_same(state, loop.train(make(**KEPT), again), 'after a resume')
  # The steps of a line are made by two processes.
  curve = losses(again)
  assert list(curve) == [5, 10, 15, 20], 'metrics.jsonl repeats or lacks lines after a resume'
  assert curve == losses(workdir), 'a line has another mean after a resume'


def test_the_checkpoint_before_a_damaged_one_is_used_and_nothing_is_lost(
  make, tmp_path, one_device, whole, capsys
):
  """One file of arrays is cut short; the others, which say where arrays are, stay whole."""
  workdir = shutil.copytree(whole[0], tmp_path / 'run')
  files = [path for path in (workdir / 'checkpoints/20').rglob('*') if path.is_file()]
  arrays = max(files, key=lambda path: path.stat().st_size)
  os.truncate(arrays, arrays.stat().st_size // 2)
  (workdir / 'metrics.jsonl').unlink()
  shutil.rmtree(workdir / 'tensorboard')
  resumed = loop.train(make(**KEPT), workdir)
  said = capsys.readouterr().err
  assert 'the checkpoint of step 20 is damaged' in said and 'going on from step 14' in said, said
  assert 'no figures up to step 14' in said, said
  assert_same(resumed, whole[1], 'after a damaged checkpoint')
  assert (workdir / 'damaged/20').is_dir(), 'the damaged checkpoint was deleted'
  assert checkpoint.Checkpoints(workdir).steps()[-1] == 20, 'step 20 was not written again'


@pytest.mark.parametrize('when', [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_run_that_was_replaced_writes_nothing_more(make, tmp_path, one_device, monkeypatch, when):
  """It finds out when it is about to write figures (2), or a checkpoint (3)."""
  asked, workdir = [], tmp_path / 'run'

  def figures():
    files = {path: path.read_bytes() for path in workdir.rglob('*') if path.is_file()}
    return {path: c for path, c in files.items() if not {'claim', 'checkpoints'} & {*path.parts}}

  class Lost(claim.Claim):
    def check(self):
      if threading.current_thread() is threading.main_thread() and len(asked) < when:
        asked.append(figures())
      if len(asked) == when:
        raise UserError('taken over')

  monkeypatch.setattr(claim, 'Claim', Lost)
  with pytest.raises(UserError, match='taken over'):
    loop.train(make(train__log_every=4), workdir)
  assert len(asked) == when
  assert figures() == asked[-1], 'figures were written after the work directory was lost'
  assert checkpoint.Checkpoints(workdir).steps() == [], 'a checkpoint was written'


def test_one_wrong_bit_ends_the_run(make, tmp_path, one_device):
  run = trainer(make(train__check_devices=4, train__log_every=1), tmp_path / 'run')
  # Steps 4 and 8 are computed twice: call 10 is the second of step 8.
  run.train_step = faulty.with_fault(run.train_step, call=10, device=0)
  with (
    jax.set_mesh(run.mesh),
    contextlib.closing(run.checkpoints),
    pytest.raises(FaultyDeviceError, match='step 8 was computed twice') as raised,
  ):
    run.train(*run.first_state())
  assert raised.value.hosts == (socket.gethostname(),)
  assert list(losses(tmp_path / 'run'))[-1] == 7, 'figures of a wrong step are written'
  assert checkpoint.Checkpoints(tmp_path / 'run').steps() == [5], 'a wrong step is saved'


@pytest.mark.slow
def test_every_sample_is_seen_once_whatever_the_batch_sizes(
  make, tmp_path, one_device, monkeypatch
):
  positions, read = {}, order.TrainBatches.__getitem__

  def spy(self, step):
    first = self.position.batch_start(int(step), self.batch_size)
    positions[int(step)] = [first + row for row in self.rows]
    return read(self, step)

  def counts_only(program, mesh):
    def step(state, batch):
      figures = {'loss': jnp.asarray(1.0), 'skipped_in_a_row': 0}
      return {**state, 'step': state['step'] + 1}, figures

    return step

  monkeypatch.setattr(order.TrainBatches, '__getitem__', spy)
  monkeypatch.setattr(fit, 'make_fitted_step', counts_only)
  monkeypatch.setattr(loop.Trainer, 'evaluate', lambda self, state: {'eval/loss': 1.0})
  for batch_size, steps in ((8, 5), (16, 8), (4, 15)):
    config = make(data__batch_size=batch_size, train__steps=steps)
    loop.train(config, tmp_path / 'run')
  grown = dataclasses.replace(
    make(train__steps=18, model__layer__ffn__tokens=96), init_from=str(tmp_path / 'run')
  )
  loop.train(grown, tmp_path / 'grown')
  seen = [position for step in sorted(positions) for position in positions[step]]
  samples = 5 * 8 + 3 * 16 + 7 * 4 + 3 * 8
  assert seen == list(range(samples)), 'samples are skipped or seen again'
  meta = checkpoint.open_source(tmp_path / 'grown').meta
  assert meta.seen.samples == samples
  assert [(one.first, one.samples) for one in meta.seen.batches] == [
    (0, 8),
    (5, 16),
    (8, 4),
    (15, 8),
  ]
  assert meta.lineage[-1].tokens == (samples - 3 * 8) * 32
  assert laws_runs.read(str(tmp_path / 'grown')).tokens == samples * 32
  xs, _ = curves.curves(tmp_path / 'grown', 'examples', 'train/loss')['train/loss']
  assert xs[-1] == samples


@pytest.fixture
def started(make, tmp_path, one_device):
  """A run, its first state, and a batch, in the run's mesh."""
  run = trainer(make(), tmp_path / 'run')
  with jax.set_mesh(run.mesh), contextlib.closing(run.batches(0, print)) as batches:
    state, _ = run.first_state()
    yield run, state, next(batches)[2]


def test_steps_move_nothing_between_host_and_device(started):
  run, state, batch = started
  state, _ = run.train_step(state, batch)
  with jax.transfer_guard('disallow'):
    for _ in range(3):
      state, figures = run.train_step(state, batch)
  assert int(state['step']) == 4, 'steps are not counted'
  assert np.isfinite(figures['loss']), 'the loss is not finite'


def test_the_state_is_donated(started):
  run, state, batch = started
  run.train_step(state, batch)
  kept = [leaf for leaf in jax.tree.leaves(state) if not leaf.is_deleted()]
  assert not kept, 'the old state stays alive, so a step needs twice the memory'


def with_infinity(state):
  """A copy of a state, one of whose parameters has an entry that is not finite in each row."""
  broken = jax.tree.map(np.array, state)
  broken['params']['embedding'][:, 0] = np.inf
  return jax.tree.map(lambda array, like: jax.device_put(array, like.sharding), broken, state)


def test_a_step_without_a_finite_gradient_changes_nothing(started):
  run, state, batch = started
  state, _ = run.train_step(state, batch)
  broken = with_infinity(state)
  expected = jax.tree.map(np.asarray, (broken['params'], broken['opt_state']))
  broken, figures = run.train_step(broken, batch)
  assert_same((broken['params'], broken['opt_state']), expected, 'a step that is skipped')
  assert int(figures['skipped_steps']) == 1 and int(broken['skipped_in_a_row']) == 1
  state['skipped'], state['skipped_in_a_row'] = broken['skipped'], broken['skipped_in_a_row']
  state, _ = run.train_step(state, batch)
  assert int(state['skipped_in_a_row']) == 0, 'a good step does not end the row'
  assert int(state['skipped']) == 1, 'skipped steps are forgotten'


def test_a_run_that_diverges_stops_and_says_what_to_do(started):
  run, state, _ = started
  train = dataclasses.replace(run.config.train, max_skipped_steps=10)
  run.config = dataclasses.replace(run.config, train=train)
  sentence = r'not finite in 10 steps in a row, from step 1; .*learning_rate'
  with contextlib.closing(run.checkpoints), pytest.raises(UserError, match=sentence):
    run.train(with_infinity(state), 0)


@pytest.mark.slow
def test_a_stop_asked_for_during_an_evaluation_saves_the_step_after_it(
  make, tmp_path, one_device, monkeypatch
):
  figures = TextTask.eval_figures

  def preempted(*arguments):
    signal.raise_signal(signal.SIGTERM)
    return figures(*arguments)

  monkeypatch.setattr(TextTask, 'eval_figures', preempted)
  config = make(train__eval_every=5, train__checkpoint_every=1000)
  state, stopped = loop.train_or_stop(config, tmp_path / 'run')
  assert list(losses(tmp_path / 'run', 'eval/loss')) == [5], 'the evaluation was not finished'
  assert stopped and state['step'] == 6, 'the signal was lost, or not waited for'
  assert checkpoint.Checkpoints(tmp_path / 'run').steps() == [6], 'the last step is not saved'


@pytest.mark.full_size
@pytest.mark.slow
def test_chosen_steps_are_profiled_and_programs_are_kept(make, tmp_path, one_device):
  cache, of_tests = tmp_path / 'programs', jax.config.jax_compilation_cache_dir
  config = make(train__profile_steps='2:3', train__compilation_cache=str(cache), train__steps=4)
  compilation_cache.reset_cache()  # It is opened once in a process.
  try:
    loop.train(config, tmp_path / 'run')
  finally:
    jax.config.update('jax_compilation_cache_dir', of_tests)
    compilation_cache.reset_cache()
  assert list((tmp_path / 'run/profile').rglob('*.xplane.pb')), 'no profile was written'
  assert list(cache.iterdir()), 'no compiled program was kept'


@pytest.mark.slow
def test_a_finished_run_says_so(make, tmp_path, one_device, capsys):
  config = make(train__check_devices=21)
  loop.train(config, tmp_path / 'run')
  doubt = 'config.train.check_devices=21 checks no step of a run of config.train.steps=20'
  assert doubt in capsys.readouterr().err
  loop.train(config, tmp_path / 'run')
  said = capsys.readouterr().err
  assert 'trained to step 20 already' in said and doubt not in said
  with pytest.raises(
    UserError, match=r'\(optim.learning_rate: 0.003 -> 0.0001\); choose workdir=NEW'
  ):
    loop.train(make(optim__learning_rate=1e-4, train__check_devices=21), tmp_path / 'run')
  said = capsys.readouterr().err
  assert 'different from step' not in said, 'a change is announced that has no effect'
