"""Every mistake of `cases.py` gets one sentence, status 2 and no traceback, and writes nothing."""

import shlex
import zlib
from pathlib import Path

import cases
import pytest
import tiny_run
import typed
from inputs import files_of

from tokenformer_jax.cli import config_flag
from tokenformer_jax.config import file
from tokenformer_jax.errors import UserError, arg

MODEL = [f'--config.{name}={tiny_run.as_flag(value)}' for name, value in tiny_run.CHANGES.items()]
TEXT = '--config.data.source=files:{}/corpus/*.txt'


def filled(text: str, material: Path) -> str:
  """A text of `cases.py` with its names replaced."""
  names = {name: str(material / name) for name in ('lm', 'dense', 'learned', 'vit')}
  tiny = shlex.join([TEXT.format(material), *MODEL])
  for name, value in {
    'repo': str(tiny_run.ROOT),
    'in': str(material),
    'tiny': tiny,
    **names,
  }.items():
    text = text.replace(f'{{{name}}}', value)
  return text


def _commands() -> list:
  """Return every mistake. One of three, by a hash of the command, is in the quick tests."""
  return [
    pytest.param(command, marks=[pytest.mark.slow] * (zlib.crc32(command.encode()) % 3 < 2))
    for command in cases.CASES
  ]


@pytest.mark.parametrize('command', _commands())
def test_a_mistake_is_one_sentence_and_writes_nothing(
  command, material, tmp_path, monkeypatch, one_device
):
  before = files_of(material)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
  done = typed.command(shlex.split(filled(command, material)))
  sentences = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
  assert 'Traceback' not in done.stderr, f'a traceback for a mistake of the user:\n{done.stderr}'
  assert done.returncode == 2, f'exit status {done.returncode}, not 2:\n{done.stdout}{done.stderr}'
  assert len(sentences) == 1, f'not one sentence:\n{done.stderr}'
  assert done.stderr.splitlines()[-1:] == sentences, (
    f'something follows the sentence:\n{done.stderr}'
  )
  wanted = filled(cases.CASES[command], material)
  assert wanted in sentences[0], f'the sentence does not name {wanted!r}:\n{sentences[0]}'
  assert not [*tmp_path.rglob('*')], 'the command wrote into the working directory'
  assert files_of(material) == before, 'the command changed files of the user'


@pytest.mark.parametrize('command', cases.CONFIG_CASES)
def test_a_mistake_in_a_config_is_refused_before_anything_else(command, material):
  config_flag.overrides.clear()
  with pytest.raises(UserError) as error, arg.as_flags():
    words = config_flag.take_overrides(shlex.split(filled(command, material))[1:])
    given = dict(word.split('=', 1) for word in words)
    file.read(given.get('--config', 'lm_stdlib'), config_flag.overrides)
  assert filled(cases.CONFIG_CASES[command], material) in str(error.value)
