"""Runs on pairs raise the margin of chosen answers, resume bit for bit, and are evaluated alike."""

import json

import numpy as np
import pytest
import tiny_run
from outcomes import assert_same, losses

import tokenformer_jax
from tokenformer_jax.runs import batches

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def root(tmp_path_factory, one_device_in_module):
  return tmp_path_factory.mktemp('preference_runs')


@pytest.fixture(scope='module')
def pairs(root):
  rng, rows = np.random.default_rng(0), []
  for _ in range(60):
    question = ''.join(rng.choice(list('abcdefgh'), 5))
    rows.append({'prompt': question, 'chosen': f'{question} yes', 'rejected': f'no {question}'})
  (root / 'pairs.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  return {'source': f'files:{root}/pairs.jsonl', 'rows': 'preference'}


@pytest.fixture(scope='module')
def base(root):
  source = tiny_run.write_corpus(root / 'texts')
  changes = {'train__steps': 5, 'data__sequence_length': 64, 'model__pattern': 'layer'}
  return tokenformer_jax.train(tiny_run.config(source, root / 'cache', **changes), root / 'base')


OPTIM = {'learning_rate': 1e-2, 'warmup_steps': 2, 'new_token_warmup': 2}


def _tuned(base, pairs, workdir, *stops, **changes):
  run = base.grow(workdir, {'qkv': 48, 'proj': 48, 'ffn': 96}, step='restart')
  optim = {**OPTIM, 'old_tokens': 'freeze', 'schedule': 'constant'}
  for steps in stops:
    run = run.train(steps, data=pairs, optim=optim, **changes)
  return run


def test_a_group_learns_the_preference_and_resumes_bit_for_bit(root, base, pairs):
  whole = _tuned(base, pairs, root / 'whole', 20)
  parts = _tuned(base, pairs, root / 'parts', 8, 20)
  assert_same(parts.parameters, whole.parameters, 'a resumed run differs')
  margins = losses(root / 'whole', 'eval/reward_margin')
  np.testing.assert_allclose(margins[0], 0, atol=1e-4)
  assert margins[20] > 0.2
  assert losses(root / 'whole', 'eval/accuracy')[20] == 1
  figures = whole.evaluate()
  assert figures['reward_margin'] == pytest.approx(margins[20], rel=1e-5)
  of_base, of_step = base.config.data.units_per_step, whole.config.data.units_per_step
  assert of_step == 2 * of_base, 'a step has the tokens of both answers'
  tokens = 5 * of_base + 20 * of_step
  assert batches.tokens_at_checkpoint(whole.meta) == tokens
  restored = whole.remove(root / 'restored')
  assert restored.meta.lineage[-1].tokens == tokens
  assert_same(restored.parameters, base.parameters, 'the reference changed')


def test_a_copy_of_the_base_is_a_reference_for_all_parameters(root, base, pairs):
  config = tiny_run.config(
    pairs['source'],
    root / 'cache',
    **{'data__rows': 'preference', 'data__sequence_length': 64, 'model__pattern': 'layer'},
    **{'init_from': base.source, 'distill__teacher': base.source, 'grow__step': 'restart'},
    **{f'optim__{key}': value for key, value in OPTIM.items()},
  )
  run = tokenformer_jax.train(config, root / 'all')
  margins = losses(root / 'all', 'eval/reward_margin')
  assert margins[20] > 0.2
  assert run.evaluate()['reward_margin'] == pytest.approx(margins[20], rel=1e-5)
