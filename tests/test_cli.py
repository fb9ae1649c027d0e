"""The commands as a user types them: what they write, and one sentence for a mistake."""

import contextlib
import functools
import json
import os
import runpy
import sys

import pytest
import tiny_run
import typed

from tokenformer_jax import config
from tokenformer_jax.cli import main, train
from tokenformer_jax.data import store
from tokenformer_jax.errors import UserError
from tokenformer_jax.runs import saved_config
from tokenformer_jax.runs.saved_config import FORMAT
from tokenformer_jax.storage import paths
from tokenformer_jax.training import loop


@pytest.mark.slow
def test_a_platform_that_is_not_there_is_named(tmp_path):
  done = tiny_run.run(
    ['env', 'JAX_PLATFORMS=tpu', sys.executable, str(tiny_run.ROOT / 'train.py')], cwd=tmp_path
  )
  assert done.returncode == 2 and 'Traceback' not in done.stderr, done.stderr
  assert "no device of the kind JAX_PLATFORMS='tpu' was found" in done.stderr.splitlines()[-1]


def _print_much(argv):
  print('x' * 1_000_000)


@pytest.mark.parametrize(
  ('run', 'flags'),
  [
    (lambda argv: print('x' * 10), []),
    (_print_much, []),
    (_print_much, ['--help']),
  ],
  ids=['kept until the end', 'written at once', 'help'],
)
def test_a_closed_output_ends_the_command_quietly(run, flags):
  """As before `… | head -1`, which does not wait for the end."""
  read, write = os.pipe()
  os.close(read)
  with open(write, 'w') as output, contextlib.redirect_stdout(output):
    status = typed.as_process(functools.partial(main.run, run), flags)
  assert status == 141, 'not the status of what SIGPIPE ends'


def test_source_and_step_are_told_apart():
  assert [str(paths.split_source('a/b')[0]), paths.split_source('a/b')[1]] == ['a/b', None]
  assert [str(paths.split_source('a@b/c@7')[0]), paths.split_source('a@b/c@7')[1]] == ['a@b/c', 7]
  with pytest.raises(UserError, match='give DIR or DIR@STEP'):
    paths.split_source('a@last')


URLS = {
  's3://b/run': lambda url: loop.train(config.resolve(config.defaults()), url),
  's3://b/other': lambda url: paths.split_source(f'{url}@7'),
  'gs://b/cache': lambda url: store.cache_folder(config.TextConfig(cache_dir=url)),
}


@pytest.mark.parametrize('url', URLS)
def test_a_url_is_not_taken_for_a_directory(url, tmp_path, monkeypatch):
  """What is written to the path `s3://b/run` goes with this host: a directory `s3:` on its disk."""
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError, match=f'{url} is (not|neither) a path in a file system.*; mount'):
    URLS[url](url)
  assert not list(tmp_path.iterdir()), 'a directory was made'


def test_train_takes_the_config_of_its_work_directory(tmp_path, monkeypatch):
  trained = []
  monkeypatch.setattr(loop, 'train_or_stop', lambda *given: trained.append(given) or (None, False))
  typed.run(train.main, '-workdir', tmp_path, '--config.train.steps=30')
  own = config.resolve(trained[0][0].__class__(), {'model': {'width': 48}})
  (tmp_path / 'config.json').write_text(saved_config.to_text(own))
  typed.run(train.main, f'--workdir={tmp_path}', '--config.train.steps=30')
  typed.run(train.main, f'--workdir={tmp_path}', '--config=lm_stdlib')
  monkeypatch.chdir(tmp_path)
  typed.run(train.main)
  (first, _), (second, workdir), (third, _), (last, default) = trained
  assert first.model.width == third.model.width == last.model.width != 48
  assert (second.model.width, second.train.steps) == (48, 30), 'the run has a config'
  assert (workdir, default) == (str(tmp_path), 'runs/lm_stdlib')


def test_a_saved_config_is_what_was_saved(tmp_path):
  get_config = runpy.run_path(str(tiny_run.ROOT / 'configs/saved.py'))['get_config']
  values = config.defaults()
  values.model.pattern, values.optim.old_tokens = 'layer*7', 'scale:0.5'
  wanted = config.resolve(values)
  (tmp_path / 'config.json').write_text(saved_config.to_text(wanted))
  assert config.resolve(get_config(str(tmp_path))) == wanted
  (tmp_path / 'config.json').write_text('{"model"')
  with pytest.raises(UserError, match='is not the config of a run'):
    get_config(str(tmp_path))


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    ({'format': FORMAT + 1}, f'has the format {FORMAT + 1}, .* install a newer'),
    ({}, f'has the format 1, .* reads format {FORMAT} only; use the older'),
  ],
)
def test_a_saved_config_of_another_format_is_refused(changes, sentence, tmp_path):
  get_config = runpy.run_path(str(tiny_run.ROOT / 'configs/saved.py'))['get_config']
  stored = json.loads(saved_config.to_text(config.Config()))
  del stored['format']
  (tmp_path / 'config.json').write_text(json.dumps({**stored, **changes, 'unknown_group': {}}))
  with pytest.raises(UserError, match=sentence):
    get_config(str(tmp_path))


def test_a_saved_run_does_not_choose_where_programs_are_loaded_from(tmp_path, capsys):
  """JAX runs what it finds in that directory: a stranger's run would run a stranger's program."""
  get_config = runpy.run_path(str(tiny_run.ROOT / 'configs/saved.py'))['get_config']
  mine = config.resolve(config.defaults())
  saved = json.loads(saved_config.to_text(mine))
  saved['train']['compilation_cache'] = '/tmp/theirs'
  (tmp_path / 'config.json').write_text(json.dumps(saved))
  got = config.resolve(get_config(str(tmp_path)))
  assert got.train.compilation_cache == '', 'the directory of a stranger is taken'
  assert got == mine, 'another key is lost, too'
  said = capsys.readouterr().err
  assert '--config.train.compilation_cache=/tmp/theirs' in said, 'it is dropped without a word'


@pytest.mark.parametrize(
  'values',
  [
    '[]',
    f'{{"format": {FORMAT}, "model": 3}}',
    f'{{"format": {FORMAT}, "modle": {{}}}}',
    f'{{"format": {FORMAT}, "train": {{"steps": {{}}}}}}',
  ],
)
def test_a_config_that_is_none_is_refused_in_a_sentence(tmp_path, values):
  get_config = runpy.run_path(str(tiny_run.ROOT / 'configs/saved.py'))['get_config']
  (tmp_path / 'config.json').write_text(values)
  with pytest.raises(UserError, match='is not the config of a run'):
    get_config(str(tmp_path))


@pytest.mark.slow
def test_a_run_grows_and_goes_on_as_the_command_says(tmp_path, one_device):
  source = tiny_run.write_corpus(tmp_path / 'corpus')
  _, _, *flags = tiny_run.command(source, tmp_path / 'cache', tmp_path / 'run')
  assert typed.command(['train', *flags]).returncode == 0
  asked = [f'--source={tmp_path}/run', f'--target={tmp_path}/grown', '--param_tokens=ffn=128']
  grown = typed.command(['grow', *asked])
  assert grown.returncode == 0, grown.stderr
  to_go_on = grown.stdout.splitlines()[-1]
  here = f'--workdir={tmp_path}/grown --config.train.steps=40'
  assert to_go_on == f'tokenformer train {here}'
  done = typed.command(to_go_on.split()[1:])
  assert done.returncode == 0, done.stderr
  assert 'going on after step 20' in done.stderr, done.stderr
  stored = json.loads((tmp_path / 'grown/config.json').read_text())
  assert stored['train']['steps'] == 40 and stored['model']['layer']['ffn']['tokens'] == 128
