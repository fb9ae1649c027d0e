"""The command `tokenformer`: its verbs, the help, and what the library does not know of it."""

import importlib
import os
import sys
import tomllib

import pytest
import tiny_run

from tokenformer_jax.cli import verbs
from tokenformer_jax.config import file as config_file
from tokenformer_jax.errors import UserError

PACKAGE = tiny_run.ROOT / 'tokenformer_jax'


def test_the_installed_command_is_this_one():
  project = tomllib.loads((tiny_run.ROOT / 'pyproject.toml').read_text())['project']
  module, _, function = project['scripts']['tokenformer'].partition(':')
  assert getattr(importlib.import_module(module), function) is verbs.main


@pytest.mark.parametrize('arguments', [[], ['--help'], ['-h'], ['help']])
def test_the_help_has_a_line_for_each_verb(arguments, capsys, monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['/bin/tokenformer', *arguments])
  verbs.main()
  lines = capsys.readouterr().out.splitlines()
  for name, summary in verbs.VERBS.items():
    assert f'  {name:10}{summary}' in lines, f'{name} is not in the help'
  assert max(map(len, lines)) <= 100, 'a line is wider than 100 columns'


def test_a_misspelt_verb_is_told_the_nearest(capsys, monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['/bin/tokenformer', 'trian', '--workdir=x'])
  with pytest.raises(SystemExit) as ended:
    verbs.main()
  said = capsys.readouterr().err
  assert ended.value.code == 2, 'not the status of a mistake'
  assert said == "error: 'trian' is not a command of tokenformer; did you mean 'train'?\n"


def test_the_package_and_the_help_of_the_command_import_nothing_heavy():
  code = (
    'import sys, tokenformer_jax; dir(tokenformer_jax);'
    'from tokenformer_jax.cli import verbs; verbs.main();'
    'sys.exit(", ".join({"jax", "numpy", "absl", "flax"} & set(sys.modules)) or 0)'
  )
  done = tiny_run.run([sys.executable, '-c', code])
  assert done.returncode == 0, f'`tokenformer --help` imports {done.stderr}'


def test_help_and_mistakes_come_before_jax():
  """Each verb's own help, its actions', and mistakes in flags, keys, values and configs."""
  words = [[verb, word] for verb in verbs.VERBS for word in ('--help', '--hlep')]
  words += [[*action, '--help'] for action in (('grow', 'merge'), ('convert', 'to-hf'))]
  words += [['train', f'--config{word}'] for word in ('=lm_stdlb', '.train.step=3', '.seed=x')]
  code = (
    f'import sys; sys.path.insert(0, {str(tiny_run.ROOT / "tests/support")!r}); import typed;'
    f' ends = [typed.command(words).returncode for words in {words}];'
    'sys.exit(", ".join({"jax", "numpy"} & set(sys.modules)) or str(ends))'
  )
  done = tiny_run.run([sys.executable, '-c', code])
  ends = [2 if words[-1] != '--help' else 0 for words in words]
  assert done.stderr.strip() == str(ends), done.stderr


def test_a_config_of_the_package_is_found_by_its_name(tmp_path, monkeypatch):
  """A folder or file of the same name does not hide it; a Python file does."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'lm_stdlib').mkdir()
  (tmp_path / 'lm_bytes').touch()
  (tmp_path / 'vit_digits.py').write_text('def get_config(): raise ValueError("of the user")')
  found = [config_file.load(name).data.source for name in ('lm_stdlib', 'lm_stdlib.py', 'lm_bytes')]
  assert found == ['stdlib'] * 3
  assert config_file.load('vit_digits').data.source == 'digits'
  with pytest.raises(UserError, match='of the user'):
    config_file.load('vit_digits.py')
  for name in ('saved', 'saved.py'):
    with pytest.raises(UserError, match=rf'{tmp_path}/config\.json'):
      config_file.load(f'{name}:{tmp_path}')
  with pytest.raises(UserError, match=r'no file configs/lm_stdlb\.py; did you mean lm_stdlib'):
    config_file.load('configs/lm_stdlb.py')


def test_an_installed_package_has_everything():
  """Packages are listed, because the configs come from a folder beside the package."""
  listed = tomllib.loads((tiny_run.ROOT / 'pyproject.toml').read_text())['tool']['setuptools']
  folders = {path.parent.relative_to(tiny_run.ROOT) for path in PACKAGE.rglob('*.py')}
  found = ['.'.join(folder.parts) for folder in folders]
  assert sorted(listed['packages']) == sorted([*found, 'tokenformer_jax.configs']), (
    'add the new folder to packages in pyproject.toml, or an installed package lacks it'
  )
  assert listed['package-dir'] == {name: name.replace('.', '/') for name in ['tokenformer_jax']} | {
    'tokenformer_jax.configs': 'configs'
  }
  assert os.path.samefile(config_file.shipped('lm_stdlib'), tiny_run.ROOT / 'configs/lm_stdlib.py')
