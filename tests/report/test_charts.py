"""Curves keep the extremes of a long run, and begin where their run does."""

import dataclasses
import random

import plotly.graph_objects as go
import written_runs
from written_runs import CONFIG

from tokenformer_jax.report import charts, differences, record


def read(path, lines, config=CONFIG):
  return record.read(written_runs.write(path, lines, config), path.name)


def test_a_long_run_keeps_its_spikes_and_gaps():
  rng = random.Random(0)
  lines = [{'step': i, 'train/loss': 3 + rng.random(), 'train/grad_norm': 1.0} for i in range(9999)]
  lines[4321]['train/loss'] = 99.0
  lines[5432]['train/grad_norm'] = 1e6
  lines[6543]['train/loss'] = None
  kept = [line['step'] for line in charts.thinned(lines, 400)]
  assert {0, 4321, 5432, 6543, 9998} <= {*kept}
  assert kept == sorted(kept) and 300 < len(kept) < 800
  assert charts.thinned(lines[:400], 400) == lines[:400]


def test_columns_have_the_figures_and_their_places(tmp_path):
  run = read(tmp_path / 'run', [*written_runs.falling(100), {'step': 100, 'train/loss': None}])
  tables = charts.data([run])['runs'][0]['tables']
  assert tables['train']['steps'] == [*range(10, 101, 10), 100]
  assert tables['train']['train/loss'][-1] is None, 'a loss that was not finite is a gap'
  assert tables['train']['tokens'][0] == 10 * 16 * 256
  assert tables['eval']['steps'] == [50, 100] and 'train/loss' not in tables['eval']
  assert 'hours' not in tables['train'], 'a run without times has no axis of hours'


def test_bits_per_byte_come_first_where_all_runs_have_them(tmp_path):
  lines = written_runs.falling(100)
  plain = read(tmp_path / 'plain', lines)
  with_bits = [
    {**line, **{name.replace('loss', 'bits_per_byte'): 1.5 for name in line if 'loss' in name}}
    for line in lines
  ]
  run = read(tmp_path / 'run', with_bits)
  assert charts.main_figure([run, plain]) == charts.main_figure([plain]) == 'eval/loss'
  assert charts.main_figure([run]) == 'eval/bits_per_byte'
  first = charts.data([run])['choices'][0]
  assert first['names'] == ['train/bits_per_byte', 'eval/bits_per_byte']
  drawn = charts.loss_by_flops([run, run], {})
  assert drawn['layout']['yaxis']['title']['text'] == 'validation: bits per byte'
  assert drawn['data'][0]['y'] == [1.5, 1.5]
  row = differences.overview([run])
  assert '>bits per byte<' in row and '>1.5000<' in row
  assert 'bits per byte' not in differences.overview([plain]), 'a column that no run has'


def test_values_of_keys_are_no_python(tmp_path):
  runs = []
  for name, trackers in (('one', ()), ('two', ('tensorboard', 'wandb'))):
    train = dataclasses.replace(CONFIG.train, trackers=trackers)
    runs.append(
      read(tmp_path / name, written_runs.falling(50), dataclasses.replace(CONFIG, train=train))
    )
  table = differences.table(runs)
  assert '<td>train.trackers</td><td>–</td><td>tensorboard, wandb</td>' in table


def test_axes_of_costs_begin_at_zero(tmp_path):
  runs = [read(tmp_path / name, written_runs.falling(50)) for name in 'ab']
  assert charts.loss_by_flops(runs, {})['layout']['xaxis']['rangemode'] == 'tozero'


def test_a_decay_begins_on_the_curve_of_its_run(tmp_path):
  stable = read(tmp_path / 'stable', written_runs.falling(100))
  train = dataclasses.replace(CONFIG.train, decay_from=50)
  config = dataclasses.replace(CONFIG, train=train, init_from='stable')
  branch = read(tmp_path / 'branch', [{'step': 60, 'eval/loss': 2.9}], config)
  written_runs.add(tmp_path / 'branch/times.jsonl', [{'step': 50, 'devices': '1 × cpu'}])
  branch = record.read(tmp_path / 'branch', 'branch')
  figure = charts.loss_by_flops([stable, branch], {1: 0})
  go.Figure(figure)  # It refuses what plotly does not know.
  main, decay = figure['data']
  assert (decay['x'][0], decay['y'][0]) == (main['x'][0], main['y'][0]), 'not at step 50 of it'
  assert decay['y'][1] == 2.9 and decay['line']['dash'] == 'dash'
  assert charts.loss_by_flops([stable], {}) is None, 'one plain run is in the curves already'
