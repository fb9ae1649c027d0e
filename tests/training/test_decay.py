"""One run at a constant rate gives a model of every length: branches that decay from it."""

import dataclasses
import shutil

import pytest
import tiny_run
from outcomes import assert_same, losses
from tiny_run import broken, train_on_one_device, trainer

from tokenformer_jax.errors import UserError
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.training import loop

pytestmark = pytest.mark.slow

STABLE = {
  'optim__schedule': 'constant',
  'train__steps': 12,
  'train__checkpoint_every': 4,
  'train__keep_checkpoints': 9,
  'train__log_every': 1,
}
DECAY = {**STABLE, 'optim__schedule': 'wsd', 'train__decay_from': 8, 'train__steps': 14}
BRANCH = {**DECAY, 'train__checkpoint_every': 3}


@pytest.fixture(scope='module')
def stable(source, tmp_path_factory):
  """A run of 12 steps at a constant rate, with checkpoints of the steps 4, 8 and 12."""
  root = tmp_path_factory.mktemp('stable')
  train_on_one_device(tiny_run.config(source, root / 'cache', **STABLE), root / 'run')
  return root / 'run'


def _branch(make, stable, step=8, **changes):
  return make(**{**BRANCH, **changes, 'init_from': f'{stable}@{step}'})


def test_a_branch_is_the_run_that_decays_from_there(make, tmp_path, one_device, stable):
  """From the start, from the checkpoint of the stable run, and in the place of its last steps."""
  whole = loop.train(make(**DECAY), tmp_path / 'whole')
  branch = loop.train(_branch(make, stable), tmp_path / 'branch')
  assert_same(branch, whole, 'a branch')
  assert losses(tmp_path / 'branch', 'train/loss') == {
    step: loss for step, loss in losses(tmp_path / 'whole', 'train/loss').items() if step > 8
  }, 'the branch does not see the batches that follow'

  again = broken(tmp_path / 'branch', tmp_path / 'again', 12)
  assert_same(loop.train(_branch(make, stable), again), whole, 'a resumed branch')
  meta = checkpoint.open_source(again).meta
  assert not meta.lineage, 'a branch counts as a growth'
  of_stable = checkpoint.open_source(stable).meta
  assert meta.run == of_stable.run != '', 'the tokens of a branch are not those of its run'

  place = broken(stable, tmp_path / 'place', 8)
  assert_same(loop.train(make(**DECAY), place), whole, 'in place')
  rates = losses(place, 'train/learning_rate')
  peak = rates[8]
  assert [rates[step] / peak for step in (9, 12, 14)] == pytest.approx([1, 0.55, 0.25])


def _sentence(config, workdir):
  with pytest.raises(UserError) as error:
    trainer(config, workdir)
  return str(error.value)


def test_a_decay_cannot_begin_in_the_past(make, tmp_path, one_device, stable):
  shutil.copytree(stable, tmp_path / 'place')
  said = _sentence(make(**BRANCH), tmp_path / 'place')
  assert said.startswith('config.train.decay_from is 8, but the checkpoint of step 12 in this work')


def test_a_decay_does_not_begin_in_the_warmup_after_a_growth(make, tmp_path, one_device, stable):
  changes = {'train__decay_from': 16, 'train__steps': 30, 'model__layer__ffn__tokens': 96}
  config = _branch(make, stable, step=12, **changes, optim__restart_schedule='yes')
  said = _sentence(config, tmp_path / 'early')
  assert 'is 16, which is inside the warm-up after the last growth, to update 17' in said
  optim = dataclasses.replace(config.optim, restart_schedule='')
  trainer(dataclasses.replace(config, optim=optim), tmp_path / 'fine').checkpoints.close()


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'train__steps': 8}, 'the run and its decay end at train.steps=8; raise'),
    ({'optim__warmup_steps': 9}, 'inside the warm-up of optim.warmup_steps=9; set it to 9 or more'),
  ],
)
def test_a_decay_that_does_not_fit_the_run_is_refused(make, changes, said):
  with pytest.raises(UserError) as error:
    make(**{**DECAY, **changes})
  assert said in str(error.value)
