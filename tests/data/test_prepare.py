"""`prepare` makes the store that a run would make, on any number of cores and after any kill."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from byte_text import byte_config

from tokenformer_jax import config as config_lib
from tokenformer_jax.cli import prepare
from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import corpus, store
from tokenformer_jax.errors import UserError

ROOT = Path(__file__).parents[2]
# A process that makes the store of the config in its first argument, with small shards.
_MAKE = """
import json, sys
from tokenformer_jax.config import TextConfig
from tokenformer_jax.data import corpus, store

if __name__ == '__main__':
  corpus.UNIT_BYTES = 2000
  store.make(TextConfig(**json.loads(sys.argv[1])), workers=2)
"""


def _write(folder: Path, files: int = 12) -> DataConfig:
  (folder / 'corpus').mkdir()
  for i in range(files):
    lines = [json.dumps({'text': f'document {j} of {i}: naïve {i * j}'}) for j in range(40)]
    (folder / f'corpus/{i:02}.jsonl').write_text('\n'.join(lines))
  return byte_config(folder, f'files:{folder}/corpus', tokenizer='bpe:300', validation_fraction=0.2)


def _files(folder: Path) -> dict[str, bytes]:
  files = (path for path in folder.rglob('*') if path.is_file())
  return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def _start(folder: Path, config: DataConfig) -> subprocess.Popen:
  script = folder / 'make.py'
  script.write_text(_MAKE)
  return subprocess.Popen(
    [sys.executable, str(script), json.dumps(vars(config) | {'mixture': {}})],
    env=os.environ | {'PYTHONPATH': str(ROOT)},
  )


def test_a_run_finds_the_store_that_was_made_for_its_config(tmp_path, monkeypatch):
  config = _write(tmp_path)
  named = dataclasses.replace(config, store=str(tmp_path / 'named/store'))
  made = [store.make(one) for one in (config, named)]
  assert made[1].path == tmp_path / 'named/store' and made[1].digest == made[0].digest
  monkeypatch.setattr(store, '_build', lambda *_: pytest.fail('it is made again'))
  assert [store.prepare(one).path for one in (config, named)] == [one.path for one in made]
  assert store.make(named).digest == made[1].digest


def test_files_next_to_a_named_store_are_untouched(tmp_path):
  config = _write(tmp_path)
  (tmp_path / 'out/of_a_user').mkdir(parents=True)
  (tmp_path / 'out/of_a_user/file').write_text('kept')
  store.make(dataclasses.replace(config, store=str(tmp_path / 'out/store')))
  assert (tmp_path / 'out/of_a_user/file').read_text() == 'kept'
  with pytest.raises(UserError, match=r'has file, which does not belong to a token store; name'):
    store.make(dataclasses.replace(config, store=str(tmp_path / 'out/of_a_user')))
  with pytest.raises(UserError, match=r'which does not belong to a token store'):
    store.make(dataclasses.replace(config, store=str(tmp_path / 'corpus/00.jsonl')))
  with pytest.raises(UserError, match=r'out has (of_a_user|store), which does not belong'):
    store.make(dataclasses.replace(config, store=str(tmp_path / 'out'), text_field='none'))


def test_bad_documents_are_left_out_by_choice_and_counted(tmp_path, capsys, monkeypatch):
  config = _write(tmp_path)
  good = store.prepare(config)
  with (tmp_path / 'corpus/03.jsonl').open('ab') as file:
    file.write(b'\nno JSON\n{"other": 1}\n{"text": "\xff"}\n[1]\n{"text": 3}')
  (tmp_path / 'corpus/97.csv').write_bytes(b'text\nnot \xff UTF-8')
  (tmp_path / 'corpus/98.json').write_bytes(b'[{"text": "not \xff UTF-8"}]')
  (tmp_path / 'corpus/99.txt').write_bytes(b'not \xff UTF-8')
  with pytest.raises(UserError, match=r'03\.jsonl, line 41, is not valid JSON'):
    store.make(config)
  made = store.make(config, skip_bad=True)
  np.testing.assert_array_equal(made.train[:], good.train[:])
  np.testing.assert_array_equal(made.validation[:], good.validation[:])
  (shard,) = made.index.shards
  assert shard.bad_documents == 8
  lines = [line for i in range(41, 46) for line in shard.bad if f'03.jsonl, line {i}, ' in line]
  assert len(lines) == 5 and '99.txt is not UTF-8' in shard.bad[-1]
  monkeypatch.setenv('RAYON_NUM_THREADS', '1')  # which the command sets
  run = dataclasses.replace(config_lib.resolve(config_lib.defaults()), data=config)
  prepare.main(run, out=tmp_path / 'out', workers=1, bad='skip')
  said = capsys.readouterr()
  assert f'left out: {tmp_path}/corpus/03.jsonl, line 41, is not valid JSON' in said.err
  assert said.out.startswith(f'{tmp_path}/out: ') and 'of 480 documents' in said.out


@pytest.mark.slow
@pytest.mark.parametrize('kills', [1, pytest.param(10, marks=pytest.mark.full_size)])
def test_a_build_by_processes_that_is_killed_gives_the_same_bytes(tmp_path, monkeypatch, kills):
  config = _write(tmp_path, files=100)
  monkeypatch.setattr(corpus, 'UNIT_BYTES', 2000)
  lines = [json.dumps({'text': f'document {i} of a long file'}) for i in range(400)]
  (tmp_path / 'corpus/long.jsonl').write_text('\n'.join(lines))
  unbroken = _files(store.make(config).path)
  broken, chance = dataclasses.replace(config, store=str(tmp_path / 'broken')), random.Random(0)
  written = 0
  for _ in range(kills):
    with _start(tmp_path, broken) as process:
      written += chance.randrange(8)
      # The children are two processes, and the tracker of resources of Python.
      while (
        len(list((tmp_path / 'broken').glob('0*.json'))) <= written
        or len(children := _children(process.pid)) < 3
      ):
        assert process.poll() is None, 'the build was too fast to be killed'
      process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(_runs(child) for child in children):
      assert time.monotonic() < deadline, 'processes stay behind a killed command'
      time.sleep(0.05)
  assert len(unbroken) > 200 and not (tmp_path / 'broken/meta.json').exists()
  assert _files(store.make(broken).path) == unbroken


def _children(pid: int) -> list[int]:
  listing = Path(f'/proc/{pid}/task/{pid}/children')
  return [int(child) for child in listing.read_text().split()] if listing.exists() else []


def _runs(pid: int) -> bool:
  try:
    return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


@pytest.mark.slow
def test_a_store_is_made_in_a_bucket(tmp_path, bucket, monkeypatch):
  monkeypatch.setattr(corpus, 'UNIT_BYTES', 4000)
  config = _write(tmp_path)
  local = store.make(config)
  named = dataclasses.replace(config, store='gs://bucket/made/store')
  made = store.make(named)
  assert made.digest == local.digest
  np.testing.assert_array_equal(made.train[:], local.train[:])
  objects = bucket.buckets['bucket']
  written = {
    name.removeprefix('made/store/'): content
    for name, (_, content) in objects.items()
    if name.startswith('made/')
  }
  expected = _files(local.path)
  assert written.keys() == expected.keys(), 'something is left behind'
  assert all(written[name] == expected[name] for name in expected if name != 'meta.json')
