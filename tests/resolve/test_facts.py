"""What a config leaves open is found once: groups, reference counts, and the facts of a run."""

import collections
import dataclasses
import sys

import pytest
import tiny_run
from written_runs import save_run

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import MLPConfig, growth

SOURCE = config_lib.with_references(config_lib.LMConfig())
TOKENS = SOURCE.layer.ffn.tokens
LARGER = 3 * TOKENS


def grown_ffn(method='group', model=SOURCE, **changes):
  """Returns the feed-forward part of a run that begins from a source with filled-in sizes."""
  ffn = dataclasses.replace(model.layer.ffn, tokens=LARGER, **changes)
  larger = dataclasses.replace(model, layer=dataclasses.replace(model.layer, ffn=ffn))
  return config_lib.with_references(larger, SOURCE, growth(method=method)).layer.ffn


@pytest.mark.parametrize('reference', [0, TOKENS], ids=['open', 'of the source'])
def test_larger_counts_make_a_group(reference):
  ffn = grown_ffn(reference=reference)
  assert str(ffn.groups) == f'({TOKENS}:{TOKENS}, {LARGER - TOKENS}:{LARGER - TOKENS})', (
    'a config made from that of the source does not grow by a group'
  )
  assert ffn.reference == 0


def test_values_of_the_config_have_precedence():
  ffn = grown_ffn(reference=0, groups=f'{TOKENS}*3')
  assert len(ffn.groups) == 3
  other = grown_ffn(reference=LARGER)
  assert (other.reference, len(other.groups)) == (LARGER, 1)


def test_without_a_group_the_scale_stays():
  ffn = grown_ffn('zero_keys')
  assert (ffn.reference, len(ffn.groups)) == (TOKENS, 1)


def test_first_tokens_beside_a_matrix_have_their_own_count():
  dense = SOURCE.map_layers(lambda _, layer: dataclasses.replace(layer, ffn=MLPConfig()))
  model = config_lib.grown_model(dense, {'ffn': 8, 'qkv': LARGER}, growth())
  is_open = dataclasses.replace(config_lib.pattentions(model)['ffn'].groups[0], reference=0)
  opened = config_lib.with_pattentions(model, {'ffn': config_lib.from_groups([is_open])})
  assert config_lib.with_references(opened, dense, growth()) == model


# The most calls while a run is prepared that has a teacher and continues from a checkpoint.
LIMITS = {
  'grow.plan.plan_growth': 1,
  'steps.last_growth.last_growth': 1,
  'model.params._define_model': 3,  # the run's, alone and in its task, and the teacher's
  'parallel.sharding.check_model': 2,  # the run's and the teacher's
  'resolve.lengths.order_changes': 2,  # before the data is read, and afterwards
  'resolve.facts.complete': 1,
  'data.tokenizers': 2,  # that of the checkpoint, and that of the store
}
MAKE_TOKENIZERS = ('from_json', 'load', 'train_bpe')


def _calls(act):
  """The calls of the package's functions while `act` runs, by module and name."""
  calls = collections.Counter()

  def count(frame, event, arg):
    del arg
    module, name = frame.f_globals.get('__name__', ''), frame.f_code.co_name
    if event == 'call' and module.startswith('tokenformer_jax.'):
      module = module.removeprefix('tokenformer_jax.')
      if module == 'data.tokenizers' and name in MAKE_TOKENIZERS:
        calls[module] += 1
      calls[f'{module}.{name}'] += 1

  sys.setprofile(count)
  try:
    act()
  finally:
    sys.setprofile(None)
  return calls


@pytest.mark.parametrize('tokenizer', ['bytes', 'bpe:280'])
@pytest.mark.parametrize('origin', ['of another run', 'its own'])
@pytest.mark.usefixtures('one_device')
def test_each_fact_is_found_once(make, tmp_path, origin, tokenizer):
  base = {'data__tokenizer': tokenizer, 'train__steps': 40}
  save_run(make(**base), tmp_path / 'small')
  base |= {'model__layer__ffn__tokens': 96, 'distill__teacher': str(tmp_path / 'small')}
  if origin == 'its own':
    config = make(**base)
    save_run(config, tmp_path / 'run')
  else:
    config = make(**base, init_from=str(tmp_path / 'small'), optim__old_tokens='freeze')
  calls = _calls(lambda: tiny_run.prepared(config, tmp_path / 'run'))
  assert calls['resolve.checks.check_after_data'] == 1
  often = {name: calls[name] for name, most in LIMITS.items() if calls[name] > most}
  assert not often, 'a fact is found again'
