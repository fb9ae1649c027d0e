"""The FLOPs and tokens of a run are those of all its stages, each at its own size and batches."""

import dataclasses

import pytest

from tokenformer_jax.config import (
  Config,
  LMConfig,
  ModelConfig,
  TextConfig,
  growth,
  with_token_counts,
)
from tokenformer_jax.model.flops import step_flops
from tokenformer_jax.runs import batches
from tokenformer_jax.runs.checkpoint_meta import (
  Ancestor,
  Batches,
  Meta,
  Seen,
  from_json,
  to_json,
)

SMALL = LMConfig(vocab_size=64)
LARGE = with_token_counts(SMALL, {'qkv': 512, 'proj': 512, 'ffn': 1024})
LARGEST = with_token_counts(SMALL, {'qkv': 1024, 'proj': 1024, 'ffn': 2048})
DATA = TextConfig(batch_size=4, sequence_length=32)


def _config(model: ModelConfig, **data) -> Config:
  return Config(model=model, data=dataclasses.replace(DATA, **data))


def _entry(model: ModelConfig, at: int, flops: float = 0, action: str = 'grow', **how):
  return Ancestor(action, '/runs/a', at, model, growth(**how), at, flops=flops)


def _meta(lineage, config: Config, step: int) -> Meta:
  return Meta(step, config, {}, lineage)


def test_a_run_that_has_not_grown_counts_its_steps():
  config = _config(SMALL)
  spent = [batches.all_flops((), config, batches.of_run(None, DATA), step) for step in (0, 7)]
  assert spent == [0, 7 * step_flops(config)]


@pytest.mark.parametrize(('how', 'begin'), [('keep', 10), ('restart', 0)])
def test_a_chain_records_what_each_stage_cost(how, begin):
  """The stages also differ in their batches, which the last config does not tell."""
  small, large = _config(SMALL, batch_size=8), _config(LARGE, sequence_length=64)
  first = _entry(SMALL, 10, batches.flops_at_checkpoint(_meta((), small, 10)), step=how)
  middle = _meta((first,), large, begin + 5)
  assert batches.flops_at_checkpoint(middle) == 10 * step_flops(small) + 5 * step_flops(large)
  second = _entry(LARGE, begin + 5, batches.flops_at_checkpoint(middle))
  last = _meta((first, second), _config(LARGEST), begin + 8)
  want = batches.flops_at_checkpoint(middle) + 3 * step_flops(_config(LARGEST))
  assert batches.flops_at_checkpoint(last) == want


def test_batches_of_several_sizes_count_as_they_were():
  """5 steps of 8 samples, 3 of 16, and then 4 of longer ones."""
  history = ()
  for step, changes in ((0, {'batch_size': 8}), (5, {'batch_size': 16}), (5, {'batch_size': 16})):
    history = batches.continued(history, step, dataclasses.replace(DATA, **changes))
  history = batches.continued(history, 8, dataclasses.replace(DATA, sequence_length=64))
  assert history == (Batches(0, 8, 32), Batches(5, 16, 32), Batches(8, 4, 64))
  assert [batches.samples(history, at) for at in (0, 3, 5, 8, 10)] == [0, 24, 40, 88, 96]
  assert batches.tokens(history, 10) == 88 * 32 + 8 * 64
  spent = batches.all_flops((), _config(SMALL, sequence_length=64), history, 10)
  long = 2 * step_flops(_config(SMALL, sequence_length=64))
  assert spent == 22 * step_flops(_config(SMALL)) + long
  again = batches.continued(history, 6, DATA)
  assert again == (*history[:2], Batches(6, 4, 32)), 'from an earlier checkpoint on'


def test_both_answers_of_a_pair_count():
  """5 steps of 4 sequences of text, and then steps of 4 pairs."""
  pairs = _config(SMALL, rows='preference')
  assert pairs.data.units_per_step == 2 * DATA.units_per_step == 2 * 4 * 32
  history = batches.continued(batches.of_run(None, DATA), 5, pairs.data)
  assert history == (Batches(0, 4, 32), Batches(5, 4, 32, 2))
  assert batches.samples(history, 15) == 15 * 4
  assert batches.tokens(history, 15) == (5 + 10 * 2) * 4 * 32
  spent = batches.all_flops((), pairs, history, 15)
  assert spent == 5 * step_flops(_config(SMALL)) + 10 * step_flops(pairs)


def test_a_checkpoint_without_the_number_of_sequences_has_those_of_its_config():
  meta = Meta(5, _config(SMALL, rows='preference'), {}, seen=Seen(20, '', (Batches(0, 4, 32, 2),)))
  stored = to_json(meta)
  assert batches.tokens_at_checkpoint(from_json(stored, {}, 'here')) == 5 * 2 * 4 * 32
  del stored['seen']['batches'][0]['sequences']
  assert batches.tokens_at_checkpoint(from_json(stored, {}, 'here')) == 5 * 2 * 4 * 32


def test_a_model_without_training_has_the_batches_of_its_config():
  assert batches.history(_meta((), _config(SMALL), 0)) == (Batches(0, 4, 32),)
  assert batches.flops_at_checkpoint(_meta((), _config(SMALL), 0)) == 0


@pytest.mark.parametrize(('how', 'since'), [('keep', 5), ('restart', 15)])
def test_tokens_before_a_growth_count_once(how, since):
  entry = dataclasses.replace(_entry(SMALL, 10, step=how), tokens=7000.0)
  assert batches.all_tokens((entry,), (Batches(0, 4, 32),), 15) == 7000 + since * 4 * 32
