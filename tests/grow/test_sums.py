"""Results of merge, extract and shrink compute the sum of the parts: forward passes of each.

Without a final norm, the logits of a model of one layer are linear in what its feed-forward part
adds, so differences of logits are the outputs of groups of its tokens.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from growing import (
  IDS,
  STEP,
  UPDATES,
  apply_steps,
  difference,
  grow,
  logits,
  merge,
  params_of,
  state_of,
)
from tiny import tiny_model

from tokenformer_jax.config import Config, GrowConfig, growth
from tokenformer_jax.grow import merging, subsets, verify
from tokenformer_jax.grow.steps.tokens import grown_model
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Meta

GROUP, JOIN = GrowConfig(), growth(method='zero_keys')
BASE = dataclasses.replace(tiny_model(layers=1), final_norm='none')
SPECIAL = grown_model(BASE, {'ffn': 64}, GROUP)
BORN = Ancestor('grow', '/base', STEP, BASE, GROUP, UPDATES)


@functools.cache
def _specialist(seed: int) -> dict:
  """The base with another group of 16 tokens, drawn with this seed."""
  state = grow(state_of(BASE), BASE, SPECIAL, GROUP)
  drawn = params_of(SPECIAL, seed)['blocks']['ffn']
  ffn = {
    name: array.at[:, 48:].set(drawn[name][:, 48:])
    for name, array in state['params']['blocks']['ffn'].items()
  }
  return _with_ffn(state, ffn)


def _with_ffn(state: dict, ffn: dict) -> dict:
  params = state['params']
  return {**state, 'params': {**params, 'blocks': {**params['blocks'], 'ffn': ffn}}}


def _logits(model, state: dict) -> np.ndarray:
  return logits(model, state['params'])


def _added(seed: int) -> tuple[dict, Meta]:
  """The extracted group of a specialist, and the description of its checkpoint."""
  tokens = subsets.extract(_specialist(seed)['params'], SPECIAL, BASE)
  return tokens, Meta(STEP, Config(model=SPECIAL), {}, (BORN,), 'added_tokens', updates=UPDATES)


@pytest.mark.slow
def test_two_specialists_merge_into_the_sum_of_what_each_added():
  base, state, model = _logits(BASE, state_of(BASE)), state_of(BASE), BASE
  want = base
  for seed in (3, 4):
    tokens, meta = _added(seed)
    after = merging.merged_model(model, meta, GROUP)
    state, model = merge(state, tokens, model, after), after
    want = want + _logits(SPECIAL, _specialist(seed)) - base
  assert difference(want, base) > 0.1, 'the specialists add nothing'
  assert difference(_logits(model, state), want) < 1e-5, 'not the sum of what each adds'


@pytest.mark.slow
def test_an_extracted_group_computes_what_it_adds():
  tokens, _ = _added(3)
  alone = grown_model(BASE, {'ffn': 16}, growth(method='zero_keys', scale='resize'))
  only = _with_ffn(state_of(BASE), tokens['blocks']['ffn'])
  silent = _with_ffn(only, jax.tree.map(np.zeros_like, tokens['blocks']['ffn']))
  got = _logits(alone, only) - _logits(alone, silent)
  want = _logits(SPECIAL, _specialist(3)) - _logits(BASE, state_of(BASE))
  assert difference(got, want) < 1e-5, 'the extracted tokens compute something else'


@pytest.mark.slow
def test_a_shrunken_model_computes_as_if_the_others_had_zero_keys():
  """A key of zero has a score of zero, which enters neither the norm nor the output."""
  after = grown_model(BASE, {'ffn': 30}, JOIN)
  state = state_of(BASE)
  steps = subsets.shrink(state['params'], verify.exact_task(Config(), BASE), after, IDS)
  shrunken = apply_steps(state, BASE, steps)
  ffn = state['params']['blocks']['ffn']
  kept = np.isin(ffn['keys'][0, :, 0], shrunken['params']['blocks']['ffn']['keys'][0, :, 0])
  assert kept.sum() == 30
  dropped = _with_ffn(state, {**ffn, 'keys': np.where(kept[:, None], ffn['keys'], 0)})
  assert difference(_logits(BASE, dropped), _logits(BASE, state)) > 1e-3, 'nothing was dropped'
  assert difference(_logits(after, shrunken), _logits(BASE, dropped)) < 1e-5
