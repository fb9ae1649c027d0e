"""Tied layers share arrays; untied, each run has a copy, and no output changes."""

import dataclasses

import jax
import numpy as np
import pytest
from grow_commands import grow as grow_command
from grow_commands import meta_of, write_run
from grow_commands import read as read_state
from growing import (
  DOUBLE,
  STEP,
  UPDATES,
  difference,
  grow,
  inexact,
  logits,
  loss_and_gradient,
  optimizer,
  params_of,
  state_of,
  trained,
)
from outcomes import assert_close, assert_same, paths
from test_optimizer_state import _state as filled_state
from tiny import tiny_model, two_kinds
from tiny_run import write_corpus

import tokenformer_jax
from tokenformer_jax.config import OPTIMIZERS, Config, GrowConfig, growth, matching
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import diff_table, plan, subsets
from tokenformer_jax.grow.steps import untie
from tokenformer_jax.model import flops
from tokenformer_jax.model.lm import define_lm, unstack
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Meta
from tokenformer_jax.steps import statistics

SLOW = pytest.mark.slow  # because of what is compiled
KEEP, GROUP, WHOLE = GrowConfig(), growth('group'), GrowConfig(place='whole_copies')


def _model(pattern, **changes):
  return dataclasses.replace(tiny_model(), pattern=pattern, **changes)


TIED, OWN = _model('layer layer^2'), _model('layer*3')


def test_tied_layers_have_the_parameters_of_one_and_the_flops_of_all():
  one = _model('layer*2')
  assert define_lm(TIED).count == define_lm(one).count, 'a run of tied layers has arrays'
  assert flops.train_flops(TIED, 16) == flops.train_flops(OWN, 16), 'a run has no FLOPs'


def test_a_row_of_layers_can_be_tied_and_a_part_of_a_parenthesis_cannot():
  rows = dataclasses.replace(two_kinds(), pattern='(local layer)^2')
  assert rows.depth == 4 and matching.untied(rows).pattern == '(local layer)*2'
  with pytest.raises(UserError, match=r"'\^' stands in the parenthesis"):
    _ = dataclasses.replace(rows, pattern='(local^2 layer)*2').repeats


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_untying_copies_parameters_and_divides_moments_by_the_uses(name):
  state = filled_state(name, TIED)
  new = grow(state, TIED, OWN, KEEP)
  assert_same(unstack(new['params'], OWN), unstack(state['params'], TIED), 'untied')

  def check(field, tree, before):
    def divided(info, array):
      return array if statistics.is_masked(array) else array / info.runs ** statistics.ORDERS[field]

    blocks = jax.tree.map(divided, define_lm(TIED).info, before)['blocks']
    for path, array in paths(tree['blocks']).items():
      parts = [paths(blocks[stack])[path] for stack in ('layer_0', 'layer_1', 'layer_1')]
      np.testing.assert_allclose(array, np.concatenate(parts), rtol=1e-6, err_msg=path)
    return tree

  statistics.map_state(check, lambda _, *counts: counts[0], new['opt_state'], state['opt_state'])
  fresh = jax.eval_shape(optimizer(OWN, OPTIMIZERS[name]()).init, new['params'])
  shapes = [jax.tree.map(lambda array: array.shape, one) for one in (new['opt_state'], fresh)]
  assert shapes[0] == shapes[1]


def test_an_own_head_is_the_embedding_and_both_have_half_of_its_mean():
  own = dataclasses.replace(TIED, tied_head=False)
  state = state_of(TIED)
  new = grow(state, TIED, own, KEEP)
  was, now = (one['opt_state'][0][1] for one in (state, new))
  for name in ('embedding', 'head'):
    assert_same(new['params'][name], state['params']['embedding'], name)
    assert_same(now.mu[name], was.mu['embedding'] / 2, f'the mean of {name}')
    assert_same(now.nu[name], was.nu['embedding'] / 4, f'the mean square of {name}')
  assert_same(now.mu['blocks'], was.mu['blocks'], 'means of layers')


_BORN = Ancestor('untie', '/runs/tied', STEP, TIED, KEEP, UPDATES)


@pytest.mark.parametrize('target', [OWN, dataclasses.replace(TIED, tied_head=False)])
@pytest.mark.parametrize('earlier', [(), (dataclasses.replace(_BORN, action='grow'),)])
def test_removing_names_the_run_before_an_untying(tmp_path, target, earlier):
  meta = Meta(STEP, Config(model=target), {}, (*earlier, _BORN), updates=UPDATES)
  with pytest.raises(UserError, match=f'untie, .*, added nothing .* go on from /runs/tied@{STEP}'):
    subsets.last_addition(meta, tmp_path)


@pytest.mark.parametrize('target', [OWN, dataclasses.replace(TIED, tied_head=False)])
def test_removing_names_the_run_before_a_growth_that_unties(tmp_path, target):
  born = dataclasses.replace(_BORN, action='grow')
  meta = Meta(STEP, Config(model=target), {}, (born,), updates=UPDATES)
  last = subsets.last_addition(meta, tmp_path)
  with pytest.raises(UserError, match=f'moves apart; go on from /runs/tied@{STEP}'):
    plan.plan_removal(last, target)


@pytest.mark.parametrize(
  ('source', 'target', 'config'),
  [('layer*3', 'layer^3', WHOLE), ('layer^2', 'layer^4', KEEP), ('layer*2', 'layer^2', KEEP)],
)
def test_a_growth_neither_ties_layers_nor_runs_them_more_often(source, target, config):
  with pytest.raises(UserError, match='ties layers that have arrays of their own, or runs'):
    plan.check(_model(source), _model(target), config)


def test_whole_copies_run_tied_layers_more_often_and_are_not_exact():
  source, target = _model('layer^2'), _model('layer^4')
  plan.check(source, target, WHOLE)
  assert 'copies of layers add once more' in inexact(source, target, WHOLE)


def test_nothing_to_untie_is_refused():
  with pytest.raises(UserError, match=r"nothing to untie: model.pattern is 'layer\*3'"):
    untie.wanted(OWN, 'layers')
  with pytest.raises(UserError, match='nothing to untie: the head has a matrix of its own'):
    untie.wanted(dataclasses.replace(OWN, tied_head=False), 'head')


def test_the_table_counts_layers_with_arrays_of_their_own():
  lines = diff_table.render(TIED, OWN, 16).splitlines()
  assert any(line.split()[-5:] == ['own', '2', '3', '×', '1.50'] for line in lines), lines


@SLOW
def test_the_gradient_of_tied_layers_is_the_sum_over_their_runs():
  params = params_of(TIED)
  own = grow({'params': params, 'opt_state': ()}, TIED, OWN, KEEP)['params']
  (loss, tied), (same, each) = loss_and_gradient(TIED)(params), loss_and_gradient(OWN)(own)
  assert_close(loss, same, 'the loss')
  summed = jax.tree.map(lambda array: array[1:].sum(0, keepdims=True), each['blocks'])
  assert_close(tied['blocks']['layer_1'], summed, 'the gradient')


@SLOW
def test_chains_of_growths_with_untied_layers_are_exact():
  """Add a group to the tied layers, untie with a group, untie the head, add layers; train each."""
  state, model = state_of(TIED), TIED
  larger = grown_model(TIED, DOUBLE, GROUP)
  chain = [
    larger,
    dataclasses.replace(grown_model(larger, {'ffn': 128}, GROUP), pattern=OWN.pattern),
  ]
  chain.append(dataclasses.replace(chain[-1], tied_head=False))
  chain.append(dataclasses.replace(chain[-1], pattern='layer*5'))
  for after in chain:
    assert inexact(model, after, GROUP) == ''
    new = grow(state, model, after, GROUP)
    want, got = (logits(m, s['params']) for m, s in ((model, state), (after, new)))
    assert difference(got, want) < 1e-5, f'{after.pattern} computes something else'
    state, model = trained(new, after, 1), after


@SLOW
def test_untied_layers_compute_the_same_bits():
  params = params_of(TIED)
  own = grow({'params': params, 'opt_state': ()}, TIED, OWN, KEEP)['params']
  np.testing.assert_array_equal(logits(OWN, own), logits(TIED, params))


@SLOW
def test_a_tied_run_trains_resumes_writes_untied_folders_and_is_untied(
  tmp_path, capsys, one_device
):
  """One run through the commands, because a step and a decoder are compiled for each model."""
  text = write_corpus(tmp_path / 'text')
  source = tmp_path / 'tied'
  write_run(source, text, tmp_path / 'cache', model__pattern='layer^2')
  run = tokenformer_jax.load(source)
  further = run.train(STEP + 2, workdir=tmp_path / 'further')
  assert further.config.model.pattern == 'layer^2'
  written = run.generate('a', length=8)
  grow_command(
    'untie', f'--source={source}', f'--target={tmp_path / "own"}', '--what=layers', '--dry_run'
  )
  grow_command('untie', f'--source={source}', f'--target={tmp_path / "own"}', '--what=layers')
  assert 'the logits differ by at most 0,' in ''.join(capsys.readouterr())
  entry = meta_of(tmp_path / 'own').lineage[-1]
  assert (entry.action, entry.model.pattern) == ('untie', 'layer^2')
  assert read_state(tmp_path / 'own')['params']['blocks']['ffn']['keys'].shape[0] == 2
  own = tokenformer_jax.load(tmp_path / 'own')
  assert own.generate('a', length=8) == written, 'the caches of runs are mixed'
  np.testing.assert_array_equal(own.logits('abc'), run.logits('abc'))
  own.train(STEP + 2, workdir=tmp_path / 'trained')
  run.to_hf(tmp_path / 'hub')
  back = tokenformer_jax.bring(tmp_path / 'hub', tmp_path / 'back')
  assert back.config.model.pattern == 'layer*2', 'a folder has tied layers'
  np.testing.assert_array_equal(back.logits('abc'), run.logits('abc'))
  assert [*run.usage('abc abc')] == [0, 1], 'a run of a layer is not counted'
