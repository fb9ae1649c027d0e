"""A whole run of each architecture: trained, resumed, read, measured, grown."""

import shutil

import jax
import numpy as np
import pytest
import tiny_run
from compilations import compilations
from outcomes import assert_same

import tokenformer_jax
from tokenformer_jax import config as config_lib
from tokenformer_jax.convert import released_torch
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import metrics
from tokenformer_jax.training import loop

STEPS, BROKEN_OFF = 6, 3
NONE = {'kind': 'none'}
LAYER, MIXER = 'model.layer', 'model.layer.mixer'
_FIRST = {'mixer': {'value': {'kind': 'pattention', 'tokens': 32}, 'value_skip': True}}
_EXPERTS = {
  'kind': 'experts',
  'count': 4,
  'expert': {'kind': 'pattention', 'tokens': 32},
  'shared': {'kind': 'pattention', 'tokens': 64},
}
# As changes of the config of `tiny_run`.
RUNS = {
  'simplified': {
    f'{LAYER}.wiring.kind': 'parallel',
    f'{LAYER}.norm': 'rms',
    f'{MIXER}.shaped': True,
    f'{MIXER}.value': NONE,
    f'{MIXER}.proj': NONE,
    'model.pattern': 'first layer',
    'model.variants.first': _FIRST,
  },
  'hybrid': {
    'model.pattern': 'local*2 layer',
    'model.variants.local': {
      'mixer': {'window': 8, 'positions': {'kind': 'rotary'}, 'length_scale': NONE}
    },
    f'{MIXER}.positions.kind': 'none',
    f'{MIXER}.length_scale.kind': 'position',
  },
  'gated units': {
    f'{MIXER}.kind': 'gated_unit',
    f'{MIXER}.uvq.tokens': 32,
    f'{MIXER}.out.tokens': 40,
    f'{MIXER}.head_width': 16,
    f'{LAYER}.wiring.kind': 'post_norm',
    f'{LAYER}.norm': 'rms_plain',
    f'{LAYER}.ffn.kind': 'none',
    'model.embedding_norm': 'rms_plain',
    'model.final_norm': 'none',
  },
  'linear': {f'{MIXER}.kind': 'linear', f'{MIXER}.positions.fraction': 1.0},
  'tied': {'model.pattern': 'layer^2 moe^2', 'model.variants.moe': {'ffn': _EXPERTS}},
}
_CASES = [
  'hybrid',
  *(pytest.param(name, marks=pytest.mark.full_size) for name in RUNS if name != 'hybrid'),
]
pytestmark = [pytest.mark.slow, pytest.mark.parametrize('name', _CASES)]


def _config(name: str, source: str, cache, **changes) -> config_lib.Config:
  dotted = {key.replace('.', '__'): value for key, value in RUNS[name].items()}
  if name == 'gated units':  # Its projections have other names than those of `tiny_run`.
    dotted |= {'model__layer__mixer__qkv__tokens': 128, 'model__layer__mixer__proj__tokens': 128}
    dotted |= {'model__layer__mixer__heads': 4, 'model__layer__ffn__tokens': 512}
  sizes = {'train__steps': STEPS, 'train__checkpoint_every': BROKEN_OFF}
  return tiny_run.config(source, cache, **dotted, **sizes, **changes)


@pytest.fixture(scope='module')
def made(source, tmp_path_factory):
  """Make the run of a name once."""
  home, runs = tmp_path_factory.mktemp('lives'), {}

  def make(name: str) -> tokenformer_jax.Run:
    if name not in runs:
      with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
        loop.train(_config(name, source, home / 'cache'), home / name)
      runs[name] = tokenformer_jax.load(home / name)
    return runs[name]

  return make


def test_the_model_learns_and_resumes_bit_for_bit(name, made, source, tmp_path, one_device):
  run = made(name)
  losses = [line['train/loss'] for line in metrics.read(run.directory) if 'train/loss' in line]
  assert np.all(np.isfinite(losses)) and losses
  broken = tmp_path / 'broken'
  shutil.copytree(run.directory, broken)
  shutil.rmtree(broken / 'checkpoints' / str(STEPS))
  loop.train(run.config, broken)
  resumed = tokenformer_jax.load(broken)
  assert_same(resumed.parameters, run.parameters, 'a resumed run is another run')


def test_its_losses_are_the_same_on_a_mesh(name, made, source, tmp_path, monkeypatch):
  run = made(name)
  config = _config(name, source, tmp_path / 'cache', mesh__fsdp=2, mesh__tokens=2)
  monkeypatch.setattr(sharding, 'find_devices', lambda: jax.devices()[:4])
  with compilations() as names:
    loop.train(config, tmp_path / 'mesh')
  one, four = (
    [line['train/loss'] for line in metrics.read(directory) if 'train/loss' in line]
    for directory in (run.directory, tmp_path / 'mesh')
  )
  np.testing.assert_allclose(four, one, rtol=1e-4, err_msg='the mesh changes the losses')
  assert names.count('step') == 1, 'the training step was compiled more than once'


def test_the_model_writes_and_is_evaluated_and_inspected(name, made, one_device):
  run = made(name)
  written = run.generate(['def', 'a longer prompt than that'], length=8, temperature=0)
  alone = run.generate('def', length=8, temperature=0)
  assert written[0] == alone, 'a neighbour changes a text'
  assert np.isfinite(run.evaluate(['def main():\n  return 1\n'])['bits_per_byte'])
  names = set(run.maps('def main(')[0])
  found = {kind: used.mean.shape for kind, used in run.usage(tokens=200)[0].items()}
  assert set(found) == names and names, 'maps and usage are of other projections'


def test_the_model_grows_exactly(name, made, tmp_path, one_device):
  run = made(name)
  counts = config_lib.token_counts(run.config.model).items()
  counts = {one: 2 * count for one, count in counts if not one.endswith('.expert')}
  grown = run.grow(tmp_path / 'grown', counts)
  ids = np.arange(24)[None] % 256
  want = run.logits(ids)
  np.testing.assert_allclose(grown.logits(ids), want, atol=1e-6 * max(1, np.abs(want).max()))


def test_the_released_layout_has_no_place_for_it(name, made):
  with pytest.raises(UserError, match='released layout'):
    released_torch.check_can_compute(made(name).config.model)
