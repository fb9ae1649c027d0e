"""Read the commands that the scripts in launch/ would run, by DRY_RUN=1."""

import os
import shlex
import subprocess

import tiny_run
import yaml

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
  found = []
  for words in lines(printed):
    if 'ssh' in words:
      (remote,) = [word for word in words if word.startswith('--command=')]
      call = remote.removeprefix('--command=').rpartition('&& ')[2]
      host = dry_run(directory, 'bash', '-c', call)
      found.append(flags_of_train(lines(host)[-1]))
  return found


def manifest(directory, **variables):
  return yaml.safe_load(dry_run(directory, LAUNCH / 'jobset.sh', 'name', *FLAGS, **variables))


def slice_job(found):
  (jobs,) = found['spec']['replicatedJobs']
  return jobs, jobs['template']['spec']


def trainer(job):
  (container,) = job['template']['spec']['containers']
  return container
