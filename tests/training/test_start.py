"""Settings that are allowed, and probably a mistake, are said."""

import pytest
import tiny_run

from tokenformer_jax.steps.entries import LastGrowth
from tokenformer_jax.training import notices

GROWTH = LastGrowth(18, {})
GUARD = {'optim__skip_deviations': 6.0}
CLIP = 'model__layer__mixer__positions__clip'
CAP = 'model__layer__mixer__score_cap'


@pytest.mark.parametrize(
  ('changes', 'growth', 'said'),
  [
    ({}, None, []),
    ({'optim__warmup_steps': 20}, None, []),
    ({'optim__warmup_steps': 21}, None, ['train.steps=20, so the rate never reaches']),
    ({CLIP: 32}, None, ['positions.clip=32 limits no distance in texts of config.data.seq']),
    ({CLIP: 31}, None, []),
    ({CAP: 30.0, 'train__attention': 'cudnn'}, None, ['score_cap=30 is unknown to cuDNN']),
    ({CAP: 30.0}, None, []),
    ({'train__remat': 'offload'}, None, ['remat=offload keeps no more on these devices than']),
    ({'train__remat': 'attention'}, None, ['remat=attention keeps no more on these devices']),
    ({'train__remat': 'attention', 'train__attention': 'splash'}, None, []),
    ({'train__remat': 'full'}, None, []),
    ({}, GROWTH, ['after the last growth, at update 18, is longer than the run']),
    ({'optim__restart_schedule': 'no'}, GROWTH, []),
    ({**GUARD, 'optim__skip_window': 40}, None, ['by 20 good ones before it at least']),
    ({**GUARD, 'optim__skip_window': 38}, None, []),
    (
      {'train__check_devices': 21},
      None,
      ['checks no step of a run of config'],
    ),
    ({'train__check_devices': 20}, None, []),
  ],
)
def test_warnings_about_a_config_are_said_before_training(tmp_path, changes, growth, said):
  config = tiny_run.config('files:corpus', tmp_path, **changes)
  warnings = notices.warnings_for(config, growth)
  assert len(warnings) == len(said)
  for doubt, part in zip(warnings, said, strict=True):
    assert part in doubt
