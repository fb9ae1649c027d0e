"""The command prints laws with intervals, and lists what the data leave undetermined."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import synthetic
import tiny_run
import written_runs

from tokenformer_jax.cli import laws as command
from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import analysis, chains, formulas, law_figures, report
from tokenformer_jax.laws.analysis import Analysis
from tokenformer_jax.laws.fit import Fit
from tokenformer_jax.laws.points import Points
from tokenformer_jax.runs.checkpoint_meta import Batches, Seen

THETA = np.array([np.log(406.4), np.log(410.7), np.log(1.69), 0.34, 0.28])


def _analysis(points: Points, theta: np.ndarray = THETA, spread: float = 0.01) -> Analysis:
  """Return an analysis without a fit, whose draws scatter around the published law."""
  draws = theta * (1 + spread * np.random.default_rng(0).normal(size=(200, 5)))
  law = formulas.values(theta)
  residuals = np.log(points.loss / formulas.loss(law, points.parameters, points.tokens))
  return Analysis(points, Fit(theta, 0.0, residuals, draws, (4500, 32)))


def _doubts(points: Points, **options) -> str:
  budget = options.pop('budget', None)
  return '\n'.join(analysis.doubts(_analysis(points, **options), budget))


GRID = synthetic.on_grid(6, 6, noise=0.002)


def _only(points: Points, which: np.ndarray) -> Points:
  return synthetic.points(points.parameters[which], points.tokens[which], points.loss[which])


def test_good_points_leave_no_doubt():
  assert _doubts(GRID) == ''


def test_the_report_doubts_points_of_few_sizes_or_on_a_diagonal():
  sizes = np.unique(GRID.parameters)
  assert '2 sizes' in _doubts(_only(GRID, GRID.parameters <= sizes[1]))
  narrow = dataclasses.replace(GRID, parameters=1e9 * (GRID.parameters / 1e9) ** 0.1)
  assert 'the sizes span a factor of 2, below 10' in _doubts(narrow)
  ratio = GRID.tokens / GRID.parameters
  diagonal = _only(GRID, (ratio > 10) & (ratio < 300))
  together = np.corrcoef(np.log(diagonal.parameters), np.log(diagonal.tokens))[0, 1]
  assert ('have a correlation' in _doubts(diagonal)) == (together > 0.95)


def test_the_report_doubts_a_fit_at_a_bound_or_with_bent_residuals():
  assert 'alpha may be anything' in _doubts(GRID, spread=0.4)
  limit = THETA.copy()
  limit[2] = -19.0
  assert 'E is not told from zero' in _doubts(GRID, theta=limit, spread=0.2)
  limit[2] = formulas.LIMIT[0]
  assert 'E is not told from zero' in _doubts(GRID, theta=limit, spread=0.0)
  bound = THETA.copy()
  bound[3] = 3.0
  assert 'lies at a bound' in _doubts(GRID, theta=bound)
  bent = dataclasses.replace(GRID, loss=GRID.loss * (GRID.parameters / 1e9) ** 0.02)
  assert 'of the residuals follow from N and D' in _doubts(bent)


def test_the_report_doubts_a_budget_far_from_the_runs():
  said = _doubts(GRID, budget=1e27)
  assert 'lies outside of the sizes' in said
  assert _doubts(GRID, budget=1e21) == ''


def test_doubts_about_a_prediction_and_a_chain_outside_of_the_runs():
  made = _analysis(GRID)
  run = analysis.predict(made, [(1e9, 2e13)])
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
  legs = [(1e9, 1e10), (1e11, 1e10)]
  chain = analysis.predict(made, legs, np.linspace(1.9, 2.1, 200))
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


def test_json_has_the_parameters_by_name():
  content = report.to_json(_analysis(GRID), ['a doubt'])
  for name, value in synthetic.PUBLISHED.items():
    assert content[name] == pytest.approx(value)
    low, high = content['intervals'][name]
    assert low < value < high


@pytest.mark.parametrize('points', [GRID, synthetic.scattered(40)])
def test_pictures_show_every_point(points):
  axes = law_figures.draw_losses(_analysis(points)).axes[0]
  drawn = sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() == 'o')
  drawn += sum(len(one.get_offsets()) for one in axes.collections[:1] if len(points) == 40)
  assert drawn == len(points)
  assert len(law_figures.draw_residuals(_analysis(points)).axes) == 3


@pytest.mark.slow
def test_the_command_fits_runs(monkeypatch, tmp_path, capsys):
  for width, steps in itertools.product((8, 24, 80), (50, 500, 5000)):
    path = tmp_path / f'law/{width}_{steps}'
    size = {'model__width': width, 'train__steps': steps, 'model__layer__mixer__heads': 1}
    loss = 1 + 40 * width**-0.7 + 30 * steps**-0.5 + 1e-3 * (steps % 7)  # near a law
    seen = Seen(8 * steps, 'abc', (Batches(0, 8, 32),))
    written_runs.finish(path, tiny_run.config('files:none', path, **size), loss, seen)
  monkeypatch.chdir(tmp_path)
  run = {'parameters': 3e4, 'tokens': 1e6, 'chain': ['1e4:1e5', '4e4:1e6']}
  chain = {'target_loss': 5.0, 'sizes': [1e4, 4e4, 1.6e5], 'mixing': 2.5}
  files = {'json': 'laws.json', 'pictures': 'pictures'}
  command.main('law', budget=1e12, draws=20, **run, **chain, **files)
  printed = capsys.readouterr().out
  for text in (
    *('9 runs of 3 sizes', 'L(N, D) = E + A/N^alpha', 'best for 1e+12', 'the chain saves'),
    'the chain 10,000 on 100,000 tokens, 40,000 on ',
  ):
    assert text in printed, text
  content = json.loads((tmp_path / 'laws.json').read_text())
  assert content['beta'] == pytest.approx(0.5, abs=0.05)
  assert content['mixing']['value'] == 2.5
  assert len(content['predictions']) == 2 and content['chain']['legs']
  names = {path.name for path in (tmp_path / 'pictures').iterdir()}
  assert names == {'loss.png', 'residuals.png'}
