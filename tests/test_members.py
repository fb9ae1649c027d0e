"""A member of experiments/members.py is a run of `train`."""

import itertools
import math
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from tokenformer_jax.config import GrowConfig
from tokenformer_jax.grow import state as grow_state
from tokenformer_jax.runs import metrics
from tokenformer_jax.training import loop, sizes

sys.path.append(str(Path(__file__).parents[1] / 'experiments'))

import family_ways
import members
import mixing
import mixing_family
import mixing_methods
import mixing_prediction
import mixing_report
import recipes
from member_edits import EDITS
from member_runs import Rate, Run, Text

GROWN, LAST, SEED = 12, 24, 3  # steps
ALL = {'optim__schedule': 'wsd', 'optim__schedule__final_fraction': 0.0, 'dtype': 'float32'}
CONSTANT = {'optim__schedule': 'constant', 'optim__schedule__final_fraction': 0.1}
ALL |= {'train__log_every': 1, 'train__seed': SEED, 'train__eval_batches': 4}
LARGE = {
  'model__pattern': 'layer*3',
  'model__layer__mixer__qkv__groups': '32*2',
  'model__layer__mixer__proj__groups': '32*2',
  'model__layer__ffn__groups': '64*2',
  'model__layer__mixer__qkv__tokens': 64,
  'model__layer__mixer__proj__tokens': 64,
  'model__layer__ffn__tokens': 128,
  'optim__new_token_warmup': 6,
}


def _losses(workdir, key='train/loss'):
  return [line[key] for line in metrics.read(workdir) if key in line]


@pytest.mark.slow
@pytest.mark.parametrize('at_once', [False, True])
def test_members_are_runs(at_once, make, tmp_path, monkeypatch):
  """A run, its growth and a decay branch, among members with other seeds, rates and teachers."""
  if at_once:  # as on accelerators
    monkeypatch.setattr(members, '_of_members', jax.vmap)
  small = make(**ALL, train__steps=GROWN, train__decay_from=GROWN - 1)
  large = {**ALL, **LARGE, 'train__steps': LAST, 'train__decay_from': LAST - 6}
  grown = make(**large, init_from=f'{tmp_path}/small@{GROWN}')
  constant = make(**{**ALL, **CONSTANT}, train__steps=GROWN)
  loop.train(constant, tmp_path / 'small')
  loop.train(grown, tmp_path / 'large')
  teacher = f'{tmp_path}/small@{GROWN}'
  taught = make(**large, init_from=teacher, distill__teacher=teacher)
  loop.train(taught, tmp_path / 'taught')

  text = Text.of(small, range(SEED + 1), LAST * 8)
  text.write(tmp_path / 'text.npz')
  text = Text.read(tmp_path / 'text.npz')
  programs = {
    'small': members.Program(small, text, slots=3, chunk=6),
    'large': members.Program(make(**large), text, slots=2, chunk=6),
    'taught': members.Program(make(**large), text, slots=2, chunk=6, teacher=constant),
  }
  rate = Rate(3e-3, warmup=5)
  later = Rate(3e-3, 0, GROWN, LAST - 6, LAST, new_warmup=6)
  how = GrowConfig()
  runs = [
    Run('other', 'small', 0, 0, 18, Rate(1e-2), decay=0.3),
    Run('base', 'small', SEED, 0, 18, rate, keep=(GROWN,)),
    Run('grown', 'large', SEED, GROWN, LAST, later, begin=('base', GROWN), grow=how),
    Run('taught', 'taught', SEED, GROWN, LAST, later, begin=('base', GROWN), grow=how),
    Run('scratch', 'large', 1, 0, LAST, rate),
    Run('behind', 'large', SEED, GROWN, LAST, later, begin=('base', GROWN), grow=how),
  ]
  records = {}
  work = members.Work(programs, lambda r: records.update({r['name']: r}), set(), time.time() + 600)
  work.make(runs)
  assert sorted(records) == sorted(run.name for run in runs)
  bits = math.log(2) * text.bytes_per_token  # of a token
  for name, workdir in (('base', 'small'), ('grown', 'large'), ('taught', 'taught')):
    expected = np.array(_losses(tmp_path / workdir)).reshape(-1, 6).mean(axis=1)
    found = np.array(records[name]['curve'][: len(expected)]) * bits
    np.testing.assert_allclose(found, expected, atol=1e-4)
  for name, workdir in (('grown', 'large'), ('taught', 'taught')):
    final = _losses(tmp_path / workdir, 'eval/loss')[-1]
    assert abs(records[name]['loss'] * bits - final) < 1e-4
  assert abs(records['taught']['loss'] - records['grown']['loss']) > 1e-4
  assert records['behind']['loss'] == records['grown']['loss']
  assert records['other']['loss'] != records['base']['loss']


def test_rate():
  rate = Rate(1.0, warmup=4, decay_from=6, end=10, new=2, new_warmup=1, layers=0.5)
  found = rate.by_age(0, 10)
  expected = np.array([0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25])
  np.testing.assert_allclose(found[:, 0], expected)
  np.testing.assert_allclose(found[:, 1], expected / 2)
  np.testing.assert_allclose(found[1:, 2], expected[1:])
  np.testing.assert_allclose(rate.by_age(3, 5), found[3:5])


def test_every_planned_run_begins_with_a_state_that_is_kept():
  runs = mixing.runs_of(list(mixing.PARTS), list(recipes.SCALES), recipes.SEEDS)
  by_name = {run.name: run for run in runs}
  assert len(by_name) == len(runs) > 1000
  for run in runs:
    chunk = recipes.SCALES[run.shape.split()[0]].chunk
    assert run.first % (chunk // 2) == 0 and run.first < run.last
    if run.begin:
      source, step = run.begin
      assert step in by_name[source].keep and step <= by_name[source].last
      assert run.grow or run.shape == by_name[source].shape


@pytest.mark.parametrize('name', recipes.RECIPES)
def test_every_recipe_grows_between_its_shapes(name):
  recipe = recipes.RECIPES[name]
  shapes = (recipe.trunk.shape, *recipe.between, recipe.shape)
  models = [sizes.fill_in(recipes.config(f'tiny {shape} adamw')).model for shape in shapes]
  for before, after in itertools.pairwise(models):
    grow_state.check(before, after, recipe.grow)
  assert (recipe.small[0] == 't') == (models[-1].layer.ffn.kind == 'mlp')


def test_runs_that_have_ended_are_made_again_only_for_others():
  runs = mixing.runs_of(['frontier'], ['tiny'], (0,), rates=(1.0,), lengths=(10, 20))
  trunk, short, long, *_ = runs
  assert mixing.unfinished(runs, set()) == runs
  left = mixing.unfinished(runs, {run.name for run in runs} - {short.name})
  assert [run.name for run in left] == [trunk.name, short.name]
  assert left[0].last == short.first < trunk.last and left[0].keep == (short.first,)
  assert mixing.unfinished(runs, {run.name for run in runs}) == []
  assert mixing.unfinished(runs, {short.name, long.name})[0] == trunk


def test_arms_at_another_length():
  runs = mixing.runs_of(['recipes'], ['small'], (0,), ['layers halved'], main=20)
  grown = [run for run in runs if 'layers halved' in run.name]
  assert grown and {run.last for run in grown} == {recipes.SCALES['small'].steps(20)}
  rows = _rows('small', 'layers halved', 20, [2.1], point=0.5)
  assert mixing_report.Runs('small', 'adamw', rows).main == 20
  assert mixing_report.Runs('small', 'adamw', []).main == 60


def test_the_committed_runs_give_the_tables():
  folder = Path(mixing.__file__).parent
  rows = mixing_report.read(folder / 'mixing_runs.csv')
  runs = mixing_report.Runs('small', 'adamw', [row for row in rows if row.scale == 'small'])
  found = {point: mixing_report.grown(runs, 'default', 60, point) for point in recipes.POINTS}
  assert found[0.25].closure > found[0.5].closure > found[0.75].closure > 0.5
  tuned = mixing_report.grown(runs, 'default', 60, 0.25, tuned=True)
  assert tuned.saving < found[0.25].saving
  low, high = tuned.saving_interval
  assert low < tuned.saving < high


def test_equal_lengths_lie_on_the_frontier():
  lengths, losses = np.array([20.0, 40, 80]), np.array([2.2, 2.0, 1.9])
  for loss, length in ((2.0, 40), (2.1, 20 * 2**0.5), (1.85, 80 * 2**0.5), (2.3, 20 / 2**0.5)):
    assert mixing_report.equal_length(lengths, losses, loss) == pytest.approx(length)


@pytest.mark.slow
def test_the_power_of_the_share_holds_at_other_scales_and_lengths():
  """The figures in docs/growth_trials.md."""
  folder = Path(mixing.__file__).parent
  means = mixing_methods.read(folder / 'growth_means.csv')
  found = [
    one for scale in ('tiny', 'small', 'large') for one in mixing_methods.points(means, scale)
  ]
  (default,) = [one for one in found if (one.scale, one.arm) == ('small', mixing_methods.DEFAULT)]
  assert (default.share, default.length) == pytest.approx((0.52, 34), rel=0.02)
  assert default.closure[0] == pytest.approx(0.76, abs=0.005)
  known = mixing_methods.default_points(found, folder / 'mixing_runs.csv')
  first, other = known.groups == mixing_methods.FITTED, known.groups == 'tiny, one budget'
  errors = []
  for _, form, start in mixing_report.FORMS[:2]:
    theta = known.fit(form, start, first)
    errors.append(abs(known.errors(form, theta, other)).mean())
  assert errors[0] < 0.03 and errors[1] > 0.15


def _rows(scale, arm, length, losses, rate=1.0, point=0.0):
  return [
    mixing_report.Row(scale, 'adamw', arm, length, point, rate, seed, loss)
    for seed, loss in enumerate(losses)
  ]


def test_a_family_as_good_as_apart_saves_the_tokens_before_growth():
  rows = []
  for number, shape in enumerate(recipes.FAMILY):
    for length, more in ((10, 0.3), (20, 0.0), (40, -0.2)):
      rows += _rows('tiny', shape, length, [2.5 - 0.1 * number + more + 0.01 * s for s in range(3)])
    if number:
      losses = [2.5 - 0.1 * number + 0.01 * seed for seed in range(3)]
      rows += _rows('tiny', f'family {shape}', 20, losses, 0.5, 0.3)
  (family,) = mixing_family.families(mixing_report.Runs('tiny', 'adamw', rows))
  assert (family.rate, family.seeds) == (0.5, [0, 1, 2])
  assert family.needed(family.seeds) == pytest.approx([20] * 4)
  costs = [family.runs.flops(shape) for shape in recipes.FAMILY]
  starts = np.array(family.starts) / 20
  np.testing.assert_allclose(starts, recipes.FAMILIES['family'], atol=0.02)
  all_four, _, smallest = family.savings(family.seeds)
  assert all_four == pytest.approx(np.dot(starts, costs) / sum(costs))
  assert smallest == pytest.approx(0)
  # With the FLOPs of both, the smallest alone goes some way towards its loss at 40.
  more = 20 * (starts[1] + (1 - starts[1]) * costs[1] / costs[0])
  assert family.chain(1) == pytest.approx(more * costs[0])
  between = 2.51 - 0.2 * np.log(more / 20) / np.log(2)
  assert family.smaller(1, family.seeds) == pytest.approx(between)


def test_a_family_by_the_law_is_behind_by_what_is_left_of_each_gap():
  rows = []
  for number, shape in enumerate(recipes.FAMILY):
    rows += _rows('tiny', shape, 20, [2.5 - 0.1 * number] * 3)
  law = mixing_family.by_law(mixing_report.Runs('tiny', 'adamw', rows), 'late family')
  left = 0.1 * np.cumsum([0, 0.25**2.1, 0.5**2.1, 0.75**2.1])
  expected = 2.5 - 0.1 * np.arange(4) + left
  np.testing.assert_allclose([losses[2] for losses in law.losses], expected)


def test_a_way_as_good_as_apart_saves_its_flops(tmp_path):
  scratch, rows = [], []
  for number, (size, shape) in enumerate(zip(family_ways.SIZES, recipes.BY_TOKENS, strict=True)):
    for length, more in ((10, 0.3), (20, 0.0), (40, -0.2)):
      losses = [2.5 - 0.1 * number + more + 0.01 * seed for seed in range(3)]
      scratch += _rows('tiny', shape, length, losses)
    for rate, worse in ((1.0, 0.0), (2.0, 0.1)):
      for seed in range(3):
        loss = 2.5 - 0.1 * number + worse + 0.01 * seed
        rows.append(family_ways.Row('tiny', 'elastic', rate, seed, size, loss, 1e9 * number, 2e9))
  family_ways.write(rows, tmp_path / 'ways.csv')
  rows = family_ways.read(tmp_path / 'ways.csv')
  runs = mixing_report.Runs('tiny', 'adamw', scratch)
  best, other = family_ways.found(rows, runs, 'elastic')
  assert (best.rows[0].rate, other.rows[0].rate, best.seeds) == (1, 2, [0, 1, 2])
  assert best.needed(best.seeds) == pytest.approx([20] * 3)
  scale = recipes.SCALES['tiny']
  apart = [scale.steps(20) * recipes.TOKENS * runs.flops(shape) for shape in recipes.BY_TOKENS]
  everything, largest, smallest = best.savings(best.seeds)
  assert everything == pytest.approx(1 - 3e9 / sum(apart))
  assert (largest, smallest) == pytest.approx((1 - 2e9 / apart[-1], 1 - 2e9 / apart[0]))


def test_a_prediction_is_compared_with_the_runs(capsys):
  rows = _rows('small', '2x1', 20, [2.3, 2.31]) + _rows('small', '4x2', 20, [2.1, 2.11])
  rows += _rows('small', '4x2', 10, [2.2, 2.21])
  rows += _rows('small', 'default', 20, [2.1, 2.11], point=0.25)
  mixing_prediction.table(rows)
  _, _, line = capsys.readouterr().out.strip().splitlines()
  runs = mixing_report.Runs('small', 'adamw', rows)
  saved = mixing_report.percent(1 - runs.cost('default', 20, 0.25) / 20)
  assert line.startswith('| small | 0.25 | 1.00') and f'| {saved} (' in line
  assert mixing_prediction.overlap((0, 1), (1, 2)) and not mixing_prediction.overlap((0, 1), (2, 3))


def test_keys_by_gradient_are_where_values_would_move():
  """The first new token has the score with the largest gradient; the second has its opposite."""
  keys = jax.random.normal(jax.random.key(0), (2, 6, 4))
  gradients = np.zeros((2, 6, 4), np.float32)
  gradients[:, 0, 0], gradients[:, 2, 1] = 0.5, 2.0  # of the old tokens 0 and 2
  mean = {'ffn': {'keys': keys, 'values': gradients}}
  state = {'params': {'ffn': {'keys': keys, 'values': keys}}}
  state['opt_state'] = (optax.ScaleByAdamState(np.int32(1), mean, mean),)
  is_new = np.zeros((2, 6, 1), np.float32)
  is_new[:, 3:], is_new[1] = 1, 1  # the second layer is new
  info = {'ffn': {'keys': types.SimpleNamespace(groups=(3, 3))}}
  grown = EDITS['gradient'](state, info, 0.1, {'ffn': {'keys': is_new}})
  found = np.asarray(grown['params']['ffn']['keys'])
  np.testing.assert_array_equal(found[0, :3], keys[0, :3])
  np.testing.assert_array_equal(found[1], keys[1])
  toward = 0.1 * 2 * keys[0, 2] / np.linalg.norm(keys[0, 2])
  np.testing.assert_allclose(found[0, 3] * np.sign(found[0, 3] @ toward), toward, rtol=1e-5)
  np.testing.assert_allclose(found[0, 4], -found[0, 3])
