"""Runs tracked by the real packages, in their own local modes, and read back by their own means."""

import json
import logging
import sqlite3
import struct
import sys

import jax
import pytest
import tiny_run

from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import metrics
from tokenformer_jax.training import loop

pytestmark = pytest.mark.slow

EIGHT = range(1, 9)


@pytest.fixture(autouse=True)
def local(tmp_path, monkeypatch):
  """Have every tracker write below the test's folder and reach for no network."""
  monkeypatch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
  monkeypatch.chdir(tmp_path)
  for name in ('WANDB_API_KEY', 'WANDB_DIR', 'WANDB_PROJECT', 'MLFLOW_EXPERIMENT_NAME'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('TRACKIO_DIR', str(tmp_path / 'trackio'))
  monkeypatch.setenv('MLFLOW_TRACKING_URI', f'sqlite:///{tmp_path}/mlflow.db')
  logging.getLogger('alembic').setLevel(logging.WARNING)
  yield
  if 'wandb' in sys.modules:
    sys.modules['wandb'].teardown()  # It keeps the variables of its first run.


def train(tmp_path, tracker, name, **changes):
  """Trains a run, or goes on with it; returns its lines under names that begin with `train/`."""
  source = tiny_run.write_corpus(tmp_path / 'corpus')
  always = {'log_every': 1, 'eval_every': 4, 'checkpoint_every': 4, 'sample_tokens': 4}
  keys = {f'train__{key}': value for key, value in always.items()}
  keys |= {'train__trackers': (tracker,), 'model__pattern': 'layer'}
  config = tiny_run.config(source, tmp_path / 'cache', **{**keys, **changes})
  loop.train(config, tmp_path / name)
  lines = metrics.read(tmp_path / name)
  return {line['step']: line['train/loss'] for line in lines if 'train/loss' in line}


def three_starts(tmp_path, tracker):
  """A run of 4 steps that goes on to 8, and a larger one that begins from it; their losses."""
  train(tmp_path, tracker, 'small', train__steps=4)
  small = train(tmp_path, tracker, 'small', train__steps=8)
  changes = {'init_from': str(tmp_path / 'small'), 'model__layer__ffn__tokens': 96}
  grown = train(tmp_path, tracker, 'large', train__steps=12, **changes)
  assert list(small) == list(EIGHT) and list(grown) == [9, 10, 11, 12]
  return small, grown


def id_of(workdir):
  return json.loads((workdir / 'tracked.json').read_text())['id']


def test_wandb(tmp_path, capsys):
  pytest.importorskip('wandb')
  small, grown = three_starts(tmp_path, 'wandb')
  told = capsys.readouterr().err
  assert 'left alone' not in told and told.count('wandb: wandb sync /') == 3, told
  runs = [_of_wandb(file) for file in sorted(tmp_path.glob('small/wandb/offline*/*.wandb'))]
  assert {run['id'] for run in runs} == {id_of(tmp_path / 'small')}, 'it begins another run'
  assert {**runs[0]['losses'], **runs[1]['losses']} == small
  assert runs[0]['config']['train']['steps'] == 4
  (large,) = (_of_wandb(file) for file in tmp_path.glob('large/wandb/offline*/*.wandb'))
  assert large['losses'] == grown
  assert large['id'] == id_of(tmp_path / 'large') != runs[0]['id']
  assert large['config']['parent'] == runs[0]['id']
  assert large['config']['lineage'][0]['change'].startswith('model.layer.ffn.')
  assert (large['group'], large['name'], large['tags']) == ('small', 'large', ['lm', 'grown'])
  assert 'small@8' in large['notes']
  assert large['samples'] == 2, 'an evaluation before the first step, and one at the end'


def _of_wandb(file):
  """Return the content of the file of an offline run."""
  from wandb.proto import wandb_internal_pb2  # noqa: PLC0415 (not installed for quick tests)

  records = [wandb_internal_pb2.Record.FromString(one) for one in _leveldb_log(file)]
  run = next(record.run for record in records if record.HasField('run'))
  found = {'id': run.run_id, 'name': run.display_name, 'group': run.run_group, 'notes': run.notes}
  found |= {'tags': list(run.tags), 'config': {}, 'losses': {}, 'samples': 0}
  updates = [*run.config.update]
  for record in records:
    updates += record.config.update
    items = record.history.item
    line = {item.key or item.nested_key[0]: item.value_json for item in items}
    if 'train/loss' in line:
      found['losses'][json.loads(line['step'])] = json.loads(line['train/loss'])
    found['samples'] += 'sample' in line
  found['config'] = {item.key: json.loads(item.value_json) for item in updates if item.key}
  return found


def _leveldb_log(file):
  """Yields the records of a log of LevelDB: blocks of parts, each with its sum, length and kind."""
  content, at, record = file.read_bytes(), 7, b''
  while at + 7 <= len(content):
    if 32768 - at % 32768 < 7:
      at += 32768 - at % 32768
    _, size, kind = struct.unpack_from('<IHB', content, at)
    record += content[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):  # whole, or the last part
      yield record
      record = b''


def test_trackio(tmp_path, capsys):
  pytest.importorskip('trackio')
  small, grown = three_starts(tmp_path, 'trackio')
  told = capsys.readouterr()
  assert 'left alone' not in told.err and not told.out, told
  ids = {name: id_of(tmp_path / name) for name in ('small', 'large')}
  with sqlite3.connect(tmp_path / 'trackio/tokenformer_jax.db') as store:
    lines = store.execute('select run_name, step, metrics from metrics order by id').fetchall()
    configs = {
      name: json.loads(text) for name, text in store.execute('select run_name, config from configs')
    }
  for name, losses in (('small', small), ('large', grown)):
    mine = [(step, json.loads(text)) for run, step, text in lines if run == f'{name}-{ids[name]}']
    assert {step: line['train/loss'] for step, line in mine if 'train/loss' in line} == losses
    assert any('sample' in line for _, line in mine)
  large = configs[f'large-{ids["large"]}']
  assert large['parent'] == ids['small'] and large['_Group'] == 'small'
  assert large['lineage'][0]['action'] == 'grow'
  assert configs[f'small-{ids["small"]}']['train']['steps'] == 8


def test_mlflow(tmp_path, capsys):
  mlflow = pytest.importorskip('mlflow')
  small, grown = three_starts(tmp_path, 'mlflow')
  told = capsys.readouterr().err
  assert 'left alone' not in told and f'at sqlite:///{tmp_path}' in told, told
  client = mlflow.MlflowClient()
  experiment = client.get_experiment_by_name('tokenformer_jax')
  runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
  assert sorted(runs) == ['large', 'small'], 'a run that goes on is another run'
  for name, losses in (('small', small), ('large', grown)):
    history = client.get_metric_history(runs[name].info.run_id, 'train/loss')
    assert {metric.step: metric.value for metric in history} == losses
    assert runs[name].info.status == 'FINISHED'
    assert client.list_artifacts(runs[name].info.run_id, 'sample')
  first, large = runs['small'], runs['large']
  assert first.data.params['train.steps'] == '4', 'a parameter cannot change'
  assert first.data.tags['train.steps from step 4 on'] == '8'
  assert large.data.tags['mlflow.parentRunId'] == first.info.run_id
  assert 'small@8' in large.data.tags['mlflow.note.content']
  assert large.data.params['model.layer.ffn.tokens'] == '96'


@pytest.mark.parametrize(
  ('tracker', 'variables'),
  [
    (
      'wandb',
      {
        'WANDB_MODE': 'online',
        'WANDB_BASE_URL': 'http://127.0.0.1:9',
        'WANDB_X_GRAPHQL_RETRY_MAX': '1',
      },
    ),
    ('wandb', {'WANDB_MODE': 'online'}),
    (
      'mlflow',
      {'MLFLOW_TRACKING_URI': 'http://127.0.0.1:9', 'MLFLOW_HTTP_REQUEST_MAX_RETRIES': '1'},
    ),
  ],
  ids=['wandb without network', 'wandb without key', 'mlflow without server'],
)
def test_a_server_out_of_reach_ends_no_run(tmp_path, monkeypatch, capsys, tracker, variables):
  pytest.importorskip(tracker)
  if 'WANDB_BASE_URL' in variables:
    monkeypatch.setenv('WANDB_API_KEY', 'a' * 40)
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setenv('HOME', str(tmp_path))  # has no key
  assert list(train(tmp_path, tracker, 'run', train__steps=8)) == list(EIGHT)
  told = capsys.readouterr().err
  assert told.count('left alone') == 1, told
