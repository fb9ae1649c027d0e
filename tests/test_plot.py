"""Curves are drawn from what a run wrote; what cannot be drawn is told in one sentence."""

import dataclasses
import json
import math
import sys
import types
from pathlib import Path

import pytest
import typed
import written_runs
from written_runs import CONFIG

from tokenformer_jax.cli import plot
from tokenformer_jax.config import Config, GrowConfig, ImagesConfig, ViTConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import flops
from tokenformer_jax.runs import curves, saved_config
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Meta


def _make_run(path: Path, losses: list[float | None]) -> Path:
  lines = [{'step': 10 * i, 'train/loss': loss} for i, loss in enumerate(losses, start=1)]
  return written_runs.write(path, [*lines, {'step': 10 * len(losses), 'eval/loss': 3.5}])


@pytest.fixture
def run(tmp_path):
  return _make_run(tmp_path / 'runs' / 'small', [8.0, None, 3.0])


@pytest.mark.parametrize(
  ('x', 'per_step'),
  [
    ('steps', 1),
    ('examples', 16),
    ('tokens', 16 * 256),
    ('flops', 16 * 256 * flops.train_flops(CONFIG.model, 256)),
  ],
)
def test_steps_become_tokens_and_flops(run, x, per_step):
  found = curves.curves(run, x, 'train/loss')
  xs, ys = found['train/loss']
  assert xs == [10 * per_step, 20 * per_step, 30 * per_step]
  assert (ys[0], ys[2]) == (8, 3)
  assert math.isnan(ys[1]), 'a loss that was not finite is a gap in the curve'
  assert found['eval/loss'] == ([30 * per_step], [3.5])


def test_a_grown_run_counts_the_steps_before_it_at_their_size(run, monkeypatch):
  """The figures of a grown run begin at its growth, after 10 steps."""
  small = dataclasses.replace(CONFIG.model, pattern='layer*2')
  before = 10 * flops.step_flops(dataclasses.replace(CONFIG, model=small))
  lineage = (Ancestor('grow', '/runs/small', 10, small, GrowConfig(), 10, flops=before),)
  opened = types.SimpleNamespace(meta=Meta(30, CONFIG, {}, lineage))
  monkeypatch.setattr(curves.checkpoint, 'open_directory', lambda _: opened)
  xs, _ = curves.curves(run, 'flops', 'train/loss')['train/loss']
  assert xs == [before + steps * flops.step_flops(CONFIG) for steps in (0, 10, 20)]


def test_a_label_says_what_a_figure_is_a_mean_over(tmp_path):
  runs = []
  of_images = Config(model=ViTConfig(channels=1, classes=10), data=ImagesConfig(batch_size=16))
  for unit, config in (('tokens', CONFIG), ('images', of_images)):
    path = _make_run(tmp_path / unit, [8.0, 3.0])
    (path / 'config.json').write_text(saved_config.to_text(config))
    with (path / 'metrics.jsonl').open('a') as file:
      file.write(json.dumps({'step': 20, 'eval/accuracy': 0.5}))
    runs.append(path)

  def label(runs, y='eval/accuracy'):
    return curves.draw(runs, 'steps', y).axes[0].get_ylabel()

  assert label(runs[:1]) == 'validation accuracy (fraction of tokens)'
  assert label(runs[1:]) == 'validation accuracy (fraction of images)'
  assert label(runs) == 'validation accuracy (fraction of tokens or images)'
  assert label(runs[1:], 'train/loss') == 'loss (nats per image)'


def test_a_run_that_began_from_another_without_a_checkpoint_says_what_is_missing(run, capsys):
  config = dataclasses.replace(CONFIG, init_from='runs/base@7')
  (run / 'config.json').write_text(saved_config.to_text(config))
  curves.curves(run, 'flops', 'train/loss')
  assert 'no checkpoint that tells of the training before runs/base@7' in capsys.readouterr().err


def test_validation_points_have_the_colour_of_their_run(run, tmp_path):
  other = _make_run(tmp_path / 'runs' / 'large', [7.0, 5.0])
  axes = curves.draw([run, other], 'steps', 'train/loss').axes[0]
  colours = [line.get_color() for line in axes.lines]
  assert colours[0] == colours[1] != colours[2] == colours[3]
  legend = [text.get_text() for text in axes.get_legend().get_texts()]
  assert legend == ['small', 'large', 'validation']
  assert (axes.get_xlabel(), axes.get_ylabel()) == ('training steps', 'loss (nats per token)')


def test_runs_of_one_name_are_told_apart_by_their_paths(run, tmp_path):
  other = _make_run(tmp_path / 'elsewhere' / 'small', [7.0])
  axes = curves.draw([run, other, run], 'steps', 'eval/loss').axes[0]
  assert [text.get_text() for text in axes.get_legend().get_texts()] == [str(run), str(other)]


def _in_picture(axes) -> list[tuple[float, float]]:
  """Every point of every line, in fractions of the picture's width and height."""
  axes.figure.draw_without_rendering()
  points = [point for line in axes.lines for point in line.get_xydata()]
  return axes.transAxes.inverted().transform(axes.transData.transform(points)).tolist()


def test_the_whole_curve_is_in_the_picture_and_its_end_can_be_read(tmp_path):
  run = _make_run(tmp_path / 'run', [11.0, 9.0, *[3 + 1 / i for i in range(1, 99)]])
  points = _in_picture(curves.draw([run], 'flops', 'train/loss').axes[0])
  assert all(-1e-6 <= at <= 1 + 1e-6 for point in points for at in point), 'a part is cut off'
  at_tenth, at_end = points[9], points[99]
  assert at_end[0] - at_tenth[0] > 0.3, 'nine tenths of the steps have no room'
  assert points[0][1] - at_tenth[1] < 0.95, 'the first fall flattens all of the rest'


def test_curves_that_begin_late_have_even_steps(tmp_path):
  """A run that has grown goes on after the steps of another: at the right of a logarithmic axis."""
  small, grown = tmp_path / 'small', tmp_path / 'grown'
  for run, steps in ((small, range(10, 101)), (grown, range(101, 151))):
    _make_run(run, [3.0])
    lines = (json.dumps({'step': step, 'train/loss': 3 + 9 / step}) for step in steps)
    (run / 'metrics.jsonl').write_text('\n'.join(lines))
  axes = curves.draw([small, grown], 'steps', 'train/loss').axes[0]
  assert axes.get_xscale() == 'linear' and axes.get_xlim()[0] == 0
  assert curves.draw([small], 'steps', 'train/loss').axes[0].get_xscale() == 'log'


def test_numbers_on_logarithmic_axes_are_plain_and_several(tmp_path):
  for name, losses in (('narrow', [2.2, 1.7]), ('wide', [60000.0, 40.0])):
    axes = curves.draw([_make_run(tmp_path / name, losses)], 'steps', 'train/loss').axes[0]
    axes.figure.draw_without_rendering()
    low, high = axes.get_ylim()
    shown = [t for t in axes.yaxis.get_major_ticks() if low <= t.get_loc() <= high]
    labels = [tick.label1.get_text() for tick in shown]
    assert 4 <= len(labels) <= 12, f'{name}: {labels}'
    assert all(float(label.replace(',', '')) for label in labels), f'{name}: {labels}'


def test_a_metric_that_is_not_positive_can_be_drawn(tmp_path):
  run = _make_run(tmp_path / 'run', [1.0, 0.0, None])
  assert curves.draw([run], 'steps', 'train/loss').axes[0].get_yscale() == 'linear'


def test_the_command_takes_runs_before_and_after_flags(run, tmp_path, capsys):
  other = _make_run(tmp_path / 'runs' / 'large', [7.0, 5.0])
  typed.run(plot.main, run, '--x=flops', other, f'--out={tmp_path}/a.png')
  assert capsys.readouterr().out == f'{tmp_path}/a.png\n'
  assert (tmp_path / 'a.png').read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize('line', ['null', '{"step": "x"}', '\xff', '[' * 10**5])
def test_lines_that_are_no_figures_are_named(run, line):
  (run / 'metrics.jsonl').write_text(f'{line}\n', encoding='latin-1')
  with pytest.raises(UserError, match=r'is not a run: |has no figures yet'):
    curves.curves(run, 'steps', 'train/loss')


@pytest.mark.parametrize('value', ['null', '1e400', '"x"'])
def test_a_metric_that_is_never_finite_is_refused(run, value):
  (run / 'metrics.jsonl').write_text(f'{{"step": 1, "train/loss": {value}}}\n')
  with pytest.raises(UserError, match=r'has no finite value of train/loss'):
    curves.draw([run], 'steps', 'train/loss')


@pytest.mark.parametrize('content', [None, '{"model": ', '{"model": 3}'])
def test_tokens_need_the_config(run, content):
  path = run / 'config.json'
  path.unlink() if content is None else path.write_text(content)
  assert curves.curves(run, 'steps', 'train/loss')
  with pytest.raises(UserError, match=r'config\.json.* (not the config|the format 1)'):
    curves.curves(run, 'tokens', 'train/loss')


def test_without_matplotlib_the_extra_is_named(run, monkeypatch):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(UserError, match=r'pip install -e "\.\[plot\]"'):
    curves.draw([run], 'steps', 'train/loss')


def test_images_are_counted_as_examples_and_not_as_tokens(run):
  model, data = ViTConfig(channels=1, classes=10), ImagesConfig(batch_size=16)
  config = dataclasses.replace(CONFIG, model=model, data=data)
  (run / 'config.json').write_text(saved_config.to_text(config))
  assert curves.curves(run, 'examples', 'train/loss')['train/loss'][0] == [160, 320, 480]
  with pytest.raises(UserError, match='images, which have no tokens; use x=examples'):
    curves.curves(run, 'tokens', 'train/loss')
