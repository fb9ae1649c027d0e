"""The runs of a family: their order, steps and FLOPs, by numbers computed by hand."""

import dataclasses

import pytest
import tiny_run

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import WSDSchedule, resolve
from tokenformer_jax.errors import UserError
from tokenformer_jax.family import jobs as jobs_lib
from tokenformer_jax.family.jobs import Family

STEP = 256  # tokens of a batch: 8 sequences of 32
TOKENS = 200 * STEP
# Of two layers: three projections of 32 tokens for queries, keys and values, one for the output,
# and 64 tokens of the feed-forward part. A token has a key and a value of 32 numbers, and a number
# costs six FLOPs.
FLOPS_OF_TOKENS = 6 * 2 * (3 * 32 + 32 + 64) * 64


@pytest.fixture
def config(tmp_path):
  return tiny_run.config('files:corpus', tmp_path / 'cache')


def _family(method, **changes):
  return dataclasses.replace(Family((1, 2, 4), TOKENS, method), **changes)


def _costs(config):
  """Return the FLOPs of a token of each size from scratch."""
  jobs = jobs_lib.list_jobs(config, _family('apart'), 'out')
  return {job.factor: job.size.flops_per_token for job in jobs}


def _total(jobs):
  return sum(job.flops for job in jobs)


def _total_alone(jobs, factor):
  return _total(jobs_lib.needed(jobs, factor))


def _run(job):
  return job.name, job.flops


def test_sizes_apart_differ_in_their_parameter_tokens(config):
  cost = _costs(config)
  assert cost[2] - cost[1] == FLOPS_OF_TOKENS and cost[4] - cost[2] == 2 * FLOPS_OF_TOKENS
  jobs = jobs_lib.list_jobs(config, _family('apart'), 'out')
  assert _total(jobs) == TOKENS * sum(cost.values())
  assert [*map(_run, jobs_lib.list_apart(config, _family('elastic')))] == [*map(_run, jobs)]
  assert [job.name for job in jobs] == ['scratch/size_1', 'scratch/size_2', 'scratch/size_4']
  assert {job.config.optim.schedule.kind for job in jobs} == {'wsd'}
  rate = config.optim.learning_rate
  assert [job.config.optim.learning_rate for job in jobs] == pytest.approx(
    [rate, rate * 2**-0.75, rate * 4**-0.75], rel=1e-5
  )


def test_bottom_up_grows_one_trunk_and_finishes_each_size(config):
  jobs = jobs_lib.list_jobs(config, _family('bottom_up'), 'out')
  shown = [(job.name, job.stage, job.first, job.config.train.steps) for job in jobs]
  assert shown == [
    ('bottom_up/size_1/trunk', 'trunk', 0, 75),
    ('bottom_up/size_1/final', 'branch', 75, 200),
    ('bottom_up/size_2/trunk', 'grow', 75, 150),
    ('bottom_up/size_2/final', 'branch', 150, 200),
    ('bottom_up/size_4/final', 'grow', 150, 200),
  ]
  assert [job.config.init_from for job in jobs] == [
    '',
    'out/bottom_up/size_1/trunk@75',
    'out/bottom_up/size_1/trunk@75',
    'out/bottom_up/size_2/trunk@150',
    'out/bottom_up/size_2/trunk@150',
  ]
  decays = [(job.config.optim.schedule.kind, job.config.train.decay_from) for job in jobs]
  stable, decay = ('constant', 0), ('wsd', 160)
  assert decays == [stable, decay, stable, decay, decay]
  cost = _costs(config)
  assert _total(jobs) == STEP * (200 * cost[1] + 125 * cost[2] + 50 * cost[4])
  assert _total_alone(jobs, 1) == STEP * 200 * cost[1]
  assert _total_alone(jobs, 2) == STEP * (75 * cost[1] + 125 * cost[2])
  assert _total_alone(jobs, 4) == STEP * (75 * cost[1] + 75 * cost[2] + 50 * cost[4])


def test_growth_and_elastic_training_have_a_group_for_each_size(config):
  for method in ('bottom_up', 'elastic'):
    jobs = jobs_lib.list_jobs(config, _family(method), 'out')
    (whole,) = (job for job in jobs if job.final and job.factor == 4)
    groups = config_lib.pattentions(whole.config.model)['qkv'].groups
    assert [(group.tokens, group.reference) for group in groups] == [
      (32, 32),
      (32, 32),
      (64, 64),
    ], method


def test_top_down_learns_from_the_largest_and_counts_the_teacher(config):
  jobs = jobs_lib.list_jobs(config, _family('top_down'), 'out')
  shown = [(job.name, job.stage, job.steps) for job in jobs]
  assert shown == [
    ('scratch/size_4', 'scratch', 200),
    ('top_down/size_2/shrunk', 'shrink', 0),
    ('top_down/size_2/final', 'distill', 50),
    ('top_down/size_1/shrunk', 'shrink', 0),
    ('top_down/size_1/final', 'distill', 50),
  ]
  assert jobs[1].action.source == 'scratch/size_4@200'
  assert jobs[1].action.arguments['param_tokens'] == {'qkv': 64, 'proj': 64, 'ffn': 128}
  student = jobs[2].config
  assert student.init_from == 'out/top_down/size_2/shrunk@0'
  assert student.distill.teacher == 'out/scratch/size_4@200'
  apart = {job.factor: job for job in jobs_lib.list_jobs(config, _family('apart'), 'out')}
  assert student.model == apart[2].config.model, 'it is another model than from scratch'
  cost = _costs(config)
  students = 50 * (cost[2] + cost[1]) + 100 * cost[4] / 3  # A forward pass is a third of a step.
  assert _total(jobs) == pytest.approx(STEP * (200 * cost[4] + students))
  alone = _family('top_down', distill_weight=0.0)
  jobs = jobs_lib.list_jobs(config, alone, 'out')
  assert _total(jobs) == STEP * (200 * cost[4] + 50 * (cost[2] + cost[1]))
  assert not jobs[2].config.distill.teacher


def test_elastic_is_one_run_with_prefixes_in_a_quarter_of_the_rows(config):
  jobs = jobs_lib.list_jobs(config, _family('elastic'), 'out')
  shown = [(job.name, job.stage, job.first, job.config.train.steps) for job in jobs]
  assert shown == [
    ('elastic/size_4', 'elastic', 0, 200),
    ('elastic/size_1', 'slice', 200, 200),
    ('elastic/size_2', 'slice', 200, 200),
  ]
  assert [job.config.train.nested_rows for job in jobs] == [8, 0, 0]
  assert [job.action.arguments for job in jobs[1:]] == [{'groups': 1}, {'groups': 2}]
  cost = _costs(config)
  assert _total(jobs) == pytest.approx(STEP * 200 * (cost[1] + cost[2] + 6 * cost[4]) / 8)
  assert _total_alone(jobs, 1) == _total(jobs), 'a prefix needs the whole run'


def test_layers_grow_too(config):
  family = _family('bottom_up', sizes=(1, 2), scale='layers')
  jobs = jobs_lib.list_jobs(config, family, 'out')
  assert [job.config.model.depth for job in jobs] == [2, 2, 4]
  assert jobs[-1].config.init_from == 'out/bottom_up/size_1/trunk@150'


def test_the_last_growth_comes_before_a_long_decay(config):
  decays = dataclasses.replace(config.optim, schedule=WSDSchedule(decay_share=0.5))
  jobs = jobs_lib.list_jobs(dataclasses.replace(config, optim=decays), _family('bottom_up'), 'out')
  assert jobs[-1].first == 95


REFUSED = {
  'no rising sizes': ('apart', {'sizes': (2, 1)}, '--sizes has 1 after 2'),
  'one size': ('apart', {'sizes': (1,)}, 'a family has at least two'),
  'a part of a token': ('apart', {'sizes': (0.01, 1)}, '--sizes has 0.01, which makes 0.32 of qkv'),
  'too few tokens': ('apart', {'tokens': 5 * STEP}, 'within its warm-up of'),
  'layers from the top': ('top_down', {'scale': 'layers'}, '--scale=layers multiplies something'),
  'one growth too few': ('bottom_up', {'grow_at': (0.5,)}, '3 sizes have 2 growths'),
  'growths that fall': ('bottom_up', {'grow_at': (0.5, 0.4)}, 'the growth before ends at step 100'),
  'a growth in the warm-up': ('bottom_up', {'grow_at': (0.01, 0.4)}, 'the warm-up ends at step 5'),
  'a growth in the decay': ('bottom_up', {'grow_at': (0.5, 0.8)}, 'decays from step 160'),
  'more prefixes than rows': ('elastic', {'sizes': (1, 2, 3, 4)}, 'of every 12 rows, and'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_families_that_cannot_be_made_are_refused(name, config):
  method, changes, message = REFUSED[name]
  with pytest.raises(UserError, match=message):
    jobs_lib.list_jobs(config, _family(method, **changes), 'out')


@pytest.mark.parametrize(
  ('method', 'changes', 'message'),
  [
    ('apart', {'init_from': 'runs/other'}, 'config.init_from'),
    ('apart', {'distill': {'teacher': 'runs/other'}}, 'a family names its own teachers'),
    ('apart', {'grow': {'place': 'behind'}}, 'effect only with --method=bottom_up'),
    ('bottom_up', {'grow': {'step': 'restart'}}, 'config.grow.step has no effect here'),
    ('apart', {'train': {'nested_rows': 8}}, 'config.train.nested_rows'),
  ],
)
def test_configs_that_are_no_base_of_a_family_are_refused(method, changes, message, config):
  with pytest.raises(UserError, match=message):
    jobs_lib.list_jobs(resolve(changes, base=config), _family(method), 'out')
