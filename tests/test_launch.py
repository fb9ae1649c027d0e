"""The scripts in launch/: what they would run, and a run that they bring to its end."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import checkers
import pytest
import tiny_hosts
import tiny_run
import typed
import yaml
from lightkube.models.batch_v1 import JobSpec

from tokenformer_jax.cli import hosts_flags, signatures
from tokenformer_jax.cli import train as train_verb
from tokenformer_jax.parallel import hosts
from tokenformer_jax.runs import checkpoint, metrics

LAUNCH = tiny_run.ROOT / 'launch'
FLAGS = ['--config=configs/lm_pile.py:1_5b', '--workdir=gs://my-bucket/runs/1_5b']
VARIABLES = {
  'ZONE': 'us-east5-a',
  'TYPE': 'v6e-256',
  'RUNTIME': 'v2-alpha-tpuv6e',
  'BUCKET': 'my-bucket',
  'IMAGE': 'registry/tokenformer_jax',
  'ACCELERATOR': 'tpu-v6e-slice',
  'TOPOLOGY': '16x16',
}
COMMANDS = ('gcloud', 'kubectl', 'sudo', 'gcsfuse', 'srun', 'scontrol', 'python', 'python3')
STOPPED = 75

slow = pytest.mark.slow


def dry_run(directory, script, *arguments, **variables):
  """Return the output of a script with DRY_RUN=1; commands that would change something fail."""
  stubs = directory / 'stubs'
  stubs.mkdir(exist_ok=True)
  for name in COMMANDS:
    (stubs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {directory}/was_run\nexit 99\n')
    (stubs / name).chmod(0o755)
  environment = {
    **os.environ,
    **VARIABLES,
    **{name: str(value) for name, value in variables.items()},
    'PATH': f'{stubs}:{os.environ["PATH"]}',
    'DRY_RUN': '1',
  }
  done = subprocess.run(
    [script, *arguments], env=environment, capture_output=True, text=True, cwd=directory
  )
  assert done.returncode == 0, done.stderr
  assert not (directory / 'was_run').exists(), (directory / 'was_run').read_text()
  return done.stdout


def lines(printed):
  """The commands in it, as lists of words."""
  return [shlex.split(line) for line in printed.splitlines()]


def flags_of_train(words):
  """The flags of `python train.py FLAGS` at the end of a command."""
  at = words.index('train.py')
  assert words[at - 1] == 'python'
  return words[at + 1 :]


def on_host(directory, printed):
  """The flags of train.py on each host, from what is printed where `tpu_host.sh` is called."""
  (directory / 'tokenformer_jax').symlink_to(tiny_run.ROOT)  # the copy that a host gets
  trained = []
  for words in lines(printed):
    if 'ssh' in words:
      (remote,) = [word for word in words if word.startswith('--command=')]
      call = remote.removeprefix('--command=').rpartition('&& ')[2]
      host = dry_run(directory, 'bash', '-c', call)
      trained.append(flags_of_train(lines(host)[-1]))
  return trained


def manifest(directory, **variables):
  return yaml.safe_load(dry_run(directory, LAUNCH / 'jobset.sh', 'name', *FLAGS, **variables))


def slice_job(jobset):
  (jobs,) = jobset['spec']['replicatedJobs']
  return jobs, jobs['template']['spec']


def trainer(job):
  (container,) = job['template']['spec']['containers']
  return container


def test_scripts_are_without_known_mistakes():
  scripts = sorted(LAUNCH.glob('*.sh'))
  checkers.check('shellcheck', *scripts)
  for script in scripts:
    assert not subprocess.run(['bash', '-n', script]).returncode
    assert len(script.read_text().splitlines()) < 80, f'{script} is long'


@pytest.fixture
def given(tmp_path):
  """The flags of `train.py` on two queued TPUs, by SLURM and in a JobSet."""
  queued = dry_run(tmp_path, LAUNCH / 'tpu_queued.sh', 'tpu', *FLAGS, SLICES=2)
  given = [
    *on_host(tmp_path, queued),
    flags_of_train(lines(dry_run(tmp_path, LAUNCH / 'slurm.sh', *FLAGS))[0]),
    flags_of_train(trainer(slice_job(manifest(tmp_path, SLICES=2))[1])['command']),
  ]
  assert len(given) == 4
  return given


def test_the_flags_of_the_user_go_to_every_host(given):
  for flags in given:
    assert [flag for flag in flags if flag in FLAGS] == FLAGS


def test_a_run_that_stops_says_so_to_what_starts_it_again(given):
  assert all(f'--stopped_status={STOPPED}' in flags for flags in given)


def test_train_knows_the_flags_that_it_is_given(given):
  every = {flag: None for flags in given for flag in flags}
  with typed.own_flags():
    signatures.define(train_verb.main)
    hosts_flags.define()
    assert signatures.parse(['train.py', *every]) == ['train.py']


def test_a_tpu_is_copied_to_and_started_on_all_its_hosts(tmp_path):
  printed = dry_run(tmp_path, LAUNCH / 'tpu_vm.sh', 'tpu', *FLAGS, '--config.data.text_field=a b')
  _, copy, start = lines(printed)
  for words in (copy, start):
    assert {'--zone=us-east5-a', '--worker=all'} <= set(words)
  (flags,) = on_host(tmp_path, printed)
  assert flags[-1] == '--config.data.text_field=a b', 'a space is lost on the way'
  assert not any('mesh' in flag for flag in flags), 'one slice needs no replicas'


def test_queued_slices_are_asked_for_started_and_deleted(tmp_path):
  printed = dry_run(tmp_path, LAUNCH / 'tpu_queued.sh', 'tpu', *FLAGS, SLICES=2, SPOT=1)
  create, *_, delete = lines(printed)
  assert create[:6] == ['gcloud', 'compute', 'tpus', 'queued-resources', 'create', 'tpu']
  assert {'--node-count=2', '--node-prefix=tpu', '--spot'} <= set(create)
  assert {'--accelerator-type=v6e-256', '--runtime-version=v2-alpha-tpuv6e'} <= set(create)
  assert [words[5] for words in lines(printed) if 'ssh' in words] == ['tpu-0', 'tpu-1']
  assert all('--config.mesh.replica=2' in flags for flags in on_host(tmp_path, printed))
  assert delete[4:6] == ['delete', 'tpu']


GCLOUD = """#!/bin/bash
next() { echo >> "$1"; sed -n "$(wc -l < "$1")p" <<< "$2"; }
case "$*" in
  *queued-resources\\ describe*--format*) next asked "$STATES" ;;
  *queued-resources\\ describe*) exit 1 ;;  # It is not there yet.
  *queued-resources*) echo "$4" >> said ;;
  *systemctl*) next looked "$UNITS" | tr , '\\n' ;;
  *tpu_host.sh*) echo start >> said ;;
esac
"""


def bring_to_an_end(tmp_path, states, units):
  """Run the script with these states of the TPUs and of the run; return what it asked for."""
  (tmp_path / 'gcloud').write_text(GCLOUD)
  (tmp_path / 'gcloud').chmod(0o755)
  environment = {
    **os.environ,
    **VARIABLES,
    'PATH': f'{tmp_path}:{os.environ["PATH"]}',
    'POLL_SECONDS': '0',
    'STATES': '\n'.join(states),
    'UNITS': '\n'.join(units),
  }
  done = subprocess.run(
    [LAUNCH / 'tpu_queued.sh', 'tpu', *FLAGS],
    env=environment,
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=20,
  )
  assert done.returncode == 0, done.stderr
  return (tmp_path / 'said').read_text().split()


def test_queued_tpus_are_replaced_when_they_are_gone_and_only_then(tmp_path):
  out_of_reach = ''
  states = ['ACTIVE', 'ACTIVE', out_of_reach, 'SUSPENDING', 'SUSPENDED', 'PROVISIONING']
  units = ['running,running', 'running,dead', 'exited,running', 'exited,exited']
  said = bring_to_an_end(tmp_path, [*states, 'ACTIVE', 'ACTIVE'], units)
  first = ['create', 'start', 'start', 'delete']  # the second start: a host was rebooted
  assert said == [*first, 'create', 'start', 'delete']


def test_queued_tpus_that_compute_wrong_are_replaced(tmp_path):
  failed = 'SubState=failed,ExecMainStatus=76,SubState=running,ExecMainStatus=0'
  said = bring_to_an_end(tmp_path, ['ACTIVE'] * 2, [failed, 'exited,exited'])
  assert said == ['create', 'start', 'delete'] * 2


def test_a_host_mounts_the_bucket_and_has_systemd_run_the_loop(tmp_path):
  *_, mount, _, _, start = lines(dry_run(tmp_path, LAUNCH / 'tpu_host.sh', *FLAGS))
  assert mount[0] == 'gcsfuse' and mount[-2:] == ['my-bucket', '/mnt/bucket']
  assert '--metadata-cache-ttl-secs=0' in mount, 'what other hosts write is not seen'
  assert start[:2] == ['sudo', 'systemd-run']
  assert str(LAUNCH / 'restart.sh') in start
  assert '--setenv=XDG_CACHE_HOME=/mnt/bucket/cache' in start


@pytest.mark.parametrize('slices', [1, 2])
def test_the_jobset_has_a_job_for_each_slice_and_a_pod_for_each_host(tmp_path, slices):
  jobset = manifest(tmp_path, SLICES=slices, TOPOLOGY='4x4x8')
  assert (jobset['apiVersion'], jobset['kind']) == ('jobset.x-k8s.io/v1alpha2', 'JobSet')
  jobs, job = slice_job(jobset)
  assert jobs['replicas'] == slices
  assert job['completionMode'] == 'Indexed'
  assert job['completions'] == job['parallelism'] == 4 * 4 * 8 // 4
  assert job['template']['spec']['nodeSelector'] == {
    'cloud.google.com/gke-tpu-accelerator': 'tpu-v6e-slice',
    'cloud.google.com/gke-tpu-topology': '4x4x8',
  }
  assert trainer(job)['resources']['limits'] == {'google.com/tpu': 4}
  named = {'fieldRef': {'fieldPath': 'spec.nodeName'}}  # in messages about a faulty TPU
  assert {'name': 'NODE_NAME', 'valueFrom': named} in trainer(job)['env']
  nodes = jobset['metadata']['annotations']['alpha.jobset.sigs.k8s.io/exclusive-topology']
  assert nodes == 'cloud.google.com/gke-nodepool', 'slices may share a node pool'
  replicas = [flag for flag in trainer(job)['command'] if 'mesh.replica' in flag]
  assert replicas == ['--config.mesh.replica=2'][: slices - 1]


@pytest.mark.parametrize('slices', [1, 2])
def test_the_jobset_is_made_of_what_kubernetes_knows(tmp_path, slices):
  jobset = manifest(tmp_path, SLICES=slices)
  jobs, job = slice_job(jobset)
  # What lacks or has another type is refused here; what is unknown is left out.
  assert JobSpec.from_dict(job).to_dict() == job, 'a field of a Job is unknown'
  policy = jobset['spec']['failurePolicy']
  names = {
    'manifest': (jobset, {'apiVersion', 'kind', 'metadata', 'spec'}),
    'spec': (jobset['spec'], {'failurePolicy', 'replicatedJobs'}),
    'policy': (policy, {'maxRestarts', 'restartStrategy', 'rules'}),
    'rule': (policy['rules'][0], {'name', 'action', 'onJobFailureReasons'}),
    'jobs': (jobs, {'name', 'replicas', 'template'}),
  }
  for name, (part, known) in names.items():
    assert part.keys() == known, name
  assert policy['restartStrategy'] == 'BlockingRecreate'


def test_replicas_that_are_asked_for_stay(tmp_path):
  flags = [*FLAGS, '--config.mesh.replica=4']
  printed = dry_run(tmp_path, LAUNCH / 'tpu_vm.sh', 'a,b', *flags)
  assert [host[-3:] for host in on_host(tmp_path, printed)] == [flags, flags]


def test_the_jobset_starts_again_except_after_a_mistake(tmp_path):
  jobset = manifest(tmp_path)
  _, job = slice_job(jobset)
  assert jobset['spec']['failurePolicy']['maxRestarts'] > 0
  (rule,) = jobset['spec']['failurePolicy']['rules']
  assert (rule['action'], rule['onJobFailureReasons']) == ('FailJobSet', ['PodFailurePolicy'])
  assert job['backoffLimit'] == 0, 'one host would be started again without the others'
  assert job['template']['spec']['restartPolicy'] == 'Never'
  (rule,) = job['podFailurePolicy']['rules']
  container = trainer(job)['name']
  codes = {'containerName': container, 'operator': 'In', 'values': [2]}
  assert rule == {'action': 'FailJob', 'onExitCodes': codes}


def test_the_jobset_mounts_the_bucket(tmp_path):
  pod = slice_job(manifest(tmp_path))[1]['template']
  assert pod['metadata']['annotations']['gke-gcsfuse/volumes'] == 'true'
  volumes = {volume['name']: volume for volume in pod['spec']['volumes']}
  (container,) = pod['spec']['containers']
  mounted = {mount['mountPath']: volumes[mount['name']] for mount in container['volumeMounts']}
  bucket = mounted['/mnt/bucket']['csi']
  assert bucket['driver'] == 'gcsfuse.csi.storage.gke.io'
  assert bucket['volumeAttributes']['bucketName'] == 'my-bucket'
  assert 'metadata-cache:ttl-secs:0' in bucket['volumeAttributes']['mountOptions'].split(',')


MISTAKES = {
  'no zone': ('tpu_vm.sh', ['tpu', *FLAGS], {'ZONE': ''}, 'set ZONE='),
  'no name': ('tpu_vm.sh', FLAGS, {}, 'name the TPUs first'),
  'lost with the TPUs': ('tpu_queued.sh', ['tpu', '--workdir=runs/x'], {}, 'TPUs are deleted'),
  'part of a host': ('jobset.sh', ['name', *FLAGS], {'TOPOLOGY': '3x3'}, 'TOPOLOGY=3x3 is not'),
}


@pytest.mark.parametrize('name', MISTAKES)
def test_mistakes_of_the_scripts_get_a_sentence(name):
  script, arguments, variables, sentence = MISTAKES[name]
  environment = {**os.environ, **VARIABLES, **variables, 'DRY_RUN': '1'}
  done = subprocess.run(
    [LAUNCH / script, *arguments], env=environment, capture_output=True, text=True
  )
  assert (done.returncode, done.stdout) == (2, '')
  assert done.stderr.startswith('error: ') and sentence in done.stderr


ENDS = {  # of the lives of a command: the status of the loop, and how many lives there were
  'stopped, crashed, finished': ('75 1 75 0', 0, 4),
  'a mistake': ('1 2', 2, 2),
  'crashes at the start': ('1 1 1 1', 1, 3),
  'crashes with a life between': ('1 1 75 1 1 0', 0, 6),
  'storage that fails for a while': ('75 75 75 75 75 0', 0, 6),
  'storage that stays out of reach': (' '.join(['75'] * 20), 75, 8),
  'a device that computes wrong': ('75 76 0', 76, 2),
}


def test_the_scripts_start_again_what_gives_up_on_storage():
  common = (LAUNCH / 'common.sh').read_text()
  assert f'STOPPED={hosts.TRANSIENT_STATUS}' in common.split(), 'such an end counts as a crash'
  assert f'FAULTY={hosts.FAULTY_STATUS}' in common.split(), 'the same host starts it again'


@pytest.mark.parametrize('name', ENDS)
def test_a_command_is_run_until_it_is_finished(name, tmp_path):
  statuses, status, lives = ENDS[name]
  command = (
    f'echo >> {tmp_path}/lives; set -- {statuses}; shift $(($(wc -l < {tmp_path}/lives) - 1)); '
    'exit $1'
  )
  done = subprocess.run(
    [LAUNCH / 'restart.sh', 'sh', '-c', command],
    env={**os.environ, 'RESTART_PAUSE': '0', 'MAX_CRASHES': '3', 'MAX_RESTARTS': '8'},
    capture_output=True,
  )
  assert done.returncode == status
  assert len((tmp_path / 'lives').read_text()) == lives


def test_a_signal_to_the_loop_stops_the_command(tmp_path):
  """The status is the command's, which had the time that it needed."""
  up = tmp_path / 'up'
  command = f'trap "sleep 0.2; exit {STOPPED}" TERM; touch {up}; while :; do sleep 0.1; done'
  loop = subprocess.Popen([LAUNCH / 'restart.sh', 'sh', '-c', command], stderr=subprocess.PIPE)
  wait_for(up.exists, [loop], seconds=10)
  loop.terminate()
  assert loop.communicate(timeout=10)[1] == b''
  assert loop.returncode == STOPPED


def wait_for(condition, running, seconds=200):
  deadline = time.monotonic() + seconds
  while not condition():
    assert all(process.poll() is None for process in running), tiny_hosts.ends(running)
    assert time.monotonic() < deadline, 'nothing happens'
    time.sleep(0.05)


STEPS = 40  # each takes longer than a look at the figures
CHANGES = {
  'mesh__fsdp': 2,
  'train__steps': STEPS,
  'train__log_every': 1,
  'train__checkpoint_every': 20,
  'train__keep_checkpoints': 2,
}


def progress(workdir):
  """The last step of which figures are written."""
  path = workdir / 'metrics.jsonl'
  read = metrics.read(workdir) if path.exists() else []
  return read[-1]['step'] if read else 0


def train(tmp_path):
  """The command of a run that takes a while, and its work directory."""
  source = tiny_run.write_corpus(tmp_path / 'corpus')
  workdir = tmp_path / 'run'
  command = tiny_run.command(source, tmp_path / 'cache', workdir, **CHANGES)
  return [*command, f'--stopped_status={STOPPED}'], workdir


def child(process):
  """The process that another one runs."""
  return int(Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()[0])


@slow
def test_two_hosts_of_which_one_is_killed_finish(tmp_path, monkeypatch):
  """Both processes end and start again; tests/parallel has the other ends of one of several."""
  monkeypatch.setenv('RESTART_PAUSE', '1')
  command, workdir = train(tmp_path)
  with tiny_hosts.started([str(LAUNCH / 'restart.sh'), *command], 2, devices=1) as loops:
    wait_for(lambda: checkpoint.Checkpoints(workdir).steps(), loops)
    os.kill(child(loops[0]), signal.SIGKILL)
    first, second = tiny_hosts.ends(loops, timeout=280)
  assert (first.status, second.status) == (0, 0), first.err + second.err
  assert re.findall(r'ended with status (\d+)', first.err) == ['137'], first.err
  assert checkpoint.Checkpoints(workdir).steps()[-1] == STEPS


SCONTROL = """#!/bin/sh
echo "$@" >> "$CALLS"
echo "   JobState=$STATE Reason=None"
"""


SRUN = """#!/bin/sh
for word; do f=${word#--faulty_hosts=}; [ "$f" = "$word" ] || break; done
[ $STATUS = 76 ] && { echo node-3; echo node-1; echo node-3; } >> "$f"
exit $STATUS
"""


@pytest.mark.parametrize(
  ('status', 'state', 'asked'),
  [
    (0, 'RUNNING', []),
    (hosts.TRANSIENT_STATUS, 'RUNNING', ['show job 7', 'requeue 7']),
    (hosts.TRANSIENT_STATUS, 'CANCELLED', ['show job 7']),
    (
      hosts.FAULTY_STATUS,
      'RUNNING',
      ['show job 7', 'requeue 7', 'update JobId=7 ExcNodeList=node-1,node-3'],
    ),
  ],
)
def test_slurm_queues_a_stopped_job_again_without_nodes_that_compute_wrong(
  tmp_path, status, state, asked
):
  """As SLURM runs it: a copy of the script elsewhere, and stand-ins for srun and scontrol."""
  for name, text in {'srun': SRUN, 'scontrol': SCONTROL}.items():
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
  (tmp_path / 'launch').symlink_to(LAUNCH)
  shutil.copy(LAUNCH / 'slurm.sh', tmp_path / 'slurm_script')
  environment = {
    **os.environ,
    'PATH': f'{tmp_path}:{os.environ["PATH"]}',
    'SLURM_SUBMIT_DIR': str(tmp_path),
    'SLURM_JOB_ID': '7',
    'CALLS': str(tmp_path / 'calls'),
    'STATE': state,
    'STATUS': str(status),
  }
  (tmp_path / 'calls').touch()
  done = subprocess.run([tmp_path / 'slurm_script', *FLAGS], env=environment, capture_output=True)
  assert done.returncode == status, done.stderr
  assert (tmp_path / 'calls').read_text().splitlines() == asked
