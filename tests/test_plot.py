"""Curves are drawn from what a run wrote; what cannot be drawn is told in one sentence."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenformer_jax import flops, plot
from tokenformer_jax.config import Config, DataConfig, ModelConfig
from tokenformer_jax.errors import UserError

CONFIG = Config(
  model=ModelConfig(vocab_size=4096), data=DataConfig(batch_size=16, sequence_length=256)
)


def _make_run(path: Path, losses: list[float | None]) -> Path:
  path.mkdir(parents=True)
  (path / 'config.json').write_text(json.dumps(dataclasses.asdict(CONFIG)))
  lines = [{'step': 10 * i, 'train/loss': loss} for i, loss in enumerate(losses, start=1)]
  lines.append({'step': 10 * len(losses), 'eval/loss': 3.5})
  (path / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return path


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
  found = plot.curves(run, x, 'train/loss')
  xs, ys = found['train/loss']
  assert xs == [10 * per_step, 20 * per_step, 30 * per_step]
  assert (ys[0], ys[2]) == (8, 3)
  assert math.isnan(ys[1]), 'a loss that was not finite is a gap in the curve'
  assert found['eval/loss'] == ([30 * per_step], [3.5])


def test_validation_points_have_the_colour_of_their_run(run, tmp_path):
  other = _make_run(tmp_path / 'runs' / 'large', [7.0, 5.0])
  axes = plot.draw([run, other], 'steps', 'train/loss').axes[0]
  colours = [line.get_color() for line in axes.lines]
  assert colours[0] == colours[1] != colours[2] == colours[3]
  legend = [text.get_text() for text in axes.get_legend().get_texts()]
  assert legend == ['small', 'large', 'validation']
  assert (axes.get_xlabel(), axes.get_ylabel()) == ('training steps', 'loss (nats per token)')


def test_runs_of_one_name_are_told_apart_by_their_paths(run, tmp_path):
  other = _make_run(tmp_path / 'elsewhere' / 'small', [7.0])
  axes = plot.draw([run, other, run], 'steps', 'eval/loss').axes[0]
  assert [text.get_text() for text in axes.get_legend().get_texts()] == [str(run), str(other)]


def test_the_first_fall_does_not_flatten_the_rest(tmp_path):
  run = _make_run(tmp_path / 'run', [100.0, 50.0, *[3 + 1 / i for i in range(1, 99)]])
  for x in plot.X_AXES:
    assert plot.draw([run], x, 'train/loss').axes[0].get_ylim()[1] < 5


def test_large_counts_have_a_unit(tmp_path):
  run = _make_run(tmp_path / 'run', [3.0] * 100)  # 4.1 million tokens
  axes = plot.draw([run], 'tokens', 'train/loss').axes[0]
  assert axes.get_xlabel() == 'training tokens (millions)'
  assert axes.xaxis.get_major_formatter()(2e6, 0) == '2'


def test_the_command_takes_runs_before_and_after_flags(run, tmp_path):
  other = _make_run(tmp_path / 'runs' / 'large', [7.0, 5.0])
  command = [sys.executable, '-m', 'tokenformer_jax.plot', run, '--x=flops', other, '--out=a.png']
  done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert done.stdout == 'a.png\n'
  assert (tmp_path / 'a.png').read_bytes().startswith(b'\x89PNG')


def test_a_metric_that_is_not_there_is_answered_with_those_that_are(run):
  with pytest.raises(UserError, match=r"no metric 'train/los'; it has eval/loss, train/loss$"):
    plot.curves(run, 'steps', 'train/los')


def test_a_directory_that_is_no_run_is_named(tmp_path):
  with pytest.raises(UserError, match=r'is not a run: .*metrics\.jsonl cannot be read'):
    plot.curves(tmp_path, 'steps', 'train/loss')


def test_a_run_that_has_just_begun_has_nothing_to_draw(tmp_path):
  run = _make_run(tmp_path / 'run', [])
  (run / 'metrics.jsonl').write_text('')
  with pytest.raises(UserError, match='has no figures yet'):
    plot.curves(run, 'steps', 'train/loss')


@pytest.mark.parametrize('content', [None, '{"model": '])
def test_tokens_need_the_config(run, content):
  path = run / 'config.json'
  path.unlink() if content is None else path.write_text(content)
  assert plot.curves(run, 'steps', 'train/loss')
  with pytest.raises(UserError, match=r'config\.json, which --x=tokens needs, cannot be read'):
    plot.curves(run, 'tokens', 'train/loss')


def test_without_matplotlib_the_extra_is_named(run, monkeypatch):
  monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
  with pytest.raises(UserError, match=r'pip install -e "\.\[plot\]"'):
    plot.draw([run], 'steps', 'train/loss')


@pytest.mark.parametrize(
  ('given', 'out', 'message'),
  [
    (False, 'a.png', 'no run is given'),
    (True, 'a.jpg', r'must end in one of \.png, \.pdf, \.svg'),
    (True, 'nowhere/a.png', 'cannot be written: No such file'),
  ],
)
def test_mistakes_on_the_command_line(run, tmp_path, monkeypatch, given, out, message):
  values = SimpleNamespace(x='steps', y='train/loss', out=str(tmp_path / out))
  monkeypatch.setattr(plot.flags, 'FLAGS', values)
  with pytest.raises(UserError, match=message):
    plot.main(['plot', *([str(run)] if given else [])])


def test_images_are_counted_as_examples_and_not_as_tokens(run):
  config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, kind='vit'))
  (run / 'config.json').write_text(json.dumps(dataclasses.asdict(config)))
  assert plot.curves(run, 'examples', 'train/loss')['train/loss'][0] == [160, 320, 480]
  with pytest.raises(UserError, match='images, which are no tokens; use --x=examples'):
    plot.curves(run, 'tokens', 'train/loss')
