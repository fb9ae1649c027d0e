"""The FLOPs of a run are those of all its stages, each at the size that the model had then."""

import dataclasses

import pytest

from tokenformer_jax.config import Config, DataConfig, GrowConfig, ModelConfig, with_token_counts
from tokenformer_jax.model.flops import step_flops
from tokenformer_jax.runs import spent_flops
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Meta

SMALL = ModelConfig(vocab_size=64)
LARGE = with_token_counts(SMALL, {'qkv': 512, 'proj': 512, 'ffn': 1024})
LARGEST = with_token_counts(SMALL, {'qkv': 1024, 'proj': 1024, 'ffn': 2048})
DATA = DataConfig(batch_size=4, sequence_length=32)


def _config(model: ModelConfig, **data) -> Config:
  return Config(model=model, data=dataclasses.replace(DATA, **data))


def _entry(model: ModelConfig, at: int, flops: float = 0, action: str = 'grow', **how):
  return Ancestor(action, '/runs/a', at, model, GrowConfig(**how), at, flops=flops)


def _meta(lineage, config: Config, step: int) -> Meta:
  return Meta(step, step, config, lineage, 'model', {}, {})


def test_a_run_that_has_not_grown_counts_its_steps():
  spent = spent_flops.of_run((), _config(SMALL))
  assert (spent.at(0), spent.at(7)) == (0, 7 * step_flops(_config(SMALL))) and not spent.assumed


@pytest.mark.parametrize(('how', 'begin'), [('keep', 10), ('restart', 0)])
def test_a_chain_records_what_each_stage_cost(how, begin):
  """The stages also differ in their batches, which the last config does not tell."""
  small, large = _config(SMALL, batch_size=8), _config(LARGE, sequence_length=64)
  first = _entry(SMALL, 10, spent_flops.of_checkpoint(_meta((), small, 10)), step=how)
  middle = _meta((first,), large, begin + 5)
  assert spent_flops.of_checkpoint(middle) == 10 * step_flops(small) + 5 * step_flops(large)
  second = _entry(LARGE, begin + 5, spent_flops.of_checkpoint(middle))
  spent = spent_flops.of_run((first, second), _config(LARGEST))
  want = spent_flops.of_checkpoint(middle) + 3 * step_flops(_config(LARGEST))
  assert spent.at(begin + 8) == want and not spent.assumed


def test_an_earlier_lineage_counts_at_its_sizes_and_says_so():
  lineage = (_entry(SMALL, 10), _entry(LARGE, 10, action='freeze'), _entry(LARGE, 15))
  spent = spent_flops.of_run(lineage, _config(LARGEST))
  sizes = [step_flops(_config(model)) for model in (SMALL, LARGE, LARGEST)]
  assert spent.at(18) == 10 * sizes[0] + 5 * sizes[1] + 3 * sizes[2] and spent.assumed
  meta = _meta(lineage, _config(LARGEST), 18)
  assert spent_flops.of_checkpoint(meta) == 0, 'what is assumed is passed on as a record'


def test_a_growth_of_a_model_without_training_assumes_nothing():
  assert not spent_flops.of_run((_entry(SMALL, 0),), _config(LARGE)).assumed
