"""The commands as a user types them: what they write, and one sentence for a mistake."""

import subprocess
import sys

import pytest
import tiny_run

from tokenformer_jax import cli
from tokenformer_jax.errors import UserError

TRAIN = [sys.executable, str(tiny_run.ROOT / 'train.py')]
GENERATE = [sys.executable, '-m', 'tokenformer_jax.generate']

MISTAKES = {
  'unknown key': (
    [*TRAIN, '--config.model.widht=64'],
    "config key 'model.widht' is unknown; did you mean 'model.width'?",
  ),
  'missing config file': (
    [*TRAIN, '--config=configs/nothing.py'],
    'the file --config=configs/nothing.py cannot be loaded',
  ),
  'unknown variant': (
    [*TRAIN, f'--config={tiny_run.ROOT}/configs/lm_pile.py:151m'],
    '150m',
  ),
  'wrong value': (
    [*TRAIN, '--config.model.score=softmx'],
    "config.model.score is 'softmx'; it must be one of l2_norm_gelu,",
  ),
  'mesh that does not fit': (
    [*TRAIN, '--config.mesh.fsdp=3'],
    'config.mesh has replica=1, fsdp=3, tokens=1, which does not make up the 1 devices here',
  ),
  'no such device': (
    ['env', 'JAX_PLATFORMS=tpu', *TRAIN],
    "no device of the kind JAX_PLATFORMS='tpu' was found",
  ),
  'unwritable work directory': (
    [*TRAIN, f'--workdir={__file__}/run'],
    'cannot be written (Not a directory); choose another --workdir',
  ),
  'no text': (
    [*TRAIN, '--config.data.source=files:/nothing/*.txt'],
    '/nothing/*.txt',
  ),
  'no run': (
    [*GENERATE, '--source=/nothing'],
    '/nothing is not the work directory of a run',
  ),
}


def test_mistakes_get_one_sentence_each(tmp_path):
  """All commands at once, because each of them takes seconds to start."""
  processes = {
    name: subprocess.Popen(
      command,
      stderr=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      cwd=tmp_path,
      env=tiny_run.environment(),
    )
    for name, (command, _) in MISTAKES.items()
  }
  for name, process in processes.items():
    said = process.communicate(timeout=300)[1]
    lines = [line for line in said.splitlines() if line.startswith('error: ')]
    assert len(lines) == 1 and MISTAKES[name][1] in lines[0], f'{name}: {said}'
    assert 'Traceback' not in said, f'{name}: {said}'
    assert process.returncode == 2, f'{name}: exit status {process.returncode}'


def test_source_and_step_are_told_apart():
  assert [str(cli.split_source('a/b')[0]), cli.split_source('a/b')[1]] == ['a/b', None]
  assert [str(cli.split_source('a@b/c@7')[0]), cli.split_source('a@b/c@7')[1]] == ['a@b/c', 7]
  with pytest.raises(UserError, match='it is DIR or DIR@STEP'):
    cli.split_source('a@last')


@pytest.mark.slow
def test_a_trained_run_writes_text_and_curves(tmp_path):
  source = tiny_run.write_corpus(tmp_path / 'corpus')
  command = tiny_run.command(source, tmp_path / 'cache', tmp_path / 'run', train__steps=10)
  assert tiny_run.run(command).returncode == 0
  asked = [f'--source={tmp_path}/run@10', '--prompt=def', '--length=5', '--temperature=0']
  drawn = [sys.executable, '-m', 'tokenformer_jax.plot', f'{tmp_path}/run', '--out=curves.png']
  assert tiny_run.run(drawn, cwd=tmp_path).returncode == 0
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG'), 'no picture'
  written = [tiny_run.run([*GENERATE, *asked]) for _ in range(2)]
  assert written[0].returncode == 0, written[0].stderr
  assert written[0].stdout.startswith('def') and len(written[0].stdout) > 4
  assert written[0].stdout == written[1].stdout, 'greedy text is not the same twice'
