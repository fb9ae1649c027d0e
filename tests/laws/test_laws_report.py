"""The command prints laws with intervals, and lists what the data leave undetermined."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import synthetic
import tiny_run

from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import analysis, chains, formulas, law_figures, report
from tokenformer_jax.laws.analysis import Analysis
from tokenformer_jax.laws.fit import Fit
from tokenformer_jax.laws.points import Points

THETA = np.array([np.log(406.4), np.log(410.7), np.log(1.69), 0.34, 0.28])


def _analysis(points: Points, theta: np.ndarray = THETA, spread: float = 0.01) -> Analysis:
  """Return an analysis without a fit, whose draws scatter around the published law."""
  draws = theta * (1 + spread * np.random.default_rng(0).normal(size=(200, 5)))
  law = formulas.values(theta)
  residuals = np.log(points.loss / formulas.loss(law, points.active, points.tokens))
  return Analysis(points, Fit(formulas.CHINCHILLA, theta, 0.0, residuals, draws, (4500, 32)))


def _doubts(points: Points, **options) -> str:
  budget = options.pop('budget', None)
  return '\n'.join(analysis.doubts(_analysis(points, **options), budget))


GRID = synthetic.on_grid(6, 6, noise=0.002)


def _only(points: Points, which: np.ndarray) -> Points:
  changed = {
    field.name: getattr(points, field.name)[which]
    for field in dataclasses.fields(points)
    if isinstance(getattr(points, field.name), np.ndarray)
  }
  return dataclasses.replace(points, names=tuple(np.array(points.names)[which]), **changed)


def test_good_points_leave_no_doubt():
  assert _doubts(GRID) == ''


def test_the_report_doubts_points_of_few_sizes_or_on_a_diagonal():
  sizes = np.unique(GRID.active)
  assert '2 sizes' in _doubts(_only(GRID, GRID.active <= sizes[1]))
  narrow = dataclasses.replace(GRID, active=1e9 * (GRID.active / 1e9) ** 0.1)
  assert 'the sizes span a factor of 2, below 10' in _doubts(narrow)
  ratio = GRID.tokens / GRID.active
  diagonal = _only(GRID, (ratio > 10) & (ratio < 300))
  together = np.corrcoef(np.log(diagonal.active), np.log(diagonal.tokens))[0, 1]
  assert ('have a correlation' in _doubts(diagonal)) == (together > 0.95)


def test_the_report_doubts_a_fit_at_a_bound_or_with_bent_residuals():
  assert 'alpha may be anything' in _doubts(GRID, spread=0.4)
  limit = THETA.copy()
  limit[2] = -19.0
  assert 'E is not told from zero' in _doubts(GRID, theta=limit, spread=0.2)
  limit[2] = formulas.LIMIT[0]
  assert 'E is not told from zero: the best fit has it at its bound, 2e-09' in _doubts(
    GRID, theta=limit, spread=0.0
  )
  bound = THETA.copy()
  bound[3] = 3.0
  assert 'lies at a bound' in _doubts(GRID, theta=bound)
  bent = dataclasses.replace(GRID, loss=GRID.loss * (GRID.active / 1e9) ** 0.02)
  assert 'of the residuals follow from N and D' in _doubts(bent)


def test_the_report_doubts_a_budget_far_from_the_runs():
  said = _doubts(GRID, budget=1e27)
  assert 'times that of the largest run' in said and 'lies outside of the sizes' in said
  assert _doubts(GRID, budget=1e21) == ''


def test_doubts_about_a_prediction_and_a_chain_outside_of_the_runs():
  made = _analysis(GRID)
  run = analysis.predict(made, 1e9, 2e13, 1e9)
  said = '\n'.join(analysis.doubts(made, predictions=[run]))
  assert said == 'length 2e+13 of the run lies outside of the lengths of the runs, 1e+09 to 3e+12'

  def doubts(target: float, *sizes: float) -> list[str]:
    priced, _ = chains.from_sizes(sizes)
    best = chains.find(made.fit.values, made.fit.drawn, priced, target, 2.1)
    return analysis.doubts(made, chain=best)

  assert doubts(2.2, 3e8, 3e9) == []
  outside = 'lies outside of the sizes of the runs, 3e+07 to 3e+10'
  said = doubts(1.75, 3e9, 1e12)
  assert f'size 1e+12 of the chain {outside}' in said
  assert f'size 1e+12 of the best run from scratch {outside}' in said


@pytest.mark.parametrize('zeros', [[3], [4], [3, 4]])
def test_a_fit_with_exponents_of_zero_is_reported_and_has_no_plan(zeros):
  theta = THETA.copy()
  theta[zeros] = 0.0
  made = _analysis(GRID, theta)
  assert 'lies at a bound' in '\n'.join(analysis.doubts(made, budget=1e21))
  assert ('both exponents are 0' in report.exponents(made)) == (len(zeros) == 2)
  assert json.dumps(report.to_json(made, []), allow_nan=False)
  assert law_figures.draw_losses(made).axes
  with pytest.raises(UserError, match=r'--budget=1e\+21 has no answer'):
    analysis.optimum(made, 1e21)
  priced, _ = chains.from_sizes((3e8, 3e9))
  with pytest.raises(UserError, match='--target_loss=2 has no answer'):
    chains.find(made.fit.values, made.fit.drawn, priced, 2, 2.1)


def test_a_chain_is_predicted_doubted_and_written():
  made = _analysis(GRID)
  alone = analysis.predict_chain(made, [(1e9, 2e10)], 2.0)
  run = analysis.predict(made, 1e9, 2e10, 1e9)
  assert (alone.loss, alone.interval) == (pytest.approx(run.loss), pytest.approx(run.interval))
  legs = [(1e9, 1e10), (1e11, 1e10)]
  chain = analysis.predict_chain(made, legs, np.linspace(1.9, 2.1, 200))
  assert chain.interval[0] < chain.loss < chain.interval[1]
  (doubt,) = analysis.doubts(made, predictions=[chain])
  assert doubt.startswith('size 1e+11 of --chain lies outside of the sizes of the runs')
  content = json.loads(json.dumps(report.to_json(made, [doubt], [chain])))
  written = {'legs': [list(leg) for leg in legs], 'loss': chain.loss}
  assert content['predictions'] == [{**written, 'interval': list(chain.interval)}]
  assert f'the chain 1e+09 on 1e+10 tokens, 1e+11 on 1e+10 tokens: loss {chain.loss:.4f}' in (
    report.prediction(chain)
  )
  long = dataclasses.replace(chain, legs=((1e9, 2e12), (2e9, 2e12)))
  assert 'length 4e+12 of --chain lies outside' in analysis.doubts(made, predictions=[long])[0]


def test_predictions_have_intervals():
  made = _analysis(GRID)
  best = analysis.optimum(made, 1e21)
  n, d = formulas.optimum(made.fit.values, 1e21)
  assert (best.parameters, best.tokens) == (pytest.approx(n), pytest.approx(d))
  assert best.parameters_interval[0] < n < best.parameters_interval[1]
  run = analysis.predict(made, 1e9, 2e10, 1e9)
  assert run.interval[0] < run.loss < run.interval[1]


def test_json_has_the_parameters_by_name():
  content = report.to_json(_analysis(GRID), ['a doubt'])
  for name, value in synthetic.PUBLISHED.items():
    assert content[name] == pytest.approx(value)
    low, high = content['intervals'][name]
    assert low < value < high
  assert json.loads(json.dumps(content, allow_nan=False)) is not None, 'a NaN is no JSON'


def test_text_has_a_row_for_each_parameter():
  made = _analysis(GRID)
  text = report.law(made.fit)
  assert all(f'  {name}' in text for name in synthetic.PUBLISHED)
  assert 'a = 0.452' in report.exponents(made)
  assert report.between((0.0, np.inf)) == 'unbounded'


@pytest.mark.parametrize('points', [GRID, synthetic.scattered(40)])
def test_pictures_show_every_point(points):
  axes = law_figures.draw_losses(_analysis(points)).axes[0]
  drawn = sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() == 'o')
  drawn += sum(len(one.get_offsets()) for one in axes.collections[:1] if len(points) == 40)
  assert drawn == len(points)
  assert len(law_figures.draw_residuals(_analysis(points)).axes) == 3


def test_the_axes_of_sizes_have_numbers_whatever_they_span():
  made = _analysis(GRID)
  for span in (1.3, 5, 20, 2000):
    sizes = np.geomspace(1.1e8, 1.1e8 * span, 36)
    points = dataclasses.replace(GRID, active=sizes)
    figure = law_figures.draw_residuals(dataclasses.replace(made, points=points))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    low, high = axes.get_xlim()
    labels = [
      label.get_text()
      for at, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
      if low <= at <= high and label.get_text()
    ]
    assert 2 <= len(labels) <= 8 and len(set(labels)) == len(labels), labels


@pytest.mark.slow
def test_the_command_fits_a_csv(tmp_path):
  points = synthetic.on_grid(6, 6, noise=0.002)
  rows = zip(points.active, points.tokens, points.loss, strict=True)
  table = '\n'.join(','.join(map(str, row)) for row in rows)
  (tmp_path / 'losses.csv').write_text(f'parameters,tokens,loss\n{table}\n')
  done = tiny_run.run(
    [
      *(sys.executable, '-m', 'tokenformer_jax', 'laws', '--csv=losses.csv', '--json=laws.json'),
      *('--budget=1e22', '--parameters=1e9', '--tokens=1e10', '--pictures=pictures'),
      *('--target_loss=2.3', '--sizes=1e8,4e8,1.6e9,6.4e9', '--mixing=2.5', '--draws=50'),
      '--chain=1e8:1e9,4e8:1e10',
    ],
    cwd=tmp_path,
  )
  assert done.returncode == 0, done.stderr
  for text in (
    *('L(N, D) = E + A/N^alpha', 'best for 1e+22', 'the chain saves'),
    'the chain 1e+08 on 1e+09 tokens, 4e+08 on 1e+10 tokens: loss ',
  ):
    assert text in done.stdout, text
  content = json.loads((tmp_path / 'laws.json').read_text())
  assert content['alpha'] == pytest.approx(0.34, abs=0.02)
  assert content['mixing']['value'] == 2.5
  assert len(content['predictions']) == 2 and content['chain']['legs']
  names = {path.name for path in (tmp_path / 'pictures').iterdir()}
  assert names == {'loss.png', 'residuals.png'}
