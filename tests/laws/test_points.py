"""Finished runs become points; runs that cannot be compared are refused in one sentence."""

import dataclasses
import math
import re
import shutil

import numpy as np
import pytest
import synthetic
import tiny_run
import written_runs

from tokenformer_jax.cli import laws as laws_command
from tokenformer_jax.config import AdamWConfig, Config, TrainConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import fit, grid, points, runs
from tokenformer_jax.laws.runs import FinishedRun, Growth, Size
from tokenformer_jax.runs import curves
from tokenformer_jax.runs.checkpoint_meta import Batches, Meta, Seen, TeacherRecord

SIZE = Size(1000, 1000, 7000.0)
PLAIN = dict.fromkeys(runs.SPECIAL_TRAINING, '')
RUN = FinishedRun('a', SIZE, 51_200, 2.0, True, {'text': 'x', 'tokenizer': 'bytes', **PLAIN})


def _runs(*changes) -> list[FinishedRun]:
  return [dataclasses.replace(RUN, name=f'run{i}', **one) for i, one in enumerate(changes)]


def test_a_point_has_the_counts_of_its_run():
  two = points.from_runs(_runs({}, {'tokens': 102_400}))
  assert two.parameters.tolist() == [1000, 1000] and two.tokens.tolist() == [51_200, 102_400]
  assert two.flops.tolist() == [6 * 1000 * 51_200, 6 * 1000 * 102_400]


@pytest.mark.parametrize(
  ('other', 'message'),
  [
    ({'data': {**RUN.data, 'text': 'y'}}, 'other values of text'),
    ({'data': {**RUN.data, 'tokenizer': 'bpe'}}, 'other values of tokenizer'),
    ({'loss': math.nan}, 'the loss of run1 is nan'),
    ({'size': Size(8000, 2000, 12_000.0)}, 'run1 is a mixture of experts'),
    ({'growth': Growth(SIZE, 100)}, 'run1 has grown'),
    ({'data': {**RUN.data, 'train.nested_rows': '8'}}, r'of train.nested_rows \(none and 8\)'),
  ],
)
def test_runs_that_do_not_fit_together(other, message):
  with pytest.raises(UserError, match=message):
    points.from_runs(_runs({}, other))


def _read(*arguments):
  finished, notes = points.read_all(arguments)
  return points.from_runs(finished, notes)


def test_grown_runs_in_a_folder_are_left_out_and_named(monkeypatch):
  names = ['f/a', 'f/grown', 'f/b', 'g']
  grown = {'f/grown': Growth(SIZE, 100), 'g': Growth(SIZE, 100)}
  monkeypatch.setattr(points, 'find_runs', lambda arguments: names)
  monkeypatch.setattr(
    runs, 'read', lambda name: dataclasses.replace(RUN, name=name, growth=grown.get(name))
  )
  with pytest.raises(UserError, match='g has grown'):
    _read('f', 'g')
  names.remove('g')
  kept = _read('f')
  assert kept.names == ('f/a', 'f/b') and kept.notes[0] == '1 grown run left out: f/grown'
  names[:] = ['f/grown']
  with pytest.raises(UserError, match='f/grown has grown'):
    _read('f')


@pytest.mark.parametrize(
  ('changes', 'way', 'value'),
  [
    ({'distill__teacher': 'runs/t', 'distill__weight': 0.5}, 'distill.teacher', r'runs/t@7.*0\.5'),
    ({'train__nested_rows': 8}, 'train.nested_rows', '8'),
  ],
)
def test_distilled_elastic_and_frozen_runs_are_not_plain(tmp_path, changes, way, value):
  config = tiny_run.config('files:none', tmp_path, **changes)
  teacher = TeacherRecord('runs/t@7', 'abc') if config.distill.teacher else None
  meta = Meta(20, config, {'kind': 'bytes'}, teacher=teacher)
  data = runs._data(config, meta)
  assert re.search(value, data[way]) and [n for n in PLAIN if data[n]] == [way], data
  assert f'have {way}=' in points.from_runs(_runs({'data': data})).notes[0]


def test_a_run_counts_the_tokens_of_all_its_batches_and_only_what_is_saved(tmp_path):
  """Ten steps with batches of 8, then ten with 24; the config has the last ones."""
  config = tiny_run.config('files:none', tmp_path, data__batch_size=24)
  seen = Seen(10 * 8 + 10 * 24, 'abc', (Batches(0, 8, 32), Batches(10, 24, 32)))
  run = written_runs.finish(tmp_path / 'run', config, 3.0, seen)
  finished = runs.read(str(run))
  assert (finished.tokens, finished.loss) == (320 * 32, 3.0)
  assert curves.curves(run, 'tokens', 'eval/loss')['eval/loss'][0] == [320 * 32]
  shutil.rmtree(run / 'checkpoints')
  with pytest.raises(UserError, match='it is at step 20, which is not saved; finish it by'):
    runs.read(str(run))


def _of_pairs(loss: str) -> Config:
  changes = {'data__rows': 'preference', 'preference__loss': loss}
  return tiny_run.config('files:none', 'cache', **changes)


@pytest.mark.parametrize(
  ('config', 'key'),
  [
    (tiny_run.vit_config(), 'model.kind=vit, whose loss is a mean over images'),
    (_of_pairs('dpo'), 'preference.loss=dpo, whose loss is a mean over pairs'),
    (_of_pairs('orpo'), 'preference.loss=orpo, whose loss is a mean over pairs'),
  ],
)
def test_a_loss_of_anything_but_text_is_refused_by_name(tmp_path, config, key):
  run = written_runs.write(tmp_path / 'run', written_runs.falling(20), config)
  with pytest.raises(UserError, match=f'run has {key}.*a law is about nats a token .*; leave it'):
    runs.read(str(run))
  with pytest.raises(UserError, match=f'the config has {key}.*; give one of text'):
    grid.check_base(config, 'a law', '--lengths')


def test_runs_without_a_decay_are_left_out_unless_none_has_one():
  some = points.from_runs(_runs({}, {'decayed': False}))
  assert len(some) == 1 and 'left out' in some.notes[0]
  none = points.from_runs(_runs({'decayed': False}, {'decayed': False}))
  assert len(none) == 2 and 'taken as they are' in none.notes[0]


@pytest.mark.parametrize(
  ('changes', 'decayed'),
  [
    ({}, True),
    ({'schedule': 'constant'}, False),
    ({'schedule': {'kind': 'wsd', 'final_fraction': 0.0}}, True),
    ({'schedule': {'kind': 'linear', 'final_fraction': 0.5}}, False),
  ],
)
def test_the_schedule_says_whether_a_rate_has_decayed(changes, decayed):
  config = Config(optim=AdamWConfig(**changes), train=TrainConfig(steps=500))
  assert runs._has_decayed(config) == decayed


HEADER = 'parameters,tokens,loss\n'


def test_the_law_of_a_table_is_that_of_its_points(tmp_path):
  size, tokens = (grid.ravel() for grid in np.meshgrid([1e6, 4e6, 2e7], [1e8, 5e8, 2e9]))
  loss = 1.7 + 400 / size**0.34 + 410 / tokens**0.28
  rows = zip(loss, size, tokens, strict=True)
  text = ''.join(f'{a!r}, {b!r} ,{c!r}\r\n' for a, b, c in np.array([*rows]).tolist())
  table = tmp_path / 'others.csv'
  table.write_text(f'\ufeffloss, parameters,tokens \r\n{text}\r\n  \r\n', encoding='utf-8')
  data, order = points.read_table(str(table)), np.lexsort((tokens, size))
  logs = {'n': np.log(size[order]), 'd': np.log(tokens[order])}
  expected = fit.fit(logs, loss[order], draws=20, starts=synthetic.FEW_STARTS)
  fitted = fit.fit(data.logs(), data.loss, draws=20, starts=synthetic.FEW_STARTS)
  assert fitted.values == pytest.approx(expected.values, rel=1e-9)


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (b'', 'has no column parameters'),
    (b'parameters,tokens\n1,2\n', 'has no column loss'),
    (
      b'N,tokens,loss\n',
      "no column parameters, but 'N', 'tokens', 'loss'; a table has the columns",
    ),
    (b'parameters,tokens,loss,loss\n', 'has 2 columns loss'),
    (b'parameters;tokens;loss\n', "but 'parameters;tokens;loss'; .* separated by commas"),
    (HEADER.encode() + b'1,2,3\n1,0,3\n', "line 3 of .* has tokens '0'"),
    (HEADER.encode() + b'1,2,nan\n', "line 2 of .* has loss 'nan'"),
    (HEADER.encode() + b'"1,000",2,3\n', "line 2 of .* has parameters '1,000'"),
    (HEADER.encode() + b'1_000,2,3\n', "line 2 of .* has parameters '1_000'"),
    (HEADER.encode() + b'1,000,2,3\n', 'line 2 of .* has 4 values for 3 columns'),
    (HEADER.encode() + b'\xff,2,3\n', 'cannot be read as a CSV file in UTF-8'),
  ],
)
def test_a_table_that_is_not_one_of_runs_is_refused(tmp_path, content, message):
  table = tmp_path / 'others.csv'
  table.write_bytes(content)
  with pytest.raises(UserError, match=message):
    points.read_table(str(table))


def test_a_table_stands_alone_and_must_exist(tmp_path):
  with pytest.raises(UserError, match='No such file'):
    points.read_table(str(tmp_path / 'absent.csv'))
  with pytest.raises(UserError, match='is a table, which does not state its data'):
    laws_command.main('runs/a', 'others.csv')


@pytest.mark.parametrize('rows', ['', '1,2,3\n'])
def test_a_table_of_too_few_runs_is_refused(tmp_path, rows):
  table = tmp_path / 'others.csv'
  table.write_text(HEADER + rows)
  with pytest.raises(UserError, match=f'there are {len(rows.splitlines())} points'):
    laws_command.main(str(table))


def test_other_columns_of_a_table_are_named(tmp_path):
  table = tmp_path / 'others.csv'
  table.write_text('seed,parameters,tokens,loss,rate\n1,1e6,1e8,21.5,1e-3\n')
  read = points.read_table(str(table))
  assert read.parameters.tolist() == [1e6] and read.loss.tolist() == [21.5]
  assert 'not read: seed, rate' in read.notes[1]
