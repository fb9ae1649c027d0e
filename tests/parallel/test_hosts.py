"""Several processes joined by JAX, as on a pod: they do what one does, and end together."""

import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny_hosts
import tiny_run
from gathered import gather_batches

from tokenformer_jax.data import order, store
from tokenformer_jax.errors import FaultyDeviceError, TransientError, UserError
from tokenformer_jax.parallel import hosts
from tokenformer_jax.runs import checkpoint, metrics
from tokenformer_jax.runs.saved_config import FormatError

MESH = {'mesh__fsdp': 2, 'mesh__tokens': 2}  # both axes cross processes where each has one device
CHANGES = {**MESH, 'train__checkpoint_every': 10, 'train__eval_every': 10}
ENDLESS = {**MESH, 'train__steps': 10**6, 'train__checkpoint_every': 20}

DEVICES = 4  # of all processes together

slow = pytest.mark.slow


@pytest.fixture(scope='module', params=[2, pytest.param(4, marks=pytest.mark.full_size)])
def processes(request):
  return request.param


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  root = tmp_path_factory.mktemp('hosts')
  return root, tiny_run.write_corpus(root / 'corpus')


def train(corpus, name, **changes):
  """The command, and the work directory."""
  root, source = corpus
  return tiny_run.command(source, root / 'cache', root / name, **changes), root / name


def run_together(arguments, processes):
  return tiny_hosts.run(arguments, processes, DEVICES // processes)


def start_together(arguments, processes):
  return tiny_hosts.started(arguments, processes, DEVICES // processes)


def run_alone(arguments):
  done = subprocess.run(
    arguments, capture_output=True, text=True, env=tiny_hosts.environment(DEVICES), timeout=300
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.fixture(scope='module')
def one(corpus):
  """The work directory of a run in one process."""
  command, workdir = train(corpus, 'one', **CHANGES)
  run_alone(command)
  return workdir


@pytest.fixture(scope='module')
def joined(corpus, processes):
  """The work directory of a run in several processes, and how they ended."""
  command, workdir = train(corpus, f'joined_{processes}', **CHANGES)
  return workdir, run_together(command, processes)


def losses(workdir):
  """By step and name; each step once."""
  lines = metrics.read(workdir)
  names = ('train/loss', 'eval/loss')
  found = [(line['step'], name, line[name]) for line in lines for name in names if name in line]
  assert len({row[:2] for row in found}) == len(found), 'a step is there twice: two wrote figures'
  return {row[:2]: row[2] for row in found}


def assert_same_losses(ours, theirs):
  assert ours.keys() == theirs.keys()
  np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-4)


@slow
def test_losses_are_those_of_one_process_and_only_the_first_speaks(one, joined):
  assert_same_losses(losses(joined[0]), losses(one))
  first, *others = joined[1]
  assert 'saved' in first.err
  assert [other.out + other.err for other in others] == [''] * len(others)


@slow
def test_resuming_with_other_processes_ends_with_the_same_losses(corpus, one, joined, processes):
  others = {2: 4, 4: 2}[processes]
  command, workdir = train(corpus, f'resumed_{others}', **CHANGES)
  shutil.copytree(joined[0], workdir)
  shutil.rmtree(workdir / 'checkpoints' / '20')
  first = run_together(command, others)[0]
  assert 'going on after step 10' in first.err
  assert_same_losses(losses(workdir), losses(one))


@slow
@pytest.mark.parametrize('processes', [2, 4])
def test_batches_are_exactly_those_of_one_process(corpus, processes, tmp_path):
  root, source = corpus
  config = tiny_run.config(source, root / 'cache', mesh__fsdp=4)
  found = gather_batches(config, tmp_path, processes, DEVICES, range(3, 6))
  data = config.data
  tokens = store.prepare(data).train
  length, size = data.sequence_length, data.batch_size
  batches = order.TrainBatches(
    sources=[tokens], rows=range(size), batch_size=size, sequence_length=length, seed=0
  )
  expected = [batches[step] for step in range(3, 6)]
  np.testing.assert_array_equal(found, expected)


def wait_for_steps(workdir, running, count):
  """Waits until so many lines of figures are written."""
  path = workdir / 'metrics.jsonl'
  deadline = time.monotonic() + 200
  while not path.exists() or len(path.read_text().splitlines()) < count:
    assert all(process.poll() is None for process in running), tiny_hosts.ends(running)
    assert time.monotonic() < deadline, 'the run makes no progress'
    time.sleep(0.05)


@pytest.fixture(scope='module')
def killed(corpus, processes):
  """A work directory with a checkpoint, and how processes ended when the last was killed."""
  command, workdir = train(corpus, f'killed_{processes}', **ENDLESS)
  with start_together(command, processes) as running:
    wait_for_steps(workdir, running, 6)
    running[-1].kill()
    started = time.monotonic()
    ended = tiny_hosts.ends(running, timeout=2 * tiny_hosts.HEARTBEAT)
    seconds = time.monotonic() - started
  return workdir, ended[:-1], seconds


def assert_ended_by_a_loss(process):
  """Its last words are ours if it learned the loss in Python, else those of JAX."""
  assert process.status != 0
  ours = 'another process of this program has ended' in process.err
  assert ours or 'coordination service' in process.err, process.err
  if ours:
    assert 'start the same command on every host again' in process.err


@slow
def test_a_killed_process_ends_the_others(killed):
  _, others, seconds = killed
  for other in others:
    assert_ended_by_a_loss(other)
    assert 'Traceback' not in other.err
  assert seconds < tiny_hosts.HEARTBEAT


@slow
def test_a_killed_coordinator_ends_the_others(corpus, processes):
  command, workdir = train(corpus, f'killed_first_{processes}', **ENDLESS)
  with start_together(command, processes) as running:
    wait_for_steps(workdir, running, 1)
    running[0].kill()
    for other in tiny_hosts.ends(running, timeout=tiny_hosts.HEARTBEAT)[1:]:
      assert_ended_by_a_loss(other)


@slow
def test_sigterm_to_one_makes_all_save_the_same_step(corpus, killed, processes):
  """The run goes on where the one that lost a process left a checkpoint."""
  workdir = killed[0]
  command, _ = train(corpus, workdir.name, **ENDLESS)
  before = checkpoint.Checkpoints(workdir).steps()[-1]
  (workdir / 'metrics.jsonl').unlink()  # so that a line is one of this start
  with start_together(command, processes) as running:
    wait_for_steps(workdir, running, 2)
    running[-1].send_signal(signal.SIGTERM)
    ended = tiny_hosts.ends(running)
  assert [process.status for process in ended] == [0] * processes, [p.err for p in ended]
  first = ended[0]
  assert f'going on after step {before}' in first.err
  last = checkpoint.Checkpoints(workdir).steps()[-1]
  assert last > before
  assert f'asked to stop: saving step {last}' in first.err


@slow
def test_growing_by_several_processes_is_growing_by_one(joined, processes, tmp_path):
  command = [sys.executable, '-m', 'tokenformer_jax', 'grow', f'--source={joined[0]}@20']
  command.append('--param_tokens=qkv=48,ffn=96')
  printed = run_alone([*command, f'--target={tmp_path}/alone'])
  first, *others = run_together([*command, f'--target={tmp_path}/all'], processes)
  assert first.out == printed.replace('/alone', '/all')
  assert [other.out for other in others] == [''] * len(others)
  metas = [checkpoint.Checkpoints(tmp_path / name).meta(20) for name in ('alone', 'all')]
  assert metas[0].checksums == metas[1].checksums


@pytest.mark.full_size
@slow
def test_slurm_is_found_and_two_processes_generate_what_one_does(one):
  command = [sys.executable, '-m', 'tokenformer_jax', 'generate', f'--source={one}']
  command += ['--prompt=def ', '--length=20', '--temperature=0']
  port = tiny_hosts.free_port()
  slurm = {
    'SLURM_JOB_ID': '1',
    'SLURM_STEP_NODELIST': 'localhost',
    'SLURM_NTASKS': '2',
    'JAX_COORDINATOR_PORT': str(port),
  }
  running = [
    subprocess.Popen(
      command,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env={**tiny_hosts.environment(2), **slurm, 'SLURM_PROCID': str(i), 'SLURM_LOCALID': str(i)},
    )
    for i in range(2)
  ]
  first, second = tiny_hosts.ends(running)
  assert (first.status, second.status) == (0, 0), first.err + second.err
  assert first.out == run_alone(command)
  assert second.out == ''


@slow
@pytest.mark.parametrize('i', [0, 1])
def test_a_process_that_starts_alone_gives_up_with_a_sentence(corpus, i):
  command, _ = train(corpus, 'alone', **CHANGES)
  port = tiny_hosts.free_port()
  done = subprocess.run(
    [*command, *tiny_hosts.flags(2, i, port, start_timeout=3)],
    capture_output=True,
    text=True,
    env=tiny_hosts.environment(1),
    timeout=60,
  )
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert f'waited 3 s (--start_timeout) at localhost:{port} as process {i} of 2' in line
  assert 'start the same command on every host' in line
  assert '--worker=all' in line


@slow
def test_a_mistake_is_told_by_every_process(corpus):
  command, _ = train(corpus, 'mistake', mesh__fsdp=3)
  with start_together(command, 2) as running:
    first, second = tiny_hosts.ends(running, timeout=60)
  assert (first.status, second.status) == (2, 2)
  assert first.err.startswith('error: config.mesh has')
  assert second.err.startswith('error (process 1 of 2): config.mesh has')


def test_flags_that_join_go_together():
  command = [sys.executable, '-m', 'tokenformer_jax', 'generate', '--source=x', '--process_id=1']
  done = tiny_run.run(command)
  assert done.returncode == 2
  assert '--coordinator=HOST:PORT, --num_processes=N and --process_id=I go together' in done.stderr


ENVIRONMENTS = {
  'nothing': ({'TPU_SKIP_MDS_QUERY': '1'}, False),
  'slurm step': ({'SLURM_STEP_NODELIST': 'n[1-2]', 'SLURM_NTASKS': '2'}, True),
  'slurm step of one': ({'SLURM_STEP_NODELIST': 'n1', 'SLURM_NTASKS': '1'}, False),
  'slurm allocation': ({'TPU_SKIP_MDS_QUERY': '1', 'SLURM_NTASKS': '2'}, False),
  'indexed job': ({'KUBERNETES_SERVICE_HOST': 'k', 'JOB_COMPLETION_INDEX': '0'}, True),
  'pod': ({'KUBERNETES_SERVICE_HOST': 'k'}, False),
  'gke slice': ({'KUBERNETES_SERVICE_HOST': 'k', 'TPU_WORKER_HOSTNAMES': 'a,b'}, True),
  'gke slices of one host': ({'TPU_WORKER_HOSTNAMES': 'a', 'MEGASCALE_NUM_SLICES': '2'}, True),
  'gke host': (
    {'KUBERNETES_SERVICE_HOST': 'k', 'JOB_COMPLETION_INDEX': '0', 'TPU_WORKER_HOSTNAMES': 'a'},
    False,
  ),
  'tpu vm, of which its metadata will tell': ({}, True),
}


@pytest.mark.parametrize('name', ENVIRONMENTS)
def test_jax_is_asked_only_where_there_may_be_others(name):
  environment, expected = ENVIRONMENTS[name]
  assert hosts._may_have_others(environment) == expected


# Fails to read the checkpoint of step 15 in process 1 so many times, with an error of some kind.
CANNOT_READ = """
import runpy
import sys

import jax
import orbax.checkpoint as ocp

from tokenformer_jax.storage import retry

retry.PAUSES = (0.1,) * 4
_, times, kind, *sys.argv = sys.argv
left, right = [int(times)], ocp.Checkpointer.restore
errors = {'busy': OSError('503'), 'damaged': ValueError('DATA_LOSS: checksum')}

def restore(reader, path, **named):
  if jax.process_index() == 1 and left[0] and path.name == '15':
    left[0] -= 1
    raise errors[kind]
  return right(reader, path, **named)

ocp.Checkpointer.restore = restore
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.fixture(scope='module')
def trained(corpus):
  """The work directory of two processes that made 20 steps, and how to copy it without the last."""
  command, workdir = train(corpus, 'trained', mesh__fsdp=2, train__keep_checkpoints=9)
  with tiny_hosts.started(command, 2, 1) as running:
    ended = tiny_hosts.ends(running, timeout=400)
  assert [process.status for process in ended] == [0, 0], [p.err for p in ended]

  def copy(name):
    again, copied = train(corpus, name, mesh__fsdp=2, train__keep_checkpoints=9)
    shutil.copytree(workdir, copied)
    shutil.rmtree(copied / 'checkpoints' / '20')
    return again, copied

  return workdir, copy


def cannot_read(trained, name, times, kind):
  """How two processes end, and in which work directory, if the second cannot read."""
  command, workdir = trained[1](name)
  script = [sys.executable, '-c', CANNOT_READ, str(times), kind, *command[1:]]
  with tiny_hosts.started(script, 2, 1) as running:
    return tiny_hosts.ends(running, timeout=400), workdir


@pytest.mark.full_size
@slow
def test_processes_wait_for_one_that_cannot_read_for_a_while(trained):
  ended, workdir = cannot_read(trained, 'busy', 3, 'busy')
  assert [process.status for process in ended] == [0, 0], [p.err for p in ended]
  assert 'going on after step 15' in ended[0].err, 'the newest checkpoint was not taken'
  assert not (workdir / 'damaged').exists(), 'an intact checkpoint was thrown away'
  metas = [checkpoint.Checkpoints(path).meta(20) for path in (workdir, trained[0])]
  assert metas[0].checksums == metas[1].checksums, 'the run is another one'


@slow
def test_all_processes_leave_out_a_checkpoint_that_one_finds_damaged(trained):
  ended, workdir = cannot_read(trained, 'damaged', 99, 'damaged')
  assert [process.status for process in ended] == [0, 0], [p.err for p in ended]
  assert (workdir / 'damaged/15').is_dir()
  assert 'going on from step 10' in ended[0].err


WAIT = """
import sys
import time

from tokenformer_jax.cli import main as cli
from tokenformer_jax.parallel import hosts

def make():
  print('at work', file=sys.stderr, flush=True)
  if hosts.is_first():
    time.sleep(float(sys.argv[1]))
    if sys.argv[2] == 'fail':
      raise OSError('503')
  return 7

cli.run(lambda argv: hosts.first_then_others(make) - 7, positional=True)
"""


def waiting(seconds, how):
  return tiny_hosts.started([sys.executable, '-c', WAIT, str(seconds), how], 2, 1)


@slow
def test_processes_wait_for_the_first_one_and_follow_it():
  with waiting(4, 'well') as running:
    first, second = tiny_hosts.ends(running)
  assert (first.status, second.status) == (0, 0), first.err + second.err
  assert (first.err, second.err) == ('at work\n', 'at work\n')


@slow
def test_all_end_alike_when_the_first_one_gives_up():
  with waiting(0, 'fail') as running:
    first, second = tiny_hosts.ends(running)
  assert (first.status, second.status) == (75, 75), first.err + second.err
  assert 'process 0 could not go on; its output says why' in second.err


@slow
def test_a_first_process_that_is_killed_at_work_ends_the_others():
  with waiting(600, 'well') as running:
    assert running[0].stderr.readline() == 'at work\n'
    time.sleep(1)  # The other process waits for it.
    running[0].kill()
    _, second = tiny_hosts.ends(running, timeout=3 * tiny_hosts.HEARTBEAT)
  assert_ended_by_a_loss(second)


STORAGE_OR_PEER = {
  'a connection to a bucket': (ConnectionResetError(104, 'Connection reset by peer'), False),
  'a bucket that is busy': (ValueError('ABORTED: All 32 retry attempts failed'), False),
  'another process': (jax.errors.JaxRuntimeError('UNAVAILABLE: Connection closed by peer'), True),
}


@pytest.mark.parametrize('name', STORAGE_OR_PEER)
def test_an_error_of_storage_is_not_taken_for_a_lost_process(name, monkeypatch):
  error, expected = STORAGE_OR_PEER[name]
  monkeypatch.setattr(jax.distributed, 'is_initialized', lambda: True)
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  assert hosts.is_loss(error) == expected


@pytest.mark.parametrize(
  ('error', 'kind'),
  [
    (UserError('a mistake'), UserError),
    (FormatError('a subclass'), UserError),
    (TransientError('busy'), TransientError),
    (OSError('503'), TransientError),
    (FaultyDeviceError('a chip', ('host-3',)), FaultyDeviceError),
  ],
)
def test_all_processes_raise_the_kind_of_error_that_one_has(error, kind, monkeypatch):
  statuses = []

  def exchange(status):
    statuses.append(status)
    return np.array([0, statuses[0]])

  def fail():
    raise error

  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(hosts, '_wait_for_all', lambda: None)
  monkeypatch.setattr(hosts.multihost_utils, 'process_allgather', exchange)
  with pytest.raises(kind) as raised:
    hosts.by_first(fail)
  assert error in (raised.value, raised.value.__cause__)
  monkeypatch.setattr(hosts, 'is_first', lambda: False)
  with pytest.raises(kind, match='process 1 could not go on; its output says why'):
    hosts.by_first(fail)
  assert statuses[1] == 0
