"""Several processes joined by JAX, as on a pod: they do what one does, and end together."""

import json
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest
import tiny_hosts
import tiny_run

import tokenformer_jax
from tokenformer_jax.errors import FaultyDeviceError, TransientError, UserError
from tokenformer_jax.parallel import hosts, sharding
from tokenformer_jax.runs import checkpoint, claim, metrics
from tokenformer_jax.runs.saved_config import FormatError
from tokenformer_jax.training import loop

CHANGES = {
  'mesh__fsdp': 2,  # crosses processes
  'mesh__tokens': 2,  # crosses processes where each has one device
  'optim__schedule': 'constant',  # Runs of any length then have the same losses.
  'train__log_every': 4,
  'train__checkpoint_every': 4,
  'train__eval_every': 4,
  'train__eval_batches': 2,
  # As in the config that a command begins with.
  'model__init__std': 0.1,
  'model__layer__mixer__positions__fraction': 1.0,
}
ENDLESS = {**CHANGES, 'train__steps': 10**6}
DEVICES = 4  # of all processes together

slow = pytest.mark.slow


@pytest.fixture(scope='module', params=[2, pytest.param(4, marks=pytest.mark.full_size)])
def processes(request):
  return request.param


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  root = tmp_path_factory.mktemp('hosts')
  return root, tiny_run.write_corpus(root / 'corpus')


def train(corpus, name):
  """The command of an endless run, and the work directory."""
  root, source = corpus
  return tiny_run.command(source, root / 'cache', root / name, **ENDLESS), root / name


def train_alone(corpus, workdir, steps):
  """Train to a step in this process, on as many devices."""
  root, source = corpus
  config = tiny_run.config(source, root / 'cache', **CHANGES, train__steps=steps)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, 'find_devices', lambda: jax.devices()[:DEVICES])
    loop.train(config, workdir)


@pytest.fixture(scope='module')
def one(corpus):
  """The work directory of a run of 8 steps in one process."""
  workdir = corpus[0] / 'one'
  train_alone(corpus, workdir, 8)
  return workdir


def losses(workdir, last):
  """The losses of the steps up to a last one, by step and name."""
  lines = [line for line in metrics.read(workdir) if line['step'] <= last]
  names = ('train/loss', 'eval/loss')
  rows = [(line['step'], name, line[name]) for line in lines for name in names if name in line]
  assert len({row[:2] for row in rows}) == len(rows), 'a step is there twice: two wrote figures'
  return {row[:2]: row[2] for row in rows}


def assert_same_losses(workdir, other, last=8):
  ours, theirs = losses(workdir, last), losses(other, last)
  assert ours.keys() == theirs.keys()
  np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-4)


def wait_for_step(workdir, running, step):
  """Wait until the figures of a step are written."""
  path = workdir / 'metrics.jsonl'
  deadline = time.monotonic() + 500
  while not path.exists() or not any(n >= step for n in map(_step, path.read_text().splitlines())):
    assert all(process.poll() is None for process in running), tiny_hosts.ends(running)
    assert time.monotonic() < deadline, 'the run makes no progress'
    time.sleep(0.05)


def _step(line):
  return json.loads(line)['step'] if line.endswith('}') else 0


@pytest.fixture(scope='module')
def killed(corpus, processes):
  """The work directory of a new run, and how processes ended when the last was killed."""
  command, workdir = train(corpus, f'killed_{processes}')
  devices = DEVICES // processes
  with tiny_hosts.started(command, processes, devices) as running:
    wait_for_step(workdir, running, 12)
    running[-1].kill()
    return workdir, tiny_hosts.ends(running)[:-1]


# Process 1 finds the checkpoint of step 8 damaged, and fails three times to read that of step 4.
CANNOT_READ = """
import runpy
import sys

import jax
import orbax.checkpoint as ocp

from tokenformer_jax.storage import retry

retry.PAUSES = (0.1,) * 4
right, busy = ocp.Checkpointer.restore, [OSError('503')] * 3

def restore(reader, path, **named):
  if jax.process_index() == 1 and path.name == '8':
    raise ValueError('DATA_LOSS: checksum')
  if jax.process_index() == 1 and path.name == '4' and busy:
    raise busy.pop()
  return right(reader, path, **named)

ocp.Checkpointer.restore = restore
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.fixture(scope='module')
def resumed(corpus, one, processes):
  """The work directory of a run that went on from `one`, and how a SIGTERM to the last ended it.

  On another mesh, on which each process has a part of every row.
  """
  command, workdir = train(corpus, f'resumed_{processes}')
  shutil.copytree(one, workdir)
  mesh = ['--config.mesh.fsdp=1', '--config.mesh.sequence=2']
  script = [sys.executable, '-c', CANNOT_READ, *command[1:], *mesh]
  with tiny_hosts.started(script, processes, DEVICES // processes) as running:
    wait_for_step(workdir, running, 12)
    running[-1].send_signal(signal.SIGTERM)
    return workdir, tiny_hosts.ends(running)


@slow
def test_losses_are_those_of_one_process(one, killed):
  assert_same_losses(killed[0], one)


def assert_ended_by_a_loss(process):
  """Its last words are ours if it learned the loss in Python, else those of JAX."""
  assert process.status != 0
  ours = 'another process of this program has ended' in process.err
  assert ours or 'coordination service' in process.err, process.err
  if ours:
    assert 'start the same command on every host again' in process.err


@slow
def test_a_killed_process_ends_the_others(killed):
  """By the broken connection, or, at a barrier of a save, after the seconds of its silence."""
  for other in killed[1]:
    assert_ended_by_a_loss(other)
    assert 'Traceback' not in other.err


@slow
def test_all_processes_leave_out_a_checkpoint_that_one_finds_damaged(resumed):
  """And they wait for the one that cannot read the checkpoint before it for a while."""
  workdir, ended = resumed
  assert [path.name for path in (workdir / 'damaged').iterdir()] == ['8']
  assert 'going on from step 4' in ended[0].err


@slow
def test_a_run_of_one_process_goes_on_in_several_and_back_with_the_same_losses(
  corpus, one, resumed, tmp_path
):
  workdir, (first, *others) = resumed
  assert_same_losses(workdir, one)
  assert 'going on after step 4' in first.err, 'the first process does not speak'
  assert not [line for other in others for line in _lines(other) if 'SIGTERM caught' not in line]
  shutil.copytree(workdir, tmp_path / 'run')
  last = checkpoint.Checkpoints(workdir).steps()[-1]
  train_alone(corpus, tmp_path / 'run', last + 2)
  assert last + 2 in {step for step, _ in losses(tmp_path / 'run', last + 2)}


def _lines(ended):
  return [*ended.out.splitlines(), *ended.err.splitlines()]


@slow
def test_sigterm_to_one_makes_all_save_the_same_step(resumed):
  workdir, ended = resumed
  assert [process.status for process in ended] == [0] * len(ended), [p.err for p in ended]
  last = checkpoint.Checkpoints(workdir).steps()[-1]
  assert f'asked to stop: saving step {last}' in ended[0].err
  assert not (workdir / 'claim').exists()


@slow
def test_growing_by_several_processes_is_growing_by_one(one, processes, tmp_path):
  tokenformer_jax.load(f'{one}@8').grow(tmp_path / 'alone', {'qkv': 48, 'ffn': 96})
  command = [sys.executable, '-m', 'tokenformer_jax', 'grow', f'--source={one}@8']
  command += ['--param_tokens=qkv=48,ffn=96', f'--target={tmp_path}/all']
  first, *others = tiny_hosts.run(command, processes, DEVICES // processes)
  assert 'all' in first.out
  assert [other.out for other in others] == [''] * len(others)
  metas = [checkpoint.Checkpoints(tmp_path / name).meta(8) for name in ('alone', 'all')]
  assert metas[0].checksums == metas[1].checksums


@pytest.mark.full_size
@slow
def test_two_processes_generate_what_one_does(one):
  command = [sys.executable, '-m', 'tokenformer_jax', 'generate', f'--source={one}']
  command += ['--prompt=def ', '--length=20', '--temperature=0']
  first, second = tiny_hosts.run(command, 2, 2)
  assert (first.out, second.out) == (tiny_run.run(command).stdout, '')


# Two pieces of work: files that the first process makes for the others, and a claim.
WORK = """
import pathlib
import sys
import time

from tokenformer_jax.cli import main as cli
from tokenformer_jax.parallel import hosts
from tokenformer_jax.runs import claim

def make():
  print('at work', file=sys.stderr, flush=True)
  if hosts.is_first():
    time.sleep(float(sys.argv[1]))
  return 7

def main(argv):
  assert hosts.first_then_others(make) == 7
  with claim.hold(pathlib.Path(argv[2]), 'the folder', 'go elsewhere', together=True):
    print('not reached', file=sys.stderr)

cli.run(main, positional=True)
"""


def work(seconds, folder):
  return [sys.executable, '-c', WORK, str(seconds), str(folder)]


@slow
def test_processes_of_slurm_wait_for_the_first_one_and_end_as_it_does(tmp_path, monkeypatch):
  """The first one claims a folder for all, and this process has it."""
  slurm = {
    'SLURM_JOB_ID': '1',
    'SLURM_STEP_NODELIST': 'localhost',
    'SLURM_NTASKS': '2',
    'JAX_COORDINATOR_PORT': str(tiny_hosts.free_port()),
  }
  with claim.hold(tmp_path / 'claim', 'the folder', 'go elsewhere'):
    running = [
      subprocess.Popen(
        work(1, tmp_path / 'claim'),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**tiny_hosts.environment(1), **slurm, 'SLURM_PROCID': f'{i}', 'SLURM_LOCALID': f'{i}'},
      )
      for i in range(2)
    ]
    first, second = tiny_hosts.ends(running)
  assert (first.status, second.status) == (2, 2), first.err + second.err
  assert first.err.startswith('at work\nerror: the folder is in use by process ')
  assert second.err.startswith('at work\nerror (process 1 of 2): process 0 could not go on; its ')


@slow
def test_a_first_process_that_is_killed_at_work_ends_the_others(tmp_path):
  with tiny_hosts.started(work(600, tmp_path / 'claim'), 2, 1) as running:
    assert running[0].stderr.readline() == 'at work\n'
    time.sleep(1)  # The other process waits for it.
    running[0].kill()
    _, second = tiny_hosts.ends(running)
  assert_ended_by_a_loss(second)


@slow
def test_a_collective_that_loses_a_process_is_known_by_its_words(tmp_path):
  """Those of the JAX here: `hosts.is_loss` has nothing but the type and the text of an error."""
  program = (
    'import sys\nfrom tokenformer_jax.cli import main as cli\n'
    'from tokenformer_jax.parallel import hosts\n\ndef main(argv):\n'
    "  while hosts.highest(1):\n    print('met', file=sys.stderr, flush=True)\n\n"
    'cli.run(main, positional=True)\n'
  )
  with tiny_hosts.started([sys.executable, '-c', program], 2, 1) as running:
    assert running[1].stderr.readline() == 'met\n'
    running[1].kill()
    first, _ = tiny_hosts.ends(running)
  words = [line for line in first.err.splitlines() if line != 'met']
  assert first.status == 1 and len(words) == 1, first.err
  assert words[0].startswith('error: another process of this program has ended'), first.err


@slow
def test_a_process_that_starts_alone_gives_up_with_a_sentence(tmp_path):
  ports = [tiny_hosts.free_port() for _ in range(2)]
  running = [
    subprocess.Popen(
      [*work(0, tmp_path / 'claim'), *tiny_hosts.flags(2, i, port, start_timeout=3)],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=tiny_hosts.environment(1),
    )
    for i, port in enumerate(ports)
  ]
  for i, end in enumerate(tiny_hosts.ends(running)):
    assert end.status == 2
    (line,) = end.err.splitlines()
    assert f'waited 3 s (--start_timeout) at localhost:{ports[i]} as process {i} of 2' in line
    assert 'start the same command on every host' in line
    assert '--worker=all' in line


def test_each_process_tells_its_own_mistake(monkeypatch, capsys):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(hosts, 'is_first', lambda: False)
  monkeypatch.setattr(hosts.os, '_exit', sys.exit)
  with pytest.raises(SystemExit) as ended:
    hosts._end(UserError('config.mesh has a mistake'))
  assert ended.value.code == 2
  assert capsys.readouterr().err == 'error (process 1 of 2): config.mesh has a mistake\n'


def test_flags_that_join_go_together(monkeypatch):
  values = types.SimpleNamespace(coordinator=None, num_processes=None, process_id=1)
  monkeypatch.setattr(hosts.flags, 'FLAGS', values)
  with pytest.raises(UserError, match='--num_processes=N and --process_id=I go together'):
    hosts._join()


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


STORAGE_OR_PEER = {
  'a connection to a bucket': (ConnectionResetError(104, 'Connection reset by peer'), False),
  'a bucket that is busy': (ValueError('ABORTED: All 32 retry attempts failed'), False),
  'a collective': (ValueError('UNKNOWN: Gloo AllGather failed: Connection reset by peer'), True),
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
